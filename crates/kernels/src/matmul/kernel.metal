// What linear layers need beside products: the gradient of a bias.
#include "common.metal.h"

/// The sums of the columns over each group of rows, `(groups, columns)`; a thread has a column of a group,
/// whose sums `sum_groups` adds up.
template <typename T>
[[kernel]] void column_sums(device const T *x [[buffer(0)]], device float *partial [[buffer(1)]],
                            constant uint &rows [[buffer(2)]], constant uint &columns [[buffer(3)]],
                            constant uint &rows_of_group [[buffer(4)]],
                            constant ulong &stride [[buffer(5)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    const uint first = group.y * rows_of_group;
    const uint last = min(rows, first + rows_of_group);
    float sum = 0.0f;
    for (uint row = first; row < last; row++) sum += float(x[row * stride + column]);
    partial[ulong(group.y) * columns + column] = sum;
}

FOR_EACH_DTYPE(column_sums)
