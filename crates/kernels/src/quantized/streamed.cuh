// y = x·Wᵀ + bias + scale·(x·A)·B of one to four rows of bf16 or f16 and weights in fewer bits, on Hopper, as fast as
// memory gives the weights.
//
// A task is 16 outputs of one projection, and a stage `WIDTH` columns of its 16 rows of W. Warps of a block do
// different work, and meet at barriers in shared memory only:
//   one brings the codes of stages into a ring, by bulk copies, as far ahead as there is room,
//   eight load and decode scales, into a ring of their own,
//   sixteen multiply, each the same columns of every stage,
//   two make the table of levels, if there is one, and then add up what these have of a task, with the low-rank part, and
//   write it, or the gated unit of two tasks.
// Weights aren't written by kernels, so all of it begins before the previous kernel ends, but for what reads x.
//
// The tensor cores multiply: W is the operand of 16 rows, x that of 8 columns. A lane has 32 codes of two rows. A
// column of x is zero but where one lane of four has its codes, so sums belong to one group of W, and are multiplied
// by its scale in f32. Which of the inner indices stand beside each other doesn't matter, so codes are taken apart in
// the order that is fastest, and x lies in the same order.
//   Integers are multiplied as such, by x in integers of 16 bits times a power of two that a unit of x shares: the
//   high and the low bytes are a column each. Sums of x take off the zero of codes, and add offsets.
//   Levels of tables and of e4m3 are multiplied in f16, by x divided by such a power of two.
// What isn't finite in x makes the output NaN.
#pragma once

#include "../glu/activation.cuh"
#include "barrier.cuh"
#include "few_rows.cuh"
#include "source.cuh"
#include "warpgroup.cuh"

#if defined(HOPPER)

/// How scales are stored, as far as kernels differ: in f32, f16 or bf16; as e8m0 or e4m3; nested; in blocks.
constexpr int IN_FLOATS = 0, IN_CODES = 1, IN_NESTED = 2, IN_BLOCKS = 3;

/// Warps of each kind of work.
constexpr int MULTIPLIERS = 16, SCALERS = 8, FINISHERS = 2;
constexpr int STREAMED_WARPS = MULTIPLIERS + 1 + FINISHERS + SCALERS;
constexpr int STREAMED_THREADS = STREAMED_WARPS * WARP;
/// Stages that have room at most.
constexpr int MOST_SLOTS = 16;

/// A kernel for ROWS_ rows of x at most and codes of BITS_ that stand for KIND_. GROUP_ is 16, 32 or, for multiples of
/// 64, 64. A lane multiplies CHUNKS_ times 32 columns of two rows in a stage; TEAMS_ of scalers have stages in turn.
/// `Streamed::bytes` in cuda.rs knows the sizes.
template <int ROWS_, int BITS_, int KIND_, int GROUP_, int FORM_, int CHUNKS_, int TEAMS_> struct Streamed {
    static constexpr int ROWS = ROWS_, BITS = BITS_, KIND = KIND_, GROUP = GROUP_, FORM = FORM_;
    static constexpr int CHUNKS = CHUNKS_, TEAMS = TEAMS_, SCALE_SLOTS = TEAMS + 1;
    static constexpr int WIDTH = 128 * MULTIPLIERS * CHUNKS;
    static constexpr bool WHOLE = KIND == INTEGERS;
    /// Bytes from a row of a slot to the next, so that lanes read from different banks.
    static constexpr int PAD = BITS == 4 ? 64 : BITS == 2 || BITS == 6 ? 32 : 16;
    static constexpr int PITCH = WIDTH * BITS / 8 + PAD;
    static constexpr int SLOT = OUTPUTS * PITCH;
    /// Scales in f32, with offsets if there may be such, of groups of `GROUP`.
    static constexpr bool SHIFTS = WHOLE && !(GROUP == 16 && BITS != 2);
    static constexpr int ENTRY = SHIFTS ? 8 : 4, OF_QUAD = 128 / GROUP * ENTRY;
    static constexpr int SCALES_PITCH = WIDTH / GROUP * ENTRY + (OF_QUAD > 16 ? OF_QUAD : 16);
    static constexpr int SCALES = OUTPUTS * SCALES_PITCH;
    /// Elements of x that share a power of two, and groups of a lane's 32 columns.
    static constexpr int UNIT = !WHOLE ? (GROUP == 64 ? 128 : 64) : GROUP < 32 ? GROUP : 32;
    static constexpr int GROUPS = GROUP < 32 ? 2 : 1;
    /// The levels of all pairs of codes of 4 bits, a copy for every lane. Half of it is unused, so that a byte with two
    /// codes is a byte of the address.
    static constexpr int TABLE_PITCH = 256, TABLE_BYTES = KIND == TABLE ? 256 * TABLE_PITCH : 0;
    static constexpr int ZEROS = 256;
    /// Columns of a product that a row of x takes where codes are floats, and rows of x in one.
    static constexpr int COLUMNS = GROUP == 64 ? 2 : 4, AT_ONCE = 8 / COLUMNS;
    /// Sums that a lane has of each of two rows of W, of a product each.
    static constexpr int SETS = WHOLE ? ROWS : (ROWS + AT_ONCE - 1) / AT_ONCE;
    /// Parts of an output that a warp has.
    static constexpr int PARTS = ROWS == 1 ? 4 : 1;
    static constexpr int OF_WARP = PARTS * ROWS * OUTPUTS, SUMS = FINISHERS * MULTIPLIERS * OF_WARP * 4;
    /// What the first finisher leaves for the other, in two rounds.
    static constexpr int GATES = 2 * ROWS * OUTPUTS * 4;
    static constexpr int BARRIERS = 2 * MOST_SLOTS + 2 * SCALE_SLOTS + 2 * FINISHERS + 2;
};

/// What is known of the elements of x that share a power of two: their sum, and sums of the high and low bytes.
struct alignas(16) XUnit {
    float size, sum;
    int high, low;
};

/// Brings so many bytes, a multiple of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// `c += a·b`, a in u8 and b in s8.
__device__ __forceinline__ void multiply_add_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                   uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Where an integer of so many bits has its element of x.
template <int BITS> __device__ __forceinline__ constexpr int place_of_code(int code) {
    if (BITS == 4) return code / 8 * 8 + code % 2 * 4 + code % 8 / 2;
    if (BITS == 2) return code / 16 * 16 + code % 4 * 4 + code % 16 / 4;
    return code;
}

