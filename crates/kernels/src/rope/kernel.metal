// Rotary embedding; a thread has a pair of one head of one token, or an element that passes through. The
// formulas are in mod.rs.
#include "common.metal.h"

/// `sign` is -1 to rotate back. `strides` are those of batch, seq and heads; `y` is contiguous.
template <typename T>
[[kernel]] void rope_rotate(device const T *x [[buffer(0)]], device const float *cosines [[buffer(1)]],
                     device const float *sines [[buffer(2)]], device T *y [[buffer(3)]],
                     constant ulong *strides [[buffer(4)]], constant uint &seq [[buffer(5)]],
                     constant uint &heads [[buffer(6)]], constant uint &head_dim [[buffer(7)]],
                     constant uint &half_dim [[buffer(8)]], constant float &sign [[buffer(9)]],
                     PLACE) {
    const uint units = head_dim - half_dim;
    const uint place = group.x * threads.x + own.x;
    if (place >= heads * units) return;
    const uint head = place / units, unit = place % units, token = group.y;
    x += token / seq * strides[0] + token % seq * strides[1] + head * strides[2];
    y += (ulong(token) * heads + head) * head_dim;
    if (unit >= half_dim) {
        y[half_dim + unit] = x[half_dim + unit];
        return;
    }
    const ulong angle = ulong(token) * half_dim + unit;
    const float c = cosines[angle], s = sign * sines[angle];
    const float x1 = float(x[unit]), x2 = float(x[half_dim + unit]);
    y[unit] = static_cast<T>(x1 * c - x2 * s);
    y[half_dim + unit] = static_cast<T>(x2 * c + x1 * s);
}

FOR_EACH_DTYPE(rope_rotate)
