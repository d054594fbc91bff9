// One step of stochastic gradient descent over flat parameters, see mod.rs for the formulas.
#include "common.metal.h"

/// What is the same for all elements of one step, as in cpu.rs. Without momentum.
struct Sgd {
    static constant constexpr uint STATES = 0;
    float learning_rate, weight_decay, momentum, share, nesterov;

    void step(thread float4 &p, thread float4 &, thread float4 &, float4 g, float4 decays) const {
        p -= learning_rate * (g + decays * weight_decay * p);
    }
};

struct SgdMomentum {
    static constant constexpr uint STATES = 1;
    float learning_rate, weight_decay, momentum, share, nesterov;

    void step(thread float4 &p, thread float4 &v, thread float4 &, float4 g, float4 decays) const {
        const float4 gradient = g + decays * weight_decay * p;
        v = momentum * v + share * gradient;
        p -= learning_rate * (nesterov != 0.0f ? gradient + momentum * v : v);
    }
};

[[kernel]] void sgd_plain_clipped_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    constant Sgd &rule [[buffer(2)]], constant ulong &decayed [[buffer(3)]],
    constant ulong &count [[buffer(4)]], device const float *norm [[buffer(5)]],
    constant float &max_norm [[buffer(6)]], PLACE) {
    const FlatBuffers buffers = {params, grads, nullptr, nullptr, decayed, count};
    flat_clipped<Sgd>(buffers, FLAT_START, norm[0], max_norm, rule);
}

[[kernel]] void sgd_clipped_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device float *v [[buffer(2)]], constant SgdMomentum &rule [[buffer(3)]],
    constant ulong &decayed [[buffer(4)]], constant ulong &count [[buffer(5)]],
    device const float *norm [[buffer(6)]], constant float &max_norm [[buffer(7)]], PLACE) {
    const FlatBuffers buffers = {params, grads, v, nullptr, decayed, count};
    flat_clipped<SgdMomentum>(buffers, FLAT_START, norm[0], max_norm, rule);
}