/// The codes at places `4·FOUR` to `4·FOUR + 3` of a lane's 32 as bytes.
template <int BITS, int FOUR> __device__ __forceinline__ uint32_t code_bytes(const uint32_t (&words)[BITS]) {
    if constexpr (BITS == 8) {
        return words[FOUR];
    } else if constexpr (BITS == 4) {
        return (FOUR % 2 == 0 ? words[FOUR / 2] : words[FOUR / 2] >> 4) & 0x0f0f0f0fu;
    } else if constexpr (BITS == 2) {
        return (words[FOUR / 4] >> (2 * (FOUR % 4))) & 0x03030303u;
    } else {
        constexpr int BIT = FOUR * 4 * BITS, AT = BIT / 32, SHIFT = BIT % 32;
        constexpr uint32_t MASK = ((1u << BITS) - 1) * 0x00010001u;
        constexpr int NEXT = AT + 1 < BITS ? AT + 1 : AT;
        const uint32_t four = SHIFT + 4 * BITS <= 32 ? words[AT] >> SHIFT
                                                     : __funnelshift_r(words[AT], words[NEXT], SHIFT);
        // Two codes to each half of a word, then one to each byte.
        const uint32_t pairs = (four & 0xffffu) | ((four << (16 - 2 * BITS)) & 0xffff0000u);
        return (pairs & MASK) | ((pairs << (8 - BITS)) & (MASK << 8));
    }
}

/// What is stored of the scales of 256 columns.
template <typename S> struct Stored {
    static constexpr int COUNT = 256 / S::GROUP;
    /// Registers of them: in f32 those of a scale each, else of two or four.
    static constexpr int WORDS = S::FORM == IN_FLOATS ? COUNT : COUNT / 4;
    uint32_t scales[WORDS], offsets[WORDS], large, large_offset;

    /// So many bytes from there on.
    template <int COUNT_OF_BYTES>
    __device__ __forceinline__ static void load_bytes_at(const uint8_t *at, uint32_t (&out)[WORDS]) {
        if constexpr (COUNT_OF_BYTES == 4) {
            out[0] = __ldg(reinterpret_cast<const uint32_t *>(at));
        } else if constexpr (COUNT_OF_BYTES == 8) {
            const uint2 two = __ldg(reinterpret_cast<const uint2 *>(at));
            out[0] = two.x, out[1] = two.y;
        } else {
#pragma unroll
            for (int i = 0; i < COUNT_OF_BYTES / 4; i += 4) {
                const uint4 four = __ldg(reinterpret_cast<const uint4 *>(at) + i / 4);
                out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
            }
        }
    }

    __device__ __forceinline__ static void load_some(const Packed &q, const void *from, uint32_t element,
                                                     uint32_t (&out)[WORDS]) {
        const uint8_t *bytes = static_cast<const uint8_t *>(from);
        if (S::GROUP < 64 || q.group == 64) {
            const uint32_t group = element / S::GROUP;
            if constexpr (S::FORM != IN_FLOATS) {
                load_bytes_at<COUNT>(bytes + group, out);
            } else if (q.scale_kind == PLAIN_F32) {
                load_bytes_at<4 * COUNT>(bytes + 4 * static_cast<int64_t>(group), out);
            } else {
                load_bytes_at<2 * COUNT>(bytes + 2 * static_cast<int64_t>(group), out);
            }
        } else {
            uint32_t all[COUNT];
            const int width = scale_bytes(q);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const uint32_t at = element + S::GROUP * i;
                all[i] = load_bytes(from, q.shift >= 0 ? at >> q.shift : at / q.group, width);
            }
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                if constexpr (S::FORM != IN_FLOATS) {
                    out[i] = all[4 * i] | all[4 * i + 1] << 8 | all[4 * i + 2] << 16 | all[4 * i + 3] << 24;
                } else {
                    out[i] = width == 4 ? all[i] : 2 * i < COUNT ? all[2 * i] | all[2 * i + 1] << 16 : 0;
                }
            }
        }
    }

    __device__ __forceinline__ void load(const Packed &q, uint32_t element) {
        load_some(q, q.scales, element, scales);
        if (S::SHIFTS && q.offsets != nullptr) load_some(q, q.offsets, element, offsets);
        if (S::FORM == IN_NESTED)
            large = load_bytes(q.large, (q.shift >= 0 ? element >> q.shift : element / q.group) / OF_NESTED, 4);
        if (S::FORM == IN_BLOCKS) {
            large = load_bytes(q.large, element / OF_BLOCK, 2);
            if (S::SHIFTS && q.offsets != nullptr) large_offset = load_bytes(q.large_offsets, element / OF_BLOCK, 2);
        }
    }

    __device__ __forceinline__ ScaleAndOffset decode(const Packed &q, int i) const {
        const bool shifts = S::SHIFTS && q.offsets != nullptr;
        if constexpr (S::FORM == IN_FLOATS) {
            auto number = [&](const uint32_t (&words)[WORDS]) {
                if (q.scale_kind == PLAIN_F32) return __uint_as_float(words[i]);
                const uint32_t bits = i % 2 == 1 ? words[i / 2] >> 16 : words[i / 2] & 0xffff;
                return q.scale_kind == PLAIN_BF16 ? __uint_as_float(bits << 16) : from_f16(bits);
            };
            return {number(scales), shifts ? number(offsets) : 0.0f};
        } else {
            const uint32_t code = (scales[i / 4] >> (8 * (i % 4))) & 0xff;
            if constexpr (S::FORM == IN_CODES) {
                if (q.scale_kind == CODED_E8M0) return {from_e8m0(code), 0.0f};
                return {from_e4m3(code) * q.number, 0.0f};
            } else if constexpr (S::FORM == IN_NESTED) {
                return {__ldg(q.table + code) * __uint_as_float(large) + q.number, 0.0f};
            } else {
                const int whole = q.scale_kind == SIGNED_BLOCKS ? static_cast<int8_t>(code) : static_cast<int>(code);
                const uint32_t of_offset = (offsets[i / 4] >> (8 * (i % 4))) & 0xff;
                return {from_f16(large) * static_cast<float>(whole),
                        shifts ? -from_f16(large_offset) * static_cast<float>(of_offset) : 0.0f};
            }
        }
    }

    /// Writes them in f32.
    __device__ __forceinline__ void write(const Packed &q, char *to) const {
        constexpr int OF_VECTOR = 16 / S::ENTRY;
#pragma unroll
        for (int i = 0; i < COUNT; i += OF_VECTOR) {
            float out[4];
#pragma unroll
            for (int j = 0; j < OF_VECTOR; j++) {
                const ScaleAndOffset one = decode(q, i + j);
                out[j * (4 / OF_VECTOR)] = one.scale;
                if constexpr (S::SHIFTS) out[2 * j + 1] = one.offset;
            }
            *reinterpret_cast<float4 *>(to + i * S::ENTRY) = make_float4(out[0], out[1], out[2], out[3]);
        }
    }
};

