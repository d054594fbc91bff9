// The passes over flat parameters, see mod.rs for the formulas.
//
// The norm takes two steps: threadgroups add up squares, each of its share and always in the same order,
// and one threadgroup adds up what they found. The step reads the norm where it lies and works out the
// factor of the gradients by itself, so it can follow without the host.
#include "common.metal.h"

/// Elements from here on are counted times `SHRINK`, 2⁻⁸⁸, as their squares may have no f32.
constant constexpr float LARGE_GRADIENT = 1e12f;
constant constexpr float SHRINK = 3.2311742677852644e-27f;

/// A sum of squares.
struct Squares {
    float usual = 0.0f;
    /// Of elements times `SHRINK`.
    float large = 0.0f;

    void add(float gradient) {
        if (fabs(gradient) >= LARGE_GRADIENT) {
            const float less = gradient * SHRINK;
            large += less * less;
        } else {
            // NaN comes here, too.
            usual += gradient * gradient;
        }
    }

    float root() const {
        if (large == 0.0f) return sqrt(usual);
        return sqrt(large + usual * SHRINK * SHRINK) / SHRINK;
    }
};

/// Threadgroup `group.x` of `parts` adds up the squares of every `parts`-th stretch of elements, and
/// leaves `usual` and `large`.
template <typename T>
[[kernel]] void adamw_squares(device const T *grads [[buffer(0)]],
                              device float *partial [[buffer(1)]],
                              constant ulong &count [[buffer(2)]],
                              constant uint &parts [[buffer(3)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    Squares squares;
    const ulong step = ulong(parts) * threads.x * AHEAD;
    ulong i = (ulong(group.x) * threads.x + own.x) * AHEAD;
    for (; i + AHEAD <= count; i += step) {
        for (uint k = 0; k < AHEAD; k++) squares.add(float(grads[i + k]));
    }
    for (; i < count; i++) squares.add(float(grads[i]));
    const float usual = group_sum(squares.usual, scratch, lane, simdgroup, simdgroups);
    const float large = group_sum(squares.large, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) {
        partial[2 * group.x] = usual;
        partial[2 * group.x + 1] = large;
    }
}

/// The norm, from what `parts` threadgroups added up; one threadgroup.
[[kernel]] void adamw_norm(device const float *partial [[buffer(0)]],
                           device float *norm [[buffer(1)]], constant uint &parts [[buffer(2)]],
                           PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    Squares squares;
    for (uint i = own.x; i < parts; i += threads.x) {
        squares.usual += partial[2 * i];
        squares.large += partial[2 * i + 1];
    }
    squares.usual = group_sum(squares.usual, scratch, lane, simdgroup, simdgroups);
    squares.large = group_sum(squares.large, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) norm[0] = squares.root();
}

/// What is the same for all elements of one step, as in metal.rs.
struct AdamwUpdate {
    float decay, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, correction;
};

/// The flat buffers of a step.
struct AdamwBuffers {
    device float *params, *m, *v;

    /// One step of element `i`, whose parameter is `decay` times what it was before.
    void step(ulong i, float g, float decay, constant AdamwUpdate &update) const {
        const float mean = m[i] + (g - m[i]) * update.one_minus_beta1;
        const float square = v[i] * update.beta2 + update.one_minus_beta2 * g * g;
        m[i] = mean;
        v[i] = square;
        const float denominator = sqrt(square) / update.correction + update.epsilon;
        params[i] = params[i] * decay - update.step_size * (mean / denominator);
    }

    /// One step of four elements that lie side by side.
    void step_four(ulong i, float4 g, float4 decay, constant AdamwUpdate &update) const {
        device packed_float4 &to_params = *reinterpret_cast<device packed_float4 *>(params + i);
        device packed_float4 &to_m = *reinterpret_cast<device packed_float4 *>(m + i);
        device packed_float4 &to_v = *reinterpret_cast<device packed_float4 *>(v + i);
        const float4 p = to_params, old_mean = to_m, old_square = to_v;
        const float4 mean = old_mean + (g - old_mean) * update.one_minus_beta1;
        const float4 square = old_square * update.beta2 + update.one_minus_beta2 * g * g;
        to_m = mean;
        to_v = square;
        const float4 denominator = sqrt(square) / update.correction + update.epsilon;
        to_params = p * decay - update.step_size * (mean / denominator);
    }
};

/// One step of the `AHEAD` elements from `first` on, as far as there are so many.
inline void adamw_elements(AdamwBuffers buffers, device const float *grads, ulong first,
                           ulong count, ulong decayed, float grad_scale,
                           constant AdamwUpdate &update) {
    static_assert(AHEAD == 4, "a thread has one vector");
    if (first + AHEAD <= count) {
        const float4 g = *reinterpret_cast<device const packed_float4 *>(grads + first);
        float4 decay = float4(1.0f);
        for (uint k = 0; k < AHEAD; k++)
            if (first + k < decayed) decay[k] = update.decay;
        buffers.step_four(first, g * grad_scale, decay, update);
        return;
    }
    for (ulong i = first; i < count; i++)
        buffers.step(i, grads[i] * grad_scale, i < decayed ? update.decay : 1.0f, update);
}

[[kernel]] void adamw_step(device float *params [[buffer(0)]],
                           device const float *grads [[buffer(1)]], device float *m [[buffer(2)]],
                           device float *v [[buffer(3)]], constant AdamwUpdate &update [[buffer(4)]],
                           constant ulong &decayed [[buffer(5)]],
                           constant ulong &count [[buffer(6)]],
                           constant float &grad_scale [[buffer(7)]], PLACE) {
    const ulong first = (ulong(group.x) * threads.x + own.x) * AHEAD;
    adamw_elements(AdamwBuffers{params, m, v}, grads, first, count, decayed, grad_scale, update);
}

/// With gradients of a norm of at most `max_norm`, which is infinite for any. Makes no step when the
/// norm isn't finite. The gradients are zero afterwards.
[[kernel]] void adamw_clipped_step(
    device float *params [[buffer(0)]], device float *grads [[buffer(1)]],
    device float *m [[buffer(2)]], device float *v [[buffer(3)]],
    constant AdamwUpdate &update [[buffer(4)]], constant ulong &decayed [[buffer(5)]],
    constant ulong &count [[buffer(6)]], device const float *norm [[buffer(7)]],
    constant float &max_norm [[buffer(8)]], PLACE) {
    // Keeps the norm's reciprocal finite.
    constexpr float CLIP_EPSILON = 1e-6f;
    const ulong first = (ulong(group.x) * threads.x + own.x) * AHEAD;
    if (isfinite(norm[0])) {
        const float grad_scale = min(max_norm / (norm[0] + CLIP_EPSILON), 1.0f);
        adamw_elements(AdamwBuffers{params, m, v}, grads, first, count, decayed, grad_scale, update);
    }
    if (first + AHEAD <= count) {
        *reinterpret_cast<device packed_float4 *>(grads + first) = packed_float4(0.0f);
    } else {
        for (ulong i = first; i < count; i++) grads[i] = 0.0f;
    }
}

/// `destination += factor·source`.
template <typename T>
[[kernel]] void adamw_accumulate(device float *destination [[buffer(0)]],
                                 device const T *source [[buffer(1)]],
                                 constant float &factor [[buffer(2)]],
                                 constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) destination[i] += factor * float(source[i]);
    }
}

FOR_EACH_DTYPE(adamw_squares)
FOR_EACH_DTYPE(adamw_accumulate)
