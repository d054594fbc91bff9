// Products of rows of 2-byte elements with an expert's matrices in fewer bits. A warp has sixteen lines of a matrix and makes their
// codes into numbers in registers, where tensor cores have them as the left side: no number goes through shared memory, and a line
// is unpacked once for all rows of a tile. Numbers are those of numbers.cuh, but that an offset is added before what it is added to
// is rounded.
//
// Which column of a matrix is which of the sixteen that are multiplied at once is free, as long as both sides agree. So a thread has
// `THREAD_CODES` that follow each other: those of four neighbouring threads are `STEP_CODES` of a line.
#pragma once

#include "../glu/activation.cuh"
#include "async.cuh"
#include "packed.cuh"
#include "routed.cuh"
#include "tensor.cuh"

/// Kinds that matrices have only here: a table that is e2m1's, with scales in e8m0, what MXFP4 is made of; and integers or a table
/// whose scales are those of blocks, as no others' are.
constexpr int E2M1 = 3, BLOCK_INTEGERS = 4, BLOCK_TABLE = 5;

constexpr bool has_blocks(int kind) { return kind == BLOCK_INTEGERS || kind == BLOCK_TABLE; }
constexpr bool has_table(int kind) { return kind == TABLE || kind == BLOCK_TABLE; }

constexpr int FRAGMENT_THREADS = 256, FRAGMENT_WARPS = FRAGMENT_THREADS / WARP, FRAGMENT_LINES = 16;
constexpr int THREAD_CODES = 32, STEP_CODES = 4 * THREAD_CODES, FRAGMENT_STAGES = 3;

/// How a block of warps divides a tile, or a single row: warps that share the depth of the same lines.
template <int TILE_ROWS, int SHARING> struct Division {
    static constexpr int ROWS = TILE_ROWS, EIGHTS = (ROWS + 7) / 8;
    static constexpr int LINES = FRAGMENT_LINES * FRAGMENT_WARPS / SHARING;
    static constexpr int DEPTH = STEP_CODES * SHARING, CHUNKS = DEPTH / 8;
    static constexpr int STAGE_BYTES = ROWS * DEPTH * 2;
    /// A single row is there as a whole, and nobody waits for another's part of the depth.
    static constexpr bool IS_SINGLE = ROWS == 1;
    /// Where a chunk of a row lies: those that eight rows of one warp read at once follow each other.
    __device__ __forceinline__ static uint32_t place(int row, int chunk) {
        const int step = chunk / 16, quarter = chunk % 16 / 4, part = chunk % 4;
        return (((step * 4 + part) * ROWS + row) * 4 + quarter) * 16;
    }
};

