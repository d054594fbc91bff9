// DoRA. The formulas are in mod.rs.
//
// Where columns are multiplied, inputs are rows at distances of their own, and results are contiguous. Sums over
// rows are made in two steps: a thread adds up one column of a group of rows, and `sum_groups` adds up the groups.
#include "common.metal.h"

/// The square of the norm of a row; a threadgroup has one.
template <typename T>
[[kernel]] void dora_squared_norms(device const T *weight [[buffer(0)]],
                                   device float *squares [[buffer(1)]],
                                   constant uint &columns [[buffer(2)]],
                                   constant ulong &stride [[buffer(3)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    weight += group.x * stride;
    float sum = 0.0f;
    for (uint i = own.x; i < columns; i += threads.x) sum += float(weight[i]) * float(weight[i]);
    sum = group_sum(sum, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) squares[group.x] = sum;
}

/// The norm of a merged row; a thread has one.
[[kernel]] void dora_merged_norms(device const float *base [[buffer(0)]],
                                  device const float *products [[buffer(1)]],
                                  device const float *gram_b [[buffer(2)]],
                                  device const float *b [[buffer(3)]],
                                  device float *norms [[buffer(4)]],
                                  constant uint &columns [[buffer(5)]],
                                  constant uint &rank [[buffer(6)]],
                                  constant float &scale [[buffer(7)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    float sum = 0.0f;
    for (uint r = 0; r < rank; r++) {
        const ulong i = ulong(r) * columns + column;
        sum += b[i] * (2.0f * scale * products[i] + scale * scale * gram_b[i]);
    }
    sum += base[column];
    // What is less is rounding.
    const float least = base[column] * 1.1920929e-7f;
    norms[column] = sqrt(sum < least ? least : sum);
}

/// `z = y ⊙ factor + bias`; a thread has `AHEAD` elements. Without `has_bias` the bias isn't touched.
template <typename T>
[[kernel]] void dora_scale_columns(
    device const T *y [[buffer(0)]], device const float *factor [[buffer(1)]],
    device const char *bias [[buffer(2)]], device T *z [[buffer(3)]],
    constant uint &columns [[buffer(4)]], constant ulong &stride [[buffer(5)]],
    constant uint &bias_dtype [[buffer(6)]], constant uint &has_bias [[buffer(7)]], PLACE) {
    y += group.y * stride;
    z += ulong(group.y) * columns;
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i >= columns) continue;
        float value = float(y[i]) * factor[i];
        if (has_bias) value += parameter_at(bias, bias_dtype, uint(i));
        z[i] = static_cast<T>(value);
    }
}

/// `dy = dz ⊙ factor`, and in `partial` `(1 or 2, groups, columns)` the sums of `dz·y` over each group of rows,
/// followed by those of `dz` where `need_dbias`. A thread has a column of the rows of group `group.y`.
template <typename T>
[[kernel]] void dora_backward(
    device const T *y [[buffer(0)]], device const float *factor [[buffer(1)]],
    device const T *dz [[buffer(2)]], device T *dy [[buffer(3)]],
    device float *partial [[buffer(4)]], constant uint &rows [[buffer(5)]],
    constant uint &columns [[buffer(6)]], constant ulong &y_stride [[buffer(7)]],
    constant ulong &dz_stride [[buffer(8)]], constant uint &rows_of_group [[buffer(9)]],
    constant uint &groups [[buffer(10)]], constant uint &need_dbias [[buffer(11)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    const uint first = group.y * rows_of_group;
    const uint last = min(rows, first + rows_of_group);
    float dfactor = 0.0f, dbias = 0.0f;
    for (uint row = first; row < last; row++) {
        const float d = float(dz[row * dz_stride + column]);
        dfactor += d * float(y[row * y_stride + column]);
        dbias += d;
        dy[ulong(row) * columns + column] = static_cast<T>(d * factor[column]);
    }
    partial[ulong(group.y) * columns + column] = dfactor;
    if (need_dbias) partial[ulong(groups + group.y) * columns + column] = dbias;
}

FOR_EACH_DTYPE(dora_squared_norms)
FOR_EACH_DTYPE(dora_scale_columns)
FOR_EACH_DTYPE(dora_backward)
