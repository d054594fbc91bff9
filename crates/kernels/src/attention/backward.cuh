// The backward pass on tensor cores, without atomics: the scores are computed twice, once by blocks
// that own rows of queries and give dq, once by blocks that own rows of keys and give dk and dv,
// summed over the queries and the heads of a group in order.
//
// Both are one kernel. A warp owns 16 rows and goes over tiles of columns; with rows of x₁ and x₂
// and columns of y₁ and y₂ it computes, of its rows,
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

/// `scaled_sums` and `corrections`, a warp 32 neighbouring queries of a head, and zeros for `turns`, if there are such.
template <typename T> __device__ __forceinline__ void backward_rows_sums(const Parameters &p) {
    follow_previous();
    constexpr int N = Pack<T>::N;
    const int lane = threadIdx.x % WARP;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int tiles = (p.queries + WARP - 1) / WARP;
    const int head = unit % p.heads, tile = unit / p.heads % tiles;
    const int64_t batch = unit / p.heads / tiles;
    if (batch >= p.batch) return;
    if (p.turns != nullptr && lane == 0) {
        p.turns[1 + unit] = 0;
        if (unit == 0) p.turns[0] = 0;
    }
    const int first = tile * WARP, queries = min(p.queries - first, WARP);
    const int64_t distance = static_cast<int64_t>(p.heads) * p.head_dim;
    const int64_t start = query_row(p, batch, first, head) * p.head_dim;
    const T *const o = static_cast<const T *>(p.o) + start;
    const T *const d_o = static_cast<const T *>(p.d_o) + start;
    // Of query number `lane`.
    float own = 0.0f;
    if (p.head_dim % N == 0) {
        // As many threads have a row as it has packs, rounded up; a thread has several rows at a time,
        // so that enough is on its way.
        constexpr int ROWS = 4;
        const int packs = p.head_dim / N, threads = packs > 16 ? 32 : packs > 8 ? 16 : 8;
        const int at_once = WARP / threads, group = lane / threads;
        for (int from = 0; from < queries; from += ROWS * at_once) {
            float sums[ROWS] = {};
            for (int pack = lane % threads; pack < packs; pack += threads) {
                Pack<T> a[ROWS], b[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const int query = from + r * at_once + group;
                    if (query < queries) {
                        a[r] = load_pack(o + query * distance + pack * N);
                        b[r] = load_pack(d_o + query * distance + pack * N);
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    if (from + r * at_once + group < queries) {
#pragma unroll
                        for (int i = 0; i < N; i++)
                            sums[r] = fmaf(to_float(a[r].at[i]), to_float(b[r].at[i]), sums[r]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                for (int offset = threads / 2; offset > 0; offset /= 2)
                    sums[r] += __shfl_xor_sync(FULL, sums[r], offset);
                const int distance_to_own = lane - from - r * at_once;
                const float sum = __shfl_sync(FULL, sums[r], distance_to_own * threads % WARP);
                if (distance_to_own >= 0 && distance_to_own < at_once) own = sum;
            }
        }
    } else {
        for (int query = 0; query < queries; query++) {
            float sum = 0.0f;
            for (int i = lane; i < p.head_dim; i += WARP)
                sum = fmaf(to_float(o[query * distance + i]), to_float(d_o[query * distance + i]), sum);
            sum = warp_sum(sum);
            if (lane == query) own = sum;
        }
    }
    if (lane >= queries) return;
    const int64_t at = sum_row(p, batch, first + lane, head);
    const float total = p.log_sum_exp[at];
    // e^(z - ∞) is 0, where no key is seen.
    p.scaled_sums[at] = total == -INFINITY ? INFINITY : total * LOG2_E;
    p.corrections[at] = own;
}

/// The gradients of sinks into `corrections`, (heads); a block has a head, and its warps take turns of the rows.
template <typename T> __device__ __forceinline__ void attention_backward_sinks(const Parameters &p) {
    follow_previous();
    __shared__ float scratch[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.x;
    const float sink = to_float(static_cast<const T *>(p.sinks)[head]);
    float total = 0.0f;
    for (int64_t token = warp; token < int64_t(p.batch) * p.queries; token += blockDim.x / WARP) {
        const int64_t start = (token * p.heads + head) * p.head_dim;
        float sum = 0.0f;
        for (int i = lane; i < p.head_dim; i += WARP)
            sum = fmaf(to_float(static_cast<const T *>(p.o)[start + i]),
                       to_float(static_cast<const T *>(p.d_o)[start + i]), sum);
        const float row = p.log_sum_exp[sum_row(p, token / p.queries, token % p.queries, head)];
        total = fmaf(expf(sink - row), sum, total);
    }
    total = block_sum(total, scratch);
    if (threadIdx.x == 0) p.corrections[head] = -total;
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

/// A product becomes the probability; gives the slope of its cap. PLAIN are scores that are seen and are neither
/// capped nor scaled by `inner`.
template <bool PLAIN>
__device__ __forceinline__ float probability(const Parameters &p, float &s, bool seen, float scaled_sum) {
    float slope = 1.0f;
    if constexpr (!PLAIN) {
        if (p.mode == CAPPED) {
            s = fast_tanh(s * p.inner);
            slope = 1.0f - s * s;
        } else if (p.mode == SCALED) {
            s *= p.inner;
        }
    }
    s = fast_exp2(fmaf(s, p.factor, -scaled_sum));
    if (!PLAIN && !seen) s = 0.0f;
    return slope;
}

/// The same, and with `dp` the gradient of the unscaled product.
template <bool PLAIN>
__device__ __forceinline__ void score_gradient(const Parameters &p, float &s, float &dp, bool seen,
                                               float scaled_sum, float correction) {
    const float slope = probability<PLAIN>(p, s, seen, scaled_sum);
    dp = s * (dp - correction);
    if constexpr (!PLAIN) dp *= slope;
}

/// What a block of BM rows does, in tiles of BN columns.
template <typename T, int D, int BM, int BN, Role ROLE> struct BackwardBlock {
    static constexpr bool BY_KEYS = ROLE != QUERIES;
    static constexpr bool FIRST = ROLE != KEYS_SECOND;
    static constexpr bool SECOND = ROLE == KEYS || ROLE == KEYS_SECOND;
    static constexpr int ROWS_BYTES = tile_bytes(BM, D), COLUMNS_BYTES = tile_bytes(BN, D);
    /// Of columns of queries: their scaled sums, corrections and lowest keys.
    static constexpr int OF_COLUMNS_BYTES = 3 * BN * 4;

    const Parameters &p;
    /// The head that the block owns, of all heads of queries or of keys.
    int owners, batch, owner, kv_head, first_head, end_head;
    /// The first query's position.
    int before;
    /// Of the rows there are `size` in all, and `rows` in this block from `first_row` on.
    int size, first_row, rows;
    /// The tiles of columns that may be seen, and the largest lowest key of rows of queries.
    int first_tile, end_tile, largest;
    const T *k, *v;
    int64_t query_stride;

    /// Block `y` of those of a head, from the one that meets the most columns on.
    __device__ __forceinline__ BackwardBlock(const Parameters &p, int x, int y) : p(p) {
        owners = BY_KEYS ? p.kv_heads : p.heads;
        batch = x / owners;
        owner = x % owners;
        const int group = p.heads / p.kv_heads;
        kv_head = BY_KEYS ? owner : owner / group;
        first_head = BY_KEYS ? owner * group : owner;
        end_head = first_head + (BY_KEYS ? group : 1);
        before = p.keys - p.queries;
        size = BY_KEYS ? p.keys : p.queries;
        first_row = (BY_KEYS ? y : (size + BM - 1) / BM - 1 - y) * BM;
        rows = min(BM, size - first_row);
        k = head_start(static_cast<const T *>(p.k), p.k_strides, batch, kv_head);
        v = head_start(static_cast<const T *>(p.v), p.v_strides, batch, kv_head);
        query_stride = static_cast<int64_t>(p.heads) * p.head_dim;
        largest = 0;
        if constexpr (BY_KEYS) {
            first_tile = max(0, first_row - before) / BN;
            end_tile = (p.queries + BN - 1) / BN;
        } else {
            int smallest = 0;
            if (p.ragged) {
                smallest = INT_MAX;
                for (int tile = first_row / BN; tile * BN < first_row + rows; tile++) {
                    smallest = min(smallest, tile_lowest(tile).x);
                    largest = max(largest, tile_lowest(tile).y);
                }
                smallest = max(smallest, 0);
            }
            first_tile = smallest / BN;
            end_tile = (before + first_row + rows - 1) / BN + 1;
        }
    }

    __device__ __forceinline__ int2 tile_lowest(int tile) const {
        return p.tile_lowest[static_cast<int64_t>(batch) * p.tiles + tile];
    }

    __device__ __forceinline__ const T *q_of(int head) const {
        return head_start(static_cast<const T *>(p.q), p.q_strides, batch, head);
    }

    __device__ __forceinline__ const T *d_o_of(int head) const {
        return static_cast<const T *>(p.d_o) + query_row(p, batch, 0, head) * p.head_dim;
    }

    /// The first tile from `tile` on that the rows see, or the end. For whole warps.
    __device__ __forceinline__ int seen_from(int tile) const {
        if constexpr (BY_KEYS) {
            if (p.ragged) {
                for (int start = tile; start < end_tile; start += WARP) {
                    const int mine = start + threadIdx.x % WARP;
                    const bool seen =
                        mine < end_tile && tile_lowest(mine).x <= first_row + rows - 1;
                    const unsigned mask = __ballot_sync(FULL, seen);
                    if (mask != 0) return start + __ffs(mask) - 1;
                }
                return end_tile;
            }
        }
        return min(tile, end_tile);
    }

    /// From a tile of a head to the next, `start` being the first; the end is at `end_head`.
    __device__ __forceinline__ void advance(int &head, int &tile, int start) const {
        tile = seen_from(tile + 1);
        if (tile >= end_tile) {
            head++;
            tile = start;
        }
    }

    /// Starts to copy x₁ and x₂.
    template <int THREADS>
    __device__ __forceinline__ void load_rows(uint32_t x, int thread) const {
        const T *const x1 =
            BY_KEYS ? k + first_row * p.k_strides[1] : q_of(owner) + first_row * p.q_strides[1];
        const int64_t x1_stride = BY_KEYS ? p.k_strides[1] : p.q_strides[1];
        load_tile<T, BM, D, THREADS>(x, x1, x1_stride, rows, p.head_dim, thread);
        if constexpr (FIRST) {
            const T *const x2 =
                BY_KEYS ? v + first_row * p.v_strides[1] : d_o_of(owner) + first_row * query_stride;
            const int64_t x2_stride = BY_KEYS ? p.v_strides[1] : query_stride;
            load_tile<T, BM, D, THREADS>(x + ROWS_BYTES, x2, x2_stride, rows, p.head_dim, thread);
        }
    }

    /// Starts to copy y₁, y₂ and what belongs to columns of queries.
    template <int THREADS>
    __device__ __forceinline__ void load_columns(int head, int tile, uint32_t y,
                                                 uint32_t of_columns, int thread) const {
        const int start = tile * BN, count = (BY_KEYS ? p.queries : p.keys) - start;
        const T *const y1 =
            BY_KEYS ? q_of(head) + start * p.q_strides[1] : k + start * p.k_strides[1];
        const T *const y2 =
            BY_KEYS ? d_o_of(head) + start * query_stride : v + start * p.v_strides[1];
        load_tile<T, BN, D, THREADS>(y, y1, BY_KEYS ? p.q_strides[1] : p.k_strides[1], count,
                                     p.head_dim, thread);
        load_tile<T, BN, D, THREADS>(y + COLUMNS_BYTES, y2,
                                     BY_KEYS ? query_stride : p.v_strides[1], count, p.head_dim,
                                     thread);
        if constexpr (BY_KEYS) load_sums<THREADS>(head, tile, of_columns, thread);
    }

    /// Starts to copy what belongs to columns of queries.
    template <int THREADS>
    __device__ __forceinline__ void load_sums(int head, int tile, uint32_t of_columns,
                                              int thread) const {
        const int start = tile * BN, count = p.queries - start;
        for (int column = thread; column < BN; column += THREADS) {
            // Beyond the last query, zeros for do and q make the probabilities harmless.
            const uint32_t to = of_columns + column * 4;
            const bool inside = column < count;
            const int64_t at = inside ? sum_row(p, batch, start + column, head) : 0;
            copy_async_word(to, p.scaled_sums + at, inside);
            copy_async_word(to + BN * 4, p.corrections + at, inside);
            if (p.ragged) {
                const int64_t query = static_cast<int64_t>(batch) * p.queries + start + column;
                copy_async_word(to + 2 * BN * 4, p.lowest + (inside ? query : 0), inside);
            }
        }
    }

    /// Whether every row sees every column of a tile.
    __device__ __forceinline__ bool sees_whole(int tile) const {
        const int first_column = tile * BN;
        if constexpr (BY_KEYS)
            return first_row >= (p.ragged ? tile_lowest(tile).y : 0) &&
                   first_row + BM - 1 <= before + first_column;
        return first_column >= largest && first_column + BN - 1 <= before + first_row;
    }

    /// Of a thread's columns, the scaled sums, or the corrections with `row` 1.
    __device__ __forceinline__ void of_pairs(float2 (&pairs)[BN / 8],
                                             const unsigned char *of_columns, int row,
                                             int lane) const {
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            pairs[n] = reinterpret_cast<const float2 *>(of_columns)[(row * BN + n * 8) / 2 + lane % 4];
    }

    /// The half of `gradients` that needs no `dp`, for rows of keys and scores that aren't capped.
    __device__ __forceinline__ void probabilities(float (&s)[BN / 8][4],
                                                  const float2 (&sums)[BN / 8], int tile,
                                                  const unsigned char *of_columns, int warp_row,
                                                  int lane) const {
        static_assert(BY_KEYS, "their sums are those of columns");
        const int first_column = tile * BN, row = first_row + warp_row + lane / 4;
        const int *const lowest = reinterpret_cast<const int *>(of_columns) + 2 * BN;
        const bool whole = sees_whole(tile);
        const float factor = p.mode == SCALED ? p.factor * p.inner : p.factor;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                s[n][half * 2] = fast_exp2(fmaf(s[n][half * 2], factor, -sums[n].x));
                s[n][half * 2 + 1] = fast_exp2(fmaf(s[n][half * 2 + 1], factor, -sums[n].y));
            }
        }
        if (whole) return;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const int pair = n * 8 + lane % 4 * 2;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int position = before + first_column + pair + e;
                const int low = p.ragged ? lowest[pair + e] : 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int key = row + half * 8;
                    if (key < low || key > position) s[n][half * 2 + e] = 0.0f;
                }
            }
        }
    }

    /// The other half, from the probabilities as they are packed for `second`.
    __device__ __forceinline__ void score_gradients(float (&dp)[BN / 8][4],
                                                    const uint32_t (&weights)[BN / 16][4],
                                                    const float2 (&corrections)[BN / 8]) const {
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 weight = unpack_pair<T>(weights[n / 2][n % 2 * 2 + half]);
                dp[n][half * 2] = weight.x * (dp[n][half * 2] - corrections[n].x);
                dp[n][half * 2 + 1] = weight.y * (dp[n][half * 2 + 1] - corrections[n].y);
            }
        }
    }

    /// Products with the columns of a tile become probabilities and gradients; `warp_row` is the
    /// first of the warp's rows in the block.
    __device__ __forceinline__ void gradients(float (&s)[BN / 8][4], float (&dp)[BN / 8][4],
                                              int tile, const unsigned char *of_columns,
                                              int warp_row, const float (&row_sums)[2],
                                              const float (&row_corrections)[2],
                                              const int (&row_lowest)[2], int lane) const {
        const int first_column = tile * BN;
        const bool whole = sees_whole(tile);
        // Most tiles are such, and cost half the instructions without masks.
        if (whole && p.mode == AS_IS)
            gradients_as<true>(s, dp, whole, first_column, of_columns, warp_row, row_sums,
                               row_corrections, row_lowest, lane);
        else
            gradients_as<false>(s, dp, whole, first_column, of_columns, warp_row, row_sums,
                                row_corrections, row_lowest, lane);
    }

    template <bool PLAIN>
    __device__ __forceinline__ void
    gradients_as(float (&s)[BN / 8][4], float (&dp)[BN / 8][4], bool whole, int first_column,
                 const unsigned char *of_columns, int warp_row, const float (&row_sums)[2],
                 const float (&row_corrections)[2], const int (&row_lowest)[2], int lane) const {
        for_each_score<BN>(whole, first_column, 0, of_columns, warp_row, row_sums, row_corrections,
                           row_lowest, lane, [&](int n, int i, bool seen, float sum, float correction) {
                               score_gradient<PLAIN>(p, s[n][i], dp[n][i], seen, sum, correction);
                           });
    }

    /// Calls `visit(n, i, seen, sum, correction)` for a thread's products `[n][i]` of COLUMNS columns, the first of them column
    /// `first` of a tile, and column `first_column` of all.
    template <int COLUMNS, typename Visit>
    __device__ __forceinline__ void
    for_each_score(bool whole, int first_column, int first, const unsigned char *of_columns, int warp_row,
                   const float (&row_sums)[2], const float (&row_corrections)[2],
                   const int (&row_lowest)[2], int lane, Visit visit) const {
        const int row = first_row + warp_row + lane / 4;
        if constexpr (BY_KEYS) {
            const float *const sums = reinterpret_cast<const float *>(of_columns) + first;
            const float *const corrections = sums + BN;
            const int *const lowest = reinterpret_cast<const int *>(sums + 2 * BN);
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++) {
                const int pair = n * 8 + lane % 4 * 2;
                const float2 of_sums = *reinterpret_cast<const float2 *>(sums + pair);
                const float2 of_corrections = *reinterpret_cast<const float2 *>(corrections + pair);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int position = before + first_column + pair + e;
                    const int low = p.ragged && !whole ? lowest[pair + e] : 0;
                    const float sum = e == 0 ? of_sums.x : of_sums.y;
                    const float correction = e == 0 ? of_corrections.x : of_corrections.y;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int key = row + half * 8;
                        const bool seen = whole || (key >= low && key <= position);
                        visit(n, half * 2 + e, seen, sum, correction);
                    }
                }
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int position = before + row + half * 8;
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int key = first_column + n * 8 + lane % 4 * 2 + e;
                        const bool seen = whole || (key >= row_lowest[half] && key <= position);
                        visit(n, half * 2 + e, seen, row_sums[half], row_corrections[half]);
                    }
                }
            }
        }
    }

    /// What `gradients` needs of rows of queries.
    __device__ __forceinline__ void row_values(float (&sums)[2], float (&corrections)[2],
                                               int (&lowest)[2], int warp_row, int lane) const {
        if constexpr (!BY_KEYS) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp_row + half * 8 + lane / 4;
                const bool inside = row < rows;
                const int64_t at = sum_row(p, batch, first_row + row, owner);
                sums[half] = inside ? p.scaled_sums[at] : INFINITY;
                corrections[half] = inside ? p.corrections[at] : 0.0f;
                const int64_t query = static_cast<int64_t>(batch) * p.queries + first_row + row;
                lowest[half] = p.ragged && inside ? p.lowest[query] : 0;
            }
        }
    }

    /// Writes a warp's rows of the results, the COLUMNS columns of a head from `first_column` on, through the places of its rows
    /// of x₁ and x₂.
    template <int COLUMNS = D>
    __device__ __forceinline__ void store(unsigned char *x,
                                          const float (&first)[1][FIRST ? COLUMNS / 8 : 1][4],
                                          const float (&second)[1][SECOND ? COLUMNS / 8 : 1][4],
                                          int warp_row, int lane, int first_column = 0) const {
        const int columns = p.head_dim - first_column;
        const auto target = [&](void *result) {
            return [this, result, warp_row, first_column](int row) -> T * {
                const int mine = first_row + warp_row + row;
                if (mine >= size) return nullptr;
                const int64_t token = static_cast<int64_t>(batch) * size + mine;
                return static_cast<T *>(result) + (token * owners + owner) * p.head_dim + first_column;
            };
        };
        if constexpr (FIRST) {
            const float by[1][2] = {{p.scale, p.scale}};
            store_rows<T, COLUMNS, BM, 1>(x, warp_row, first, by, columns, lane,
                                          target(BY_KEYS ? p.dk : p.dq));
        }
        if constexpr (SECOND) {
            const float by[1][2] = {{1.0f, 1.0f}};
            store_rows<T, COLUMNS, BM, 1>(x + ROWS_BYTES, warp_row, second, by, columns, lane,
                                          target(p.dv));
        }
    }
};

