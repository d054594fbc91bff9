// The products of LoRA that have the rank as a side, for bf16 and f16. They do little arithmetic and are
// as fast as the large matrices are read or written, each once:
//
//   down      x·Fᵀ   (rows, wide) by (rank, wide) to (rows, rank)     xa = x·A, g = s·dy·Bᵀ
//   gradient  Lᵀ·x   (rows, rank) by (rows, wide) to (rank, wide)     dAᵀ = gᵀ·x, dB = s·xaᵀ·dy
//   both      of one x, here dy, in one reading
//   up        L·F    (rows, rank) by (rank, wide) to (rows, wide)     s·xa·B, g·Aᵀ
//
// The first three go over tiles of x that asynchronous copies bring into shared memory. Blocks share the
// tiles; what they found is added up by `add_up`, always in the same order. Sizes and distances of rows
// are multiples of 8 elements and matrices begin at 16 bytes; the rank is at most 64 and a multiple of 8.
#include "tensor.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// Columns of the tile of x of `down` and `both`; each warp takes 32 of its rows.
constexpr int COLUMNS = 64;

// The tile of x of `gradient`.
constexpr int GRADIENT_ROWS = 128;
constexpr int GRADIENT_COLUMNS = 128;

/// Shared memory that a block may have.
#if __CUDA_ARCH__ >= 900
constexpr int SHARED = 227 << 10;
#else
constexpr int SHARED = 163 << 10;
#endif

// The tile of the result of `up`: four by two warps of 32 rows and 64 columns.
constexpr int UP_ROWS = 128;
constexpr int UP_COLUMNS = 128;

struct Pass {
    const void *x;      // (rows, wide)
    const void *factor; // (rank, wide), of `down`
    const void *left;   // (rows, rank), of `gradient`
    float *down;        // (gridDim.y, rows, R) with R the rank rounded up to 16
    float *gradient;    // (gridDim.x, R, wide)
    int64_t x_stride, factor_stride, left_stride;
    int rows, wide, rank;
    int unused;
};

struct Up {
    const void *left;   // (rows, rank)
    const void *factor; // (rank, wide)
    const void *bias;   // (wide), or null
    void *out;          // (rows, wide), contiguous
    int64_t left_stride, factor_stride;
    int rows, wide, rank;
    float alpha;
};

/// to[row·row_stride + column·column_stride] = alpha·Σ_slot from[slot·slot_stride + row·pitch + column]
struct Sum {
    const float *from;
    void *to;
    int64_t slot_stride, row_stride, column_stride;
    int slots, rows, columns, pitch;
    float alpha;
    int single; // whether `to` is in f32
};
constexpr int MOST = 8;
struct Sums {
    Sum at[MOST];
};

/// Where 16 bytes number `chunk` of row `row` lie in a tile whose rows are 128 bytes: swizzled, so
/// that 8 rows of one column of chunks are in different banks.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

/// Threads of `both`: the more rows its blocks have, the fewer are the terms of `gradient`, which is what
/// it writes; but there have to be registers for them.
constexpr int both_threads(int tiles) { return tiles == 1 ? 512 : 256; }