/// Where x is put, and what is known of its units.
template <typename S> struct Staged {
    char *x;
    XUnit *units;
    int inner;

    /// Writes eight numbers of a row: for each 128 columns, first 16 bytes for each of four lanes, then the next ones.
    __device__ __forceinline__ void put(int r, int i, bool valid, const float (&values)[8]) const {
        int most = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) most = max(most, __float_as_int(values[j]) & 0x7fffffff);
#pragma unroll
        for (int lanes = 1; lanes < S::UNIT / 8; lanes *= 2) most = max(most, __shfl_xor_sync(FULL, most, lanes));
        // The power of two by which all are below 2^14.
        const int exponent = max(most >> 23, 27) - 13;
        const float size = most >= 0x7f800000 ? NAN : __int_as_float(exponent << 23);
        const float inverse = __int_as_float((254 - exponent) << 23);
        const int element = 8 * i, within = element % 128;
        XUnit unit{size, 0.0f, 0, 0};
        char *row = x + r * inner * 2 + element / 128 * 256;
        if constexpr (S::WHOLE) {
            uint32_t high[2] = {}, low[2] = {};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                // Added to 1.5·2^23, a number's integer is in the mantissa.
                const int whole = __float_as_int(values[j] * inverse + 12582912.0f) - 0x4b400000;
                const int upper = (whole + 128) >> 8;
                unit.high += upper;
                unit.low += whole - 256 * upper;
                const int place = S::BITS == 2 ? j : place_of_code<S::BITS>(j);
                high[place / 4] |= (upper & 0xff) << (8 * (place % 4));
                low[place / 4] |= (whole & 0xff) << (8 * (place % 4));
            }
            row += within / 32 * 32 + within % 32 / 16 * 128;
            if (S::BITS == 2 && valid) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int place = place_of_code<2>(within % 16 + j);
                    row[place] = static_cast<char>(high[j / 4] >> (8 * (j % 4)));
                    row[16 + place] = static_cast<char>(low[j / 4] >> (8 * (j % 4)));
                }
            } else if (valid) {
                *reinterpret_cast<uint2 *>(row + within % 16) = make_uint2(high[0], high[1]);
                *reinterpret_cast<uint2 *>(row + 16 + within % 16) = make_uint2(low[0], low[1]);
            }
#pragma unroll
            for (int lanes = 1; lanes < S::UNIT / 8; lanes *= 2) {
                unit.high += __shfl_xor_sync(FULL, unit.high, lanes);
                unit.low += __shfl_xor_sync(FULL, unit.low, lanes);
            }
            unit.sum = size * static_cast<float>(256 * unit.high + unit.low);
        } else if (valid) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                pairs[j] = pack_pair<f16>(values[2 * j] * inverse, values[2 * j + 1] * inverse);
            row += within / 32 * 16 + within % 32 / 8 * 64;
            *reinterpret_cast<uint4 *>(row) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        if (valid && element % S::UNIT == 0) units[(r * inner + element) / S::UNIT] = unit;
    }
};

/// The longest row that is normed on the way.
constexpr int MOST_NORMED = 8192;

/// Puts the norm of a row there, by all multipliers, for each warp of which `sums` has a float, and what it was
/// multiplied by for its mean square at `root`. The first block stores the sum of x and the residual. All is asked for
/// at once, and kept in registers until the squares are added up.
template <typename S>
__device__ __forceinline__ void stage_norm(const Source &source, int row, const Staged<S> &staged, float *sums,
                                           float *root) {
    constexpr int THREADS = MULTIPLIERS * WARP, OWN = MOST_NORMED / 8 / THREADS;
    const bool is_f16 = source.is_f16;
    const int lane = threadIdx.x % WARP, inner = staged.inner, eights = inner / 8;
    uint4 sum[OWN], residual[OWN], weight[OWN];
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        const int i = o * THREADS + threadIdx.x;
        sum[o] = residual[o] = weight[o] = make_uint4(0, 0, 0, 0);
        if (i < eights) {
            sum[o] = load_eight(source.x, row * source.x_stride + 8 * i);
            residual[o] = load_eight(source.residual, row * source.residual_stride + 8 * i);
            weight[o] = load_eight(source.weight, 8 * i);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        Eight x = unpack_eight(sum[o], is_f16);
        const Eight other = unpack_eight(residual[o], is_f16);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x.at[j] = as_stored(x.at[j] + other.at[j], is_f16);
            squares += x.at[j] * x.at[j];
        }
        sum[o] = pack_eight(x, is_f16);
    }
    squares = warp_sum(squares);
    if (lane == 0) sums[threadIdx.x / WARP] = squares;
    if (blockIdx.x == 0 && source.sum != nullptr) {
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            const int i = o * THREADS + threadIdx.x;
            if (i < eights) store_eight(source.sum, static_cast<int64_t>(row) * inner + 8 * i, sum[o]);
        }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
    squares = warp_sum(lane < MULTIPLIERS ? sums[lane] : 0.0f);
    const float inverse = rsqrtf(squares / static_cast<float>(inner) + source.eps);
    if (threadIdx.x == 0) *root = inverse;
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        if (o * THREADS >= eights) break;
        Eight x = unpack_eight(sum[o], is_f16);
        const Eight scale = unpack_eight(weight[o], is_f16);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x.at[j] = as_stored(x.at[j] * inverse * (source.offset + scale.at[j]), is_f16);
        const int i = o * THREADS + threadIdx.x;
        staged.put(row, i, i < eights, x.at);
    }
}

