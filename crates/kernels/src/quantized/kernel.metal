// Matrices in fewer bits: their numbers, as mod.rs has the formula, for product.metal too, all of them written, and
// some rows of them.
#include "common.metal.h"

// What a launch's code is made for; the indices are those of metal.rs.

/// Bits of a code, and what codes stand for.
constant ushort CODE_BITS [[function_constant(40)]];
constant ushort LEVEL_KIND [[function_constant(41)]];
/// How scales are stored, and whether there are offsets.
constant ushort SCALE_KIND [[function_constant(42)]];
constant bool HAS_OFFSETS [[function_constant(43)]];
/// Whether rows begin at a multiple of eight elements, and groups too.
constant bool IN_EIGHTS [[function_constant(44)]];

constant constexpr ushort LEVEL_INTEGERS = 0, LEVEL_TABLE = 1;
constant constexpr ushort SCALE_F32 = 0, SCALE_F16 = 1, SCALE_BF16 = 2, SCALE_E8M0 = 3, SCALE_E4M3 = 4,
                          SCALE_NESTED = 5, SCALE_SIGNED_BLOCKS = 7;
/// Groups that share one scale of nested ones, and elements that share one of blocks.
constant constexpr uint OF_NESTED = 256, OF_BLOCK = 256;

/// What a matrix has beside its tensors, as `Packed::numbers` in metal.rs lays it out.
struct PackedNumbers {
    float levels[16];
    float number;
    int zero;
    uint group, columns;
};

/// A matrix; tensors that aren't there are the scales again.
struct Packed {
    device const uchar *codes, *scales, *offsets, *large, *large_offsets, *table;
    constant PackedNumbers &of;
};

struct ScaleAndOffset {
    float scale, offset;
};

/// An 8-bit float with 4 bits of exponent and 3 of mantissa.
inline float from_e4m3(uint code) {
    // The bits where an f32 has them, whose exponent counts from 127 and not from 7. Not as an f32 that is too small
    // for a normal one, which may be taken for 0.
    const uint exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? float(mantissa) * (1.0f / 512.0f)
                                          : as_type<float>((exponent + 120) << 23 | mantissa << 20);
    const float known = (code & 0x7f) == 0x7f ? NAN : magnitude;
    return code & 0x80 ? -known : known;
}

inline float half_at(device const uchar *from, ulong index) {
    return float(reinterpret_cast<device const half *>(from)[index]);
}

inline float float_at(device const uchar *from, ulong index) {
    return reinterpret_cast<device const float *>(from)[index];
}

inline float plain_at(device const uchar *from, ulong index) {
    switch (SCALE_KIND) {
        case SCALE_F32:
            return float_at(from, index);
        case SCALE_F16:
            return half_at(from, index);
        default:
            return float(reinterpret_cast<device const bfloat *>(from)[index]);
    }
}

/// Of the group of an element.
inline ScaleAndOffset scale_of(Packed matrix, ulong element) {
    const ulong group = element / matrix.of.group;
    switch (SCALE_KIND) {
        case SCALE_F32:
        case SCALE_F16:
        case SCALE_BF16:
            return {plain_at(matrix.scales, group),
                    HAS_OFFSETS ? plain_at(matrix.offsets, group) : -0.0f};
        case SCALE_E8M0: {
            const uint code = matrix.scales[group];
            return {code == 255 ? NAN : as_type<float>(code == 0 ? 1u << 22 : code << 23), -0.0f};
        }
        case SCALE_E4M3:
            return {from_e4m3(matrix.scales[group]) * matrix.of.number, -0.0f};
        case SCALE_NESTED: {
            const float coded = float_at(matrix.table, matrix.scales[group]);
            const float product = coded * float_at(matrix.large, group / OF_NESTED);
            return {product + matrix.of.number, -0.0f};
        }
        default: {
            const ulong block = element / OF_BLOCK;
            const int code = SCALE_KIND == SCALE_SIGNED_BLOCKS ? int(char(matrix.scales[group]))
                                                               : int(matrix.scales[group]);
            const float scale = half_at(matrix.large, block) * float(code);
            if (!HAS_OFFSETS) return {scale, -0.0f};
            return {scale, -(half_at(matrix.large_offsets, block) * float(matrix.offsets[group]))};
        }
    }
}

