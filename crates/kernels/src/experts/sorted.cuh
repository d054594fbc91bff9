// The experts of many tokens where the host doesn't know how many rows each has: choices are put into the order of experts, and a
// block has a tile of one expert's rows, as in grouped.cuh.
#pragma once

#include "../glu/activation.cuh"
#include "grouped.cuh"
#include "routed.cuh"

constexpr int SORT_THREADS = 256, MOST_COUNT = 1024;

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

/// Block `blockIdx.x` has an expert: its tiles of up to `tile_rows`, and of each of its choices, in their order, the place and the
/// token.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    experts_sort(const unsigned *chosen, unsigned *tokens, unsigned *places, SortedItem *items, int choices,
                 int active, int count, int most_items, int tile_rows) {
    follow_previous();
    __shared__ int counts[MOST_COUNT], scratch[WARP];
    const int expert = blockIdx.x;
    for (int i = threadIdx.x; i < count; i += SORT_THREADS) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += SORT_THREADS) atomicAdd(counts + min(chosen[i], count - 1u), 1);
    __syncthreads();
    int rows_before = 0, tiles_before = 0, tiles_of_all = 0;
    for (int i = threadIdx.x; i < count; i += SORT_THREADS) {
        const int tiles = (counts[i] + tile_rows - 1) / tile_rows;
        if (i < expert) {
            rows_before += counts[i];
            tiles_before += tiles;
        }
        tiles_of_all += tiles;
    }
    const int first = sums_before(rows_before, scratch).y, first_tile = sums_before(tiles_before, scratch).y;
    const int all_tiles = sums_before(tiles_of_all, scratch).y;
    const int own = counts[expert], own_tiles = (own + tile_rows - 1) / tile_rows;
    for (int i = threadIdx.x; i < own_tiles; i += SORT_THREADS)
        items[first_tile + i] = {expert, first + i * tile_rows, min(tile_rows, own - i * tile_rows), 0};
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

/// Starts to copy a right tile.
template <typename T, int MATRICES>
__device__ __forceinline__ void copy_lines(uint32_t tile, const T *const (&matrices)[MATRICES], int first_column, int start,
                                           int depth, int columns) {
#pragma unroll
    for (int i = threadIdx.x; i < RIGHT_BYTES / 16; i += GROUP_THREADS) {
        const int row = i / 8, chunk = i % 8, k = start + chunk * 8;
        const int2 line = line_of<MATRICES>(first_column, row);
        const bool valid = k < depth && line.x < columns;
        const T *const matrix = MATRICES == 1 || line.y == 0 ? matrices[0] : matrices[MATRICES - 1];
        copy_async(tile + chunk_at<8>(row, chunk), valid ? matrix + int64_t(line.x) * depth + k : matrix, valid);
    }
}

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
template <typename T, int MATRICES>
__device__ __forceinline__ void multiply_sorted(const T *left, const T *const *table, const T *const *biases,
                                                const SortedItem *items, const unsigned *tokens, T *y,
                                                int depth, int columns, int activation) {
    extern __shared__ __align__(16) unsigned char row[];
    follow_previous();
    const SortedItem item = items[blockIdx.y];
    if (item.rows == 0) return;
    const int first_column = blockIdx.x * (GROUP_COLUMNS / MATRICES);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp % 2 * 32, warp_column = warp / 2 * 32;
    const uint32_t shared = shared_address(row);
    const int steps = (depth + GROUP_DEPTH - 1) / GROUP_DEPTH;
    const T *matrices[MATRICES];
#pragma unroll
    for (int m = 0; m < MATRICES; m++) matrices[m] = table[int64_t(item.expert) * MATRICES + m];
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
        copy_lines(stage_of(step) + LEFT_BYTES, matrices, first_column, start, depth, columns);
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
#pragma unroll
    for (int step = 0; step < GROUP_STAGES - 1; step++) {
        if (step < steps) copy_tiles(step);
        copy_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<GROUP_STAGES - 2>();
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

#define SORTED(T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS)                                    \
        experts_sorted_unit_##T UNIT_PARAMETERS(T, T *const) {                                     \
        multiply_sorted<T, 2>(x, table, biases, items, tokens, y, depth, columns, activation);     \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(GROUP_THREADS)                                    \
        experts_sorted_down_##T DOWN_PARAMETERS(T, T *const) {                                     \
        multiply_sorted<T, 1>(unit, table, biases, items, nullptr, y, depth, columns, 0);          \
    }

SORTED(bf16)
SORTED(f16)