/// What a thread has of two lines of a matrix, as it is stored.
template <int BITS, int KIND> struct LineCodes {
    uint32_t words[2][BITS];
    /// Of a line's sixteen codes each, if the second sixteen have one of their own.
    StoredScale scales[2][2];

    /// Those of these chunks of all that the matrix has of `THREAD_CODES` each.
    __device__ __forceinline__ void fetch(const Packed &q, const uint32_t (&chunks)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t *const from = static_cast<const uint32_t *>(q.codes) + uint64_t(chunks[half]) * BITS;
            if constexpr (BITS % 4 == 0) {
#pragma unroll
                for (int i = 0; i < BITS; i += 4) {
                    const uint4 four = __ldg(reinterpret_cast<const uint4 *>(from + i));
                    words[half][i] = four.x, words[half][i + 1] = four.y;
                    words[half][i + 2] = four.z, words[half][i + 3] = four.w;
                }
            } else {
#pragma unroll
                for (int i = 0; i < BITS; i++) words[half][i] = __ldg(from + i);
            }
        }
        if constexpr (KIND == E2M1) {
            fetch_scales<uint8_t>(q, chunks);
        } else if constexpr (has_blocks(KIND)) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t block = chunks[half] / (OF_BLOCK / THREAD_CODES);
                scales[half][0].large = __ldg(static_cast<const unsigned short *>(q.large) + block);
                if (q.offsets != nullptr)
                    scales[half][0].large_offset = __ldg(static_cast<const unsigned short *>(q.large_offsets) + block);
            }
            fetch_scales<uint8_t>(q, chunks);
        } else {
            // One branch for both lines.
            const int bytes = scale_bytes(q);
            if (bytes == 4) fetch_scales<uint32_t>(q, chunks);
            if (bytes == 2) fetch_scales<unsigned short>(q, chunks);
            if (bytes == 1) fetch_scales<uint8_t>(q, chunks);
        }
    }

    /// The scales and offsets, of which each has the type `S`.
    template <typename S> __device__ __forceinline__ void fetch_scales(const Packed &q, const uint32_t (&chunks)[2]) {
        const S *const all = static_cast<const S *>(q.scales), *const offsets = static_cast<const S *>(q.offsets);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool has_two = KIND != E2M1 && q.shift == 4;
            uint32_t group = chunks[half];
            if constexpr (KIND != E2M1) {
                group = has_two        ? 2 * group
                        : q.shift >= 5 ? group >> (q.shift - 5)
                                       : group / (uint32_t(q.group) / THREAD_CODES);
            }
            scales[half][0].scale = __ldg(all + group);
            if (has_two) scales[half][1].scale = __ldg(all + group + 1);
            if constexpr (KIND == INTEGERS || KIND == BLOCK_INTEGERS) {
                if (offsets != nullptr) {
                    scales[half][0].offset = __ldg(offsets + group);
                    if (has_two) scales[half][1].offset = __ldg(offsets + group + 1);
                }
            } else if constexpr (KIND == TABLE) {
                if (q.scale_kind == NESTED) {
                    const uint32_t *const large = static_cast<const uint32_t *>(q.large);
                    scales[half][0].large = __ldg(large + group / OF_NESTED);
                    if (has_two) scales[half][1].large = __ldg(large + (group + 1) / OF_NESTED);
                }
            }
        }
    }
};

/// The integer that the masked bits are, in the mantissa of 2^23, as one instruction.
__device__ __forceinline__ float masked_integer(uint32_t bits, uint32_t mask, uint32_t integer) {
    uint32_t number;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(number) : "r"(bits), "r"(mask), "r"(integer));
    return __uint_as_float(number);
}

