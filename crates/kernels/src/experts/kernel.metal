// Sums of what experts give. The formulas are in mod.rs.
//
// A place that is none of y's rows can't be reported from here: it gives NaN.
#include "common.metal.h"

/// The threadgroups of `group.y` have a token, of which a thread has `AHEAD` columns.
template <typename T>
[[kernel]] void experts_combine(device const T *y [[buffer(0)]],
                                device const float *weights [[buffer(1)]],
                                device const uint *places [[buffer(2)]],
                                device T *out [[buffer(3)]], constant uint &rows [[buffer(4)]],
                                constant uint &columns [[buffer(5)]],
                                constant uint &active [[buffer(6)]], PLACE) {
    weights += ulong(group.y) * active;
    places += ulong(group.y) * active;
    for (uint k = 0; k < AHEAD; k++) {
        const uint i = (group.x * AHEAD + k) * threads.x + own.x;
        if (i >= columns) continue;
        float sum = 0.0f;
        for (uint j = 0; j < active; j++)
            sum += places[j] < rows ? weights[j] * float(y[ulong(places[j]) * columns + i]) : NAN;
        out[ulong(group.y) * columns + i] = static_cast<T>(sum);
    }
}

/// A threadgroup has one choice: a row of dy, and its weight's gradient.
template <typename T>
[[kernel]] void experts_backward(
    device const T *y [[buffer(0)]], device const float *weights [[buffer(1)]],
    device const uint *places [[buffer(2)]], device const T *dout [[buffer(3)]],
    device T *dy [[buffer(4)]], device float *dweights [[buffer(5)]],
    constant uint &rows [[buffer(6)]], constant uint &columns [[buffer(7)]],
    constant uint &active [[buffer(8)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const uint place = places[group.x];
    if (place >= rows) {
        if (own.x == 0) dweights[group.x] = NAN;
        return;
    }
    y += ulong(place) * columns;
    dy += ulong(place) * columns;
    dout += ulong(group.x / active) * columns;
    float sum = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float d = float(dout[i]);
        sum += d * float(y[i]);
        dy[i] = static_cast<T>(weights[group.x] * d);
    }
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) dweights[group.x] = sum;
}

FOR_EACH_DTYPE(experts_combine)
FOR_EACH_DTYPE(experts_backward)
