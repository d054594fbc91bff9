// y = x·Wᵀ + bias + scale·(x·A)·B of up to eight rows and weights in fewer bits.
//
// A task is 16 outputs of one projection, whose 16 rows of W a block reads once. For bf16 and f16 the tensor
// cores multiply: W is the 16 x 16 operand, made of codes without their scales, and x the 16 x 8 one, of which
// there is far more room than few rows need. So a lane's own codes stay apart from those of the three others that
// have the same row of W, by zeros in x: columns 2·t and 2·t + 1 have two rows of x where lane t of four has
// codes. A sum belongs to one group then, and is multiplied by its scale in f32 where it is. Which of the inner
// indices stand beside each other in a product doesn't matter, so codes are taken apart in the order that is
// fastest, and x is put in the same order.
//
// Integers get a power of two added, by putting their bits into a mantissa, and keep it. With the offsets it
// makes a multiple of the sum of x over the group, which is one more product, with ones for W.
#pragma once

#include "common.cuh"
#include "numbers.cuh"
#include "tensor.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
/// Projections of one launch.
constexpr int MOST = 4;
/// Outputs of a task.
constexpr int OUTPUTS = 16;

struct Projection {
    Packed weight;    // (outer, inner)
    const void *bias; // (outer), or null
    const float *a;   // (inner, rank)
    const float *b;   // (rank, outer)
    void *y;          // (rows, outer)
    int outer;
    int rank;       // 0 without an adapter
    int first_task; // the tasks of the projections stand one behind the other
    int column;     // of all x·A
    float scale;
    int unused;
};

struct Projections {
    Projection at[MOST];
    int count;
    int ranks; // columns of all x·A
    int tasks;
    int pairs; // whether a table is used, by pairs of codes
    int gate;  // of streamed.cuh
    int unused;
};

/// What the tasks of a block share.
template <typename T> struct Work {
    const T *x;
    int64_t x_stride;
    int rows, inner;
    /// Parts of sums, two times (WARPS, rows, OUTPUTS).
    float *sums;
    /// x·A, (rows, ranks)
    const float *xa;
    int ranks;
};

template <typename T> struct HalfFormat;
template <> struct HalfFormat<bf16> {
    static constexpr int MANTISSA = 7, BIAS = 127;
    static constexpr uint32_t ONES = 0x3f803f80u;
};
template <> struct HalfFormat<f16> {
    static constexpr int MANTISSA = 10, BIAS = 15;
    static constexpr uint32_t ONES = 0x3c003c00u;
};

/// What is added to integers, as pairs of them leave `code_pairs`.
template <int BITS> __device__ __forceinline__ constexpr int added_to_codes() {
    return BITS == 8 ? -128 : 1 << BITS;
}

/// Codes apart that share a register, of those that fit a power of two; 1 for neighbours.
template <int BITS, int KIND> __device__ __forceinline__ constexpr int distance_of_pairs() {
    return KIND == INTEGERS && BITS == 2 ? 8 : KIND == INTEGERS && BITS == 4 ? 4 : 1;
}

/// The levels of two codes of 4 bits for each byte, a copy for every lane: (256, WARP). It is the beginning of the
/// shared memory, and there if a matrix has a table.
__device__ __forceinline__ uint32_t *pairs_of_levels() {
    extern __shared__ float4 shared[];
    return reinterpret_cast<uint32_t *>(shared);
}

