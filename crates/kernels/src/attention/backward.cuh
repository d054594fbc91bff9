// The backward pass on tensor cores, without atomics: the scores are computed twice, once by blocks that
// own rows of queries and give dq, once by blocks that own rows of keys and give dk and dv, summed over
// the queries and the heads of a group in order.
//
// Both are one kernel. A warp owns 16 rows and goes over tiles of columns; with rows of x₁ and x₂ and
// columns of y₁ and y₂ it computes, of its rows,
//   s = x₁·y₁ᵀ,  dp = x₂·y₂ᵀ,  p and ds from them,  first += ds·y₁,  second += p·y₂.
// Rows of queries: x = q, do; y = k, v; dq = first. Rows of keys: x = k, v; y = q, do; dk = first,
// dv = second. Scores stay in registers, since what a product gives is what the next one takes.
#pragma once

#include "tiles.cuh"

/// What a block owns, and which sums it makes.
enum Role { QUERIES, KEYS, KEYS_FIRST, KEYS_SECOND };

/// Rows and columns of the tiles: as many as fit in shared memory and registers.
constexpr int backward_rows(int d) { return d <= 128 ? 128 : 64; }
constexpr int backward_columns(int d) { return d <= 128 ? 64 : 32; }

/// `scaled_sums` and `corrections`, a warp a row.
template <typename T> __device__ __forceinline__ void backward_rows_sums(const Parameters &p) {
    const int lane = threadIdx.x % WARP;
    const int64_t row =
        static_cast<int64_t>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= static_cast<int64_t>(p.batch) * p.queries * p.heads) return;
    const T *const o = static_cast<const T *>(p.o) + row * p.head_dim;
    const T *const d_o = static_cast<const T *>(p.d_o) + row * p.head_dim;
    float sum = 0.0f;
    if (p.head_dim % Pack<T>::N == 0) {
        for (int start = lane * Pack<T>::N; start < p.head_dim; start += WARP * Pack<T>::N) {
            const Pack<T> a = load_pack(o + start), b = load_pack(d_o + start);
#pragma unroll
            for (int i = 0; i < Pack<T>::N; i++)
                sum = fmaf(to_float(a.at[i]), to_float(b.at[i]), sum);
        }
    } else {
        for (int i = lane; i < p.head_dim; i += WARP)
            sum = fmaf(to_float(o[i]), to_float(d_o[i]), sum);
    }
    sum = warp_sum(sum);
    if (lane != 0) return;
    const int head = row % p.heads;
    const int64_t token = row / p.heads;
    const int64_t at = sum_row(p, token / p.queries, token % p.queries, head);
    const float total = p.log_sum_exp[at];
    // e^(z - ∞) is 0, where no key is seen.
    p.scaled_sums[at] = total == -INFINITY ? INFINITY : total * LOG2_E;
    p.corrections[at] = sum;
}

/// `lowest` and `tile_lowest`, a warp a tile of `size` queries.
__device__ __forceinline__ void backward_tile_ranges(const Parameters &p, int size) {
    const int lane = threadIdx.x % WARP;
    const int index = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (index >= p.batch * p.tiles) return;
    const int batch = index / p.tiles, first = index % p.tiles * size;
    int smallest = INT_MAX, largest = 0;
    for (int query = first + lane; query < min(first + size, p.queries); query += WARP) {
        const int low = lowest_key(p, batch, query);
        p.lowest[static_cast<int64_t>(batch) * p.queries + query] = low;
        largest = max(largest, low);
        if (low <= p.keys - p.queries + query) smallest = min(smallest, low);
    }
    smallest = warp_min(smallest);
    largest = warp_max(largest);
    if (lane == 0) p.tile_lowest[index] = make_int2(smallest, largest);
}