/// The numbers of a thread's codes, eight at a time; zeros where there is nothing.
template <typename T, int BITS, int KIND> struct LineNumbers {
    uint32_t words[BITS];
    /// Of e2m1, each as two bf16: the scale, and what else numbers are multiplied by where some lane of the warp has more than
    /// its scale.
    uint32_t factor, rest;
    bool has_rest;
    ScaleAndOffset scales[2];

    /// Of both lines.
    __device__ __forceinline__ static void of(const Packed &q, const LineCodes<BITS, KIND> &codes, bool is_there,
                                              LineNumbers (&numbers)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < BITS; i++) {
                // Elsewhere any code is finite.
                numbers[half].words[i] = KIND == E4M3 && !is_there ? 0 : codes.words[half][i];
            }
        }
        if constexpr (KIND == E2M1) {
#pragma unroll
            for (int half = 0; half < 2; half++) numbers[half].set_factor(codes.scales[half][0].scale, is_there);
        } else if constexpr (has_blocks(KIND)) {
            if (q.scale_kind == BLOCKS) set_scales<BLOCKS>(q, codes, is_there, numbers);
            if (q.scale_kind == SIGNED_BLOCKS) set_scales<SIGNED_BLOCKS>(q, codes, is_there, numbers);
        } else {
            if (q.scale_kind == PLAIN_F32) set_scales<PLAIN_F32>(q, codes, is_there, numbers);
            if (q.scale_kind == PLAIN_F16) set_scales<PLAIN_F16>(q, codes, is_there, numbers);
            if (q.scale_kind == PLAIN_BF16) set_scales<PLAIN_BF16>(q, codes, is_there, numbers);
            if constexpr (KIND == TABLE || KIND == E4M3)
                if (q.scale_kind == CODED_E8M0) set_scales<CODED_E8M0>(q, codes, is_there, numbers);
            if constexpr (KIND == TABLE) {
                if (q.scale_kind == CODED_E4M3) set_scales<CODED_E4M3>(q, codes, is_there, numbers);
                if (q.scale_kind == NESTED) set_scales<NESTED>(q, codes, is_there, numbers);
            }
        }
    }

    __device__ __forceinline__ void set_factor(uint32_t code, bool is_there) {
        // Numbers are 2^126 times too small at first, which is a part of the scale unless that is too large for bf16 then.
        constexpr uint32_t ONE = 127 << 7, UP = (126 + 127) << 7;
        const bool is_large = code > 128;
        has_rest = __any_sync(FULL, is_there && is_large);
        rest = (is_large ? UP : ONE) * 0x10001u;
        const uint32_t bits = code == 255 ? 0x7fc0 : (is_large ? code : code + 126) << 7;
        factor = is_there ? bits | bits << 16 : 0;
    }

    template <int STORED>
    __device__ __forceinline__ static void set_scales(const Packed &q, const LineCodes<BITS, KIND> &codes, bool is_there,
                                                      LineNumbers (&numbers)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            ScaleAndOffset(&to)[2] = numbers[half].scales;
            to[0] = to[1] = {0.0f, 0.0f};
            if (!is_there) continue;
            StoredScale stored = codes.scales[half][0];
            to[0] = to[1] = decoded_as<STORED>(q, stored);
            if (q.shift != 4) continue;
            stored.scale = codes.scales[half][1].scale, stored.offset = codes.scales[half][1].offset;
            if constexpr (STORED == NESTED) stored.large = codes.scales[half][1].large;
            to[1] = decoded_as<STORED>(q, stored);
        }
    }

    /// Those from `8·part` on, as pairs: of e2m1 the first and the fifth, the second and the sixth and so on, else neighbours.
    __device__ __forceinline__ void pairs(const Packed &q, float zero, int part, uint32_t (&to)[4]) const {
        if constexpr (KIND == E2M1) {
            const uint32_t word = words[part];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Sign, exponent and mantissa where bf16 has them, whose exponent counts from 127 and not from 1.
                const uint32_t sign = (i < 3 ? word << (12 - 4 * i) : word) & 0x80008000u;
                const uint32_t others = (i < 2 ? word << (6 - 4 * i) : word >> (4 * i - 6)) & 0x01c001c0u;
                to[i] = pairwise_product<bf16>(sign | others, factor);
            }
            if (has_rest) {
#pragma unroll
                for (int i = 0; i < 4; i++) to[i] = pairwise_product<bf16>(to[i], rest);
            }
        } else {
            const ScaleAndOffset scale = scales[part / 2];
            uint32_t integer = 0x4b000000u;
            // So that it is a register.
            asm volatile("" : "+r"(integer));
            float numbers[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int bit = (part * 8 + i) * BITS, word = bit / 32, shift = bit % 32;
                uint32_t code = words[word] >> shift;
                if (shift + BITS > 32) code |= words[word + 1] << (32 - shift);
                constexpr uint32_t MASK = (1u << BITS) - 1;
                float level;
                if constexpr (has_table(KIND) || KIND == E4M3)
                    level = level_of<has_table(KIND) ? TABLE : E4M3>(code & MASK, zero, q.levels);
                else
                    level = masked_integer(code, MASK, integer) - zero;
                numbers[i] = fmaf(level, scale.scale, scale.offset);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) to[i] = pack_pair<T>(numbers[2 * i], numbers[2 * i + 1]);
        }
    }
};

/// Eight neighbours of a row as the pairs that `LineNumbers` gives.
template <int KIND> __device__ __forceinline__ void pair_up(uint4 &eight) {
    if constexpr (KIND == E2M1) {
        const uint4 from = eight;
        eight.x = __byte_perm(from.x, from.z, 0x5410);
        eight.y = __byte_perm(from.x, from.z, 0x7632);
        eight.z = __byte_perm(from.y, from.w, 0x5410);
        eight.w = __byte_perm(from.y, from.w, 0x7632);
    }
}

