// The functions that the gate of a gated unit goes through, see mod.rs.
#pragma once

#include "common.cuh"

constexpr int SILU = 0, GELU_TANH = 1, GELU = 2, CLAMPED = 3;
/// Of CLAMPED.
constexpr float CLAMPED_SLOPE = 1.702f, CLAMPED_LIMIT = 7.0f;

struct Slope {
    float value, slope;
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

/// The activation and its derivative.
template <int ACTIVATION> __device__ __forceinline__ Slope activate(float x) {
    if constexpr (ACTIVATION == SILU) {
        const float s = sigmoid(x);
        return {x * s, s * (1.0f + x * (1.0f - s))};
    } else if constexpr (ACTIVATION == GELU_TANH) {
        // (1 + tanh u) / 2 = σ(2u)
        constexpr float CUBIC = 0.044715f, FACTOR = 1.5957691216057308f;
        const float square = x * x;
        const float s = sigmoid(FACTOR * (x + CUBIC * square * x));
        const float slope = FACTOR * (1.0f + 3.0f * CUBIC * square);
        return {x * s, s + x * s * (1.0f - s) * slope};
    } else if constexpr (ACTIVATION == CLAMPED) {
        const bool is_inside = !(x > CLAMPED_LIMIT);
        const float y = is_inside ? x : CLAMPED_LIMIT;
        const float s = sigmoid(CLAMPED_SLOPE * y);
        return {y * s, is_inside ? s * (1.0f + CLAMPED_SLOPE * y * (1.0f - s)) : 0.0f};
    } else {
        const float cumulative = normcdff(x);
        const float density = 0.3989422804014327f * expf(-0.5f * x * x);
        return {x * cumulative, cumulative + x * density};
    }
}

/// What the gate is multiplied by, and its derivative.
template <int ACTIVATION> __device__ __forceinline__ Slope multiplier(float up) {
    if constexpr (ACTIVATION == CLAMPED) {
        const bool is_inside = !(fabsf(up) > CLAMPED_LIMIT);
        const float cut = is_inside ? up : copysignf(CLAMPED_LIMIT, up);
        return {cut + 1.0f, is_inside ? 1.0f : 0.0f};
    } else {
        return {up, 1.0f};
    }
}

/// The gated unit.
__device__ __forceinline__ float gated(float gate, float up, int activation) {
    if (activation == SILU) return activate<SILU>(gate).value * up;
    if (activation == GELU_TANH) return activate<GELU_TANH>(gate).value * up;
    if (activation == CLAMPED) return activate<CLAMPED>(gate).value * multiplier<CLAMPED>(up).value;
    return activate<GELU>(gate).value * up;
}
