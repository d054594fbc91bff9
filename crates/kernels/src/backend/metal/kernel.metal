// Kernels that serve several operations: zeros, and the last step of sums over rows.
#include "common.metal.h"

/// Writes `count` zeros.
[[kernel]] void fill_zeros(device float *out [[buffer(0)]], constant ulong &count [[buffer(1)]],
                           PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = 0.0f;
    }
}

/// The sums `(sets, columns)` over the groups of `(sets, groups, columns)`, in order; a thread a column.
[[kernel]] void sum_groups(device const float *partial [[buffer(0)]],
                           device float *out [[buffer(1)]], constant uint &groups [[buffer(2)]],
                           constant uint &columns [[buffer(3)]], PLACE) {
    const uint column = group.x * threads.x + own.x;
    if (column >= columns) return;
    partial += ulong(group.y) * groups * columns + column;
    float sum = 0.0f;
    for (uint g = 0; g < groups; g++) sum += partial[ulong(g) * columns];
    out[ulong(group.y) * columns + column] = sum;
}
