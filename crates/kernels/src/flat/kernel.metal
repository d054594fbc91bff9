// The passes over flat gradients that every optimiser shares, see mod.rs, and a step of an optimiser over flat
// parameters, in one pass: the gradients are clipped on the way and zero afterwards.
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
[[kernel]] void flat_squares(device const T *grads [[buffer(0)]],
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
[[kernel]] void flat_norm(device const float *partial [[buffer(0)]],
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

/// `destination += factor·source`.
template <typename T>
[[kernel]] void flat_accumulate(device float *destination [[buffer(0)]],
                                 device const T *source [[buffer(1)]],
                                 constant float &factor [[buffer(2)]],
                                 constant ulong &count [[buffer(3)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) destination[i] += factor * float(source[i]);
    }
}

FOR_EACH_DTYPE(flat_squares)
FOR_EACH_DTYPE(flat_accumulate)

/// The flat buffers of a step, and how many elements they have; weight decay applies to the first `decayed`.
struct FlatBuffers {
    device float *params, *grads;
    /// What the optimiser keeps of each element, as far as there is something.
    device float *first, *second;
    ulong decayed, count;
};

/// What gradients of this norm are multiplied by; no step is made when the norm isn't finite.
inline float flat_grad_scale(float norm, float max_norm) {
    // Keeps the norm's reciprocal finite.
    constexpr float CLIP_EPSILON = 1e-6f;
    return min(max_norm / (norm + CLIP_EPSILON), 1.0f);
}

/// One step of the `AHEAD` elements from `start` on, as far as there are so many. `Rule::step` makes the step
/// of four elements, of which `STATES` numbers each are kept.
template <typename Rule>
inline void flat_elements(FlatBuffers buffers, device const float *grads, ulong start,
                          float grad_scale, Rule rule) {
    static_assert(AHEAD == 4, "a thread has one vector");
    if (start + AHEAD <= buffers.count) {
        device packed_float4 &to_p = *reinterpret_cast<device packed_float4 *>(buffers.params + start);
        const float4 g = *reinterpret_cast<device const packed_float4 *>(grads + start);
        float4 p = to_p, first = float4(0.0f), second = float4(0.0f), decays = float4(0.0f);
        if (Rule::STATES > 0)
            first = *reinterpret_cast<device packed_float4 *>(buffers.first + start);
        if (Rule::STATES > 1)
            second = *reinterpret_cast<device packed_float4 *>(buffers.second + start);
        for (uint k = 0; k < AHEAD; k++)
            if (start + k < buffers.decayed) decays[k] = 1.0f;
        rule.step(p, first, second, g * grad_scale, decays);
        to_p = p;
        if (Rule::STATES > 0)
            *reinterpret_cast<device packed_float4 *>(buffers.first + start) = first;
        if (Rule::STATES > 1)
            *reinterpret_cast<device packed_float4 *>(buffers.second + start) = second;
        return;
    }
    for (ulong i = start; i < buffers.count; i++) {
        float4 p = float4(buffers.params[i]), first = float4(0.0f), second = float4(0.0f);
        if (Rule::STATES > 0) first = float4(buffers.first[i]);
        if (Rule::STATES > 1) second = float4(buffers.second[i]);
        const float4 decays = float4(i < buffers.decayed ? 1.0f : 0.0f);
        rule.step(p, first, second, float4(grads[i] * grad_scale), decays);
        buffers.params[i] = p.x;
        if (Rule::STATES > 0) buffers.first[i] = first.x;
        if (Rule::STATES > 1) buffers.second[i] = second.x;
    }
}

/// Clears the `AHEAD` elements from `start` on, as far as there are so many.
inline void flat_clear(device float *elements, ulong start, ulong count) {
    if (start + AHEAD <= count) {
        *reinterpret_cast<device packed_float4 *>(elements + start) = packed_float4(0.0f);
    } else {
        for (ulong i = start; i < count; i++) elements[i] = 0.0f;
    }
}

/// `flat_elements` with gradients of a norm of at most `max_norm`, which is infinite for any, unless the norm
/// isn't finite. The gradients are zero afterwards.
template <typename Rule>
inline void flat_clipped(FlatBuffers buffers, ulong start, float norm, float max_norm, Rule rule) {
    if (isfinite(norm))
        flat_elements(buffers, buffers.grads, start, flat_grad_scale(norm, max_norm), rule);
    flat_clear(buffers.grads, start, buffers.count);
}

/// Where the thread's elements start.
#define FLAT_START ((ulong(group.x) * threads.x + own.x) * AHEAD)