/// `down` and, of the same reading of x, `gradient` for a rank of up to 16·TILES. A block of `WARPS` has one
/// tile of rows and a part of the columns, which it takes tile by tile. For `gradient`, half of the warps
/// have the upper half of a tile's rows, a part of the columns each, and the others the lower one.
template <typename T, int TILES, int WARPS, bool GRADIENT>
__device__ __forceinline__ void down(const Pass &p) {
    follow_previous();
    constexpr int R = 16 * TILES, ROWS = 32 * WARPS, THREADS = WARP * WARPS;
    // A warp's rows of the left matrix are in registers, where these suffice; else they stay in shared
    // memory, set apart by 16 bytes more than they have, against bank conflicts.
    constexpr bool KEPT = TILES <= 3;
    constexpr int LEFT_ROW = KEPT ? 2 * R : 2 * R + 16;
    constexpr int LEFT_BYTES = GRADIENT ? ROWS * LEFT_ROW : 0;
    // Sums of the lower half for a step, and for the one before it.
    constexpr int SUM_BYTES = GRADIENT ? R * COLUMNS * 4 : 0;
    // A tile of x and of the factor.
    constexpr int X_BYTES = ROWS * COLUMNS * 2;
    constexpr int STAGE = X_BYTES + R * COLUMNS * 2;
    constexpr int STAGES = 3 * STAGE + LEFT_BYTES + 2 * SUM_BYTES <= SHARED ? 3 : 2;
    extern __shared__ uint4 shared[];
    const uint32_t lefts = shared_address(shared) + 2 * SUM_BYTES, base = lefts + LEFT_BYTES;
    const T *x = static_cast<const T *>(p.x);
    const T *factor = static_cast<const T *>(p.factor);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column_tiles = (p.wide + COLUMNS - 1) / COLUMNS;
    const int first_row = blockIdx.x * ROWS;
    // Blocks at a time are in neighbouring columns, which memory likes.
    const int steps = (column_tiles - (int)blockIdx.y + (int)gridDim.y - 1) / (int)gridDim.y;
    auto column_of = [&](int step) { return (int)(blockIdx.y + step * gridDim.y) * COLUMNS; };

    // A thread copies 16 bytes of every `APART`th row of a tile.
    constexpr int APART = ROWS / 8;
    const int own_row = first_row + threadIdx.x / 8, own_column = threadIdx.x % 8 * 8;
    const uint32_t own_place = swizzled(threadIdx.x / 8, threadIdx.x % 8);
    const T *const own = x + own_row * p.x_stride + own_column;
    const int64_t apart = APART * p.x_stride;
    auto copy_tiles = [&](int step) {
        const uint32_t stage = base + step % STAGES * STAGE;
        const int column = column_of(step);
        const int own_rows = column + own_column < p.wide ? p.rows - own_row : 0;
        const T *from = own + column;
        // Rows that are a multiple of 8 apart are swizzled the same way.
        static_assert(APART % 8 == 0, "copies of a thread are at the same place of a row");
#pragma unroll
        for (int i = 0; i < 8; i++, from += apart)
            copy_async(stage + own_place + i * APART * 128, i * APART < own_rows ? from : x,
                       i * APART < own_rows);
        for (int i = threadIdx.x; i < R * 8; i += THREADS) {
            const int r = i / 8, chunk = i % 8;
            const bool valid = r < p.rank && column + chunk * 8 < p.wide;
            const T *from = valid ? factor + r * p.factor_stride + column + chunk * 8 : factor;
            copy_async(stage + X_BYTES + swizzled(r, chunk), from, valid);
        }
    };

    if (GRADIENT) {
        const T *left = static_cast<const T *>(p.left);
        constexpr int CHUNKS = R / 8;
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS, chunk = i % CHUNKS;
            const bool valid = first_row + r < p.rows && chunk * 8 < p.rank;
            const T *from = valid ? left + (first_row + r) * p.left_stride + chunk * 8 : left;
            copy_async(lefts + r * LEFT_ROW + chunk * 16, from, valid);
        }
        copy_async_commit();
    }
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy_tiles(step);
        copy_async_commit();
    }

    // What a warp has of `gradient`: columns in groups of 8, and rows in tiles of 16.
    constexpr int GROUPS = COLUMNS / 8 / (WARPS / 2), DEPTH = ROWS / 2 / 16;
    const int warp_column = warp % (WARPS / 2) * GROUPS * 8, warp_row = warp / (WARPS / 2) * (ROWS / 2);
    const bool lower = warp >= WARPS / 2;
    auto load_left = [&](uint32_t(&tile)[4], int k, int i) {
        const int r = warp_row + k * 16 + lane % 8 + lane / 16 * 8;
        load_tiles_transposed(tile, lefts + r * LEFT_ROW + i * 32 + lane / 8 % 2 * 16);
    };
    uint32_t kept[GRADIENT && KEPT ? DEPTH : 1][TILES][4];
    if constexpr (GRADIENT && KEPT) {
        copy_async_wait<STAGES - 1>();
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) load_left(kept[k][i], k, i);
        }
    }
    float gradient[TILES][GROUPS][4];
    // Where a thread's sums lie, those of the lower half or what they are added to.
    float4 *const sums_of_lower =
        reinterpret_cast<float4 *>(shared) + threadIdx.x % (THREADS / 2);
    auto sums_at = [&](int step) { return sums_of_lower + step % 2 * (SUM_BYTES / 16); };
    auto store_gradient = [&](int step) {
        if (lower) return;
        const float4 *const others = sums_at(step);
        const int column = column_of(step) + warp_column + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
                const float4 other = others[(i * GROUPS + j) * (THREADS / 2)];
                const float(&own)[4] = gradient[i][j];
                const float2 pairs[2] = {make_float2(own[0] + other.x, own[1] + other.y),
                                         make_float2(own[2] + other.z, own[3] + other.w)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int r = i * 16 + half * 8 + lane / 4;
                    if (r >= p.rank || column + j * 8 >= p.wide) continue;
                    float *to = p.gradient + ((int64_t)blockIdx.x * R + r) * p.wide + column + j * 8;
                    *reinterpret_cast<float2 *>(to) = pairs[half];
                }
            }
        }
    };

    float down[2][2 * TILES][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 2 * TILES; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) down[i][j][e] = 0.0f;
        }
    }
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        // The tiles of this step are there, those of the step before are free to be written over, and so
        // are the lower half's sums of the one before that.
        __syncthreads();
        if (step + STAGES - 1 < steps) copy_tiles(step + STAGES - 1);
        copy_async_commit();
        if constexpr (GRADIENT) {
            if (step > 0) store_gradient(step - 1);
        }

        const uint32_t tile = base + step % STAGES * STAGE, factors = tile + X_BYTES;
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            uint32_t a[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = warp * 32 + i * 16 + lane % 16;
                load_tiles(a[i], tile + swizzled(r, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                uint32_t b[4];
                const int r = j * 16 + lane % 8 + lane / 16 * 8;
                load_tiles(b, factors + swizzled(r, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    multiply_add<T>(down[i][2 * j], a[i], b[0], b[1]);
                    multiply_add<T>(down[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
        if constexpr (GRADIENT) {
            // Several sums side by side, so that a product need not wait for the one before it.
            constexpr int SETS = TILES * GROUPS == 1 ? 2 : 1;
            float sums[SETS][TILES][GROUPS][4];
#pragma unroll
            for (int s = 0; s < SETS; s++) {
#pragma unroll
                for (int i = 0; i < TILES; i++) {
#pragma unroll
                    for (int j = 0; j < GROUPS; j++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) sums[s][i][j][e] = 0.0f;
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < DEPTH; k += 2) {
                uint32_t b[GROUPS][4];
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
                    const int r = warp_row + k * 16 + lane;
                    load_tiles_transposed(b[j], tile + swizzled(r, warp_column / 8 + j));
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        uint32_t a[4];
                        if constexpr (KEPT) {
#pragma unroll
                            for (int e = 0; e < 4; e++) a[e] = kept[k + half][i][e];
                        } else {
                            load_left(a, k + half, i);
                        }
#pragma unroll
                        for (int j = 0; j < GROUPS; j++)
                            multiply_add<T>(sums[(k + half) % SETS][i][j], a, b[j][2 * half],
                                            b[j][2 * half + 1]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        gradient[i][j][e] = 0.0f;
#pragma unroll
                        for (int s = 0; s < SETS; s++) gradient[i][j][e] += sums[s][i][j][e];
                    }
                    const float(&own)[4] = gradient[i][j];
                    if (lower)
                        sums_at(step)[(i * GROUPS + j) * (THREADS / 2)] =
                            make_float4(own[0], own[1], own[2], own[3]);
                }
            }
        }
    }
    if constexpr (GRADIENT) {
        __syncthreads();
        if (steps > 0) store_gradient(steps - 1);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + warp * 32 + i * 16 + half * 8 + lane / 4;
            if (row >= p.rows) continue;
            float *to = p.down + ((int64_t)blockIdx.y * p.rows + row) * R + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 2 * TILES; j++)
                *reinterpret_cast<float2 *>(to + j * 8) =
                    make_float2(down[i][j][2 * half], down[i][j][2 * half + 1]);
        }
    }
}

/// `gradient` alone, for a rank of up to 16·TILES. A block has a part of the tiles of rows and one of the
/// tiles of columns, and goes over its rows for one tile of columns after the other. A warp has 32 columns
/// of a tile and half of its rows.
template <typename T, int TILES> __device__ __forceinline__ void gradient(const Pass &p) {
    follow_previous();
    constexpr int R = 16 * TILES;
    // A tile of x, in two parts of 64 columns, and of the left matrix, whose rows are set apart by 16
    // bytes more than they have, against bank conflicts.
    constexpr int PART_BYTES = GRADIENT_ROWS * 128;
    constexpr int X_BYTES = GRADIENT_ROWS * GRADIENT_COLUMNS * 2;
    constexpr int LEFT_ROW = 2 * R + 16;
    constexpr int STAGE = X_BYTES + GRADIENT_ROWS * LEFT_ROW;
    constexpr int SUM_BYTES = R * GRADIENT_COLUMNS * 4;
    constexpr int FIT = (SHARED - SUM_BYTES) / STAGE, STAGES = FIT < 4 ? FIT : 4;
    extern __shared__ uint4 shared[];
    float4 *const other_half = reinterpret_cast<float4 *>(shared) + threadIdx.x % (THREADS / 2);
    const uint32_t base = shared_address(shared) + SUM_BYTES;
    const T *x = static_cast<const T *>(p.x);
    const T *left = static_cast<const T *>(p.left);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row_tiles = (p.rows + GRADIENT_ROWS - 1) / GRADIENT_ROWS;
    const int column_tiles = (p.wide + GRADIENT_COLUMNS - 1) / GRADIENT_COLUMNS;
    const int first_row = blockIdx.x * row_tiles / gridDim.x;
    const int own_rows = (blockIdx.x + 1) * row_tiles / gridDim.x - first_row;
    const int first_column = blockIdx.y * column_tiles / gridDim.y;
    const int own_columns = (blockIdx.y + 1) * column_tiles / gridDim.y - first_column;
    const int steps = own_rows * own_columns;

    // A thread copies 16 bytes of every `APART`th row of a tile.
    constexpr int X_CHUNKS = GRADIENT_COLUMNS / 8, APART = THREADS / X_CHUNKS;
    const int own_row = threadIdx.x / X_CHUNKS, own_chunk = threadIdx.x % X_CHUNKS;
    const uint32_t own_place =
        own_chunk / 8 * PART_BYTES + swizzled(own_row, own_chunk % 8);
    const T *const own = x + own_row * p.x_stride + own_chunk * 8;
    const int64_t apart = APART * p.x_stride;
    // The tile that is copied next.
    int row_tile = 0, column_tile = 0;
    auto copy_tiles = [&](int step) {
        const uint32_t stage = base + step % STAGES * STAGE;
        const int row = (first_row + row_tile) * GRADIENT_ROWS;
        const int column = (first_column + column_tile) * GRADIENT_COLUMNS;
        if (++row_tile == own_rows) {
            row_tile = 0;
            column_tile++;
        }
        const int there = column + own_chunk * 8 < p.wide ? p.rows - row - own_row : 0;
        const T *from = own + row * p.x_stride + column;
        // Rows that are a multiple of 8 apart are swizzled the same way.
        static_assert(APART % 8 == 0, "copies of a thread are at the same place of a row");
#pragma unroll
        for (int i = 0; i < GRADIENT_ROWS / APART; i++, from += apart)
            copy_async(stage + own_place + i * APART * 128, i * APART < there ? from : x,
                       i * APART < there);
        constexpr int CHUNKS = R / 8;
#pragma unroll
        for (int i = threadIdx.x; i < GRADIENT_ROWS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS, chunk = i % CHUNKS;
            const bool valid = row + r < p.rows && chunk * 8 < p.rank;
            const T *from = valid ? left + (row + r) * p.left_stride + chunk * 8 : left;
            copy_async(stage + X_BYTES + r * LEFT_ROW + chunk * 16, from, valid);
        }
    };

    // Of 8 columns each.
    constexpr int GROUPS = 4;
    const int warp_columns = warp % 4, warp_row = warp / 4 * (GRADIENT_ROWS / 2);
    float sums[TILES][GROUPS][4];
    auto clear = [&] {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int j = 0; j < GROUPS; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
            }
        }
    };
    clear();

#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy_tiles(step);
        copy_async_commit();
    }
    int rows_left = own_rows, column = first_column * GRADIENT_COLUMNS + warp_columns * 32;
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        // The tiles of this step are there, and those of the step before are free to be written over.
        __syncthreads();
        if (step + STAGES - 1 < steps) copy_tiles(step + STAGES - 1);
        copy_async_commit();

        const uint32_t tile = base + step % STAGES * STAGE, lefts = tile + X_BYTES;
        const uint32_t part = tile + warp_columns / 2 * PART_BYTES;
#pragma unroll
        for (int k = 0; k < GRADIENT_ROWS / 64; k++) {
            const int row = warp_row + k * 32;
            uint32_t b[GROUPS][4];
#pragma unroll
            for (int j = 0; j < GROUPS; j++)
                load_tiles_transposed(b[j], part + swizzled(row + lane, warp_columns % 2 * 4 + j));
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = row + half * 16 + lane % 8 + lane / 16 * 8;
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    uint32_t a[4];
                    load_tiles_transposed(a, lefts + r * LEFT_ROW + i * 32 + lane / 8 % 2 * 16);
#pragma unroll
                    for (int j = 0; j < GROUPS; j++)
                        multiply_add<T>(sums[i][j], a, b[j][2 * half], b[j][2 * half + 1]);
                }
            }
        }
        // The last of the block's rows for this tile of columns.
        if (--rows_left > 0) continue;
        rows_left = own_rows;
        if (warp >= WARPS / 2) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int j = 0; j < GROUPS; j++)
                    other_half[(i * GROUPS + j) * (THREADS / 2)] =
                        make_float4(sums[i][j][0], sums[i][j][1], sums[i][j][2], sums[i][j][3]);
            }
        }
        __syncthreads();
        if (warp < WARPS / 2) {
            const int own_column = column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int j = 0; j < GROUPS; j++) {
                    const float4 other = other_half[(i * GROUPS + j) * (THREADS / 2)];
                    const float2 pairs[2] = {
                        make_float2(sums[i][j][0] + other.x, sums[i][j][1] + other.y),
                        make_float2(sums[i][j][2] + other.z, sums[i][j][3] + other.w)};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int r = i * 16 + half * 8 + lane / 4;
                        if (r >= p.rank || own_column + j * 8 >= p.wide) continue;
                        float *to = p.gradient + ((int64_t)blockIdx.x * R + r) * p.wide +
                                    own_column + j * 8;
                        *reinterpret_cast<float2 *>(to) = pairs[half];
                    }
                }
            }
        }
        clear();
        column += GRADIENT_COLUMNS;
    }
}