/// Writes what is multiplied, `(rows, inner)`, into shared memory, and zeros where a kernel has more rows. `roots` has a
/// float for each row, as `stage_norm` leaves it.
template <typename S>
__device__ __forceinline__ void stage_x(const Source &source, int rows, int inner, char *to, XUnit *units,
                                        float *scratch, float *roots) {
    const Staged<S> staged{to, units, inner};
    int first = 0;
    if (source.residual != nullptr) {
#pragma unroll 1
        for (; first < rows; first++) stage_norm<S>(source, first, staged, scratch + first * MULTIPLIERS, roots + first);
    }
    // So many are asked for before the first is put.
    constexpr int AT_ONCE = 4, STEP = MULTIPLIERS * WARP;
    const int lane = threadIdx.x % WARP, eights = inner / 8;
#pragma unroll
    for (int r = 0; r < S::ROWS; r++) {
        if (r < first) continue;
#pragma unroll 1
        for (int base = threadIdx.x - lane; base < eights; base += AT_ONCE * STEP) {
            uint4 x[AT_ONCE];
#pragma unroll
            for (int o = 0; o < AT_ONCE; o++) {
                const int i = base + o * STEP + lane;
                x[o] = make_uint4(0, 0, 0, 0);
                if (i < eights && r < rows) x[o] = load_eight(source.x, r * source.x_stride + 8 * i);
            }
#pragma unroll
            for (int o = 0; o < AT_ONCE; o++) {
                const int first_eight = base + o * STEP;
                if (first_eight >= eights) break;
                staged.put(r, first_eight + lane, first_eight + lane < eights, unpack_eight(x[o], source.is_f16).at);
            }
        }
    }
}

template <int BITS> __device__ __forceinline__ void read_codes(const char *from, uint32_t (&words)[BITS]) {
    if constexpr (BITS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < BITS; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4 *>(from + 4 * i);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else if constexpr (BITS % 2 == 0) {
#pragma unroll
        for (int i = 0; i < BITS; i += 2) {
            const uint2 two = *reinterpret_cast<const uint2 *>(from + 4 * i);
            words[i] = two.x, words[i + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BITS; i++) words[i] = *reinterpret_cast<const uint32_t *>(from + 4 * i);
    }
}

/// Pairs of levels in f16 of eight codes of 4 bits. `own` is what a lane adds to an entry's place.
__device__ __forceinline__ void table_pairs(const char *table, uint32_t own, uint32_t word, uint32_t (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t offset = __byte_perm(word, own, 0x5504 | i << 4);
        out[i] = *reinterpret_cast<const uint32_t *>(table + offset);
    }
}

/// Pairs in f16 of four numbers of e4m3.
__device__ __forceinline__ void e4m3_pairs(uint32_t word, uint32_t &low, uint32_t &high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}\n"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

/// Adds a lane's 32 columns of two rows of W, whose codes are integers.
template <typename S>
__device__ __forceinline__ void add_integers(float (&total)[S::ROWS][2], const uint32_t (&first)[S::BITS],
                                             const uint32_t (&second)[S::BITS], const char *scales,
                                             const char *x, int x_row, const XUnit *units,
                                             int units_of_row, int minus_zero) {
    constexpr int BITS = S::BITS;
    ScaleAndOffset scale[2][S::GROUPS];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const char *at = scales + 8 * r * S::SCALES_PITCH;
        if constexpr (S::GROUPS == 1 && S::SHIFTS) {
            const float2 one = *reinterpret_cast<const float2 *>(at);
            scale[r][0] = {one.x, one.y};
        } else if constexpr (S::GROUPS == 1) {
            scale[r][0] = {*reinterpret_cast<const float *>(at), 0.0f};
        } else if constexpr (S::SHIFTS) {
            const float4 two = *reinterpret_cast<const float4 *>(at);
            scale[r][0] = {two.x, two.y};
            scale[r][1] = {two.z, two.w};
        } else {
            const float2 two = *reinterpret_cast<const float2 *>(at);
            scale[r][0] = {two.x, 0.0f};
            scale[r][1] = {two.y, 0.0f};
        }
    }
    uint32_t a[2][8];
    a[0][0] = code_bytes<BITS, 0>(first), a[1][0] = code_bytes<BITS, 0>(second);
    a[0][1] = code_bytes<BITS, 1>(first), a[1][1] = code_bytes<BITS, 1>(second);
    a[0][2] = code_bytes<BITS, 2>(first), a[1][2] = code_bytes<BITS, 2>(second);
    a[0][3] = code_bytes<BITS, 3>(first), a[1][3] = code_bytes<BITS, 3>(second);
    a[0][4] = code_bytes<BITS, 4>(first), a[1][4] = code_bytes<BITS, 4>(second);
    a[0][5] = code_bytes<BITS, 5>(first), a[1][5] = code_bytes<BITS, 5>(second);
    a[0][6] = code_bytes<BITS, 6>(first), a[1][6] = code_bytes<BITS, 6>(second);
    a[0][7] = code_bytes<BITS, 7>(first), a[1][7] = code_bytes<BITS, 7>(second);
#pragma unroll
    for (int r = 0; r < S::ROWS; r++) {
        int sum[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 b = *reinterpret_cast<const uint4 *>(x + r * x_row + half * 128);
            const XUnit unit = units[r * units_of_row + (S::GROUPS == 2 ? half : 0)];
            if (S::GROUPS == 2 || half == 0) {
                sum[0] = sum[2] = minus_zero * unit.high;
                sum[1] = sum[3] = minus_zero * unit.low;
            }
            const int i = 4 * half;
            multiply_add_bytes(sum, a[0][i], a[1][i], a[0][i + 1], a[1][i + 1], b.x, b.y);
            multiply_add_bytes(sum, a[0][i + 2], a[1][i + 2], a[0][i + 3], a[1][i + 3], b.z, b.w);
            if (S::GROUPS == 2 || half == 1) {
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    const ScaleAndOffset by = scale[s][S::GROUPS == 2 ? half : 0];
                    const float whole = static_cast<float>(256 * sum[2 * s] + sum[2 * s + 1]);
                    total[r][s] += by.scale * (whole * unit.size);
                    if constexpr (S::SHIFTS) total[r][s] += by.offset * unit.sum;
                }
            }
        }
    }
}

