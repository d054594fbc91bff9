// Layer norm; a threadgroup has a row. The formulas are in mod.rs.
//
// The gradients of the parameters are sums over rows, in two steps: a thread adds up one column of a
// group of rows, and `sum_groups` adds up the groups.
#include "common.metal.h"

template <typename T>
[[kernel]] void layer_norm_forward(
    device const T *x [[buffer(0)]], device const char *weight [[buffer(1)]],
    device const char *bias [[buffer(2)]], device T *y [[buffer(3)]],
    constant uint &weight_dtype [[buffer(4)]], constant uint &bias_dtype [[buffer(5)]],
    constant uint &has_bias [[buffer(6)]], constant uint &columns [[buffer(7)]],
    constant float &eps [[buffer(8)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    y += row;
    float mean = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) mean += float(x[i]);
    mean = group_sum(mean, scratch, lane, simdgroup, simdgroups) / float(columns);
    float squares = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float centred = float(x[i]) - mean;
        squares += centred * centred;
    }
    squares = group_sum(squares, scratch, lane, simdgroup, simdgroups);
    const float r = 1.0f / sqrt(squares / float(columns) + eps);
    for (uint i = own.x; i < columns; i += threads.x) {
        float value = (float(x[i]) - mean) * r * parameter_at(weight, weight_dtype, i);
        if (has_bias) value += parameter_at(bias, bias_dtype, i);
        y[i] = static_cast<T>(value);
    }
}

/// Writes `dx` where `need_dx`, and the mean and `r` of every row where `need_statistics`. The others'
/// buffers aren't touched.
template <typename T>
[[kernel]] void layer_norm_backward(
    device const T *x [[buffer(0)]], device const char *weight [[buffer(1)]],
    device const T *dy [[buffer(2)]], device T *dx [[buffer(3)]],
    device float *statistics [[buffer(4)]], constant uint &dtype [[buffer(5)]],
    constant uint &columns [[buffer(6)]], constant float &eps [[buffer(7)]],
    constant uint &need_dx [[buffer(8)]], constant uint &need_statistics [[buffer(9)]], PLACE,
    SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const ulong row = ulong(group.x) * columns;
    x += row;
    dy += row;
    float mean = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) mean += float(x[i]);
    mean = group_sum(mean, scratch, lane, simdgroup, simdgroups) / float(columns);
    float squares = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float centred = float(x[i]) - mean;
        squares += centred * centred;
    }
    squares = group_sum(squares, scratch, lane, simdgroup, simdgroups);
    const float r = 1.0f / sqrt(squares / float(columns) + eps);
    if (need_statistics && own.x == 0) {
        statistics[2 * ulong(group.x)] = mean;
        statistics[2 * ulong(group.x) + 1] = r;
    }
    if (!need_dx) return;
    float sum = 0.0f, product = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float g = float(dy[i]) * parameter_at(weight, dtype, i);
        sum += g;
        product += g * ((float(x[i]) - mean) * r);
    }
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups) / float(columns);
    product = group_sum(product, scratch, lane, simdgroup, simdgroups) / float(columns);
    for (uint i = own.x; i < columns; i += threads.x) {
        const float g = float(dy[i]) * parameter_at(weight, dtype, i);
        dx[row + i] = static_cast<T>(r * (g - sum - (float(x[i]) - mean) * r * product));
    }
}

/// A thread has a column of the rows of group `group.y`, of `groups`: sums for the weight in the first
/// half of `partial` `(2, groups, columns)`, for the bias in the second.
template <typename T>
[[kernel]] void layer_norm_parameters(
    device const T *x [[buffer(0)]], device const T *dy [[buffer(1)]],
    device const float *statistics [[buffer(2)]], device float *partial [[buffer(3)]],
    constant uint &rows [[buffer(4)]], constant uint &columns [[buffer(5)]],
    constant uint &rows_of_group [[buffer(6)]], constant uint &groups [[buffer(7)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    const uint first = group.y * rows_of_group;
    const uint last = min(rows, first + rows_of_group);
    float for_weight = 0.0f, for_bias = 0.0f;
    for (uint row = first; row < last; row++) {
        const ulong i = ulong(row) * columns + column;
        const float mean = statistics[2 * ulong(row)], r = statistics[2 * ulong(row) + 1];
        for_weight += float(dy[i]) * ((float(x[i]) - mean) * r);
        for_bias += float(dy[i]);
    }
    partial[ulong(group.y) * columns + column] = for_weight;
    partial[ulong(groups + group.y) * columns + column] = for_bias;
}

FOR_EACH_DTYPE(layer_norm_forward)
FOR_EACH_DTYPE(layer_norm_backward)
FOR_EACH_DTYPE(layer_norm_parameters)
