// One step of AdamW over flat parameters, see mod.rs for the formulas.
#include "common.metal.h"

/// What is the same for all elements of one step, as in cpu.rs.
struct AdamW {
    static constant constexpr uint STATES = 2;
    float decay, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, correction;

    void step(thread float4 &p, thread float4 &m, thread float4 &v, float4 g, float4 decays) const {
        m += (g - m) * one_minus_beta1;
        v = v * beta2 + one_minus_beta2 * g * g;
        const float4 denominator = sqrt(v) / correction + epsilon;
        p = p * select(float4(1.0f), float4(decay), decays != 0.0f) - step_size * (m / denominator);
    }
};

[[kernel]] void adamw_step(device float *params [[buffer(0)]],
                           device const float *grads [[buffer(1)]], device float *m [[buffer(2)]],
                           device float *v [[buffer(3)]], constant AdamW &rule [[buffer(4)]],
                           constant ulong &decayed [[buffer(5)]],
                           constant ulong &count [[buffer(6)]],
                           constant float &grad_scale [[buffer(7)]], PLACE) {
    const FlatBuffers buffers = {params, nullptr, m, v, decayed, count};
    flat_elements<AdamW>(buffers, grads, FLAT_START, grad_scale, rule);
}

[[kernel]] void adamw_clipped_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device float *m [[buffer(2)]], device float *v [[buffer(3)]], constant AdamW &rule [[buffer(4)]],
    constant ulong &decayed [[buffer(5)]], constant ulong &count [[buffer(6)]],
    device const float *norm [[buffer(7)]], constant float &max_norm [[buffer(8)]], PLACE) {
    const FlatBuffers buffers = {params, grads, m, v, decayed, count};
    flat_clipped<AdamW>(buffers, FLAT_START, norm[0], max_norm, rule);
}