/// 16 bytes where `valid`; elsewhere they stay as they are.
__device__ __forceinline__ void load_shared_if(uint32_t address, uint32_t *out, int valid) {
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.s32 p, %5, 0;\n"
                 "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "+r"(out[0]), "+r"(out[1]), "+r"(out[2]), "+r"(out[3])
                 : "r"(address), "r"(valid));
}

/// The same, whose codes are floats. Of a product's columns, each row of x has one for each of four lanes' codes, or,
/// in groups of 64, for those of two lanes. A lane gets the sums of two columns, of the same row of x.
template <typename S>
__device__ __forceinline__ void add_floats(float (&total)[S::SETS][2], const uint32_t (&first)[S::BITS],
                                           const uint32_t (&second)[S::BITS], const char *scales,
                                           const char *table, uint32_t x, int x_pair, const int (&x_valid)[S::SETS],
                                           const XUnit *units, int units_pair) {
    float scale[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const char *at = scales + 8 * r * S::SCALES_PITCH;
        if constexpr (S::GROUPS == 1) {
            const float2 two = *reinterpret_cast<const float2 *>(at);
            scale[r][0] = two.x, scale[r][1] = two.y;
        } else {
            const float4 four = *reinterpret_cast<const float4 *>(at);
            scale[r][0] = four.x, scale[r][1] = four.y, scale[r][2] = four.z, scale[r][3] = four.w;
        }
    }
    const uint32_t own = threadIdx.x % WARP * 4;
    float sum[S::SETS][S::GROUPS][4];
#pragma unroll
    for (int eight = 0; eight < 4; eight++) {
        uint32_t a[2][4];
        if constexpr (S::KIND == TABLE) {
            table_pairs(table, own, first[eight], a[0]);
            table_pairs(table, own, second[eight], a[1]);
        } else {
            e4m3_pairs(first[2 * eight], a[0][0], a[0][1]);
            e4m3_pairs(first[2 * eight + 1], a[0][2], a[0][3]);
            e4m3_pairs(second[2 * eight], a[1][0], a[1][1]);
            e4m3_pairs(second[2 * eight + 1], a[1][2], a[1][3]);
        }
        constexpr int EIGHTS = 4 / S::GROUPS;
        const int u = eight / EIGHTS;
#pragma unroll
        for (int set = 0; set < S::SETS; set++) {
            uint32_t b[4] = {};
            load_shared_if(x + set * x_pair + eight * 64, b, x_valid[set]);
            if (eight % EIGHTS == 0) sum[set][u][0] = sum[set][u][1] = sum[set][u][2] = sum[set][u][3] = 0.0f;
            const uint32_t low[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
            const uint32_t high[4] = {a[0][2], a[1][2], a[0][3], a[1][3]};
            multiply_add<f16>(sum[set][u], low, b[0], b[1]);
            multiply_add<f16>(sum[set][u], high, b[2], b[3]);
        }
    }
#pragma unroll
    for (int set = 0; set < S::SETS; set++) {
        const float size = units[set * units_pair].size;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float value;
            if constexpr (S::GROUPS == 1)
                value = scale[r][0] * sum[set][0][2 * r] + scale[r][1] * sum[set][0][2 * r + 1];
            else
                value = scale[r][0] * sum[set][0][2 * r] + scale[r][1] * sum[set][1][2 * r] +
                        scale[r][2] * sum[set][0][2 * r + 1] + scale[r][3] * sum[set][1][2 * r + 1];
            total[set][r] += value * size;
        }
    }
}

/// What a launch makes of two projections of as many outputs, gate and up, whose tasks a block has in turn: nothing, or
/// the gated unit, by an activation whose number is one less.
constexpr int NO_GATE = 0;

/// The block's task after this one; `tasks` and beyond are none.
__device__ __forceinline__ int task_after(int task, int tasks, int gate) {
    const int step = gridDim.x, half = tasks / 2;
    if (gate == NO_GATE) return task + step;
    if (task < half) return task + half;
    task += step - half;
    return task < half ? task : tasks;
}

/// The gated unit of what products give.
__device__ __forceinline__ float gated(float gate, float up, int kind, bool is_f16) {
    return gated(as_stored(gate, is_f16), as_stored(up, is_f16), kind - 1);
}

/// Where in the block's work something is: a stage of a task.
struct Cursor {
    int task = blockIdx.x, column = 0, projection = 0;

    __device__ __forceinline__ bool exists(const Projections &all) const { return task < all.tasks; }
    /// The first output of the task.
    __device__ __forceinline__ int find(const Projections &all) {
        if (all.gate != NO_GATE) projection = 0;
        while (projection + 1 < all.count && task >= all.at[projection + 1].first_task) projection++;
        return (task - all.at[projection].first_task) * OUTPUTS;
    }
    __device__ __forceinline__ void next_task(const Projections &all) {
        task = task_after(task, all.tasks, all.gate);
    }
    /// To the next stage.
    __device__ __forceinline__ void advance(const Projections &all, int width, int inner) {
        column += width;
        if (column < inner) return;
        column = 0;
        next_task(all);
    }
};

/// A place in a ring of so many, and the parity of how often the ring was gone through.
struct Turn {
    int at = 0, round = 0;
    __device__ __forceinline__ void next(int count) {
        at++;
        if (at == count) at = 0, round ^= 1;
    }
};

__device__ __forceinline__ float load_half(const void *from, int64_t index, bool is_f16) {
    return is_f16 ? to_float(static_cast<const f16 *>(from)[index]) : to_float(static_cast<const bf16 *>(from)[index]);
}

__device__ __forceinline__ void store_half(void *to, int64_t index, bool is_f16, float value) {
    if (is_f16)
        static_cast<f16 *>(to)[index] = from_float<f16>(value);
    else
        static_cast<bf16 *>(to)[index] = from_float<bf16>(value);
}

