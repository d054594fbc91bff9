// The functions that the gate of a gated unit goes through, see mod.rs.
#pragma once

#include "common.cuh"

constexpr int SILU = 0, GELU_TANH = 1, GELU = 2;

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
    } else {
        const float cumulative = normcdff(x);
        const float density = 0.3989422804014327f * expf(-0.5f * x * x);
        return {x * cumulative, cumulative + x * density};
    }
}

__device__ __forceinline__ float activated(float x, int activation) {
    if (activation == SILU) return activate<SILU>(x).value;
    if (activation == GELU_TANH) return activate<GELU_TANH>(x).value;
    return activate<GELU>(x).value;
}
