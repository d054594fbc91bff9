// Numbers in codes of 8 bits and powers of two, as mod.rs has them.
#pragma once

#include "tensor.cuh"

/// Neighbours of a head that share a scale.
constexpr int ROUNDED_GROUP = 32;
/// The byte of the least scale.
constexpr uint32_t LEAST_SCALE = 7;

/// What a code is multiplied by: a 64th of the scale.
__device__ __forceinline__ float step_of(uint32_t scale) {
    return scale == 255 ? NAN : __uint_as_float((max(scale, LEAST_SCALE) - 6) << 23);
}

/// Two neighbours of four codes, to which 128 has been added, as numbers.
template <typename T, int FIRST>
__device__ __forceinline__ uint32_t two_numbers(uint32_t codes, float step) {
    // A byte below the exponent of 2^23 is 2^23 and the byte.
    constexpr uint32_t EXPONENT = 0x4b000000u;
    constexpr float BIAS = 8388608.0f + 128.0f;
    const float low = __uint_as_float(__byte_perm(codes, EXPONENT, 0x7540 + FIRST));
    const float high = __uint_as_float(__byte_perm(codes, EXPONENT, 0x7540 + FIRST + 1));
    return pack_pair<T>((low - BIAS) * step, (high - BIAS) * step);
}

/// Eight codes as numbers.
template <typename T>
__device__ __forceinline__ uint4 eight_numbers(uint32_t first, uint32_t second, float step) {
    constexpr uint32_t SIGNS = 0x80808080u;
    first ^= SIGNS;
    second ^= SIGNS;
    return make_uint4(two_numbers<T, 0>(first, step), two_numbers<T, 2>(first, step),
                      two_numbers<T, 0>(second, step), two_numbers<T, 2>(second, step));
}
