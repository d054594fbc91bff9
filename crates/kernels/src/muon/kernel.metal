// The passes of Muon over flat parameters, see mod.rs for the formulas; its products are other operations.
#include "common.metal.h"

/// What is the same for all elements of one step, as in cpu.rs.
struct Muon {
    static constant constexpr uint STATES = 2;
    float decay, momentum, one_minus_momentum, nesterov;

    void step(thread float4 &p, thread float4 &m, thread float4 &update, float4 g,
              float4 decays) const {
        m += (g - m) * one_minus_momentum;
        update = nesterov != 0.0f ? g + (m - g) * momentum : m;
        p *= select(float4(1.0f), float4(decay), decays != 0.0f);
    }
};

/// The gradients are zero afterwards.
[[kernel]] void muon_step(device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
                          device float *m [[buffer(2)]], device float *update [[buffer(3)]],
                          constant Muon &rule [[buffer(4)]], constant ulong &decayed [[buffer(5)]],
                          constant ulong &count [[buffer(6)]],
                          constant float &grad_scale [[buffer(7)]], PLACE) {
    const FlatBuffers buffers = {params, grads, m, update, decayed, count};
    flat_elements<Muon>(buffers, grads, FLAT_START, grad_scale, rule);
    flat_clear(grads, FLAT_START, count);
}

/// `x ← x / max(‖x‖, ε)`
[[kernel]] void muon_normalize(device float *x [[buffer(0)]],
                               device const float *norm [[buffer(1)]],
                               constant float &epsilon [[buffer(2)]],
                               constant ulong &count [[buffer(3)]], PLACE) {
    const float divisor = max(norm[0], epsilon);
    for (ulong i = FLAT_START; i < min(FLAT_START + AHEAD, count); i++) x[i] /= divisor;
}
