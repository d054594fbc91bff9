// The experts of many tokens where the host doesn't know how many rows each has: choices are put into the order of experts, and a
// block has a tile of one expert's rows, as in grouped.cuh, with matrices as they are or in fewer bits.
#pragma once

#include "../glu/activation.cuh"
#include "grouped.cuh"
#include "packed.cuh"

constexpr int SORT_THREADS = 256, MOST_COUNT = 1024;

/// Rows of an expert in the order of experts; none where there is no such tile.
struct SortedItem {
    int expert, first, rows, unused;
};

/// The sum over the threads before this one, and over all.
__device__ __forceinline__ int2 sums_before(int own, int *scratch) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const int other = __shfl_up_sync(FULL, sum, offset);
        if (lane >= offset) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < int(blockDim.x) / WARP; w++) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    return make_int2(before + sum - own, all);
}

/// Block `blockIdx.x` has an expert: its tiles, and of each of its choices, in their order, the place and the token.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    experts_sort(const unsigned *chosen, unsigned *tokens, unsigned *places, SortedItem *items, int choices,
                 int active, int count, int most_items) {
    follow_previous();
    __shared__ int counts[MOST_COUNT], scratch[WARP];
    const int expert = blockIdx.x;
    for (int i = threadIdx.x; i < count; i += SORT_THREADS) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += SORT_THREADS) atomicAdd(counts + min(chosen[i], count - 1u), 1);
    __syncthreads();
    int rows_before = 0, tiles_before = 0, tiles_of_all = 0;
    for (int i = threadIdx.x; i < count; i += SORT_THREADS) {
        const int tiles = (counts[i] + GROUP_ROWS - 1) / GROUP_ROWS;
        if (i < expert) {
            rows_before += counts[i];
            tiles_before += tiles;
        }
        tiles_of_all += tiles;
    }
    const int first = sums_before(rows_before, scratch).y, first_tile = sums_before(tiles_before, scratch).y;
    const int all_tiles = sums_before(tiles_of_all, scratch).y;
    const int own = counts[expert], own_tiles = (own + GROUP_ROWS - 1) / GROUP_ROWS;
    for (int i = threadIdx.x; i < own_tiles; i += SORT_THREADS)
        items[first_tile + i] = {expert, first + i * GROUP_ROWS, min(GROUP_ROWS, own - i * GROUP_ROWS), 0};
    if (expert == 0)
        for (int i = all_tiles + threadIdx.x; i < most_items; i += SORT_THREADS) items[i] = {0, 0, 0, 0};
    // A thread has neighbouring choices.
    const int each = (choices + SORT_THREADS - 1) / SORT_THREADS;
    const int from = min(int(threadIdx.x) * each, choices), to = min(from + each, choices);
    int mine = 0;
    for (int i = from; i < to; i++) mine += chosen[i] == unsigned(expert);
    int place = first + sums_before(mine, scratch).x;
    for (int i = from; i < to; i++) {
        if (chosen[i] != unsigned(expert)) continue;
        tokens[place] = i / active;
        places[i] = place++;
    }
}

/// The line of a matrix that a row of a right tile is, and of which of `MATRICES` matrices: of two, eight lines of each in turn.
template <int MATRICES> __device__ __forceinline__ int2 line_of(int first_column, int row) {
    if constexpr (MATRICES == 1) return make_int2(first_column + row, 0);
    return make_int2(first_column + row / 16 * 8 + row % 8, row / 8 % 2);
}

/// Right tiles of matrices as they are.
template <typename T, int MATRICES> struct DenseTiles {
    using Entry = const T *;
    const T *matrices[MATRICES];

    __device__ __forceinline__ DenseTiles(const Entry *entries, unsigned char *) {
#pragma unroll
        for (int m = 0; m < MATRICES; m++) matrices[m] = entries[m];
    }

    /// Starts to copy a tile.
    __device__ __forceinline__ void copy(uint32_t tile, int first_column, int start, int depth, int columns) const {
#pragma unroll
        for (int i = threadIdx.x; i < RIGHT_BYTES / 16; i += GROUP_THREADS) {
            const int row = i / 8, chunk = i % 8, k = start + chunk * 8;
            const int2 line = line_of<MATRICES>(first_column, row);
            const bool valid = k < depth && line.x < columns;
            const T *const matrix = MATRICES == 1 || line.y == 0 ? matrices[0] : matrices[MATRICES - 1];
            copy_async(tile + chunk_at<8>(row, chunk), valid ? matrix + int64_t(line.x) * depth + k : matrix, valid);
        }
    }

    __device__ __forceinline__ void fetch(int, int, int, int) {}
    __device__ __forceinline__ void land(uint32_t) const {}
};

