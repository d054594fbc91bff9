// Rows of a table, and the gradient of the table.
//
// An id outside the table can't be reported from here: its row of the result is NaN, and it has no
// gradient.
#include "common.metal.h"

/// The threadgroups of `group.y` have a token.
template <typename T>
[[kernel]] void embedding_forward(device const T *table [[buffer(0)]],
                                  device const uint *ids [[buffer(1)]],
                                  device T *out [[buffer(2)]], constant uint &columns [[buffer(3)]],
                                  constant uint &vocabulary [[buffer(4)]], PLACE) {
    const uint id = ids[group.y];
    const bool known = id < vocabulary;
    for (uint k = 0; k < AHEAD; k++) {
        const uint i = (group.x * AHEAD + k) * threads.x + own.x;
        if (i < columns)
            out[ulong(group.y) * columns + i] =
                known ? table[ulong(id) * columns + i] : static_cast<T>(NAN);
    }
}

/// The threadgroups of `group.y` have the id of that position, if it is the first with it, and a thread a
/// column. It adds the gradients of all positions with the id, in their order, to what is there.
template <typename T>
[[kernel]] void embedding_backward(device const T *dy [[buffer(0)]],
                                   device const uint *ids [[buffer(1)]],
                                   device float *out [[buffer(2)]],
                                   constant uint &positions [[buffer(3)]],
                                   constant uint &columns [[buffer(4)]],
                                   constant uint &vocabulary [[buffer(5)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    threadgroup uint ids_at[1024];
    const uint start = group.y, id = ids[start];
    if (id >= vocabulary) return;
    for (uint next = 0; next < start; next += threads.x) {
        const uint position = next + own.x;
        const float found = position < start && ids[position] == id ? 1.0f : 0.0f;
        if (group_max(found, scratch, lane, simdgroup, simdgroups) > 0.0f) return;
    }
    const uint column = group.x * threads.x + own.x;
    float sum = 0.0f;
    for (uint next = start; next < positions; next += threads.x) {
        const uint some = min(threads.x, positions - next);
        if (own.x < some) ids_at[own.x] = ids[next + own.x];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (column < columns) {
            for (uint k = 0; k < some; k++)
                if (ids_at[k] == id) sum += float(dy[ulong(next + k) * columns + column]);
        }
        // Before the ids are overwritten.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (column < columns) out[ulong(id) * columns + column] += sum;
}

FOR_EACH_DTYPE(embedding_forward)
FOR_EACH_DTYPE(embedding_backward)
