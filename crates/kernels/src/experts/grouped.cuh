// Products of rows that lie expert by expert with the weights of their expert, for elements of 2 bytes. The formulas are in
// grouped.rs.
//
// A block has up to `GROUP_ROWS` rows of one expert and `GROUP_COLUMNS` columns. Tiles of both sides are copied ahead, in stages,
// and lie in shared memory in chunks of 16 bytes, which are swizzled so that eight neighbouring rows lie in other banks.
#pragma once

#include "tensor.cuh"

constexpr int GROUP_THREADS = 256, GROUP_ROWS = 64, GROUP_COLUMNS = 128, GROUP_DEPTH = 64;
constexpr int GROUP_STAGES = 3;
constexpr int LEFT_BYTES = GROUP_ROWS * GROUP_DEPTH * 2, RIGHT_BYTES = GROUP_COLUMNS * GROUP_DEPTH * 2;

/// Rows of an expert, its weights, and what is added to each row, or null.
struct Item {
    const void *weights[2];
    const void *bias;
    int first, rows;
};

/// The place of a chunk in a tile whose rows have `CHUNKS` of them.
template <int CHUNKS> __device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
    return (row * CHUNKS + (chunk ^ (row & 7))) * 16;
}

/// Adds the products of the left and the right tile that follow each other at `stage`: a warp has 32 rows, of which those from
/// `rows` of the tile on aren't there, and 32 columns.
template <typename T, bool ACROSS>
__device__ __forceinline__ void multiply_tiles(float (&sums)[2][4][4], uint32_t stage, int warp_row,
                                               int rows, int warp_column, int lane) {
    if (warp_row >= rows) return;
    const bool has_both = warp_row + 16 < rows;
    const int tile = lane / 8, of_tile = lane % 8;
#pragma unroll
    for (int k = 0; k < GROUP_DEPTH / 16; k++) {
        uint32_t a[2][4], b[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (m == 1 && !has_both) break;
            const int r = warp_row + m * 16 + tile % 2 * 8 + of_tile;
            load_tiles(a[m], stage + chunk_at<8>(r, k * 2 + tile / 2));
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int column = warp_column + n * 16 + tile / 2 * 8;
            if constexpr (ACROSS) {
                const int r = k * 16 + tile % 2 * 8 + of_tile;
                load_tiles_transposed(b[n],
                                      stage + LEFT_BYTES + chunk_at<GROUP_COLUMNS / 8>(r, column / 8));
            } else {
                load_tiles(b[n],
                           stage + LEFT_BYTES + chunk_at<8>(column + of_tile, k * 2 + tile % 2));
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (m == 1 && !has_both) break;
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply_add<T>(sums[m][n], a[m], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

/// `y = Σ left·weightᵀ`, or with `ACROSS` `Σ left·weight`, over `terms` of both: `left` `(rows, depth)`, weights `(columns, depth)`
/// or `(depth, columns)`, all of whole chunks.
template <typename T, bool ACROSS>
__device__ __forceinline__ void multiply_groups(const T *left0, const T *left1, const Item *items,
                                                T *y, int depth, int columns, int terms) {
    extern __shared__ __align__(16) unsigned char row[];
    follow_previous();
    const Item item = items[blockIdx.y];
    const int first_column = blockIdx.x * GROUP_COLUMNS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp % 2 * 32, warp_column = warp / 2 * 32;
    const uint32_t shared = shared_address(row);
    const int per_term = (depth + GROUP_DEPTH - 1) / GROUP_DEPTH, steps = terms * per_term;
    auto copy_tiles = [&](int step) {
        const int term = step / per_term, start = (step - term * per_term) * GROUP_DEPTH;
        const uint32_t stage = shared + step % GROUP_STAGES * (LEFT_BYTES + RIGHT_BYTES);
        const T *left = (term ? left1 : left0) + int64_t(item.first) * depth;
        const T *weight = static_cast<const T *>(item.weights[term]);
#pragma unroll
        for (int i = threadIdx.x; i < LEFT_BYTES / 16; i += GROUP_THREADS) {
            const int r = i / 8, chunk = i % 8;
            const bool valid = r < item.rows && start + chunk * 8 < depth;
            const T *from = valid ? left + int64_t(r) * depth + start + chunk * 8 : left;
            copy_async(stage + chunk_at<8>(r, chunk), from, valid);
        }
#pragma unroll
        for (int i = threadIdx.x; i < RIGHT_BYTES / 16; i += GROUP_THREADS) {
            constexpr int CHUNKS = ACROSS ? GROUP_COLUMNS / 8 : 8;
            const int r = i / CHUNKS, chunk = i % CHUNKS;
            const int k = start + (ACROSS ? r : chunk * 8);
            const int column = first_column + (ACROSS ? chunk * 8 : r);
            const bool valid = k < depth && column < columns;
            const int64_t place = ACROSS ? int64_t(k) * columns + column : int64_t(column) * depth + k;
            copy_async(stage + LEFT_BYTES + chunk_at<CHUNKS>(r, chunk), valid ? weight + place : weight,
                       valid);
        }
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
        const uint32_t stage = shared + step % GROUP_STAGES * (LEFT_BYTES + RIGHT_BYTES);
        multiply_tiles<T, ACROSS>(sums, stage, warp_row, item.rows, warp_column, lane);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int column = first_column + warp_column + n * 8 + lane % 4 * 2;
            float2 bias = make_float2(0.0f, 0.0f);
            if (item.bias != nullptr && column < columns)
                bias = unpack_pair<T>(*reinterpret_cast<const uint32_t *>(static_cast<const T *>(item.bias) + column));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = warp_row + m * 16 + half * 8 + lane / 4;
                if (r < item.rows && column < columns)
                    *reinterpret_cast<uint32_t *>(y + int64_t(item.first + r) * columns + column) =
                        pack_pair<T>(sums[m][n][half * 2] + bias.x, sums[m][n][half * 2 + 1] + bias.y);
            }
        }
    }
}

template <typename T>
__device__ __forceinline__ void experts_grouped(const T *left0, const T *left1, const Item *items,
                                                T *y, int depth, int columns, int terms) {
    multiply_groups<T, false>(left0, left1, items, y, depth, columns, terms);
}

template <typename T>
__device__ __forceinline__ void experts_across(const T *left0, const T *left1, const Item *items,
                                               T *y, int depth, int columns, int terms) {
    multiply_groups<T, true>(left0, left1, items, y, depth, columns, terms);
}

#define GROUPED_PARAMETERS                                                                         \
    (const T *left0, const T *left1, const Item *items, T *y, int depth, int columns, int terms)
#define GROUPED_ARGUMENTS (left0, left1, items, y, depth, columns, terms)

FOR_ONE_DTYPE(experts_grouped, bf16, bf16, GROUP_THREADS, GROUPED_PARAMETERS, GROUPED_ARGUMENTS)
FOR_ONE_DTYPE(experts_grouped, f16, f16, GROUP_THREADS, GROUPED_PARAMETERS, GROUPED_ARGUMENTS)
FOR_ONE_DTYPE(experts_across, bf16, bf16, GROUP_THREADS, GROUPED_PARAMETERS, GROUPED_ARGUMENTS)
FOR_ONE_DTYPE(experts_across, f16, f16, GROUP_THREADS, GROUPED_PARAMETERS, GROUPED_ARGUMENTS)
