// The numbers of a matrix in fewer bits, as mod.rs has the formula: each step in f32, rounded as the CPU does.
#pragma once

#include "common.cuh"

/// What codes stand for.
constexpr int INTEGERS = 0, TABLE = 1, E4M3 = 2;
/// How scales are stored.
constexpr int PLAIN_F32 = 0, PLAIN_F16 = 1, PLAIN_BF16 = 2, CODED_E8M0 = 3, CODED_E4M3 = 4, NESTED = 5,
              BLOCKS = 6, SIGNED_BLOCKS = 7;
/// Groups that share one scale of nested ones, and elements that share one of blocks.
constexpr int OF_NESTED = 256, OF_BLOCK = 256;

struct Packed {
    const void *codes;
    const void *scales;        // (groups)
    const void *offsets;       // (groups), or null
    const void *large;         // of nested scales f32, of blocks f16
    const void *large_offsets; // (blocks) f16, or null
    const float *table;        // (256), of nested scales
    float levels[16];
    float number; // what scales of e4m3 are multiplied by, and what is added to nested ones
    int bits;
    int kind; // of levels
    int zero;
    int scale_kind;
    int group;
    int shift; // the group's logarithm, or -1
    int unused;
};

/// The number of an 8-bit float with 4 bits of exponent and 3 of mantissa.
__device__ __forceinline__ float from_e4m3(uint32_t code) {
    // The bits where an f32 has them, whose exponent counts from 127 and not from 7.
    const float number = __uint_as_float((code & 0x7f) << 20) * __uint_as_float((120 + 127) << 23);
    const float known = (code & 0x7f) == 0x7f ? NAN : number;
    return __uint_as_float(__float_as_uint(known) | (code & 0x80) << 24);
}

/// `2^(code - 127)`, NaN for 255.
__device__ __forceinline__ float from_e8m0(uint32_t code) {
    return code == 255 ? NAN : __uint_as_float(code == 0 ? 1u << 22 : code << 23);
}

