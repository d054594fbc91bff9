// Tensor cores, as compute capability 8.0 has them.
//
// A warp multiplies a 16 x 16 tile A by a 16 x 8 tile B into a 16 x 8 tile C of f32. With
// `group = lane / 4` and `pair = lane % 4 * 2`, a thread holds of
//   C: (group, pair), (group, pair + 1), (group + 8, pair), (group + 8, pair + 1),
//   A: the pairs (group, pair), (group + 8, pair), (group, pair + 8), (group + 8, pair + 8),
//   B: the pairs (pair, group) and (pair + 8, group), a pair being two neighbours in depth,
// so that two neighbouring C, rounded, are one A.
#pragma once

#include "async.cuh"
#include "common.cuh"

/// Four 8 x 8 tiles of 2-byte elements: lane `8·i + r` gives the address of row `r` of tile `i`; a
/// thread gets the pair (lane / 4, lane % 4 * 2) of each.
__device__ __forceinline__ void load_tiles(uint32_t (&tiles)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

/// Like `load_tiles`, of the transposed tiles.
__device__ __forceinline__ void load_tiles_transposed(uint32_t (&tiles)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(address)
                 : "memory");
}

/// `c += a·b` for elements `T`, bf16 or f16.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Two floats rounded to `T`, the first in the low half.
template <typename T> __device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/// The products of two pairs.
template <typename T>
__device__ __forceinline__ uint32_t pairwise_product(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t pairwise_product<bf16>(uint32_t a, uint32_t b) {
    const __nv_bfloat162 result = __hmul2(*reinterpret_cast<__nv_bfloat162 *>(&a),
                                          *reinterpret_cast<__nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&result);
}
template <> __device__ __forceinline__ uint32_t pairwise_product<f16>(uint32_t a, uint32_t b) {
    const __half2 result =
        __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&result);
}

/// And their differences.
template <typename T>
__device__ __forceinline__ uint32_t pairwise_difference(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t pairwise_difference<bf16>(uint32_t a, uint32_t b) {
    const __nv_bfloat162 result = __hsub2(*reinterpret_cast<__nv_bfloat162 *>(&a),
                                          *reinterpret_cast<__nv_bfloat162 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&result);
}
template <>
__device__ __forceinline__ uint32_t pairwise_difference<f16>(uint32_t a, uint32_t b) {
    const __half2 result =
        __hsub2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&result);
}

/// The floats of such a pair.
template <typename T> __device__ __forceinline__ float2 unpack_pair(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack_pair<f16>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
}

/// `2^x` by the special function unit, with an error of about two units in the last place.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
