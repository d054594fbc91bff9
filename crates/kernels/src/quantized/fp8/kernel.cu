// Rows rounded to e4m3, as mod.rs has it, and codes of e4m3 transposed.
#include "../numbers.cuh"
#include "vector.cuh"

namespace {

constexpr int MOST_PARTS = 4;

/// Neighbouring columns of rows that share their scales.
struct RoundedPart {
    const void *x;       // rows `stride` elements apart
    const float *scales; // (columns): what x is multiplied by first; or null
    int64_t stride;
    int first; // column of the first one
    int unused;
};

struct Rounding {
    RoundedPart parts[MOST_PARTS];
    uint8_t *codes; // rows `stride` bytes apart
    float *scales;  // (rows)
    int64_t stride;
    int count; // of parts
    int rows;
    int columns; // of all parts
    int eights;  // whether all that lies at a multiple of eight columns can be moved at once
};

/// The columns of the concatenation [W_0; W_1; ..] of matrices (outer, inner) become rows.
struct TransposedPart {
    const uint8_t *codes; // (outer, inner)
    int first;            // row in the concatenation
    int outer;
};

struct Transposing {
    TransposedPart parts[MOST_PARTS];
    uint8_t *to; // (inner) rows `stride` bytes apart
    int64_t stride;
    int inner;
    int unused;
};

/// Bits of the least power of two of which 448 are no less than a magnitude of such bits: 2^-110 at least, so that
/// no multiple is subnormal, and NaN for what isn't finite.
__device__ __forceinline__ uint32_t scale_bits(uint32_t magnitude) {
    if (magnitude >= 0x7f800000u) return 0x7fc00000u;
    // 448 is 1.75·2^8.
    const uint32_t exponent = (magnitude + 0x1fffffu) >> 23;
    return (max(exponent, 17u + 8u) - 8u) << 23;
}

__device__ __forceinline__ uint32_t warp_max_bits(uint32_t x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

/// The nearest code, for magnitudes of up to 448; of two the even one.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return pair & 0xff;
#else
    // One unit of this number is 2^-9, the unit of e4m3's subnormal numbers.
    constexpr uint32_t ALIGN = 141u << 23;
    const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
    const uint32_t subnormal =
        __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(ALIGN))) - ALIGN;
    const uint32_t normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1)) >> 20;
    return (magnitude < 121u << 23 ? subnormal : normal) | (bits >> 24 & 0x80);
#endif
}

/// Where a column of the concatenated parts is.
struct Place {
    const RoundedPart &part;
    int inside;
};

__device__ __forceinline__ Place place_of(const Rounding &p, int column) {
    int part = 0;
#pragma unroll
    for (int i = 1; i < MOST_PARTS; i++) part += i < p.count && column >= p.parts[i].first;
    return {p.parts[part], column - p.parts[part].first};
}

/// The `N` columns of a row from `column` on, as they lie: eight, or one.
template <typename T, int N> struct Columns {
    static constexpr int OF_VECTOR = N == 1 ? 1 : 16 / sizeof(T);
    Vector<T, OF_VECTOR> at[N / OF_VECTOR];

    __device__ __forceinline__ void load(const Rounding &p, int row, int column) {
        const Place place = place_of(p, column);
        const T *x = static_cast<const T *>(place.part.x) + row * place.part.stride + place.inside;
#pragma unroll
        for (int i = 0; i < N / OF_VECTOR; i++) at[i] = load_vector<OF_VECTOR>(x + i * OF_VECTOR);
    }

    /// Multiplied by the part's scales.
    __device__ __forceinline__ void read(const Rounding &p, int column, float (&x)[N]) const {
        const Place place = place_of(p, column);
        const float *scales = place.part.scales;
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = to_float(at[i / OF_VECTOR].at[i % OF_VECTOR]);
        if (scales == nullptr) return;
        constexpr int FOUR = N == 1 ? 1 : 4;
#pragma unroll
        for (int i = 0; i < N; i += FOUR) {
            const Vector<float, FOUR> four = load_vector<FOUR>(scales + place.inside + i);
#pragma unroll
            for (int e = 0; e < FOUR; e++) x[i + e] *= four.at[e];
        }
    }

    /// The bits of the largest magnitude: NaN has more than infinity, and infinity than others.
    __device__ __forceinline__ uint32_t largest(const Rounding &p, int column) const {
        float x[N];
        read(p, column, x);
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < N; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
        return most;
    }

    /// Writes the codes, or with `NUMBERS` what they stand for.
    template <typename To, bool NUMBERS>
    __device__ __forceinline__ void write(const Rounding &p, To *numbers, int row, int column,
                                          float scale, float inverse) const {
        float x[N];
        read(p, column, x);
        uint32_t codes[N];
#pragma unroll
        for (int i = 0; i < N; i++) codes[i] = to_e4m3(x[i] * inverse);
        const int64_t place = row * p.stride + column;
        if constexpr (NUMBERS) {
#pragma unroll
            for (int i = 0; i < N; i++)
                numbers[place + i] = from_float<To>(from_e4m3(codes[i]) * scale);
        } else if constexpr (N == 8) {
            uint2 eight;
            eight.x = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
            eight.y = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
            *reinterpret_cast<uint2 *>(p.codes + place) = eight;
        } else {
            p.codes[place] = static_cast<uint8_t>(codes[0]);
        }
    }
};