/// Where a block's shared memory has what.
template <typename S> struct Places {
    char *table, *scales, *zeros, *x, *ring;
    float *sums, *gates, *xa;
    XUnit *units;
    uint32_t full, empty, scales_full, scales_empty, sums_full, sums_empty, xa_ready;
    int slots;

    __device__ __forceinline__ Places(int inner, int ranks) {
        extern __shared__ float4 shared[];
        char *at = reinterpret_cast<char *>(shared);
        table = at;
        at += S::TABLE_BYTES;
        scales = at;
        at += S::SCALE_SLOTS * S::SCALES;
        zeros = at;
        at += S::ZEROS;
        sums = reinterpret_cast<float *>(at);
        at += S::SUMS;
        gates = reinterpret_cast<float *>(at);
        at += S::GATES;
        full = shared_address(at), empty = full + 8 * MOST_SLOTS;
        scales_full = empty + 8 * MOST_SLOTS, scales_empty = scales_full + 8 * S::SCALE_SLOTS;
        sums_full = scales_empty + 8 * S::SCALE_SLOTS, sums_empty = sums_full + 8 * FINISHERS;
        xa_ready = sums_empty + 8 * FINISHERS;
        at += 8 * S::BARRIERS;
        x = at;
        at += S::ROWS * inner * 2;
        units = reinterpret_cast<XUnit *>(at);
        at += S::ROWS * inner / S::UNIT * sizeof(XUnit);
        xa = reinterpret_cast<float *>(at);
        at += (S::ROWS * ranks * 4 + 15) / 16 * 16;
        ring = at;
        uint32_t bytes;
        asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
        slots = min(static_cast<int>(bytes - (at - reinterpret_cast<char *>(shared))) / S::SLOT, MOST_SLOTS);
    }

    /// By a warp, whose lanes have some each.
    __device__ __forceinline__ void begin_barriers() const {
        static_assert(MOST_SLOTS <= WARP && S::SCALE_SLOTS <= WARP, "a lane for each of a kind");
        const int i = threadIdx.x % WARP;
        if (i < slots) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, MULTIPLIERS);
        }
        if (i < S::SCALE_SLOTS) {
            barrier_init(scales_full + 8 * i, SCALERS / S::TEAMS);
            barrier_init(scales_empty + 8 * i, MULTIPLIERS);
        }
        if (i < FINISHERS) {
            barrier_init(sums_full + 8 * i, MULTIPLIERS);
            barrier_init(sums_empty + 8 * i, 1);
        }
        if (i == 0) barrier_init(xa_ready, 1);
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
};

/// Brings codes: a lane has a row.
template <typename S>
__device__ __forceinline__ void bring_codes(const Projections &all, const Places<S> &places, int inner) {
    const int lane = threadIdx.x % WARP;
    Turn slot;
    int stage = 0;
    for (Cursor now; now.exists(all); now.next_task(all)) {
        const int first = now.find(all);
        const Projection &projection = all.at[now.projection];
        const int count = min(OUTPUTS, projection.outer - first);
        const char *from = static_cast<const char *>(projection.weight.codes) +
                           static_cast<int64_t>(first + lane) * inner / 8 * S::BITS;
        for (int column = 0; column < inner; column += S::WIDTH, stage++) {
            const int bytes = min(S::WIDTH, inner - column) * S::BITS / 8;
            const uint32_t barrier = places.full + 8 * slot.at;
            if (stage >= places.slots) barrier_wait(places.empty + 8 * slot.at, slot.round ^ 1);
            if (lane == 0) barrier_expect(barrier, count * bytes);
            __syncwarp();
            if (lane < count)
                copy_bulk(shared_address(places.ring) + slot.at * S::SLOT + lane * S::PITCH,
                          from + column / 8 * S::BITS, bytes, barrier);
            slot.next(places.slots);
        }
    }
}