/// Codes `16·step` to `16·step + 15` of a lane as eight pairs of `T`.
template <typename T, int BITS, int KIND, int STEP, int WORDS>
__device__ __forceinline__ void code_pairs(const uint32_t (&words)[WORDS], uint32_t (&out)[8]) {
    using Format = HalfFormat<T>;
    if constexpr (KIND == TABLE) {
        const char *pairs = reinterpret_cast<const char *>(pairs_of_levels());
        const uint32_t own = threadIdx.x % WARP * sizeof(uint32_t);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t word = words[2 * STEP + i / 4];
            // The byte times what all lanes have for it.
            const uint32_t moved = i % 4 == 0 ? word << 7 : word >> (8 * (i % 4) - 7);
            out[i] = *reinterpret_cast<const uint32_t *>(pairs + ((moved & 0x7f80u) | own));
        }
    } else if constexpr (KIND == E4M3) {
        constexpr int SHIFT = 10 - Format::MANTISSA + 1;
        // 2^120 in bf16, 2^8 in f16.
        constexpr uint32_t LARGE = sizeof(T) == 2 && Format::MANTISSA == 7 ? 0x7b807b80u : 0x5c005c00u;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t word = words[4 * STEP + i / 2];
            const uint32_t high = __byte_perm(word, 0, i % 2 == 0 ? 0x1404 : 0x3424);
            const uint32_t bits = (high & 0x7f007f00u) >> SHIFT | (high & 0x80008000u);
            out[i] = pairwise_product<T>(bits, LARGE);
            // NaN, as infinity would not stay one beside a zero of x.
            if ((high & 0x7f00u) == 0x7f00u) out[i] |= 0x7fffu;
            if ((high & 0x7f000000u) == 0x7f000000u) out[i] |= 0x7fff0000u;
        }
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t word = words[4 * STEP + i / 2];
            if constexpr (Format::MANTISSA == 10) {
                const uint32_t pair = __byte_perm(word, 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
                out[i] = pairwise_difference<T>(pair, 0x64806480u);
            } else {
                // 128 and the lower seven bits, less 128 or 256 as the highest is set or not.
                const uint32_t pair = __byte_perm(word, 0, i % 2 == 0 ? 0x4140 : 0x4342);
                out[i] = pairwise_difference<T>((pair & 0x007f007fu) | 0x43004300u,
                                                (~pair & 0x00800080u) | 0x43004300u);
            }
        }
    } else {
        constexpr int PLACE = Format::MANTISSA - BITS;
        constexpr uint32_t MASK = ((1u << BITS) - 1) << PLACE;
        constexpr uint32_t EXPONENT = static_cast<uint32_t>(BITS + Format::BIAS) << Format::MANTISSA;
        constexpr uint32_t BOTH = EXPONENT | EXPONENT << 16;
        if constexpr (BITS == 2 || BITS == 4) {
            constexpr int OF_WORD = 16 / BITS;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t word = words[STEP * BITS / 2 + i / OF_WORD];
                const int shift = i % OF_WORD * BITS - PLACE;
                const uint32_t moved = shift < 0 ? word << -shift : word >> shift;
                out[i] = (moved & (MASK | MASK << 16)) | BOTH;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int bit = (STEP * 16 + 2 * i) * BITS, at = bit / 32;
                const uint32_t next = words[at + 1 < WORDS ? at + 1 : at];
                const uint32_t two = bit % 32 + 2 * BITS <= 32
                                         ? words[at] >> (bit % 32)
                                         : __funnelshift_r(words[at], next, bit % 32);
                out[i] = ((two << PLACE) & MASK) | BOTH;
                out[i] |= (two << (PLACE + 16 - BITS)) & (MASK << 16);
            }
        }
    }
}

/// 16 elements of x in the order of `code_pairs`.
template <int DISTANCE>
__device__ __forceinline__ void put_in_order(const uint32_t (&x)[8], uint32_t (&out)[8]) {
    if constexpr (DISTANCE == 1) {
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = x[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int first = i / DISTANCE * DISTANCE + i % DISTANCE / 2;
            out[i] = __byte_perm(x[first], x[first + DISTANCE / 2], i % 2 == 0 ? 0x5410 : 0x7632);
        }
    }
}