template <typename T, int D, Role ROLE>
__device__ __forceinline__ void backward_tiles(const Parameters &p) {
    constexpr int BM = backward_rows(D), BN = backward_columns(D);
    constexpr int WARPS = BM / 16, THREADS = WARP * WARPS;
    using Block = BackwardBlock<T, D, BM, BN, ROLE>;
    constexpr bool FIRST = Block::FIRST, SECOND = Block::SECOND;
    constexpr int COLUMNS_BYTES = Block::COLUMNS_BYTES;
    extern __shared__ __align__(1024) unsigned char shared[];
    // x₁, x₂, then for every stage y₁, y₂, then what belongs to their columns.
    const uint32_t x_shared = shared_address(shared);
    const uint32_t y_shared = x_shared + 2 * Block::ROWS_BYTES;
    unsigned char *const of_columns = shared + 2 * Block::ROWS_BYTES + p.stages * 2 * COLUMNS_BYTES;
    const uint32_t of_columns_shared = shared_address(of_columns);

    const Block block(p, blockIdx.x, blockIdx.y);
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16;
    float row_sums[2], row_corrections[2];
    int row_lowest[2];
    block.row_values(row_sums, row_corrections, row_lowest, warp_row, lane);
    const auto load_columns = [&](int head, int tile, int stage) {
        block.template load_columns<THREADS>(
            head, tile, y_shared + stage * 2 * COLUMNS_BYTES,
            of_columns_shared + stage * Block::OF_COLUMNS_BYTES, threadIdx.x);
    };

    float first[1][FIRST ? D / 8 : 1][4] = {}, second[1][SECOND ? D / 8 : 1][4] = {};
    const int start_tile = block.seen_from(block.first_tile);
    int head = start_tile < block.end_tile ? block.first_head : block.end_head;
    int tile = start_tile, stage = 0;
    if (head < block.end_head) {
        block.template load_rows<THREADS>(x_shared, threadIdx.x);
        load_columns(head, tile, 0);
        copy_async_commit();
    }
    while (head < block.end_head) {
        int next_head = head, next = tile;
        block.advance(next_head, next, start_tile);
        if (p.stages == 2) {
            if (next_head < block.end_head) load_columns(next_head, next, stage ^ 1);
            copy_async_commit();
            copy_async_wait<1>();
        } else {
            copy_async_wait<0>();
        }
        __syncthreads();

        const uint32_t y1 = y_shared + stage * 2 * COLUMNS_BYTES, y2 = y1 + COLUMNS_BYTES;
        float s[1][BN / 8][4] = {}, dp[1][BN / 8][4] = {};
        multiply_rows<T, D, BM, BN, 1>(s, x_shared, warp_row, y1, lane);
        if constexpr (FIRST)
            multiply_rows<T, D, BM, BN, 1>(dp, x_shared + Block::ROWS_BYTES, warp_row, y2, lane);
        block.gradients(s[0], dp[0], tile, of_columns + stage * Block::OF_COLUMNS_BYTES, warp_row,
                        row_sums, row_corrections, row_lowest, lane);
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
        } else if (next_head < block.end_head) {
            load_columns(next_head, next, 0);
            copy_async_commit();
        }
        head = next_head;
        tile = next;
    }
    copy_async_wait<0>();
    // A warp's rows are read by no other, so their place serves for the results.
    block.store(shared, first, second, warp_row, lane);
}