/// Adds up what the warps have, when they have all of a task, with the low-rank part: finishers have tasks in turn, so
/// where there is a gated unit the first has gates, and the other what they are for.
template <typename S>
__device__ __forceinline__ void finish_tasks(const Projections &all, const Places<S> &places, int rows, bool is_f16,
                                             int turn) {
    const int lane = threadIdx.x % WARP, half = lane / OUTPUTS;
    follow_previous();
    barrier_wait(places.xa_ready, 0);
    Cursor now;
    for (int i = 0; i < turn; i++) now.next_task(all);
    // B at a part of the ranks for a task's outputs. The first part is asked for a task ahead.
    constexpr int RANKS = 16;
    float b[RANKS];
    const auto ask = [&](Cursor &task, int first_rank) {
        const int output = task.find(all) + lane % OUTPUTS;
        const Projection &projection = all.at[task.projection];
        const float *from = projection.b + min(output, projection.outer - 1);
#pragma unroll
        for (int i = 0; i < RANKS; i++) {
            const int c = first_rank + half + 2 * i, valid = c < projection.rank;
            b[i] = 0.0f;
            // Not to be put off until it is used.
            asm volatile("{\n.reg .pred p;\n"
                         "setp.ne.s32 p, %2, 0;\n"
                         "@p ld.global.nc.f32 %0, [%1];\n}\n"
                         : "+f"(b[i])
                         : "l"(from + static_cast<int64_t>(c) * projection.outer), "r"(valid));
        }
    };
    Cursor following = now;
    const auto ask_ahead = [&]() {
        if (all.ranks > 0 && following.exists(all)) ask(following, 0);
        for (int i = 0; i < FINISHERS; i++) following.next_task(all);
    };
    ask_ahead();
    for (int round = 0; now.exists(all); round ^= 1) {
        const int output = now.find(all) + lane % OUTPUTS;
        const Projection &projection = all.at[now.projection];
        const int within = min(output, projection.outer - 1);
        const float bias = projection.bias != nullptr ? load_half(projection.bias, within, is_f16) : 0.0f;
        float low[S::ROWS] = {};
        for (int first = 0; first < projection.rank; first += 2 * RANKS) {
            if (first > 0) ask(now, first);
#pragma unroll
            for (int i = 0; i < RANKS; i++) {
                const int c = min(first + half + 2 * i, projection.rank - 1);
#pragma unroll
                for (int r = 0; r < S::ROWS; r++) low[r] += places.xa[r * all.ranks + projection.column + c] * b[i];
            }
        }
        ask_ahead();
        barrier_wait(places.sums_full + 8 * turn, round);
        const float *from = places.sums + turn * (MULTIPLIERS * S::OF_WARP) + lane % OUTPUTS;
        float values[S::ROWS];
#pragma unroll
        for (int r = 0; r < S::ROWS; r++) {
            float value = projection.scale * low[r];
#pragma unroll 8
            for (int part = half; part < MULTIPLIERS * S::PARTS; part += 2)
                value += from[(part * S::ROWS + r) * OUTPUTS];
            values[r] = value + __shfl_xor_sync(FULL, value, OUTPUTS) + bias;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(places.sums_empty + 8 * turn);
        // The places of two rounds: that of the last but one has been read when both meet again.
        float *const gates = places.gates + round * S::ROWS * OUTPUTS + lane % OUTPUTS;
        const bool is_gate = all.gate != NO_GATE && turn == 0;
        if (is_gate && half == 0) {
#pragma unroll
            for (int r = 0; r < S::ROWS; r++) gates[r * OUTPUTS] = values[r];
        }
        if (all.gate != NO_GATE) asm volatile("bar.sync 2, %0;" ::"n"(FINISHERS * WARP) : "memory");
#pragma unroll
        for (int r = 0; r < S::ROWS; r++) {
            if (is_gate || half != 0 || output >= projection.outer || r >= rows) continue;
            const float value =
                all.gate != NO_GATE ? gated(gates[r * OUTPUTS], values[r], all.gate, is_f16) : values[r];
            store_half(projection.y, static_cast<int64_t>(r) * projection.outer + output, is_f16, value);
        }
        for (int i = 0; i < FINISHERS; i++) now.next_task(all);
    }
}

/// Decodes scales: teams have stages in turn.
template <typename S>
__device__ __forceinline__ void decode_scales(const Projections &all, const Places<S> &places, int inner, int scaler) {
    constexpr int OF_TEAM = SCALERS / S::TEAMS, MEMBERS = OF_TEAM * WARP;
    constexpr int OWN = OUTPUTS * (S::WIDTH / 256) / MEMBERS, STEP = MEMBERS / OUTPUTS * 256;
    const int lane = threadIdx.x % WARP, team = scaler / OF_TEAM, member = scaler % OF_TEAM * WARP + lane;
    const int row = member % OUTPUTS, first_column = member / OUTPUTS * 256;
    Cursor now;
    Turn turn;
    for (int i = 0; i < team; i++) now.advance(all, S::WIDTH, inner), turn.next(S::SCALE_SLOTS);
    Cursor next = now;
    auto skip_others = [&](Cursor &cursor) {
#pragma unroll
        for (int i = 0; i < S::TEAMS; i++) cursor.advance(all, S::WIDTH, inner);
    };
    auto load_next = [&](Stored<S> (&stored)[OWN]) {
        if (next.exists(all)) {
            const int first = next.find(all);
            const Projection &projection = all.at[next.projection];
            const int output = min(first + row, projection.outer - 1);
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const int column = min(next.column + first_column + o * STEP, inner - 256);
                stored[o].load(projection.weight, static_cast<uint32_t>(output) * inner + column);
            }
        }
        skip_others(next);
    };
    Stored<S> stored[OWN], following[OWN];
    load_next(stored);
    for (int stage = team; now.exists(all); stage += S::TEAMS) {
        load_next(following);
        if (stage >= S::SCALE_SLOTS) barrier_wait(places.scales_empty + 8 * turn.at, turn.round ^ 1);
        now.find(all);
        const Packed &q = all.at[now.projection].weight;
        char *to = places.scales + turn.at * S::SCALES + row * S::SCALES_PITCH + first_column / S::GROUP * S::ENTRY;
#pragma unroll
        for (int o = 0; o < OWN; o++) stored[o].write(q, to + o * STEP / S::GROUP * S::ENTRY);
        __syncwarp();
        if (lane == 0) barrier_arrive(places.scales_full + 8 * turn.at);
#pragma unroll
        for (int o = 0; o < OWN; o++) stored[o] = following[o];
        skip_others(now);
#pragma unroll
        for (int i = 0; i < S::TEAMS; i++) turn.next(S::SCALE_SLOTS);
    }
}