__device__ __forceinline__ float from_f16(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// What is stored of a group's scale and offset.
struct StoredScale {
    uint32_t scale, offset, large, large_offset;
};

struct ScaleAndOffset {
    float scale, offset;
};

/// What a scale that is stored in a way stands for. An offset that isn't there is -0, which changes no number that it is added to.
template <int STORED> __device__ __forceinline__ ScaleAndOffset decoded_as(const Packed &q, StoredScale from) {
    const bool shifts = q.offsets != nullptr;
    if constexpr (STORED == PLAIN_F32) {
        return {__uint_as_float(from.scale), shifts ? __uint_as_float(from.offset) : -0.0f};
    } else if constexpr (STORED == PLAIN_F16) {
        return {from_f16(from.scale), shifts ? from_f16(from.offset) : -0.0f};
    } else if constexpr (STORED == PLAIN_BF16) {
        return {__uint_as_float(from.scale << 16), shifts ? __uint_as_float(from.offset << 16) : -0.0f};
    } else if constexpr (STORED == CODED_E8M0) {
        return {from_e8m0(from.scale), -0.0f};
    } else if constexpr (STORED == CODED_E4M3) {
        return {__fmul_rn(from_e4m3(from.scale), q.number), -0.0f};
    } else if constexpr (STORED == NESTED) {
        const float scale = __fmul_rn(__ldg(q.table + from.scale), __uint_as_float(from.large));
        return {__fadd_rn(scale, q.number), -0.0f};
    } else {
        const int code = STORED == SIGNED_BLOCKS ? static_cast<int8_t>(from.scale) : static_cast<int>(from.scale);
        const float offset = -__fmul_rn(from_f16(from.large_offset), static_cast<float>(from.offset));
        return {__fmul_rn(from_f16(from.large), static_cast<float>(code)), shifts ? offset : -0.0f};
    }
}

/// The same, however it is stored.
__device__ __forceinline__ ScaleAndOffset decoded(const Packed &q, StoredScale from) {
    switch (q.scale_kind) {
        case PLAIN_F32: return decoded_as<PLAIN_F32>(q, from);
        case PLAIN_F16: return decoded_as<PLAIN_F16>(q, from);
        case PLAIN_BF16: return decoded_as<PLAIN_BF16>(q, from);
        case CODED_E8M0: return decoded_as<CODED_E8M0>(q, from);
        case CODED_E4M3: return decoded_as<CODED_E4M3>(q, from);
        case NESTED: return decoded_as<NESTED>(q, from);
        case SIGNED_BLOCKS: return decoded_as<SIGNED_BLOCKS>(q, from);
        default: return decoded_as<BLOCKS>(q, from);
    }
}

/// Bytes of a stored scale.
__device__ __forceinline__ int scale_bytes(const Packed &q) {
    return q.scale_kind == PLAIN_F32 ? 4 : q.scale_kind <= PLAIN_BF16 ? 2 : 1;
}

__device__ __forceinline__ uint32_t load_bytes(const void *address, int64_t index, int bytes) {
    if (bytes == 4) return __ldg(static_cast<const uint32_t *>(address) + index);
    if (bytes == 2) return __ldg(static_cast<const unsigned short *>(address) + index);
    return __ldg(static_cast<const uint8_t *>(address) + index);
}

/// What is stored of group `group`, of which `element` is one.
__device__ __forceinline__ StoredScale stored_scale(const Packed &q, int64_t group, int64_t element) {
    StoredScale stored{};
    const int bytes = scale_bytes(q);
    stored.scale = load_bytes(q.scales, group, bytes);
    if (q.offsets != nullptr) stored.offset = load_bytes(q.offsets, group, bytes);
    if (q.scale_kind == NESTED) stored.large = load_bytes(q.large, group / OF_NESTED, 4);
    if (q.scale_kind >= BLOCKS) {
        stored.large = load_bytes(q.large, element / OF_BLOCK, 2);
        if (q.offsets != nullptr)
            stored.large_offset = load_bytes(q.large_offsets, element / OF_BLOCK, 2);
    }
    return stored;
}

/// What that stands for.
__device__ __forceinline__ ScaleAndOffset scale_of(const Packed &q, int64_t group, int64_t element) {
    return decoded(q, stored_scale(q, group, element));
}

/// What a code stands for. `table` has the levels where there are such.
template <int KIND>
__device__ __forceinline__ float level_of(uint32_t code, float zero, const float *table) {
    if constexpr (KIND == TABLE) return table[code];
    if constexpr (KIND == E4M3) return from_e4m3(code);
    // The integer in the mantissa of 2^23.
    return __uint_as_float(0x4b000000u | code) - zero;
}

/// What `level_of` takes off.
__device__ __forceinline__ float zero_of(const Packed &q) {
    return 8388608.0f + static_cast<float>(q.zero);
}

/// The codes from `8·index` on, of memory that begins at a multiple of 4 bytes.
template <int BITS>
__device__ __forceinline__ uint64_t eight_codes(const Packed &q, uint32_t index) {
    const uint32_t *words = static_cast<const uint32_t *>(q.codes);
    if constexpr (BITS == 8) {
        const uint2 both = __ldg(reinterpret_cast<const uint2 *>(words) + index);
        return both.x | static_cast<uint64_t>(both.y) << 32;
    } else if constexpr (BITS == 4) {
        return __ldg(words + index);
    } else if constexpr (BITS == 2) {
        return __ldg(reinterpret_cast<const unsigned short *>(words) + index);
    } else {
        const uint8_t *bytes = static_cast<const uint8_t *>(q.codes) + static_cast<int64_t>(index) * BITS;
        uint64_t codes = 0;
#pragma unroll
        for (int i = 0; i < BITS; i++) codes |= static_cast<uint64_t>(__ldg(bytes + i)) << (8 * i);
        return codes;
    }
}

/// One number of a matrix, however it lies.
__device__ __forceinline__ float any_number(const Packed &q, int64_t element, int64_t elements) {
    const uint8_t *bytes = static_cast<const uint8_t *>(q.codes);
    const int64_t bit = element * q.bits, last = (elements * q.bits + 7) / 8 - 1;
    const uint32_t low = bytes[bit / 8], high = bit / 8 < last ? bytes[bit / 8 + 1] : 0;
    const uint32_t code = (low | high << 8) >> (bit % 8) & ((1u << q.bits) - 1);
    const float level = q.kind == TABLE ? q.levels[code]
                        : q.kind == E4M3
                            ? from_e4m3(code)
                            : static_cast<float>(static_cast<int>(code) - q.zero);
    const ScaleAndOffset group = scale_of(q, element / q.group, element);
    return __fadd_rn(__fmul_rn(level, group.scale), group.offset);
}