/// Adds the products of a warp's lines with the rows whose chunks of this step begin at `rows`.
template <typename T, int MATRICES, int BITS, int KIND, typename Divided>
__device__ __forceinline__ void add_products(float (&sums)[MATRICES][Divided::EIGHTS][4], const Packed (&matrices)[MATRICES],
                                             const LineNumbers<T, BITS, KIND> (&numbers)[MATRICES][2], uint32_t rows,
                                             int row_count) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
        uint32_t a[MATRICES][2][4];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
            const float zero = KIND == E2M1 ? 0.0f : zero_of(matrices[m]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t pairs[4];
                numbers[m][half].pairs(matrices[m], zero, part, pairs);
                a[m][0][half] = pairs[0], a[m][0][2 + half] = pairs[1];
                a[m][1][half] = pairs[2], a[m][1][2 + half] = pairs[3];
            }
        }
#pragma unroll
        for (int n = 0; n < Divided::EIGHTS; n++) {
            if (n > 0 && n * 8 >= row_count) break;
            uint4 b;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                         : "r"(rows + (part * Divided::ROWS + n * 8) * 64)
                         : "memory");
            pair_up<KIND>(b);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                multiply_add<T>(sums[m][n], a[m][0], b.x, b.y);
                multiply_add<T>(sums[m][n], a[m][1], b.z, b.w);
            }
        }
    }
}