/// A block has rows in turn, and of each what a thread has first in registers.
template <typename T, typename To, int N, bool NUMBERS>
__device__ __forceinline__ void round_rows(const Rounding &p, To *numbers) {
    constexpr int HELD = 8;
    __shared__ uint32_t largest[2][WARP];
    const int step = blockDim.x * N, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warps = blockDim.x / WARP;
    int turn = 0;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
        const int first = threadIdx.x * N, rest = first + HELD * step;
        Columns<T, N> held[HELD];
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int column = first + i * step;
            if (column < p.columns) held[i].load(p, row, column);
        }
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int column = first + i * step;
            if (column < p.columns) most = max(most, held[i].largest(p, column));
        }
        for (int column = rest; column < p.columns; column += step) {
            Columns<T, N> columns;
            columns.load(p, row, column);
            most = max(most, columns.largest(p, column));
        }
        most = warp_max_bits(most);
        if (lane == 0) largest[turn][warp] = most;
        __syncthreads();
        const uint32_t bits = scale_bits(warp_max_bits(lane < warps ? largest[turn][lane] : 0));
        const float scale = __uint_as_float(bits);
        // A row of which something isn't finite is NaN.
        const bool finite = bits < 0x7f800000u;
        const float inverse = finite ? __uint_as_float((254u << 23) - bits) : 0.0f;
        if (!NUMBERS && threadIdx.x == 0) p.scales[row] = scale;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int column = first + i * step;
            if (column < p.columns)
                held[i].template write<To, NUMBERS>(p, numbers, row, column, scale, inverse);
        }
        for (int column = rest; column < p.columns; column += step) {
            Columns<T, N> columns;
            columns.load(p, row, column);
            columns.template write<To, NUMBERS>(p, numbers, row, column, scale, inverse);
        }
    }
}

/// The codes of two numbers, as `to_e4m3` has them, the first in the lower bits.
__device__ __forceinline__ uint32_t to_e4m3_pair(float x, float y) {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(y), "f"(x));
    return pair;
#else
    return to_e4m3(x) | to_e4m3(y) << 8;
#endif
}

/// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_once(const void *address) {
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(address));
    return bits;
}

/// The larger of a magnitude and that of `x`, NaN if one is.
__device__ __forceinline__ float larger(float most, float x) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(most), "f"(fabsf(x)));
    return larger;
}

/// Eights of columns that a thread has in registers.
constexpr int EIGHTS = 4;

/// Rows in eights that fit in a block's registers, which has them in turn: while one is rounded, the next is read.
/// `COUNT` is no less than the number of parts.
template <typename T, int COUNT> __device__ __forceinline__ void round_short_rows(const Rounding &p) {
    static_assert(sizeof(T) == 2);
    follow_previous();
    __shared__ uint32_t largest[2][WARP];
    const int step = blockDim.x * 8, first = threadIdx.x * 8;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const auto part_of = [&](int column) {
        int part = 0;
#pragma unroll
        for (int i = 1; i < COUNT; i++) part += i < p.count && column >= p.parts[i].first;
        return part;
    };
    uint4 read[EIGHTS];
    const auto load = [&](int row) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int column = first + i * step;
            if (column >= p.columns) break;
            const RoundedPart &part = p.parts[COUNT == 1 ? 0 : part_of(column)];
            read[i] = load_once(static_cast<const T *>(part.x) + row * part.stride + column - part.first);
        }
    };
    int turn = 0;
    if (blockIdx.x < p.rows) load(blockIdx.x);
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
        float x[EIGHTS][8];
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int column = first + i * step;
            if (column >= p.columns) break;
            const Vector<T, 8> eight = *reinterpret_cast<const Vector<T, 8> *>(&read[i]);
#pragma unroll
            for (int e = 0; e < 8; e++) x[i][e] = to_float(eight.at[e]);
            const RoundedPart &part = p.parts[COUNT == 1 ? 0 : part_of(column)];
            if (part.scales != nullptr) {
                const float4 *scales = reinterpret_cast<const float4 *>(part.scales + column - part.first);
                const float4 low = __ldg(scales), high = __ldg(scales + 1);
                x[i][0] *= low.x, x[i][1] *= low.y, x[i][2] *= low.z, x[i][3] *= low.w;
                x[i][4] *= high.x, x[i][5] *= high.y, x[i][6] *= high.z, x[i][7] *= high.w;
            }