/// The same of matrices in fewer bits: a thread fetches 32 neighbouring codes ahead, and makes numbers of them, those of numbers.cuh
/// but that an offset is added before what it is added to is rounded.
template <typename T, int MATRICES, int BITS, int KIND> struct PackedTiles {
    using Entry = Packed;
    const Packed *matrices;
    uint32_t words[BITS];
    StoredScale scales[2];
    int matrix;
    bool is_there;

    __device__ __forceinline__ PackedTiles(const Entry *entries, unsigned char *room) {
        uint32_t *const to = reinterpret_cast<uint32_t *>(room);
        for (int i = threadIdx.x; i < int(MATRICES * sizeof(Packed) / 4); i += GROUP_THREADS)
            to[i] = reinterpret_cast<const uint32_t *>(entries)[i];
        matrices = reinterpret_cast<const Packed *>(room);
        __syncthreads();
    }

    __device__ __forceinline__ void copy(uint32_t, int, int, int, int) const {}

    __device__ __forceinline__ void fetch(int first_column, int start, int depth, int columns) {
        const int k = start + threadIdx.x % 2 * 32;
        const int2 line = line_of<MATRICES>(first_column, threadIdx.x / 2);
        matrix = line.y;
        is_there = k < depth && line.x < columns;
        if (!is_there) {
#pragma unroll
            for (int i = 0; i < BITS; i++) words[i] = 0;
            return;
        }
        const Packed &q = matrices[matrix];
        const int64_t element = int64_t(line.x) * depth + k;
        const uint32_t *const from = static_cast<const uint32_t *>(q.codes) + element / 32 * BITS;
        if constexpr (BITS % 4 == 0) {
#pragma unroll
            for (int i = 0; i < BITS; i += 4) {
                const uint4 four = __ldg(reinterpret_cast<const uint4 *>(from + i));
                words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < BITS; i++) words[i] = __ldg(from + i);
        }
        const auto group = [&](int64_t of) { return q.shift >= 0 ? of >> q.shift : of / q.group; };
        scales[0] = stored_scale(q, group(element), element);
        scales[1] = q.group % 32 == 0 ? scales[0] : stored_scale(q, group(element + 16), element + 16);
    }

    __device__ __forceinline__ void land(uint32_t tile) const {
        const Packed &q = matrices[matrix];
        const float zero = zero_of(q);
        ScaleAndOffset scale{0.0f, 0.0f};
        if (is_there) scale = decoded(q, scales[0]);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            if (part == 2 && is_there && q.group % 32 != 0) scale = decoded(q, scales[1]);
            float numbers[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int bit = (part * 8 + i) * BITS, word = bit / 32, shift = bit % 32;
                uint32_t code = words[word] >> shift;
                if (shift + BITS > 32) code |= words[word + 1] << (32 - shift);
                const float level = level_of<KIND>(code & ((1u << BITS) - 1), zero, q.levels);
                numbers[i] = fmaf(level, scale.scale, scale.offset);
            }
            const uint32_t to = tile + chunk_at<8>(threadIdx.x / 2, threadIdx.x % 2 * 4 + part);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(pack_pair<T>(numbers[0], numbers[1])), "r"(pack_pair<T>(numbers[2], numbers[3])),
                         "r"(pack_pair<T>(numbers[4], numbers[5])), "r"(pack_pair<T>(numbers[6], numbers[7]))
                         : "memory");
        }
    }
};

/// What is added to two neighbouring columns of an expert's layer.
template <typename T>
__device__ __forceinline__ float2 biases_of(const T *const *biases, int expert, int layer, int column) {
    if (biases == nullptr) return make_float2(0.0f, 0.0f);
    const T *const bias = biases[3 * int64_t(expert) + layer];
    if (bias == nullptr) return make_float2(0.0f, 0.0f);
    return make_float2(to_float(bias[column]), to_float(bias[column + 1]));
}

