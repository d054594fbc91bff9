#include <metal_stdlib>
using namespace metal;

// How often each of 16 values is there, counted in threadgroup memory and then in the device's.
kernel void histogram(
    device const uchar* x [[buffer(0)]],
    device atomic_uint* counts [[buffer(1)]],
    constant uint& count [[buffer(2)]],
    uint i [[thread_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup atomic_uint mine[16];
  for (uint j = thread_index; j < 16; j += threads) {
    atomic_store_explicit(&mine[j], 0, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < count) atomic_fetch_add_explicit(&mine[x[i] & 15], 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = thread_index; j < 16; j += threads) {
    atomic_fetch_add_explicit(
        &counts[j], atomic_load_explicit(&mine[j], memory_order_relaxed), memory_order_relaxed);
  }
}
