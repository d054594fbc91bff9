// RMS norm; a threadgroup has a row. The formulas are in mod.rs.
//
// The gradient of the weight is a sum over rows, in two steps: a thread adds up one column of a group of
// rows, and `sum_groups` adds up the groups.
#include "common.metal.h"

inline float inverse_rms(float squares, uint columns, float eps) {
    return 1.0f / sqrt(squares / float(columns) + eps);
}

template <typename T>
[[kernel]] void rms_norm_forward(device const T *x [[buffer(0)]],
                                 device const char *weight [[buffer(1)]],
                                 device T *y [[buffer(2)]], constant uint &dtype [[buffer(3)]],
                                 constant uint &columns [[buffer(4)]],
                                 constant float &eps [[buffer(5)]],
                                 constant float &offset [[buffer(6)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    y += row;
    float squares = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) squares += float(x[i]) * float(x[i]);
    squares = group_sum(squares, scratch, lane, simdgroup, simdgroups);
    const float r = inverse_rms(squares, columns, eps);
    for (uint i = own.x; i < columns; i += threads.x)
        y[i] = static_cast<T>(float(x[i]) * r * (offset + parameter_at(weight, dtype, i)));
}

/// The norm is that of the sum as it is stored. A thread reads what it wrote itself.
template <typename T>
[[kernel]] void rms_norm_forward_residual(
    device const T *x [[buffer(0)]], device const T *residual [[buffer(1)]],
    device const char *weight [[buffer(2)]], device T *sum [[buffer(3)]],
    device T *y [[buffer(4)]], constant uint &dtype [[buffer(5)]],
    constant uint &columns [[buffer(6)]], constant float &eps [[buffer(7)]],
    constant float &offset [[buffer(8)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    residual += row;
    sum += row;
    y += row;
    float squares = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const T stored = static_cast<T>(float(x[i]) + float(residual[i]));
        sum[i] = stored;
        squares += float(stored) * float(stored);
    }
    squares = group_sum(squares, scratch, lane, simdgroup, simdgroups);
    const float r = inverse_rms(squares, columns, eps);
    for (uint i = own.x; i < columns; i += threads.x)
        y[i] = static_cast<T>(float(sum[i]) * r * (offset + parameter_at(weight, dtype, i)));
}

/// Writes `dx` where `need_dx`, with `dsum` added where `has_dsum`, and `r` of every row where
/// `need_inverse`. The others' buffers aren't touched.
template <typename T>
[[kernel]] void rms_norm_backward(
    device const T *x [[buffer(0)]], device const char *weight [[buffer(1)]],
    device const T *dy [[buffer(2)]], device const T *dsum [[buffer(3)]],
    device T *dx [[buffer(4)]], device float *inverse [[buffer(5)]],
    constant uint &dtype [[buffer(6)]], constant uint &columns [[buffer(7)]],
    constant float &eps [[buffer(8)]], constant float &offset [[buffer(9)]],
    constant uint &has_dsum [[buffer(10)]], constant uint &need_dx [[buffer(11)]],
    constant uint &need_inverse [[buffer(12)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    dy += row;
    float squares = 0.0f, product = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float value = float(x[i]);
        squares += value * value;
        product += float(dy[i]) * (offset + parameter_at(weight, dtype, i)) * value;
    }
    squares = group_sum(squares, scratch, lane, simdgroup, simdgroups);
    product = group_sum(product, scratch, lane, simdgroup, simdgroups);
    const float r = inverse_rms(squares, columns, eps);
    if (need_inverse && own.x == 0) inverse[group.x] = r;
    if (!need_dx) return;
    const float correction = r * r * r * (product / float(columns));
    for (uint i = own.x; i < columns; i += threads.x) {
        float gradient = r * (float(dy[i]) * (offset + parameter_at(weight, dtype, i))) -
                         float(x[i]) * correction;
        if (has_dsum) gradient += float(dsum[row + i]);
        dx[row + i] = static_cast<T>(gradient);
    }
}

/// A thread has a column of the rows of group `group.y`.
template <typename T>
[[kernel]] void rms_norm_weight(device const T *x [[buffer(0)]], device const T *dy [[buffer(1)]],
                                device const float *inverse [[buffer(2)]],
                                device float *partial [[buffer(3)]],
                                constant uint &rows [[buffer(4)]],
                                constant uint &columns [[buffer(5)]],
                                constant uint &rows_of_group [[buffer(6)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    const uint first = group.y * rows_of_group;
    const uint last = min(rows, first + rows_of_group);
    float sum = 0.0f;
    for (uint row = first; row < last; row++) {
        const ulong i = ulong(row) * columns + column;
        sum += float(dy[i]) * (float(x[i]) * inverse[row]);
    }
    partial[ulong(group.y) * columns + column] = sum;
}

FOR_EACH_DTYPE(rms_norm_forward)
FOR_EACH_DTYPE(rms_norm_forward_residual)
FOR_EACH_DTYPE(rms_norm_backward)
FOR_EACH_DTYPE(rms_norm_weight)
