#include <metal_stdlib>
using namespace metal;

// What each operation of a simdgroup gives to each lane, a column an operation.
kernel void operations(
    device const int* x [[buffer(0)]],
    device int* results [[buffer(1)]],
    uint i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint width [[threads_per_simdgroup]]) {
  const int v = x[i];
  device int* to = results + i * 22;
  to[0] = simd_sum(v);
  to[1] = simd_max(v);
  to[2] = simd_min(v);
  to[3] = simd_product(v | 1);
  to[4] = simd_or(v);
  to[5] = simd_and(v);
  to[6] = simd_xor(v);
  to[7] = simd_prefix_inclusive_sum(v);
  to[8] = simd_prefix_exclusive_sum(v);
  to[9] = simd_broadcast_first(v);
  to[10] = int(simd_vote::vote_t(simd_ballot(v > 0)));
  to[11] = simd_all(v > -1000) + 2 * simd_any(v > 1000);
  to[12] = simd_is_first();
  to[13] = popcount(uint(simd_vote::vote_t(simd_active_threads_mask())));
  to[14] = int(simdgroups * width);
  to[15] = simd_ballot(v > -1000).all();
  // These need their neighbours, so they are asked of whole simdgroups only.
  if (simd_sum(1) < 32) return;
  to[16] = simd_shuffle(v, 31 - lane);
  to[17] = simd_shuffle_xor(v, 5);
  to[18] = simd_shuffle_down(v, 3);
  to[19] = simd_shuffle_up(v, 3);
  to[20] = simd_shuffle_rotate_down(v, 3);
  to[21] = simd_shuffle_and_fill_up(v, -v, 3);
}

// The sum of a simdgroup as if it always had 32 lanes.
kernel void assumes_32_lanes(
    device float* x [[buffer(0)]],
    uint i [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  float sum = x[i];
  for (uint step = 16; step > 0; step /= 2) sum += simd_shuffle_down(sum, step);
  if (lane == 0) x[i] = sum;
}

kernel void multiplies(
    device float* x [[buffer(0)]],
    uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 m(2.0f), n;
  simdgroup_load(n, x);
  simdgroup_multiply(n, m, n);
  simdgroup_barrier(mem_flags::mem_device);
  simdgroup_store(n, x, 8, 0, true);
}

// A store and a load of the same simdgroup, which are ordered by a barrier only.
kernel void stores_and_loads(
    device float* x [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]]) {
  simdgroup_float8x8 m(3.0f), n;
  simdgroup_store(m, shared);
#ifndef UNORDERED
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  simdgroup_load(n, shared);
  simdgroup_store(n, x);
}
