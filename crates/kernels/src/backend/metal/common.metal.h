// What the Metal kernels share: dtypes, and sums over a threadgroup.
//
// Sums are in f32 and always added in the same order for the same number of threads, which may be any,
// also one that fills no whole simdgroup.
#pragma once
#include <metal_stdlib>
using namespace metal;

/// Elements of a thread in kernels that have one thread for some elements; as in `mod.rs`.
constant constexpr uint AHEAD = 4;
/// Simdgroups of a threadgroup at most.
constant constexpr uint SIMDGROUPS = 32;

/// The kernel template `name` for elements of each dtype, as `name_f32` and so on.
#define FOR_EACH_DTYPE(name)                                                                       \
    template [[host_name(#name "_f32")]] [[kernel]] decltype(name<float>) name<float>;             \
    template [[host_name(#name "_f16")]] [[kernel]] decltype(name<half>) name<half>;               \
    template [[host_name(#name "_bf16")]] [[kernel]] decltype(name<bfloat>) name<bfloat>;

/// Where a thread is: its threadgroup, and its place and company there.
#define PLACE                                                                                      \
    uint3 group [[threadgroup_position_in_grid]], uint3 own [[thread_position_in_threadgroup]],    \
        uint3 threads [[threads_per_threadgroup]]
#define SIMD_PLACE                                                                                 \
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],    \
        uint simdgroups [[simdgroups_per_threadgroup]]

/// The sum over all threads of the threadgroup, in each of them. All have to call it.
inline float group_sum(float value, threadgroup float *scratch, uint lane, uint simdgroup,
                       uint simdgroups) {
    const float sum = simd_sum(value);
    if (lane == 0) scratch[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
    for (uint s = 0; s < simdgroups; s++) total += scratch[s];
    // Before the scratch memory is written again.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}

/// Like `group_sum`, the maximum.
inline float group_max(float value, threadgroup float *scratch, uint lane, uint simdgroup,
                       uint simdgroups) {
    const float largest = simd_max(value);
    if (lane == 0) scratch[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = scratch[0];
    for (uint s = 1; s < simdgroups; s++) total = max(total, scratch[s]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}

/// Element `i` of a parameter, whose dtype is a code of `parameter_code` in `mod.rs`.
inline float parameter_at(device const char *parameter, uint dtype, uint i) {
    switch (dtype) {
        case 0:
            return reinterpret_cast<device const float *>(parameter)[i];
        case 1:
            return float(reinterpret_cast<device const half *>(parameter)[i]);
        default:
            return float(reinterpret_cast<device const bfloat *>(parameter)[i]);
    }
}

/// The `index`-th number of the SplitMix64 generator (Steele, Lea and Flood 2014), of which the upper half
/// says whether an element is dropped. The threshold is the probability times 2^32.
inline bool dropped(ulong seed, ulong index, uint threshold) {
    ulong z = seed + (index + 1) * 0x9e3779b97f4a7c15ul;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ul;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebul;
    return uint((z ^ (z >> 31)) >> 32) < threshold;
}
