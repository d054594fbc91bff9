#include <metal_stdlib>
using namespace metal;

// One fault a kernel.

kernel void writes_past_buffer(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i + 1] = 1;
}
kernel void reads_before_buffer(
    device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = x[int(i) - 1];
}
kernel void writes_past_argument(
    device float* y [[buffer(0)]], threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_position_in_grid]]) {
  shared[i] = 1;
  y[i] = shared[i];
}
kernel void reads_past_variable(
    device float* y [[buffer(0)]], constant uint& step [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  threadgroup float first[32], second[32];
  first[i] = second[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* p = first;
  y[i] = p[i + step];
}
kernel void indexes_past_array(
    device float* y [[buffer(0)]], constant uint& step [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float mine[4] = {1, 2, 3, 4};
  y[i] = mine[(i + step) % 8];
}
kernel void reads_what_nobody_wrote(
    device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  threadgroup float shared[33];
  shared[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = shared[i + 1];
}
kernel void reads_its_output(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] += 1;
}
kernel void misaligned(device char* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  *reinterpret_cast<device float*>(x + 1) = 1;
}
kernel void reads_another_threadgroup(
    device float* x [[buffer(0)]], device float* y [[buffer(1)]],
    uint i [[thread_position_in_grid]], uint n [[threads_per_grid]]) {
  x[i] = 1;
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = x[n - 1 - i];
}
kernel void mixes_atomic_and_plain(
    device atomic_uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 0) *reinterpret_cast<device uint*>(x) = 0;
  atomic_fetch_add_explicit(x, 1, memory_order_relaxed);
}
kernel void atomic_past_buffer(
    device atomic_uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(x + i, 1, memory_order_relaxed);
}
kernel void diverges(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i % 2) x[i] = simd_sum(x[i]);
  else x[i] = simd_max(x[i]);
}
kernel void returns_early(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 3) return;
  threadgroup_barrier(mem_flags::mem_device);
  x[i] = 1;
}
kernel void divides_by_zero(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] = 5 / x[i];
}

constant bool given [[function_constant(7)]];
kernel void reads_what_is_left_out(
    device float* y [[buffer(0)]], device const float* x [[buffer(1), function_constant(given)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
}