inline float level_of(Packed matrix, uint code) {
    switch (LEVEL_KIND) {
        case LEVEL_INTEGERS:
            return float(int(code) - matrix.of.zero);
        case LEVEL_TABLE:
            return matrix.of.levels[code];
        default:
            return from_e4m3(code);
    }
}

/// One number.
inline float packed_number(Packed matrix, ulong element) {
    const ulong bit = element * CODE_BITS;
    device const uchar *from = matrix.codes + bit / 8;
    const uint shift = bit % 8;
    // The next byte is there where the code goes on.
    const uint high = shift + CODE_BITS > 8 ? uint(from[1]) << 8 : 0;
    const uint code = (from[0] | high) >> shift & ((1u << CODE_BITS) - 1);
    const ScaleAndOffset scale = scale_of(matrix, element);
    const float product = level_of(matrix, code) * scale.scale;
    return product + scale.offset;
}

/// The numbers from element `8·index` on, all of one group.
inline void eight_numbers(Packed matrix, ulong index, thread float (&out)[8]) {
    device const uchar *from = matrix.codes + index * CODE_BITS;
    ulong codes = 0;
    switch (CODE_BITS) {
        case 4:
            codes = *reinterpret_cast<device const uint *>(from);
            break;
        case 8: {
            const uint2 both = *reinterpret_cast<device const uint2 *>(from);
            codes = both.x | ulong(both.y) << 32;
            break;
        }
        default:
            for (ushort i = 0; i < CODE_BITS; i++) codes |= ulong(from[i]) << (8 * i);
    }
    const ScaleAndOffset scale = scale_of(matrix, 8 * index);
    for (ushort i = 0; i < 8; i++) {
        const uint code = uint(codes >> (i * CODE_BITS)) & ((1u << CODE_BITS) - 1);
        const float product = level_of(matrix, code) * scale.scale;
        out[i] = product + scale.offset;
    }
}

#define PACKED_BUFFERS                                                                             \
    device const uchar *codes [[buffer(0)]], device const uchar *scales [[buffer(1)]],             \
        device const uchar *offsets [[buffer(2)]], device const uchar *large [[buffer(3)]],        \
        device const uchar *large_offsets [[buffer(4)]], device const uchar *table [[buffer(5)]],  \
        constant PackedNumbers &of [[buffer(6)]]

/// Writes `count` numbers from `first` on, of which the threadgroups of `index` have `8·threads`.
template <typename T>
inline void write_numbers(Packed matrix, ulong first, ulong count, device T *out, uint index,
                          uint own, uint threads) {
    const ulong start = (ulong(index) * threads + own) * 8;
    if (IN_EIGHTS && start + 8 <= count) {
        float numbers[8];
        eight_numbers(matrix, (first + start) / 8, numbers);
        for (ushort i = 0; i < 8; i++) out[start + i] = static_cast<T>(numbers[i]);
        return;
    }
    for (ulong i = start; i < min(count, start + 8); i++)
        out[i] = static_cast<T>(packed_number(matrix, first + i));
}

/// All numbers; a thread has eight.
template <typename T>
[[kernel]] void dequantize(PACKED_BUFFERS, device T *out [[buffer(7)]],
                           constant ulong &count [[buffer(8)]], PLACE) {
    write_numbers<T>({codes, scales, offsets, large, large_offsets, table, of}, 0, count, out,
                     group.x, own.x, threads.x);
}

/// The threadgroups of `group.y` have the row of an id; one outside the table gives NaN.
template <typename T>
[[kernel]] void quantized_rows(PACKED_BUFFERS, device T *out [[buffer(7)]],
                               device const uint *ids [[buffer(8)]],
                               constant uint &rows [[buffer(9)]], PLACE) {
    const uint id = ids[group.y];
    const ulong columns = of.columns;
    out += group.y * columns;
    if (id < rows) {
        write_numbers<T>({codes, scales, offsets, large, large_offsets, table, of}, id * columns,
                         columns, out, group.x, own.x, threads.x);
        return;
    }
    const ulong start = (ulong(group.x) * threads.x + own.x) * 8;
    for (ulong i = start; i < min(columns, start + 8); i++) out[i] = static_cast<T>(NAN);
}

FOR_EACH_DTYPE(dequantize)
FOR_EACH_DTYPE(quantized_rows)