/// Of a tile of an expert's rows the gated unit, `MATRICES` being 2, or the product with its last matrix. The rows are those of
/// `tokens`, or lie in the order of experts where that is null.
template <typename T, int MATRICES, typename Tiles>
__device__ __forceinline__ void multiply_sorted(const T *left, const typename Tiles::Entry *table,
                                                const T *const *biases, const SortedItem *items,
                                                const unsigned *tokens, T *y, int depth, int columns,
                                                int activation) {
    extern __shared__ __align__(16) unsigned char row[];
    __shared__ __align__(16) unsigned char room[2 * sizeof(Packed)];
    follow_previous();
    const SortedItem item = items[blockIdx.y];
    if (item.rows == 0) return;
    const int first_column = blockIdx.x * (GROUP_COLUMNS / MATRICES);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp % 2 * 32, warp_column = warp / 2 * 32;
    const uint32_t shared = shared_address(row);
    const int steps = (depth + GROUP_DEPTH - 1) / GROUP_DEPTH;
    Tiles tiles(table + int64_t(item.expert) * MATRICES, room);
    // The rows whose chunks this thread copies.
    constexpr int COPIES = LEFT_BYTES / 16 / GROUP_THREADS;
    const T *from[COPIES];
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        const int r = (threadIdx.x + c * GROUP_THREADS) / 8;
        const int place = item.first + min(r, item.rows - 1);
        from[c] = left + int64_t(tokens == nullptr ? place : int(tokens[place])) * depth;
    }
    const auto stage_of = [&](int step) { return shared + step % GROUP_STAGES * (LEFT_BYTES + RIGHT_BYTES); };
    const auto copy_tiles = [&](int step) {
        const int start = step * GROUP_DEPTH;
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            const int i = threadIdx.x + c * GROUP_THREADS, r = i / 8, chunk = i % 8;
            const bool valid = r < item.rows && start + chunk * 8 < depth;
            copy_async(stage_of(step) + chunk_at<8>(r, chunk), valid ? from[c] + start + chunk * 8 : left, valid);
        }
        tiles.copy(stage_of(step) + LEFT_BYTES, first_column, start, depth, columns);
    };
    float sums[2][4][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    tiles.fetch(first_column, 0, depth, columns);
#pragma unroll
    for (int step = 0; step < GROUP_STAGES - 1; step++) {
        if (step < steps) copy_tiles(step);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<GROUP_STAGES - 2>();
        tiles.land(stage_of(step) + LEFT_BYTES);
        if (step + 1 < steps) tiles.fetch(first_column, (step + 1) * GROUP_DEPTH, depth, columns);
        // All have the tiles, and are done with those that are overwritten.
        __syncthreads();
        if (step + GROUP_STAGES - 1 < steps) copy_tiles(step + GROUP_STAGES - 1);
        copy_async_commit();
        multiply_tiles<T, false>(sums, stage_of(step), warp_row, item.rows, warp_column, lane);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n += MATRICES) {
            const int column = line_of<MATRICES>(first_column, warp_column + n * 8).x + lane % 4 * 2;
            if (column >= columns) continue;
            const float2 bias = biases_of(biases, item.expert, MATRICES == 1 ? 2 : 0, column);
            const float2 other =
                MATRICES == 1 ? bias : biases_of(biases, item.expert, 1, column);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = warp_row + m * 16 + half * 8 + lane / 4;
                if (r >= item.rows) continue;
                float2 result = make_float2(sums[m][n][half * 2] + bias.x, sums[m][n][half * 2 + 1] + bias.y);
                if constexpr (MATRICES == 2) {
                    // As if gates and values had been stored.
                    const float2 gates = unpack_pair<T>(pack_pair<T>(result.x, result.y));
                    const float2 values = unpack_pair<T>(pack_pair<T>(sums[m][n + 1][half * 2] + other.x,
                                                                      sums[m][n + 1][half * 2 + 1] + other.y));
                    result = make_float2(gated(gates.x, values.x, activation),
                                         gated(gates.y, values.y, activation));
                }
                *reinterpret_cast<uint32_t *>(y + int64_t(item.first + r) * columns + column) =
                    pack_pair<T>(result.x, result.y);
            }
        }
    }
}

/// `experts_sorted_unit` and `experts_sorted_down` of matrices of a kind.
#define SORTED_OF(form, suffix, T, ...)                                                            \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS)                                    \
        experts_sorted_unit##form##_##suffix(                                                      \
            const T *x, const typename __VA_ARGS__<T, 2>::Entry *table, const T *const *biases,    \
            const SortedItem *items, const unsigned *tokens, T *y, int depth, int columns,         \
            int activation) {                                                                      \
        multiply_sorted<T, 2, __VA_ARGS__<T, 2>>(x, table, biases, items, tokens, y, depth,        \
                                                 columns, activation);                             \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS)                                    \
        experts_sorted_down##form##_##suffix(                                                      \
            const T *x, const typename __VA_ARGS__<T, 1>::Entry *table, const T *const *biases,    \
            const SortedItem *items, T *y, int depth, int columns) {                               \
        multiply_sorted<T, 1, __VA_ARGS__<T, 1>>(x, table, biases, items, nullptr, y, depth,       \
                                                 columns, 0);                                      \
    }
#define SORTED(form, ...) SORTED_OF(form, bf16, bf16, __VA_ARGS__) SORTED_OF(form, f16, f16, __VA_ARGS__)

template <typename T, int MATRICES> using TableTiles = PackedTiles<T, MATRICES, 4, TABLE>;
template <typename T, int MATRICES> using E4m3Tiles = PackedTiles<T, MATRICES, 8, E4M3>;
template <typename T, int MATRICES> using Tiles2Bits = PackedTiles<T, MATRICES, 2, INTEGERS>;
template <typename T, int MATRICES> using Tiles3Bits = PackedTiles<T, MATRICES, 3, INTEGERS>;
template <typename T, int MATRICES> using Tiles4Bits = PackedTiles<T, MATRICES, 4, INTEGERS>;
template <typename T, int MATRICES> using Tiles5Bits = PackedTiles<T, MATRICES, 5, INTEGERS>;
template <typename T, int MATRICES> using Tiles6Bits = PackedTiles<T, MATRICES, 6, INTEGERS>;
template <typename T, int MATRICES> using Tiles8Bits = PackedTiles<T, MATRICES, 8, INTEGERS>;

SORTED(, DenseTiles)
SORTED(_table, TableTiles)
SORTED(_e4m3, E4m3Tiles)
SORTED(_2_bits, Tiles2Bits)
SORTED(_3_bits, Tiles3Bits)
SORTED(_4_bits, Tiles4Bits)
SORTED(_5_bits, Tiles5Bits)
SORTED(_6_bits, Tiles6Bits)
SORTED(_8_bits, Tiles8Bits)