/// Loads what is read once.
template <int COUNT>
__device__ __forceinline__ void load_words(const uint8_t *address, uint32_t (&out)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            asm volatile("ld.global.nc.L1::evict_first.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(out[i]), "=r"(out[i + 1]), "=r"(out[i + 2]), "=r"(out[i + 3])
                         : "l"(address + 4 * i));
    } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2)
            asm volatile("ld.global.nc.L1::evict_first.v2.u32 {%0, %1}, [%2];"
                         : "=r"(out[i]), "=r"(out[i + 1])
                         : "l"(address + 4 * i));
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            asm volatile("ld.global.nc.L1::evict_first.u32 %0, [%1];"
                         : "=r"(out[i])
                         : "l"(address + 4 * i));
    }
}

/// How matrices of levels in groups of at least `UNIT` may have their scales, of what `unit` in cuda.rs lets through:
/// a loop has registers for no others.
template <int BITS, int KIND, int UNIT> struct Scaling {
    static constexpr bool CODED = KIND != INTEGERS;
    static constexpr bool NESTS = KIND == TABLE && UNIT > 32;
    static constexpr bool IN_BLOCKS = KIND == INTEGERS && BITS != 8 && UNIT <= 32;
    static constexpr bool SHIFTS = KIND == INTEGERS && !(UNIT == 16 && BITS != 2);
    static constexpr bool LARGE = NESTS || IN_BLOCKS;

    static __device__ __forceinline__ ScaleAndOffset decoded(const Packed &q, StoredScale from) {
        const bool shifts = SHIFTS && q.offsets != nullptr;
        if (IN_BLOCKS && q.scale_kind >= BLOCKS) {
            const int code = q.scale_kind == SIGNED_BLOCKS ? static_cast<int8_t>(from.scale)
                                                           : static_cast<int>(from.scale);
            return {from_f16(from.large) * static_cast<float>(code),
                    shifts ? -from_f16(from.large_offset) * static_cast<float>(from.offset) : 0.0f};
        }
        if (NESTS && q.scale_kind == NESTED)
            return {__ldg(q.table + from.scale) * __uint_as_float(from.large) + q.number, 0.0f};
        if (CODED && q.scale_kind == CODED_E8M0) return {from_e8m0(from.scale), 0.0f};
        if (CODED && q.scale_kind == CODED_E4M3) return {from_e4m3(from.scale) * q.number, 0.0f};
        if (q.scale_kind == PLAIN_F16)
            return {from_f16(from.scale), shifts ? from_f16(from.offset) : 0.0f};
        const int place = q.scale_kind == PLAIN_BF16 ? 16 : 0;
        return {__uint_as_float(from.scale << place),
                shifts ? __uint_as_float(from.offset << place) : 0.0f};
    }
};