/// out = alpha·left·factor + bias, for a rank of up to 16·TILES.
template <typename T, int TILES> __device__ __forceinline__ void up(const Up &p) {
    follow_previous();
    constexpr int R = 16 * TILES;
    // Rows are set apart by 16 bytes more than they have, against bank conflicts.
    constexpr int LEFT_ROW = 2 * R + 16;
    constexpr int WIDE_ROW = 2 * UP_COLUMNS + 16;
    constexpr int LEFT_BYTES = UP_ROWS * LEFT_ROW;
    constexpr int FACTOR_BYTES = R * WIDE_ROW;
    extern __shared__ uint4 shared[];
    const uint32_t lefts = shared_address(shared), factors = lefts + LEFT_BYTES;
    char *result = reinterpret_cast<char *>(shared) + LEFT_BYTES + FACTOR_BYTES;
    const T *left = static_cast<const T *>(p.left);
    const T *factor = static_cast<const T *>(p.factor);
    const T *bias = static_cast<const T *>(p.bias);
    T *out = static_cast<T *>(p.out);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int row = blockIdx.y * UP_ROWS, column = blockIdx.x * UP_COLUMNS;
    for (int i = threadIdx.x; i < UP_ROWS * (R / 8); i += THREADS) {
        const int r = i / (R / 8), chunk = i % (R / 8);
        const bool valid = row + r < p.rows && chunk * 8 < p.rank;
        const T *from = valid ? left + (row + r) * p.left_stride + chunk * 8 : left;
        copy_async(lefts + r * LEFT_ROW + chunk * 16, from, valid);
    }
    for (int i = threadIdx.x; i < R * (UP_COLUMNS / 8); i += THREADS) {
        const int r = i / (UP_COLUMNS / 8), chunk = i % (UP_COLUMNS / 8);
        const bool valid = r < p.rank && column + chunk * 8 < p.wide;
        const T *from = valid ? factor + r * p.factor_stride + column + chunk * 8 : factor;
        copy_async(factors + r * WIDE_ROW + chunk * 16, from, valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();

    const int warp_row = warp % 4 * 32, warp_column = warp / 4 * 64;
    float sum[2][8][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = warp_row + i * 16 + lane % 16;
            load_tiles(a[i], lefts + r * LEFT_ROW + k * 32 + lane / 16 * 16);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[4];
            const int r = k * 16 + lane % 16;
            load_tiles_transposed(b, factors + r * WIDE_ROW + (warp_column + j * 16) * 2 + lane / 16 * 16);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                multiply_add<T>(sum[i][2 * j], a[i], b[0], b[1]);
                multiply_add<T>(sum[i][2 * j + 1], a[i], b[2], b[3]);
            }
        }
    }

    // By way of shared memory, so that rows are written in whole.
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int c = warp_column + j * 8 + lane % 4 * 2;
        float first = 0.0f, second = 0.0f;
        if (bias != nullptr && column + c < p.wide) {
            first = to_float(bias[column + c]);
            second = to_float(bias[column + c + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int r = warp_row + i * 16 + half * 8 + lane / 4;
                alignas(4) T pair[2] = {from_float<T>(p.alpha * sum[i][j][2 * half] + first),
                                        from_float<T>(p.alpha * sum[i][j][2 * half + 1] + second)};
                *reinterpret_cast<uint32_t *>(result + r * WIDE_ROW + c * 2) =
                    *reinterpret_cast<const uint32_t *>(pair);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < UP_ROWS / (THREADS / 16); i++) {
        const int r = threadIdx.x / 16 + i * (THREADS / 16), chunk = threadIdx.x % 16;
        if (row + r < p.rows && column + chunk * 8 < p.wide) {
            const uint4 piece = *reinterpret_cast<const uint4 *>(result + r * WIDE_ROW + chunk * 16);
            *reinterpret_cast<uint4 *>(out + (int64_t)(row + r) * p.wide + column + chunk * 8) = piece;
        }
    }
}

/// Sum number blockIdx.y. A warp has 32 neighbouring elements in the order of the terms; each quarter of
/// its threads adds up every fourth term of all of them, four elements a thread.
template <typename T> __device__ __forceinline__ void add_up(const Sums &sums) {
    follow_previous();
    const Sum &sum = sums.at[blockIdx.y];
    const int lane = threadIdx.x % WARP, quarter = lane / 8;
    const int fours = sum.columns / 4, count = sum.rows * fours;
    for (int first = (blockIdx.x * WARPS + threadIdx.x / WARP) * 8; first < count;
         first += gridDim.x * WARPS * 8) {
        const int i = first + lane % 8, row = i / fours, column = i % fours * 4;
        float4 total = {};
        if (i < count) {
            const float *from = sum.from + (int64_t)row * sum.pitch + column;
#pragma unroll 8
            for (int slot = quarter; slot < sum.slots; slot += 4) {
                const float4 term = *reinterpret_cast<const float4 *>(from + slot * sum.slot_stride);
                total.x += term.x;
                total.y += term.y;
                total.z += term.z;
                total.w += term.w;
            }
        }
#pragma unroll
        for (int offset = 8; offset < WARP; offset *= 2) {
            total.x += __shfl_xor_sync(FULL, total.x, offset);
            total.y += __shfl_xor_sync(FULL, total.y, offset);
            total.z += __shfl_xor_sync(FULL, total.z, offset);
            total.w += __shfl_xor_sync(FULL, total.w, offset);
        }
        if (i >= count) continue;
        const float own = quarter == 0   ? total.x
                          : quarter == 1 ? total.y
                          : quarter == 2 ? total.z
                                         : total.w;
        const int64_t to = row * sum.row_stride + (column + quarter) * sum.column_stride;
        if (sum.single)
            static_cast<float *>(sum.to)[to] = sum.alpha * own;
        else
            static_cast<T *>(sum.to)[to] = from_float<T>(sum.alpha * own);
    }
}

} // namespace

#define SKINNY(TILES, suffix, element)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
        down_##TILES##_##suffix(const __grid_constant__ Pass p) {                                  \
        down<element, TILES, WARPS, false>(p);                                                     \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                       \
        gradient_##TILES##_##suffix(const __grid_constant__ Pass p) {                              \
        gradient<element, TILES>(p);                                                               \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(both_threads(TILES), 1)                           \
        both_##TILES##_##suffix(const __grid_constant__ Pass p) {                                  \
        down<element, TILES, both_threads(TILES) / WARP, true>(p);                                 \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                       \
        up_##TILES##_##suffix(const __grid_constant__ Up p) {                                      \
        up<element, TILES>(p);                                                                     \
    }
#define SKINNY_OF_RANK(TILES)                                                                      \
    SKINNY(TILES, bf16, bf16)                                                                      \
    SKINNY(TILES, f16, f16)

SKINNY_OF_RANK(1)
SKINNY_OF_RANK(2)
SKINNY_OF_RANK(3)
SKINNY_OF_RANK(4)

FOR_EACH_DTYPE(add_up, THREADS, (const __grid_constant__ Sums sums), (sums))
