// The gated unit; a threadgroup has a stretch of a row. The formulas are in mod.rs.
//
// Inputs are rows at distances of their own; results are contiguous.
#include "common.metal.h"

/// The code of the unit that is clamped, the slope within its sigmoid, and where gates and values are cut.
constant constexpr uint CLAMPED = 3;
constant constexpr float CLAMPED_SLOPE = 1.702f, CLAMPED_LIMIT = 7.0f;

/// The activation and its derivative.
struct Activated {
    float value, slope;
};

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp(-x)); }

/// The cumulative normal distribution, by the error function of N. Juffa: a polynomial in its middle, and
/// the exponential of one outside, which keeps small probabilities exact.
inline float normal_cumulative(float x) {
    const float z = x * M_SQRT1_2_F;
    const float t = abs(z), s = z * z;
    if (t <= 0.927734375f) {
        float r = fma(-5.96761703e-4f, s, 4.99119423e-3f);
        r = fma(r, s, -2.67681349e-2f);
        r = fma(r, s, 1.12819925e-1f);
        r = fma(r, s, -3.76125336e-1f);
        r = fma(r, s, 1.28379166e-1f);
        return 0.5f + 0.5f * fma(r, z, z);
    }
    float r = fma(-1.72853470e-5f, t, 3.83197126e-4f);
    r = fma(r, s, fma(-3.88396438e-3f, t, 2.42546219e-2f));
    r = fma(r, t, -1.06777877e-1f);
    r = fma(r, t, -6.34846687e-1f);
    r = fma(r, t, -1.28717512e-1f);
    const float tail = 0.5f * exp(fma(r, t, -t));
    return z > 0.0f ? 1.0f - tail : tail;
}

/// `activation` is a code of metal.rs.
inline Activated activate(uint activation, float x) {
    if (activation == 0) {
        const float s = sigmoid_of(x);
        return {x * s, s * (1.0f + x * (1.0f - s))};
    }
    if (activation == 1) {
        // With (1 + tanh u) / 2 = sigmoid(2u).
        const float factor = M_SQRT2_F * M_2_SQRTPI_F, square = x * x;
        const float s = sigmoid_of(factor * (x + 0.044715f * square * x));
        return {x * s, s + x * s * (1.0f - s) * (factor * (1.0f + 3.0f * 0.044715f * square))};
    }
    if (activation == CLAMPED) {
        const bool is_inside = !(x > CLAMPED_LIMIT);
        const float y = is_inside ? x : CLAMPED_LIMIT;
        const float s = sigmoid_of(CLAMPED_SLOPE * y);
        return {y * s, is_inside ? s * (1.0f + CLAMPED_SLOPE * y * (1.0f - s)) : 0.0f};
    }
    const float cumulative = normal_cumulative(x);
    const float density = 0.5f * M_SQRT1_2_F * M_2_SQRTPI_F * exp(-0.5f * x * x);
    return {x * cumulative, cumulative + x * density};
}

/// What the gate is multiplied by, and its derivative.
inline Activated multiplier(uint activation, float up) {
    if (activation != CLAMPED) return {up, 1.0f};
    const bool is_inside = !(abs(up) > CLAMPED_LIMIT);
    const float cut = is_inside ? up : copysign(CLAMPED_LIMIT, up);
    return {cut + 1.0f, is_inside ? 1.0f : 0.0f};
}

template <typename T>
[[kernel]] void glu_forward(device const T *gate [[buffer(0)]], device const T *up [[buffer(1)]],
                            device T *out [[buffer(2)]], constant ulong &columns [[buffer(3)]],
                            constant ulong &gate_stride [[buffer(4)]],
                            constant ulong &up_stride [[buffer(5)]],
                            constant uint &activation [[buffer(6)]], PLACE) {
    gate += group.y * gate_stride;
    up += group.y * up_stride;
    out += group.y * columns;
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < columns)
            out[i] = static_cast<T>(activate(activation, float(gate[i])).value *
                                    multiplier(activation, float(up[i])).value);
    }
}

/// Gradients that aren't needed aren't touched.
template <typename T>
[[kernel]] void glu_backward(
    device const T *gate [[buffer(0)]], device const T *up [[buffer(1)]],
    device const T *d_out [[buffer(2)]], device T *dgate [[buffer(3)]],
    device T *dup [[buffer(4)]], constant ulong &columns [[buffer(5)]],
    constant ulong &gate_stride [[buffer(6)]], constant ulong &up_stride [[buffer(7)]],
    constant ulong &d_out_stride [[buffer(8)]], constant uint &activation [[buffer(9)]],
    constant uint &need_dgate [[buffer(10)]], constant uint &need_dup [[buffer(11)]], PLACE) {
    gate += group.y * gate_stride;
    up += group.y * up_stride;
    d_out += group.y * d_out_stride;
    const ulong row = group.y * columns;
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i >= columns) continue;
        const float d = float(d_out[i]);
        const Activated f = activate(activation, float(gate[i]));
        const Activated by = multiplier(activation, float(up[i]));
        if (need_dgate) dgate[row + i] = static_cast<T>(d * by.value * f.slope);
        if (need_dup) dup[row + i] = static_cast<T>(d * f.value * by.slope);
    }
}

FOR_EACH_DTYPE(glu_forward)
FOR_EACH_DTYPE(glu_backward)