/// What a lane loads at once of two rows of W: codes, and what is stored of their scales.
template <int BITS, int CODES, int GROUPS, typename Scales> struct Stage {
    static constexpr int WORDS = CODES * BITS / 32;
    /// Registers of the scales: two for two f32, else those of 16 or 8 bits share one.
    static constexpr int WIDE = GROUPS == 2 ? 2 : 1;
    uint32_t codes[2][WORDS], scales[2][WIDE], offsets[2][WIDE], large[2], large_offsets[2];

    __device__ __forceinline__ void load_scales(const void *from, uint32_t group, int bytes,
                                                uint32_t (&out)[WIDE]) {
        const uint8_t *address = static_cast<const uint8_t *>(from) + static_cast<uint64_t>(group) * bytes;
        if constexpr (GROUPS == 2) {
            if (bytes == 4) {
                const uint2 both = __ldg(reinterpret_cast<const uint2 *>(address));
                out[0] = both.x, out[1] = both.y;
            } else if (bytes == 2) {
                out[0] = __ldg(reinterpret_cast<const uint32_t *>(address));
            } else {
                out[0] = __ldg(reinterpret_cast<const unsigned short *>(address));
            }
        } else {
            // Scales of four groups are bytes.
            out[0] = load_bytes(address, 0, GROUPS == 4 ? 4 : bytes);
        }
    }

    /// From column `column` of rows `first` and `second` on.
    __device__ __forceinline__ void load(const Packed &q, int64_t first, int64_t second, int column,
                                         int inner) {
        const int bytes = scale_bytes(q);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t element = (r == 0 ? first : second) * inner + column;
            load_words(static_cast<const uint8_t *>(q.codes) + static_cast<int64_t>(element) * BITS / 8,
                       codes[r]);
            const uint32_t group = q.shift >= 0 ? element >> q.shift : element / q.group;
            load_scales(q.scales, group, bytes, scales[r]);
            if (Scales::SHIFTS && q.offsets != nullptr)
                load_scales(q.offsets, group, bytes, offsets[r]);
            if (Scales::NESTS && q.scale_kind == NESTED)
                large[r] = load_bytes(q.large, group / OF_NESTED, 4);
            if (Scales::IN_BLOCKS && q.scale_kind >= BLOCKS) {
                large[r] = load_bytes(q.large, element / OF_BLOCK, 2);
                if (Scales::SHIFTS && q.offsets != nullptr)
                    large_offsets[r] = load_bytes(q.large_offsets, element / OF_BLOCK, 2);
            }
        }
    }

    __device__ __forceinline__ static uint32_t one_of(const uint32_t (&words)[WIDE], int index,
                                                      int bytes) {
        if constexpr (GROUPS == 1) return words[0];
        if constexpr (GROUPS == 4) return words[0] >> (8 * index) & 0xff;
        if (bytes == 4) return words[index];
        if (bytes == 2) return words[0] >> (16 * index) & 0xffff;
        return words[0] >> (8 * index) & 0xff;
    }

    /// Of the lane's group `index` in row `r`.
    __device__ __forceinline__ ScaleAndOffset scale(const Packed &q, int r, int index) const {
        const int bytes = scale_bytes(q);
        StoredScale stored{one_of(scales[r], index, bytes)};
        if constexpr (Scales::SHIFTS) stored.offset = one_of(offsets[r], index, bytes);
        if constexpr (Scales::LARGE) stored.large = large[r];
        if constexpr (Scales::IN_BLOCKS && Scales::SHIFTS) stored.large_offset = large_offsets[r];
        return Scales::decoded(q, stored);
    }
};

/// 16 bytes of x, which other kernels have written, where `valid`; `out` stays as it is elsewhere.
template <typename T>
__device__ __forceinline__ void load_x(const T *address, uint32_t *out, int valid) {
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.s32 p, %5, 0;\n"
                 "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "+r"(out[0]), "+r"(out[1]), "+r"(out[2]), "+r"(out[3])
                 : "l"(address), "r"(valid));
}

/// What a lane multiplies its codes by: rows of x from the lane's own column on, if it has one and it isn't beyond
/// the row.
template <typename T> struct OwnX {
    const T *at;
    int64_t stride;
    /// Its first row, and how many rows there are.
    int row, rows;
    bool valid;
};

/// Adds 16 codes of a stage. With the last ones of a group its sums are multiplied by the scale.
template <typename T, int BITS, int KIND, int UNIT, int SETS, int STEP, typename Loaded>
__device__ __forceinline__ void add_step(float (&total)[SETS][4], float (&sum)[SETS][4],
                                         float (&of_x)[SETS][4], const Loaded &stage,
                                         const Packed &q, const OwnX<T> &own, bool needs_sums,
                                         float added) {
    constexpr int OF_UNIT = UNIT / 16;
    if constexpr (STEP % OF_UNIT == 0) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sum[set][i] = of_x[set][i] = 0.0f;
        }
    }
    uint32_t first[8], second[8];
    code_pairs<T, BITS, KIND, STEP>(stage.codes[0], first);
    code_pairs<T, BITS, KIND, STEP>(stage.codes[1], second);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        if (SETS > 1 && 2 * set >= own.rows) break;
        const int row = 2 * set + own.row;
        uint32_t natural[8] = {}, x[8];
        const int valid = own.valid && row < own.rows;
        const T *from = own.at + row * own.stride + 16 * STEP;
        load_x(from, natural, valid);
        load_x(from + 8, natural + 4, valid);
        put_in_order<distance_of_pairs<BITS, KIND>()>(natural, x);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const uint32_t w[4] = {first[i], second[i], first[i + 1], second[i + 1]};
            multiply_add<T>(sum[set], w, x[i], x[i + 1]);
        }
        if (needs_sums) {
            constexpr uint32_t ONES = HalfFormat<T>::ONES;
            const uint32_t ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
            for (int i = 0; i < 8; i += 2) multiply_add<T>(of_x[set], ones, x[i], x[i + 1]);
        }
    }
    if constexpr (STEP % OF_UNIT == OF_UNIT - 1) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const ScaleAndOffset scale = stage.scale(q, r, STEP / OF_UNIT);
            const float offset = scale.offset - scale.scale * added;
