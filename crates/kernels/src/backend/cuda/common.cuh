// What the kernels share: element types, wide loads and stores, and sums over warps and blocks.
//
// Storage is f32, bf16 or f16; arithmetic is f32. A `Pack` is what a thread loads or stores at once:
// 16 bytes, to be used only where the address and the number of elements allow it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int WARP = 32;
constexpr unsigned FULL = 0xffffffffu;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

/// Waits until what came before is done, and lets the stream's next kernel start beside this one, not
/// sooner: three kernels under way are slower than two. Until then nothing may be written, and nothing
/// read that the kernel before it writes; what comes before that is done. Where that kernel reads and writes nothing
/// of what this one does, it may come at the end, but it has to come. Kernels have it that are launched as
/// `overlapping`; before Hopper it does nothing, as kernels follow each other there.
__device__ __forceinline__ void follow_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Brings the line of `address` nearer, whoever writes it.
__device__ __forceinline__ void fetch_ahead(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/// 16 bytes of elements.
template <typename T> struct alignas(16) Pack {
    static constexpr int N = 16 / sizeof(T);
    T at[N];
};

template <typename T> __device__ __forceinline__ Pack<T> load_pack(const T *address) {
    // As one number of 16 bytes: the compiler might split a copy of the struct.
    const uint4 bits = *reinterpret_cast<const uint4 *>(address);
    return *reinterpret_cast<const Pack<T> *>(&bits);
}

template <typename T> __device__ __forceinline__ void store_pack(T *address, const Pack<T> &pack) {
    *reinterpret_cast<uint4 *>(address) = *reinterpret_cast<const uint4 *>(&pack);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

/// The sum over a block of whole warps, in every thread. `scratch` has 32 floats of shared memory, and
/// may be used again after the next barrier.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

/// Like `block_sum`, the largest.
__device__ __forceinline__ float block_max(float x, float *scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -INFINITY);
}

/// Defines `name_f32`, `name_bf16` and `name_f16` as kernels that call the device function template
/// `name<T>`. Give the parameters and the arguments in parentheses; `T` stands for the element.
#define FOR_EACH_DTYPE(name, threads, parameters, arguments)                                       \
    FOR_ONE_DTYPE(name, f32, float, threads, parameters, arguments)                                \
    FOR_ONE_DTYPE(name, bf16, bf16, threads, parameters, arguments)                                \
    FOR_ONE_DTYPE(name, f16, f16, threads, parameters, arguments)
#define FOR_ONE_DTYPE(name, suffix, element, threads, parameters, arguments)                       \
    namespace name##_##suffix##_types {                                                            \
    using T = element;                                                                             \
    extern "C" __global__ void __launch_bounds__(threads) name##_##suffix parameters {             \
        name<T> arguments;                                                                         \
    }                                                                                              \
    }
