#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include "tile.h"
using namespace metal;

// c = a b for a (m, k), b (k, n): a threadgroup of four simdgroups makes a tile of 32 x 32, each
// simdgroup a quarter of it, from tiles in threadgroup memory that are zero outside of the matrices.
#ifndef FENCE
#define FENCE threadgroup_barrier(mem_flags::mem_threadgroup)
#endif

constant bool accumulate [[function_constant(0)]];
constant float scale [[function_constant(1)]];
constant float factor = is_function_constant_defined(scale) ? scale : 1.0f;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void matmul(
    device const T* a [[buffer(0)]],
    device const T* b [[buffer(1)]],
    device T* c [[buffer(2)]],
    constant uint3& shape [[buffer(3)]],
    device const T* before [[buffer(4), function_constant(accumulate)]],
    threadgroup T* tiles [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const uint m = shape.x, n = shape.y, k = shape.z;
  const uint2 corner = group.yx * kSide;
  threadgroup T* left = tiles;
  threadgroup T* right = tiles + kSide * kDepth;
  threadgroup float result[kSide * kSide];

  const uint2 quarter = uint2(simdgroup / 2, simdgroup % 2) * 16;
  simdgroup_matrix<float, 8, 8> sums[2][2];
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (uint from = 0; from < k; from += kDepth) {
    copy_tile<kSide, kDepth>(left, a, uint2(corner.x, from), uint2(m, k), thread_index);
    copy_tile<kDepth, kSide>(right, b, uint2(from, corner.y), uint2(k, n), thread_index);
    FENCE;
    for (uint inner = 0; inner < kDepth; inner += 8) {
      simdgroup_matrix<T, 8, 8> x[2], y[2];
      for (uint i = 0; i < 2; i++) {
        simdgroup_load(x[i], left + (quarter.x + 8 * i) * kDepth + inner, kDepth);
        simdgroup_load(y[i], right, kSide, ulong2(quarter.y + 8 * i, inner));
      }
      for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++)
          simdgroup_multiply_accumulate(sums[i][j], x[i], y[j], sums[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < 2; i++)
    for (uint j = 0; j < 2; j++)
      simdgroup_store(sums[i][j], result + (quarter.x + 8 * i) * kSide + quarter.y + 8 * j, kSide);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < kSide * kSide; i += 128) {
    const uint2 at = corner + uint2(i / kSide, i % kSide);
    if (at.x >= m || at.y >= n) continue;
    float value = factor * result[i];
    if (accumulate) value += float(before[at.x * n + at.y]);
    c[at.x * n + at.y] = static_cast<T>(value);
  }
}

#define instantiate(name, T) template [[host_name("matmul_" name)]] [[kernel]] void matmul<T>( \
    device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device T* c [[buffer(2)]], \
    constant uint3& shape [[buffer(3)]], \
    device const T* before [[buffer(4), function_constant(accumulate)]], \
    threadgroup T* tiles [[threadgroup(0)]], uint2 group [[threadgroup_position_in_grid]], \
    uint thread_index [[thread_index_in_threadgroup]], \
    uint simdgroup [[simdgroup_index_in_threadgroup]]);
instantiate("f32", float)
instantiate("f16", half)
instantiate("bf16", bfloat)

// Depends on no function constant.
[[kernel]] void clear(device float* c [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  c[i] = 0.0f;
}