#pragma unroll
            for (int set = 0; set < SETS; set++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &to = total[set][2 * r + i];
                    to += scale.scale * sum[set][2 * r + i];
                    if (needs_sums) to += offset * of_x[set][i];
                }
            }
        }
    }
}

/// Adds a stage to the sums of all groups.
template <typename T, int BITS, int KIND, int CODES, int UNIT, int SETS, typename Loaded>
__device__ __forceinline__ void add_stage(float (&total)[SETS][4], const Loaded &stage,
                                          const Packed &q, const OwnX<T> &own, bool needs_sums,
                                          float added) {
    float sum[SETS][4], of_x[SETS][4];
    add_step<T, BITS, KIND, UNIT, SETS, 0>(total, sum, of_x, stage, q, own, needs_sums, added);
    add_step<T, BITS, KIND, UNIT, SETS, 1>(total, sum, of_x, stage, q, own, needs_sums, added);
    if constexpr (CODES == 64) {
        add_step<T, BITS, KIND, UNIT, SETS, 2>(total, sum, of_x, stage, q, own, needs_sums, added);
        add_step<T, BITS, KIND, UNIT, SETS, 3>(total, sum, of_x, stage, q, own, needs_sums, added);
    }
}

/// Terms of the low-rank part that a thread has loaded before they are needed.
constexpr int B_AHEAD = 2;

/// What the low-rank part of a task needs: a lane has an output, and every sixteenth rank.
struct LowRank {
    float b[B_AHEAD];

    __device__ __forceinline__ static int first_rank() {
        return threadIdx.x / OUTPUTS;
    }
    static constexpr int STEP = THREADS / OUTPUTS;

    __device__ __forceinline__ void begin(const Projection &projection, int first) {
        const int output = min(first + static_cast<int>(threadIdx.x % OUTPUTS), projection.outer - 1);
#pragma unroll
        for (int s = 0; s < B_AHEAD; s++) {
            const int c = first_rank() + s * STEP;
            if (c < projection.rank) b[s] = __ldg(projection.b + (int64_t)c * projection.outer + output);
        }
    }
};

/// Ends a task: adds up what the warps have in `sums`, with the low-rank part and the bias.
template <typename T, int ROWS>
__device__ __forceinline__ void end_task(const Projection &projection, const Work<T> &work,
                                         const LowRank &low_rank, float *sums, int first) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (projection.rank > 0) {
        float low[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) low[r] = 0.0f;
        auto add_term = [&](int c, float b) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r < work.rows) low[r] += work.xa[r * work.ranks + projection.column + c] * b;
            }
        };