/// Of a tile of an expert's rows the gated unit, `MATRICES` being 2, or the product with its last matrix. A single row is a choice's:
/// its own of `left`, or with `active` its token's. A tile is an item, whose rows are those of `tokens`, or lie in the order of
/// experts where that is null.
template <typename T, int MATRICES, int BITS, int KIND, int ROWS, int SHARING>
__device__ __forceinline__ void multiply_fragments(const T *left, const Packed *table, const T *const *biases,
                                                   const SortedItem *items, const unsigned *tokens,
                                                   const unsigned *chosen, T *y, int depth, int columns,
                                                   int active, int activation) {
    using Divided = Division<ROWS, SHARING>;
    constexpr int EIGHTS = Divided::EIGHTS;
    extern __shared__ __align__(16) unsigned char row[];
    __shared__ Shared<MATRICES> described;
    // The kernel before one of outputs makes the units alone.
    constexpr bool IS_AHEAD = MATRICES == 1;
    if (!IS_AHEAD) follow_previous();
    SortedItem item;
    if constexpr (Divided::IS_SINGLE) {
        item = {int(chosen[blockIdx.y]), int(blockIdx.y), 1, 0};
    } else {
        item = items[blockIdx.y];
        if (item.rows == 0) {
            if (IS_AHEAD) follow_previous();
            return;
        }
    }
    described.copy(table + int64_t(item.expert) * MATRICES);
    const Packed(&matrices)[MATRICES] = described.at;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quarter = lane % 4;
    const int share = warp % SHARING, first_line = blockIdx.x * Divided::LINES + warp / SHARING * FRAGMENT_LINES;
    const uint32_t shared = shared_address(row);
    const int steps = (depth + Divided::DEPTH - 1) / Divided::DEPTH;
    const uint32_t of_line = depth / THREAD_CODES;
    uint32_t lines[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        lines[half] = min(first_line + half * 8 + lane / 4, columns - 1) * of_line;
    const auto chunk_of = [&](int step) { return uint32_t((step * SHARING + share) * 4 + quarter); };
    using Codes = LineCodes<BITS, KIND>[MATRICES];
    const auto fetch = [&](Codes &codes, int step) {
        if (step >= steps) return;
        // Behind the end there is the last once more, of which nothing is used.
        const uint32_t chunk = min(chunk_of(step), of_line - 1);
        const uint32_t chunks[2] = {lines[0] + chunk, lines[1] + chunk};
#pragma unroll
        for (int m = 0; m < MATRICES; m++) codes[m].fetch(matrices[m], chunks);
    };
    float sums[MATRICES][EIGHTS][4];
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    using Numbers = LineNumbers<T, BITS, KIND>[MATRICES][2];
    const auto numbers_of = [&](const Codes &codes, int step, Numbers &numbers) {
#pragma unroll
        for (int m = 0; m < MATRICES; m++)
            LineNumbers<T, BITS, KIND>::of(matrices[m], codes[m], chunk_of(step) < of_line, numbers[m]);
    };
    const auto add = [&](const Numbers &numbers, uint32_t stage) {
        const int of_lane = Divided::IS_SINGLE ? 0 : lane / 4;
        add_products<T, MATRICES, BITS, KIND, Divided>(
            sums, matrices, numbers, stage + Divided::place(of_lane, share * 16 + quarter * 4), item.rows);
    };
    __syncthreads();
    if constexpr (Divided::IS_SINGLE) {
        // As many steps as registers allow.
        constexpr int AHEAD = KIND == E2M1 || BITS < 4 ? 2 : 1;
        Codes codes[AHEAD];
#pragma unroll
        for (int step = 0; step < AHEAD; step++) fetch(codes[step], step);
        if (IS_AHEAD) follow_previous();
        const T *const source = left + int64_t(active == 0 ? item.first : item.first / active) * depth;
        for (int c = threadIdx.x; c < steps * Divided::CHUNKS; c += FRAGMENT_THREADS)
            copy_async(shared + Divided::place(0, c), c * 8 < depth ? source + c * 8 : source, c * 8 < depth);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        const auto work = [&](Codes &codes, int step) {
            Numbers numbers;
            numbers_of(codes, step, numbers);
            fetch(codes, step + AHEAD);
            add(numbers, shared + step * Divided::STAGE_BYTES);
        };
        for (int first = 0; first < steps; first += AHEAD) {
#pragma unroll
            for (int step = 0; step < AHEAD; step++)
                if (step == 0 || first + step < steps) work(codes[step], first + step);
        }
    } else {
        Codes codes;
        fetch(codes, 0);
        if (IS_AHEAD) follow_previous();
        const auto stage_of = [&](int step) { return shared + step % FRAGMENT_STAGES * Divided::STAGE_BYTES; };
        constexpr int COPIES = ROWS * Divided::CHUNKS / FRAGMENT_THREADS;
        constexpr int ROWS_APART = FRAGMENT_THREADS / Divided::CHUNKS;
        const int own_chunk = threadIdx.x % Divided::CHUNKS, own_row = threadIdx.x / Divided::CHUNKS;
        int from[COPIES];
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            const int place = item.first + min(own_row + c * ROWS_APART, item.rows - 1);
            from[c] = tokens == nullptr ? place : int(tokens[place]);
        }
        const auto copy_rows = [&](int step) {
            const int k = step * Divided::DEPTH + own_chunk * 8;
#pragma unroll
            for (int c = 0; c < COPIES; c++) {
                const int r = own_row + c * ROWS_APART;
                if (r >= item.rows) break;
                const bool is_there = k < depth;
                const T *const source = is_there ? left + int64_t(from[c]) * depth + k : left;
                copy_async(stage_of(step) + Divided::place(r, own_chunk), source, is_there);
            }
        };
#pragma unroll
        for (int step = 0; step < FRAGMENT_STAGES - 1; step++) {
            if (step < steps) copy_rows(step);
            copy_async_commit();
        }
        for (int step = 0; step < steps; step++) {
            Numbers numbers;
            numbers_of(codes, step, numbers);
            fetch(codes, step + 1);
            copy_async_wait<FRAGMENT_STAGES - 2>();
            // All have the rows, and are done with those that are overwritten.
            __syncthreads();
            if (step + FRAGMENT_STAGES - 1 < steps) copy_rows(step + FRAGMENT_STAGES - 1);
            copy_async_commit();
            add(numbers, stage_of(step));
        }
    }
    if constexpr (SHARING > 1) {
        constexpr int NUMBERS = MATRICES * EIGHTS * 4;
        float(*const others)[WARP] = reinterpret_cast<float(*)[WARP]>(row);
        static_assert(Divided::IS_SINGLE || FRAGMENT_WARPS * NUMBERS * WARP * 4 <= FRAGMENT_STAGES * Divided::STAGE_BYTES,
                      "there is room for all");
        __syncthreads();
        float(*const own)[WARP] = others + warp * NUMBERS;
        if (share > 0) {
#pragma unroll
            for (int i = 0; i < NUMBERS; i++) own[i][lane] = sums[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4];
        }
        __syncthreads();
        if (share > 0) return;
#pragma unroll
        for (int i = 0; i < NUMBERS; i++) {
#pragma unroll
            for (int other = 1; other < SHARING; other++)
                sums[i / (EIGHTS * 4)][i / 4 % EIGHTS][i % 4] += own[other * NUMBERS + i][lane];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int column = first_line + half * 8 + lane / 4;
        if (column >= columns) continue;
        const float bias = bias_of(biases, item.expert, MATRICES == 1 ? 2 : 0, column);
        const float other = MATRICES == 1 ? 0.0f : bias_of(biases, item.expert, 1, column);
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = n * 8 + quarter * 2 + i;
                if (r >= item.rows) continue;
                float result = sums[0][n][half * 2 + i] + bias;
                if constexpr (MATRICES == 2) {
                    // As if gate and value had been stored.
                    const float gate = to_float(from_float<T>(result));
                    const float value = to_float(from_float<T>(sums[MATRICES - 1][n][half * 2 + i] + other));
                    result = gated(gate, value, activation);
                }
                y[int64_t(item.first + r) * columns + column] = from_float<T>(result);
            }
        }
    }
}

