// One step of Lion over flat parameters, see mod.rs for the formulas.
#include "common.metal.h"

/// What is the same for all elements of one step, as in cpu.rs.
struct Lion {
    static constant constexpr uint STATES = 1;
    float learning_rate, decay, beta1, one_minus_beta1, beta2, one_minus_beta2;

    void step(thread float4 &p, thread float4 &m, thread float4 &, float4 g, float4 decays) const {
        const float4 c = beta1 * m + one_minus_beta1 * g;
        m = beta2 * m + one_minus_beta2 * g;
        p = p * select(float4(1.0f), float4(decay), decays != 0.0f) - learning_rate * sign(c);
    }
};

[[kernel]] void lion_clipped_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device float *m [[buffer(2)]], constant Lion &rule [[buffer(3)]],
    constant ulong &decayed [[buffer(4)]], constant ulong &count [[buffer(5)]],
    device const float *norm [[buffer(6)]], constant float &max_norm [[buffer(7)]], PLACE) {
    const FlatBuffers buffers = {params, grads, m, nullptr, decayed, count};
    flat_clipped<Lion>(buffers, FLAT_START, norm[0], max_norm, rule);
}