/// A product becomes the probability, and with `dp` the gradient of the unscaled product.
__device__ __forceinline__ void score_gradient(const Parameters &p, float &s, float &dp, bool seen,
                                               float scaled_sum, float correction) {
    float slope = 1.0f;
    if (p.mode == CAPPED) {
        s = fast_tanh(s * p.inner);
        slope = 1.0f - s * s;
    } else if (p.mode == SCALED) {
        s *= p.inner;
    }
    s = seen ? fast_exp2(fmaf(s, p.factor, -scaled_sum)) : 0.0f;
    dp = s * (dp - correction) * slope;
}

template <typename T, int D, Role ROLE>
__device__ __forceinline__ void backward_tiles(const Parameters &p) {
    constexpr int BM = backward_rows(D), BN = backward_columns(D);
    constexpr int WARPS = BM / 16, THREADS = WARP * WARPS;
    constexpr bool BY_KEYS = ROLE != QUERIES;
    constexpr bool FIRST = ROLE != KEYS_SECOND, SECOND = ROLE == KEYS || ROLE == KEYS_SECOND;
    constexpr int ROWS_BYTES = tile_bytes(BM, D), COLUMNS_BYTES = tile_bytes(BN, D);
    extern __shared__ __align__(1024) unsigned char shared[];
    // x₁, x₂, then for every stage y₁, y₂, then the columns' sums, corrections and lowest keys.
    const uint32_t x_shared = shared_address(shared);
    const uint32_t y_shared = x_shared + 2 * ROWS_BYTES;
    unsigned char *const of_columns = shared + 2 * ROWS_BYTES + p.stages * 2 * COLUMNS_BYTES;
    const uint32_t of_columns_shared = shared_address(of_columns);
    constexpr int OF_COLUMNS_BYTES = 3 * BN * 4;

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int owners = BY_KEYS ? p.kv_heads : p.heads, group = p.heads / p.kv_heads;
    const int batch = blockIdx.x / owners, owner = blockIdx.x % owners;
    const int kv_head = BY_KEYS ? owner : owner / group;
    const int before = p.keys - p.queries;
    const int size = BY_KEYS ? p.keys : p.queries;
    // The rows that meet the most columns first: early keys, late queries.
    const int first_row = (BY_KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y) * BM;
    const int rows = min(BM, size - first_row);

    const T *const k = head_start(static_cast<const T *>(p.k), p.k_strides, batch, kv_head);
    const T *const v = head_start(static_cast<const T *>(p.v), p.v_strides, batch, kv_head);
    const int64_t query_stride = static_cast<int64_t>(p.heads) * p.head_dim;
    const auto q_of = [&](int head) {
        return head_start(static_cast<const T *>(p.q), p.q_strides, batch, head);
    };
    const auto d_o_of = [&](int head) {
        return static_cast<const T *>(p.d_o) + query_row(p, batch, 0, head) * p.head_dim;
    };

    // Of the rows of queries that a thread holds.
    float row_scaled_sum[2], row_correction[2];
    int row_lowest[2] = {};
    // The tiles of columns that are seen, and the largest lowest key of the rows.
    int first_tile, end_tile, largest = 0;
    if constexpr (BY_KEYS) {
        first_tile = max(0, first_row - before) / BN;
        end_tile = (p.queries + BN - 1) / BN;
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp * 16 + half * 8 + lane / 4;
            const bool inside = row < rows;
            const int64_t at = sum_row(p, batch, first_row + row, owner);
            row_scaled_sum[half] = inside ? p.scaled_sums[at] : INFINITY;
            row_correction[half] = inside ? p.corrections[at] : 0.0f;
            if (p.ragged && inside)
                row_lowest[half] =
                    p.lowest[static_cast<int64_t>(batch) * p.queries + first_row + row];
        }
        int smallest = 0;
        if (p.ragged) {
            smallest = INT_MAX;
            // Tiles of queries as `tile_lowest` counts them.
            const int2 *const ranges = p.tile_lowest + static_cast<int64_t>(batch) * p.tiles;
            const int end = (first_row + rows + BN - 1) / BN;
            for (int tile = first_row / BN; tile < end; tile++) {
                smallest = min(smallest, ranges[tile].x);
                largest = max(largest, ranges[tile].y);
            }
            smallest = max(smallest, 0);
        }
        first_tile = smallest / BN;
        end_tile = (before + first_row + rows - 1) / BN + 1;
    }

    // The first tile from `tile` on that the rows see, or the end.
    const auto seen_from = [&](int tile) {
        if (!BY_KEYS || !p.ragged) return min(tile, end_tile);
        const int2 *const ranges = p.tile_lowest + static_cast<int64_t>(batch) * p.tiles;
        for (int start = tile; start < end_tile; start += WARP) {
            const int mine = start + lane;
            const bool seen = mine < end_tile && ranges[mine].x <= first_row + rows - 1;
            const unsigned mask = __ballot_sync(FULL, seen);
            if (mask != 0) return start + __ffs(mask) - 1;
        }
        return end_tile;
    };
    const auto load_columns = [&](int head, int tile, int stage) {
        const int start = tile * BN;
        const uint32_t y = y_shared + stage * 2 * COLUMNS_BYTES;
        if constexpr (BY_KEYS) {
            const int count = p.queries - start;
            load_tile<T, BN, D, THREADS>(y, q_of(head) + start * p.q_strides[1], p.q_strides[1],
                                         count, p.head_dim, threadIdx.x);
            load_tile<T, BN, D, THREADS>(y + COLUMNS_BYTES, d_o_of(head) + start * query_stride,
                                         query_stride, count, p.head_dim, threadIdx.x);
            const int column = threadIdx.x;
            if (column < BN) {
                // Beyond the last query, zeros for do and q make the probabilities harmless.
                const uint32_t to = of_columns_shared + stage * OF_COLUMNS_BYTES + column * 4;
                const bool inside = column < count;
                const int64_t at = inside ? sum_row(p, batch, start + column, head) : 0;
                copy_async_word(to, p.scaled_sums + at, inside);
                copy_async_word(to + BN * 4, p.corrections + at, inside);
                if (p.ragged) {
                    const int64_t query = static_cast<int64_t>(batch) * p.queries + start + column;
                    copy_async_word(to + 2 * BN * 4, p.lowest + (inside ? query : 0), inside);
                }
            }
        } else {
            load_tile<T, BN, D, THREADS>(y, k + start * p.k_strides[1], p.k_strides[1],
                                         p.keys - start, p.head_dim, threadIdx.x);
            load_tile<T, BN, D, THREADS>(y + COLUMNS_BYTES, v + start * p.v_strides[1],
                                         p.v_strides[1], p.keys - start, p.head_dim, threadIdx.x);
        }
    };

    float first[1][FIRST ? D / 8 : 1][4] = {}, second[1][SECOND ? D / 8 : 1][4] = {};
    int head = BY_KEYS ? kv_head * group : owner;
    const int end_head = BY_KEYS ? head + group : head + 1;
    int tile = seen_from(first_tile);
    const bool any = tile < end_tile;
    const int start_tile = tile;
    if (any) {
        const T *const x1 = BY_KEYS ? k + first_row * p.k_strides[1]
                                    : q_of(owner) + first_row * p.q_strides[1];
        const int64_t x1_stride = BY_KEYS ? p.k_strides[1] : p.q_strides[1];
        load_tile<T, BM, D, THREADS>(x_shared, x1, x1_stride, rows, p.head_dim, threadIdx.x);
        if constexpr (FIRST) {
            const T *const x2 = BY_KEYS ? v + first_row * p.v_strides[1]
                                        : d_o_of(owner) + first_row * query_stride;
            const int64_t x2_stride = BY_KEYS ? p.v_strides[1] : query_stride;
            load_tile<T, BM, D, THREADS>(x_shared + ROWS_BYTES, x2, x2_stride, rows, p.head_dim,
                                         threadIdx.x);
        }
        load_columns(head, tile, 0);
        copy_async_commit();
    }
    int stage = 0;
    while (any && head < end_head) {
        // The tile after this one.
        int next_head = head, next = seen_from(tile + 1);
        if (next >= end_tile) {
            next_head++;
            next = start_tile;
        }
        if (p.stages == 2) {
            if (next_head < end_head) load_columns(next_head, next, stage ^ 1);
            copy_async_commit();
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        __syncthreads();

        const uint32_t y1 = y_shared + stage * 2 * COLUMNS_BYTES, y2 = y1 + COLUMNS_BYTES;
        const float *const column_sums =
            reinterpret_cast<const float *>(of_columns + stage * OF_COLUMNS_BYTES);
        const float *const column_corrections = column_sums + BN;
        const int *const column_lowest = reinterpret_cast<const int *>(column_sums + 2 * BN);

        float s[1][BN / 8][4] = {}, dp[1][BN / 8][4] = {};
        multiply_rows<T, D, BM, BN, 1>(s, x_shared, warp * 16, y1, lane);
        if constexpr (FIRST)
            multiply_rows<T, D, BM, BN, 1>(dp, x_shared + ROWS_BYTES, warp * 16, y2, lane);

        const int first_column = tile * BN;
        if constexpr (BY_KEYS) {
            const int largest_lowest =
                p.ragged ? p.tile_lowest[static_cast<int64_t>(batch) * p.tiles + tile].y : 0;
            const bool whole =
                first_row >= largest_lowest && first_row + BM - 1 <= before + first_column;
#pragma unroll
            for (int n = 0; n < BN / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int column = n * 8 + lane % 4 * 2 + e;
                    const int position = before + first_column + column;
                    const float sum = column_sums[column];
                    const float correction = column_corrections[column];
                    const int low = p.ragged && !whole ? column_lowest[column] : 0;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int key = first_row + warp * 16 + half * 8 + lane / 4;
                        const bool seen = whole || (key >= low && key <= position);
                        const int at = half * 2 + e;
                        score_gradient(p, s[0][n][at], dp[0][n][at], seen, sum, correction);
                    }
                }
            }
        } else {
            const bool whole = first_column >= largest &&
                               first_column + BN - 1 <= before + first_row;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int position = before + first_row + warp * 16 + half * 8 + lane / 4;
#pragma unroll
                for (int n = 0; n < BN / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int key = first_column + n * 8 + lane % 4 * 2 + e;
                        const bool seen = whole || (key >= row_lowest[half] && key <= position);
                        const int at = half * 2 + e;
                        score_gradient(p, s[0][n][at], dp[0][n][at], seen, row_scaled_sum[half],
                                       row_correction[half]);
                    }
                }
            }
        }

        uint32_t weights[1][BN / 16][4];
        if constexpr (SECOND) {
            pack_weights<T, BN, 1>(weights, s);
            multiply_columns<T, D, BN, 1>(second, weights, y2, lane);
        }
        if constexpr (FIRST) {
            pack_weights<T, BN, 1>(weights, dp);
            multiply_columns<T, D, BN, 1>(first, weights, y1, lane);
        }
        // Every warp is done with this stage.
        __syncthreads();
        if (p.stages == 2) {
            stage ^= 1;
        } else if (next_head < end_head) {
            load_columns(next_head, next, 0);
            copy_async_commit();
        }
        head = next_head;
        tile = next;
    }
    copy_async_wait<0>();

    // A warp's rows are read by no other, so their place serves for the results.
    const auto target = [&](void *result) {
        return [=](int row) -> T * {
            const int mine = first_row + warp * 16 + row;
            if (mine >= size) return nullptr;
            const int64_t token = static_cast<int64_t>(batch) * size + mine;
            return static_cast<T *>(result) + (token * owners + owner) * p.head_dim;
        };
    };
    if constexpr (FIRST) {
        const float by[1][2] = {{p.scale, p.scale}};
        store_rows<T, D, BM, 1>(shared, warp * 16, first, by, p.head_dim, lane,
                                target(BY_KEYS ? p.dk : p.dq));
    }
    if constexpr (SECOND) {
        const float by[1][2] = {{1.0f, 1.0f}};
        store_rows<T, D, BM, 1>(shared + ROWS_BYTES, warp * 16, second, by, p.head_dim, lane,
                                target(p.dv));
    }
}
