#include <metal_stdlib>
using namespace metal;

// The sum of each row, one threadgroup a row. FENCE is what stands between the simdgroups' sums and
// the reading of them, so that tests can leave it out or take a wrong one.
#ifndef FENCE
#define FENCE threadgroup_barrier(mem_flags::mem_threadgroup)
#endif
#ifndef AGAIN
#define AGAIN threadgroup_barrier(mem_flags::mem_threadgroup)
#endif
#ifndef PAST
#define PAST 0
#endif

template <typename T>
[[kernel]] void row_sum(
    device const T* x [[buffer(0)]],
    device float* sums [[buffer(1)]],
    device float* largest [[buffer(2)]],
    constant uint& columns [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float part[32];
  x += size_t(row) * columns;
  float sum = 0, most = -INFINITY;
  for (uint i = thread_index; i < columns + PAST; i += threads) {
    sum += float(x[i]);
    most = max(most, float(x[i]));
  }
  sum = simd_sum(sum);
  most = simd_max(most);
  if (lane == 0) part[simdgroup] = sum;
  FENCE;
  if (thread_index == 0) {
    sum = 0;
    for (uint i = 0; i < simdgroups; i++) sum += part[i];
    sums[row] = sum;
  }
  AGAIN;
  if (lane == 0) part[simdgroup] = most;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    for (uint i = 0; i < simdgroups; i++) most = max(most, part[i]);
    largest[row] = most;
  }
}

template [[host_name("row_sum_f32")]] [[kernel]] decltype(row_sum<float>) row_sum<float>;
template [[host_name("row_sum_f16")]] [[kernel]] decltype(row_sum<half>) row_sum<half>;
template [[host_name("row_sum_bf16")]] [[kernel]] decltype(row_sum<bfloat>) row_sum<bfloat>;
