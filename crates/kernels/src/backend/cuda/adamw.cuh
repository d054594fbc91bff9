// The step of AdamW, of one element.
#pragma once

#include "flat.cuh"

/// What is the same for all elements of one step, as in `adamw/cpu.rs`.
struct AdamW {
    static constexpr int STATES = 2;
    float decay, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, correction;

    __device__ __forceinline__ void step(float &p, float *state, float g, bool decays) const {
        float &m = state[0], &v = state[1];
        m += (g - m) * one_minus_beta1;
        v = v * beta2 + one_minus_beta2 * g * g;
        const float denominator = sqrtf(v) / correction + epsilon;
        p = p * (decays ? decay : 1.0f) - step_size * (m / denominator);
    }
};