#pragma unroll
            for (int e = 0; e < 8; e++) most = larger(most, x[i][e]);
        }
        if (row + gridDim.x < p.rows) load(row + gridDim.x);
        const uint32_t of_warp = __reduce_max_sync(FULL, __float_as_uint(most));
        if (lane == 0) largest[turn][warp] = of_warp;
        __syncthreads();
        const uint32_t bits =
            scale_bits(__reduce_max_sync(FULL, lane < warps ? largest[turn][lane] : 0));
        // A row of which something isn't finite is NaN.
        const float inverse = bits < 0x7f800000u ? __uint_as_float((254u << 23) - bits) : 0.0f;
        if (threadIdx.x == 0) p.scales[row] = __uint_as_float(bits);
        uint8_t *codes = p.codes + row * p.stride;
#pragma unroll
        for (int i = 0; i < EIGHTS; i++) {
            const int column = first + i * step;
            if (column >= p.columns) break;
            uint32_t pairs[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                pairs[e] = to_e4m3_pair(x[i][2 * e] * inverse, x[i][2 * e + 1] * inverse);
            *reinterpret_cast<uint2 *>(codes + column) =
                make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        }
    }
}

/// Writes codes and scales.
template <typename T> __device__ __forceinline__ void round_to_codes(const Rounding &p) {
    follow_previous();
    if (p.eights) {
        round_rows<T, T, 8, false>(p, nullptr);
    } else {
        round_rows<T, T, 1, false>(p, nullptr);
    }
}

/// Writes what codes stand for.
template <typename T, typename To>
__device__ __forceinline__ void round_to_numbers(const Rounding &p, To *numbers) {
    follow_previous();
    round_rows<T, To, 1, true>(p, numbers);
}

/// Of a tile.
constexpr int SIDE = 128;

/// A tile of 128 x 128 codes is read in words of a row and written in words of a column. A thread transposes 4 x 4
/// codes at a time; what it has of column `c` lies in shared memory at place `word ^ c / 4` of the column's.
__device__ __forceinline__ void transpose(const Transposing &p) {
    follow_previous();
    __shared__ uint32_t words[SIDE][SIDE / 4];
    const TransposedPart &part = p.parts[blockIdx.z];
    const int top = blockIdx.y * SIDE, left = blockIdx.x * SIDE;
    if (top >= part.outer) return;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const int column = left + lane * 4;
#pragma unroll
    for (int group = warp; group < SIDE / 4; group += warps) {
        uint32_t rows[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = top + group * 4 + i;
            const uint8_t *from = part.codes + static_cast<int64_t>(row) * p.inner + column;
            const bool inside = row < part.outer && column < p.inner;
            rows[i] = inside ? __ldg(reinterpret_cast<const uint32_t *>(from)) : 0;
        }
        // Of rows 0 and 1, and of 2 and 3: the first two columns, and the others.
        const uint32_t a = __byte_perm(rows[0], rows[1], 0x5140);
        const uint32_t b = __byte_perm(rows[2], rows[3], 0x5140);
        const uint32_t c = __byte_perm(rows[0], rows[1], 0x7362);
        const uint32_t d = __byte_perm(rows[2], rows[3], 0x7362);
        const int place = group ^ lane;
        words[lane * 4][place] = __byte_perm(a, b, 0x5410);
        words[lane * 4 + 1][place] = __byte_perm(a, b, 0x7632);
        words[lane * 4 + 2][place] = __byte_perm(c, d, 0x5410);
        words[lane * 4 + 3][place] = __byte_perm(c, d, 0x7632);
    }
    __syncthreads();
    const int row = top + lane * 4;
#pragma unroll
    for (int i = warp; i < SIDE; i += warps) {
        if (left + i >= p.inner || row >= part.outer) continue;
        uint8_t *to = p.to + static_cast<int64_t>(left + i) * p.stride + part.first + row;
        *reinterpret_cast<uint32_t *>(to) = words[i][lane ^ i / 4];
    }
}

} // namespace

/// Of a block that rounds: two such have a multiprocessor's registers.
constexpr int THREADS = 448;
/// Of a block that rounds short rows, at most.
constexpr int SHORT_THREADS = 896;

#define CODES(suffix, element)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                       \
        round_to_codes_##suffix(const __grid_constant__ Rounding p) {                              \
        round_to_codes<element>(p);                                                                \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1)                                 \
        round_short_##suffix(const __grid_constant__ Rounding p) {                                 \
        round_short_rows<element, 1>(p);                                                           \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(SHORT_THREADS, 1)                                 \
        round_short_parts_##suffix(const __grid_constant__ Rounding p) {                           \
        round_short_rows<element, MOST_PARTS>(p);                                                  \
    }
#define NUMBERS(suffix, element)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        round_to_same_##suffix(const __grid_constant__ Rounding p, element *numbers) {             \
        round_to_numbers<element>(p, numbers);                                                     \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        round_to_f32_##suffix(const __grid_constant__ Rounding p, float *numbers) {                \
        round_to_numbers<element>(p, numbers);                                                     \
    }
CODES(bf16, bf16)
CODES(f16, f16)
NUMBERS(f32, float)
NUMBERS(bf16, bf16)
NUMBERS(f16, f16)

extern "C" __global__ void __launch_bounds__(256) transpose_codes(const __grid_constant__ Transposing p) {
    transpose(p);
}