/// `experts_packed_unit` and `experts_packed_down` of matrices of a kind, by tiles of a number of rows.
#define FRAGMENTS_OF(form, suffix, T, bits, kind, rows, sharing, blocks)                           \
    extern "C" __global__ void __launch_bounds__(FRAGMENT_THREADS, blocks)                         \
        experts_packed_unit_##rows##form##_##suffix UNIT_PARAMETERS(T, Packed) {                   \
        multiply_fragments<T, 2, bits, kind, rows, sharing>(                                       \
            x, table, biases, items, tokens, chosen, y, depth, columns, active, activation);       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(FRAGMENT_THREADS, blocks)                         \
        experts_packed_down_##rows##form##_##suffix DOWN_PARAMETERS(T, Packed) {                   \
        multiply_fragments<T, 1, bits, kind, rows, sharing>(                                       \
            unit, table, biases, items, nullptr, chosen, y, depth, columns, 0, 0);                 \
    }
#define FRAGMENTS(form, suffix, T, bits, kind)                                                     \
    FRAGMENTS_OF(form, suffix, T, bits, kind, 1, 4, (bits < 8 ? 2 : 1))                            \
    FRAGMENTS_OF(form, suffix, T, bits, kind, 32, 2, (bits < 8 ? 2 : 1))                           \
    FRAGMENTS_OF(form, suffix, T, bits, kind, 64, 1, 1)
#define FRAGMENTS_OF_BOTH(form, bits, kind)                                                        \
    FRAGMENTS(form, bf16, bf16, bits, kind) FRAGMENTS(form, f16, f16, bits, kind)

FRAGMENTS(_e2m1, bf16, bf16, 4, E2M1)
FRAGMENTS_OF_BOTH(_table, 4, TABLE)
FRAGMENTS_OF_BOTH(_e4m3, 8, E4M3)
FRAGMENTS_OF_BOTH(_2_bits, 2, INTEGERS)
FRAGMENTS_OF_BOTH(_3_bits, 3, INTEGERS)
FRAGMENTS_OF_BOTH(_4_bits, 4, INTEGERS)
FRAGMENTS_OF_BOTH(_5_bits, 5, INTEGERS)
FRAGMENTS_OF_BOTH(_6_bits, 6, INTEGERS)
FRAGMENTS_OF_BOTH(_8_bits, 8, INTEGERS)
FRAGMENTS_OF_BOTH(_table_blocks, 4, BLOCK_TABLE)
FRAGMENTS_OF_BOTH(_2_bits_blocks, 2, BLOCK_INTEGERS)
FRAGMENTS_OF_BOTH(_3_bits_blocks, 3, BLOCK_INTEGERS)
FRAGMENTS_OF_BOTH(_4_bits_blocks, 4, BLOCK_INTEGERS)
FRAGMENTS_OF_BOTH(_5_bits_blocks, 5, BLOCK_INTEGERS)
FRAGMENTS_OF_BOTH(_6_bits_blocks, 6, BLOCK_INTEGERS)
