// Softmax over rows; a threadgroup has a row. The formulas are in mod.rs.
//
// NaN in a row makes its sum NaN, as do a maximum of infinity and one of negative infinity.
#include "common.metal.h"

template <typename T>
[[kernel]] void softmax_forward(device const T *x [[buffer(0)]], device T *y [[buffer(1)]],
                                constant uint &columns [[buffer(2)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    y += row;
    float largest = -INFINITY;
    for (uint i = own.x; i < columns; i += threads.x) largest = max(largest, float(x[i]));
    largest = group_max(largest, scratch, lane, simdgroup, simdgroups);
    float total = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) total += exp(float(x[i]) - largest);
    total = group_sum(total, scratch, lane, simdgroup, simdgroups);
    const float factor = 1.0f / total;
    for (uint i = own.x; i < columns; i += threads.x)
        y[i] = static_cast<T>(exp(float(x[i]) - largest) * factor);
}

template <typename T>
[[kernel]] void softmax_backward(device const T *y [[buffer(0)]], device const T *dy [[buffer(1)]],
                                 device T *dx [[buffer(2)]], constant uint &columns [[buffer(3)]],
                                 PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    y += row;
    dy += row;
    dx += row;
    float total = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) total += float(y[i]) * float(dy[i]);
    total = group_sum(total, scratch, lane, simdgroup, simdgroups);
    for (uint i = own.x; i < columns; i += threads.x)
        dx[i] = static_cast<T>(float(y[i]) * (float(dy[i]) - total));
}

FOR_EACH_DTYPE(softmax_forward)
FOR_EACH_DTYPE(softmax_backward)
