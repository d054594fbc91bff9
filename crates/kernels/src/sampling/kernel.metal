// The index of the largest logit of each row; a threadgroup has a row.
#include "common.metal.h"

/// The first of the largest. NaN and negative infinity are never chosen; 0 when nothing else is there.
template <typename T>
[[kernel]] void sampling_greedy(device const T *logits [[buffer(0)]],
                                device uint *ids [[buffer(1)]],
                                constant uint &columns [[buffer(2)]], PLACE, SIMD_PLACE) {
    constexpr uint NOWHERE = 0xffffffffu;
    threadgroup float values[SIMDGROUPS];
    threadgroup uint places[SIMDGROUPS];
    logits += ulong(group.x) * columns;
    // A thread meets its logits in their order, so the first of equals stays.
    float value = -INFINITY;
    uint place = NOWHERE;
    for (uint i = own.x; i < columns; i += threads.x) {
        const float logit = float(logits[i]);
        if (logit > value) {
            value = logit;
            place = i;
        }
    }
    const float largest = simd_max(value);
    const uint first = simd_min(value == largest ? place : NOWHERE);
    if (lane == 0) {
        values[simdgroup] = largest;
        places[simdgroup] = first;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (own.x != 0) return;
    value = values[0];
    place = places[0];
    for (uint s = 1; s < simdgroups; s++) {
        if (values[s] > value || (values[s] == value && places[s] < place)) {
            value = values[s];
            place = places[s];
        }
    }
    ids[group.x] = place == NOWHERE ? 0 : place;
}

FOR_EACH_DTYPE(sampling_greedy)