#pragma unroll
        for (int s = 0; s < B_AHEAD; s++) {
            const int c = LowRank::first_rank() + s * LowRank::STEP;
            if (c < projection.rank) add_term(c, low_rank.b[s]);
        }
        const int output = min(first + lane % OUTPUTS, projection.outer - 1);
        for (int c = LowRank::first_rank() + B_AHEAD * LowRank::STEP; c < projection.rank;
             c += LowRank::STEP)
            add_term(c, __ldg(projection.b + (int64_t)c * projection.outer + output));
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            low[r] += __shfl_xor_sync(FULL, low[r], OUTPUTS);
            if (r < work.rows && lane < OUTPUTS)
                sums[(warp * work.rows + r) * OUTPUTS + lane] += projection.scale * low[r];
        }
    }
    __syncthreads();
    if (threadIdx.x < work.rows * OUTPUTS) {
        const int row = threadIdx.x / OUTPUTS, output = first + threadIdx.x % OUTPUTS;
        if (output < projection.outer) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += sums[w * work.rows * OUTPUTS + threadIdx.x];
            if (projection.bias != nullptr)
                total += to_float(static_cast<const T *>(projection.bias)[output]);
            static_cast<T *>(projection.y)[(int64_t)row * projection.outer + output] =
                from_float<T>(total);
        }
    }
}

/// The block's tasks of a projection, whose groups have at least `WIDE_UNIT` neighbours. `SETS` times two rows of x are multiplied.
template <typename T, int BITS, int KIND, int WIDE_UNIT, int SETS>
__device__ __forceinline__ void multiply_codes(const Projection &projection, const Work<T> &work) {
    // Where there are registers for it, a lane has all of its part of a wide group at once.
    constexpr int CODES = SETS == 1 && BITS <= 5 && WIDE_UNIT == 64 ? 64 : 32;
    constexpr int UNIT = WIDE_UNIT < CODES ? WIDE_UNIT : CODES;
    constexpr int GROUPS = CODES / UNIT;
    using Scales = Scaling<BITS, KIND, WIDE_UNIT>;
    using Loaded = Stage<BITS, CODES, GROUPS, Scales>;
    const Packed q = projection.weight;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // The lane's rows of W are `group` and `group + 8`.
    const int group = lane / 4, quarter = lane % 4;
    const int inner = work.inner, rows = work.rows, outer = projection.outer;
    const int tasks = (outer + OUTPUTS - 1) / OUTPUTS;
    const int step = gridDim.x;
    int task = (blockIdx.x + step - projection.first_task % step) % step;
    if (task >= tasks) return;
    const int chunks = (inner + 4 * CODES - 1) / (4 * CODES);
    // The lane's column of the product has this row of x, if it belongs to the lane's codes.
    OwnX<T> own{work.x, work.x_stride, group & 1, rows, false};
    const bool own_column = group / 2 == quarter;
    const bool needs_sums =
        KIND == INTEGERS && (q.offsets != nullptr || added_to_codes<BITS>() + q.zero != 0);
    const float added = KIND == INTEGERS ? added_to_codes<BITS>() + q.zero : 0;

    int next_task = task, next_chunk = warp;
    if (warp >= chunks) next_task = tasks;
#define LOAD_NEXT(stage)                                                                           \
    if (next_task < tasks) {                                                                       \
        const int first = next_task * OUTPUTS + group;                                             \
        const int column = (next_chunk * 4 + quarter) * CODES;                                     \
        /* What is beyond the row has no share in the result, as its x is zero. */                 \
        stage.load(q, min(first, outer - 1), min(first + 8, outer - 1),                            \
                   column < inner ? column : 0, inner);                                            \
        next_chunk += WARPS;                                                                       \
        if (next_chunk >= chunks) next_chunk = warp, next_task += step;                            \
    }
#define ADD_AND_LOAD_NEXT(stage)                                                                   \
    add_stage<T, BITS, KIND, CODES, UNIT, SETS>(total, stage, q, own, needs_sums, added);          \
    LOAD_NEXT(stage)

    float total[SETS][4];
    LowRank low_rank;
    // Stages in turn: copying one to the other would wait for it.
    constexpr int DEPTH = SETS == 1 && BITS < 6 && CODES == 32 ? 3 : 2;
    Loaded stage_0, stage_1, stage_2;
    LOAD_NEXT(stage_0)
    LOAD_NEXT(stage_1)
    if constexpr (DEPTH == 3) LOAD_NEXT(stage_2)
    int turn = 0, other = 0;
    for (; task < tasks; task += step) {
        low_rank.begin(projection, task * OUTPUTS);
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < 4; i++) total[set][i] = 0.0f;
        }
        for (int chunk = warp; chunk < chunks; chunk += WARPS) {
            const int column = (chunk * 4 + quarter) * CODES;
            own.at = work.x + column;
            own.valid = own_column && column < inner;
            if (turn == 0) {
                ADD_AND_LOAD_NEXT(stage_0)
            } else if (DEPTH == 2 || turn == 1) {
                ADD_AND_LOAD_NEXT(stage_1)
            } else {
                ADD_AND_LOAD_NEXT(stage_2)
            }
            turn = turn + 1 == DEPTH ? 0 : turn + 1;
        }
        float *sums = work.sums + other * WARPS * rows * OUTPUTS;
        other ^= 1;
