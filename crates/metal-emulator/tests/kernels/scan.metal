#include <metal_stdlib>
using namespace metal;

// Sums of all elements up to each, by one threadgroup. FENCE stands between the threads of a
// simdgroup, which share memory here instead of shuffling.
#ifndef FENCE
#define FENCE simdgroup_barrier(mem_flags::mem_threadgroup)
#endif

kernel void scan(
    device const uint* x [[buffer(0)]],
    device uint* sums [[buffer(1)]],
    constant uint& count [[buffer(2)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup uint mine[1024], totals[32];
  uint before = 0;
  for (uint start = 0; start < count; start += threads) {
    const uint i = start + thread_index;
    mine[thread_index] = i < count ? x[i] : 0;
    for (uint step = 1; step < 32; step *= 2) {
      FENCE;
      const uint other = lane >= step ? mine[thread_index - step] : 0;
      FENCE;
      mine[thread_index] += other;
    }
    const uint last = min(threads - simdgroup * 32, 32u) - 1;
    if (lane == last) totals[simdgroup] = mine[thread_index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint offset = before;
    for (uint j = 0; j < simdgroups; j++) {
      if (j < simdgroup) offset += totals[j];
      before += totals[j];
    }
    if (i < count) sums[i] = offset + mine[thread_index];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