/// Multiplies all stages, after x is in shared memory.
template <typename S>
__device__ __forceinline__ void multiply_stages(const Projections &all, const Places<S> &places, int inner) {
    constexpr int ROWS = S::ROWS, SETS = S::SETS, STEP = MULTIPLIERS * 128;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, quarter = lane % 4;
    const char *own_codes = places.ring + group * S::PITCH + (warp * 128 + quarter * 32) / 8 * S::BITS;
    // Integers: a lane's column of the product has its own codes' x, a byte of it, or zeros.
    const bool own_column = group / 2 == quarter;
    const char *own_x = own_column ? places.x + warp * 256 + quarter * 32 + group % 2 * 16 : places.zeros;
    const int x_step = own_column ? 2 : 0, x_row = own_column ? inner * 2 : 0;
    // Floats: as `add_floats` has it.
    const uint32_t float_x = shared_address(places.x) + warp * 256 + group / S::COLUMNS * inner * 2 + quarter * 16;
    int x_valid[SETS];
#pragma unroll
    for (int set = 0; set < SETS; set++)
        x_valid[set] = group % S::COLUMNS == quarter * S::COLUMNS / 4 && S::AT_ONCE * set + group / S::COLUMNS < ROWS;
    const int row_of_sums = quarter * 2 / S::COLUMNS;
    const int scale_column = warp * 128 + (S::WHOLE ? quarter * 32 : S::COLUMNS == 4 ? quarter % 2 * 64 : 0);
    const char *own_scales = places.scales + group * S::SCALES_PITCH + scale_column / S::GROUP * S::ENTRY;
    const int units_of_row = inner / S::UNIT;
    const XUnit *own_units =
        places.units + scale_column / S::UNIT + (S::WHOLE ? 0 : min(row_of_sums, ROWS - 1) * units_of_row);
    float *own_sums = places.sums + warp * S::OF_WARP + (S::PARTS > 1 ? quarter * OUTPUTS : 0) + group;
    // Weights of a launch have the same.
    const int minus_zero = -all.at[0].weight.zero;
    Turn slot, scales_slot, sums_slot;
    bool sums_used = false;
    for (Cursor now; now.exists(all); now.next_task(all)) {
        float total[SETS][2];
#pragma unroll
        for (int set = 0; set < SETS; set++) total[set][0] = total[set][1] = 0.0f;
        for (int column = 0; column < inner; column += S::WIDTH) {
            barrier_wait(places.full + 8 * slot.at, slot.round);
            uint32_t codes[S::CHUNKS][2][S::BITS];
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++) {
                const char *from = own_codes + slot.at * S::SLOT + c * STEP / 8 * S::BITS;
                read_codes<S::BITS>(from, codes[c][0]);
                read_codes<S::BITS>(from + 8 * S::PITCH, codes[c][1]);
            }
            barrier_wait(places.scales_full + 8 * scales_slot.at, scales_slot.round);
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c++) {
                const int first = column + c * STEP;
                if (first + warp * 128 < inner) {
                    const char *scales = own_scales + scales_slot.at * S::SCALES + c * STEP / S::GROUP * S::ENTRY;
                    const XUnit *units = own_units + first / S::UNIT;
                    if constexpr (S::WHOLE)
                        add_integers<S>(total, codes[c][0], codes[c][1], scales, own_x + first * x_step, x_row, units,
                                        units_of_row, minus_zero);
                    else
                        add_floats<S>(total, codes[c][0], codes[c][1], scales, places.table, float_x + first * 2,
                                      S::AT_ONCE * inner * 2, x_valid, units, S::AT_ONCE * units_of_row);
                }
            }
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(places.empty + 8 * slot.at);
                barrier_arrive(places.scales_empty + 8 * scales_slot.at);
            }
            slot.next(places.slots);
            scales_slot.next(S::SCALE_SLOTS);
        }
        if (sums_used) barrier_wait(places.sums_empty + 8 * sums_slot.at, sums_slot.round ^ 1);
        float *to = own_sums + sums_slot.at * (MULTIPLIERS * S::OF_WARP);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                float value = total[set][s];
                if constexpr (S::PARTS > 1) {
                    to[8 * s] = value;
                } else {
                    if constexpr (S::WHOLE || S::COLUMNS == 4) value += __shfl_xor_sync(FULL, value, 1);
                    if constexpr (S::WHOLE) value += __shfl_xor_sync(FULL, value, 2);
                    const int row = S::WHOLE ? set : S::AT_ONCE * set + row_of_sums;
                    const bool has_all = S::WHOLE ? quarter == 0 : S::COLUMNS == 2 || quarter % 2 == 0;
                    if (has_all && row < ROWS) to[row * OUTPUTS + 8 * s] = value;
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(places.sums_full + 8 * sums_slot.at);
        sums_slot.next(FINISHERS);
        if (sums_slot.at == 0) sums_used = true;
    }
}

/// Writes the pairs of levels of all bytes, by the finishers. A thread has four lanes' copies of every eighth byte's.
template <int PITCH>
__device__ __forceinline__ void fill_table(char *table, const float *levels) {
    constexpr int QUADS = WARP / 4, BYTES = FINISHERS * WARP / QUADS;
    const int first = threadIdx.x % (FINISHERS * WARP) / QUADS;
    const float level = __ldg(levels + threadIdx.x % 16);
    float low[16 / BYTES];
#pragma unroll
    for (int i = 0; i < 16 / BYTES; i++) low[i] = __shfl_sync(FULL, level, i * BYTES + first);
#pragma unroll
    for (int byte = 0; byte < 256; byte += BYTES) {
        const float high = __shfl_sync(FULL, level, byte / 16);
        const uint32_t pair = pack_pair<f16>(low[byte % 16 / BYTES], high);
        *reinterpret_cast<uint4 *>(table + (byte + first) * PITCH + threadIdx.x % QUADS * 16) =
            make_uint4(pair, pair, pair, pair);
    }
}

/// All rows of the source begin at 16 bytes, `inner` is a multiple of 256, and all weights are as `S` has it, with the
/// same table and zero. `parts` is as for `few_rows`, of what isn't divided by the root of the mean square yet where a
/// norm is made, and `xa_out` may be null.
template <typename S>
__device__ __forceinline__ void streamed_rows(const Projections &all, const Source &source, int rows, int inner,
                                              void *xa_out, const float *parts, int slices, int part_rows) {
    const bool is_f16 = source.is_f16;
    const Places<S> places(inner, all.ranks);
    const int warp = threadIdx.x / WARP;
    if (warp == 0) places.begin_barriers();
    __syncthreads();
    if (warp == MULTIPLIERS) return bring_codes<S>(all, places, inner);
    if (warp > MULTIPLIERS + FINISHERS) return decode_scales<S>(all, places, inner, warp - MULTIPLIERS - 1 - FINISHERS);
    if (warp > MULTIPLIERS) {
        // The table is made by these, which have nothing to do yet, as all waits for those that multiply.
        if constexpr (S::KIND == TABLE) fill_table<S::TABLE_PITCH>(places.table, all.at[0].weight.levels);
        asm volatile("bar.arrive 3, %0;" ::"n"((MULTIPLIERS + FINISHERS) * WARP) : "memory");
        return finish_tasks<S>(all, places, rows, is_f16, warp - MULTIPLIERS - 1);
    }

    if (threadIdx.x < S::ZEROS / 4) reinterpret_cast<uint32_t *>(places.zeros)[threadIdx.x] = 0;
    if (source.residual != nullptr && threadIdx.x < (inner + 63) / 64)
        fetch_ahead(static_cast<const char *>(source.weight) + 128 * threadIdx.x);
    follow_previous();
    float *const roots = places.gates;
    stage_x<S>(source, rows, inner, places.x, places.units, places.sums, roots);
    const bool is_normed = source.residual != nullptr;
    if (is_normed && all.ranks > 0) asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS * WARP) : "memory");
    for (int i = threadIdx.x; i < rows * all.ranks; i += MULTIPLIERS * WARP) {
        float total = 0.0f;
#pragma unroll 16
        for (int slice = 0; slice < slices; slice++) total += parts[slice * part_rows * all.ranks + i];
        if (is_normed) total *= roots[i / all.ranks];
        places.xa[i] = total;
        if (blockIdx.x == 0 && xa_out != nullptr) store_half(xa_out, i, is_f16, total);
    }
    asm volatile("bar.sync 3, %0;" ::"n"((MULTIPLIERS + FINISHERS) * WARP) : "memory");
    if (threadIdx.x == 0) barrier_arrive(places.xa_ready);
    multiply_stages<S>(all, places, inner);
}

#endif