#pragma unroll
        for (int set = 0; set < SETS; set++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float value = total[set][i];
                value += __shfl_xor_sync(FULL, value, 1);
                value += __shfl_xor_sync(FULL, value, 2);
                const int row = 2 * set + i % 2;
                if (quarter == 0 && row < rows)
                    sums[(warp * rows + row) * OUTPUTS + group + 8 * (i / 2)] = value;
            }
        }
        end_task<T, 2 * SETS>(projection, work, low_rank, sums, task * OUTPUTS);
    }
#undef ADD_AND_LOAD_NEXT
#undef LOAD_NEXT
}

/// The same for x in f32, without tensor cores: a warp has two of a task's outputs, a lane eight of the inner
/// indices at once.
template <int BITS, int KIND, int ROWS>
__device__ __forceinline__ void multiply_numbers(const Projection &projection, const Work<float> &work) {
    constexpr int OWN = OUTPUTS / WARPS;
    const Packed &q = projection.weight;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int inner = work.inner, rows = work.rows;
    const int tasks = (projection.outer + OUTPUTS - 1) / OUTPUTS;
    const int step = gridDim.x;
    const float zero = zero_of(q);
    float *sums = work.sums, *other = work.sums + WARPS * rows * OUTPUTS;
    for (int task = (blockIdx.x + step - projection.first_task % step) % step; task < tasks;
         task += step) {
        const int first = task * OUTPUTS;
        LowRank low_rank;
        low_rank.begin(projection, first);
        float total[OWN][ROWS] = {};
#pragma unroll 2
        for (int column = 8 * lane; column < inner; column += 8 * WARP) {
            float values[OWN][8];
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const int64_t row = min(first + warp * OWN + o, projection.outer - 1);
                const uint32_t element = row * inner + column;
                const uint64_t codes = eight_codes<BITS>(q, element / 8);
                const uint32_t group = q.shift >= 0 ? element >> q.shift : element / q.group;
                const ScaleAndOffset scale = scale_of(q, group, element);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const uint32_t code = (codes >> (i * BITS)) & ((1u << BITS) - 1);
                    values[o][i] = level_of<KIND>(code, zero, q.levels) * scale.scale + scale.offset;
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (r < rows) {
                    const float *x = work.x + r * work.x_stride + column;
                    const float4 low = *reinterpret_cast<const float4 *>(x);
                    const float4 high = *reinterpret_cast<const float4 *>(x + 4);
                    const float xs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                    for (int o = 0; o < OWN; o++) {
#pragma unroll
                        for (int i = 0; i < 8; i++) total[o][r] += values[o][i] * xs[i];
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int o = 0; o < OWN; o++) total[o][r] = warp_sum(total[o][r]);
            if (r < rows && lane < OUTPUTS) {
                float value = 0.0f;
#pragma unroll
                for (int o = 0; o < OWN; o++) {
                    if (lane == warp * OWN + o) value = total[o][r];
                }
                sums[(warp * rows + r) * OUTPUTS + lane] = value;
            }
        }
        __syncwarp();
        end_task<float, ROWS>(projection, work, low_rank, sums, first);
        float *const last = sums;
        sums = other, other = last;
    }
}

/// Levels of two codes of 4 bits for every byte, and bytes of shared memory that they take.
constexpr int PAIRS = 256;

template <typename T>
__device__ __forceinline__ void write_pairs(const Projections &all, uint32_t *pairs) {
    int p = 0;
    while (p + 1 < all.count && all.at[p].weight.kind != TABLE) p++;
    const float *levels = all.at[p].weight.levels;
    // A thread has four lanes' copies of some bytes' pairs.
    constexpr int QUADS = WARP / 4;
    for (int i = threadIdx.x; i < PAIRS * QUADS; i += THREADS) {
        const int byte = i / QUADS;
        const uint32_t pair = pack_pair<T>(levels[byte % 16], levels[byte / 16]);
        reinterpret_cast<uint4 *>(pairs)[i] = make_uint4(pair, pair, pair, pair);
    }
    __syncthreads();
}

/// `parts` holds x·A of `slices` slices of the inner indices, `(slices, part_rows, ranks)`. `xa_out` may be null.
/// There are up to ROWS rows, and all weights have codes of so many BITS of this KIND in groups of UNIT at least.
template <int ROWS, int BITS, int KIND, int UNIT, typename T>
__device__ __forceinline__ void few_rows(const Projections &all, const T *__restrict__ x,
                                         int64_t x_stride, int rows, int inner, T *xa_out,
                                         const float *__restrict__ parts, int slices, int part_rows) {
    extern __shared__ float4 shared[];
    uint32_t *pairs = reinterpret_cast<uint32_t *>(shared);
    float *sums = reinterpret_cast<float *>(pairs + (all.pairs ? PAIRS * WARP : 0));
    float *xa = sums + 2 * WARPS * OUTPUTS * rows;
    // What the first task reads of the weight may be asked for before its x is there.
    const int task = blockIdx.x;
    if (task < all.tasks) {
        int p = 0;
        while (p + 1 < all.count && task >= all.at[p + 1].first_task) p++;
        const Projection &projection = all.at[p];
        const Packed &q = projection.weight;
        const int first = (task - projection.first_task) * OUTPUTS;
        const int64_t row = static_cast<int64_t>(inner) * q.bits / 8;
        const int64_t bytes = min(OUTPUTS, projection.outer - first) * row;
        const char *from = static_cast<const char *>(q.codes) + first * row;
        for (int64_t at = threadIdx.x * 128; at < min(bytes, int64_t(1) << 16); at += THREADS * 128)
            fetch_ahead(from + at);
    }
    if constexpr (sizeof(T) == 2) {
        if (all.pairs) write_pairs<T>(all, pairs);
    }
    follow_previous();
    if (all.ranks > 0) {
        for (int i = threadIdx.x; i < rows * all.ranks; i += THREADS) {
            float total = 0.0f;
#pragma unroll 8
            for (int slice = 0; slice < slices; slice++) total += parts[slice * part_rows * all.ranks + i];
            xa[i] = total;
            if (blockIdx.x == 0 && xa_out != nullptr) xa_out[i] = from_float<T>(total);
        }
        __syncthreads();
    }
    const Work<T> work{x, x_stride, rows, inner, sums, xa, all.ranks};
    for (int p = 0; p < all.count; p++) {
        // Sums of the projection before this are read until then.
        if (p > 0) __syncthreads();
        if constexpr (sizeof(T) == 4)
            multiply_numbers<BITS, KIND, ROWS>(all.at[p], work);
        else
            multiply_codes<T, BITS, KIND, UNIT, ROWS <= 2 ? 1 : 4>(all.at[p], work);
    }
}
