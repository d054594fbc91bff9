// Rows that are multiplied, as they are or as an RMS norm that is made on the way.
#pragma once

#include "tensor.cuh"

/// What is multiplied: x, or, if there is a residual, the RMS norm of both together, whose sum is then stored. All are
/// `(rows, inner)`, of f16 or bf16, and what a kernel of its own would have stored is rounded as there.
struct Source {
    const void *x;
    const void *residual; // or null
    const void *weight;   // of the norm, (inner), or null
    void *sum;            // (rows, inner), or null
    int64_t x_stride;
    int64_t residual_stride;
    int is_f16;
    float eps;
    float offset;
    int unused;
};

/// Eight neighbouring numbers.
struct Eight {
    float at[8];
};

__device__ __forceinline__ Eight unpack_eight(const uint4 &bits, bool is_f16) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
    Eight out;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 both = is_f16 ? unpack_pair<f16>(words[j]) : unpack_pair<bf16>(words[j]);
        out.at[2 * j] = both.x, out.at[2 * j + 1] = both.y;
    }
    return out;
}

__device__ __forceinline__ uint4 pack_eight(const Eight &eight, bool is_f16) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
        words[j] = is_f16 ? pack_pair<f16>(eight.at[2 * j], eight.at[2 * j + 1])
                          : pack_pair<bf16>(eight.at[2 * j], eight.at[2 * j + 1]);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint4 load_eight(const void *from, int64_t index) {
    return *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(from) + index);
}

__device__ __forceinline__ void store_eight(void *to, int64_t index, const uint4 &eight) {
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(to) + index) = eight;
}

__device__ __forceinline__ float as_stored(float x, bool is_f16) {
    return is_f16 ? to_float(from_float<f16>(x)) : to_float(from_float<bf16>(x));
}
