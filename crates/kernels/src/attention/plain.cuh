// Attention without tensor cores, for f32 and for head dimensions of any size: 64 x 64 tiles of
// scores, four by four a thread, from slices of the head's dimension in shared memory. A block
// gives COLUMNS columns of the result; with more, `z` says which, and the scores are computed
// again.
#pragma once

#include "backward.cuh"

constexpr int PLAIN_TILE = 64, PLAIN_DEPTH = 32, PLAIN_PITCH = PLAIN_TILE + 4, PLAIN_THREADS = 256;
/// Of two slices, or rows of values, and of scores.
constexpr int PLAIN_FLOATS = 2 * PLAIN_DEPTH * PLAIN_PITCH + PLAIN_TILE * PLAIN_PITCH;

/// Rows of a head.
template <typename T> struct PlainRows {
    const T *start;
    int64_t stride;
    int count;
};

template <typename T>
__device__ __forceinline__ PlainRows<T> plain_rows(const void *tensor, const int64_t (&strides)[3],
                                                   int batch, int head, int first, int end) {
    return {head_start(static_cast<const T *>(tensor), strides, batch, head) + first * strides[1],
            strides[1], end - first};
}

/// `scores += a·bᵀ`: a thread's rows of `a` are the four from `threadIdx.x / 16 * 4` on, of `b`
/// those from `threadIdx.x % 16 * 4` on.
template <typename T>
__device__ __forceinline__ void plain_multiply_rows(float (&scores)[4][4], const PlainRows<T> &a,
                                                    const PlainRows<T> &b, int d, float *slices) {
    float *const of_a = slices, *const of_b = slices + PLAIN_DEPTH * PLAIN_PITCH;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    const int depth = threadIdx.x % PLAIN_DEPTH;
    for (int start = 0; start < d; start += PLAIN_DEPTH) {
        __syncthreads();
#pragma unroll
        for (int line = threadIdx.x / PLAIN_DEPTH; line < PLAIN_TILE;
             line += PLAIN_THREADS / PLAIN_DEPTH) {
            const bool inside = start + depth < d;
            of_a[depth * PLAIN_PITCH + line] =
                inside && line < a.count ? to_float(a.start[line * a.stride + start + depth])
                                         : 0.0f;
            of_b[depth * PLAIN_PITCH + line] =
                inside && line < b.count ? to_float(b.start[line * b.stride + start + depth])
                                         : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < PLAIN_DEPTH; k++) {
            const float4 x = *reinterpret_cast<const float4 *>(of_a + k * PLAIN_PITCH + row);
            const float4 y = *reinterpret_cast<const float4 *>(of_b + k * PLAIN_PITCH + column);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) scores[i][j] = fmaf(xs[i], ys[j], scores[i][j]);
            }
        }
    }
}

/// `out += weights·b`, of `b` the columns from `first_column` on: a thread's rows are as above, its
/// columns four of every 64.
template <typename T, int COLUMNS>
__device__ __forceinline__ void
plain_multiply_columns(float (&out)[4][COLUMNS / 64][4], const float (&weights)[4][4],
                       const PlainRows<T> &b, int first_column, int d, float *slices) {
    constexpr int PITCH = COLUMNS + 4;
    static_assert(PLAIN_DEPTH * PITCH <= 2 * PLAIN_DEPTH * PLAIN_PITCH, "values fit");
    // (column of the scores, row)
    float *const transposed = slices + 2 * PLAIN_DEPTH * PLAIN_PITCH;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    // What was there before has been read.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        *reinterpret_cast<float4 *>(transposed + (column + j) * PLAIN_PITCH + row) =
            make_float4(weights[0][j], weights[1][j], weights[2][j], weights[3][j]);
    }
#pragma unroll
    for (int start = 0; start < PLAIN_TILE; start += PLAIN_DEPTH) {
        if (start != 0) __syncthreads();
        for (int index = threadIdx.x; index < PLAIN_DEPTH * COLUMNS; index += PLAIN_THREADS) {
            const int line = index / COLUMNS, c = index % COLUMNS;
            const bool inside = start + line < b.count && first_column + c < d;
            slices[line * PITCH + c] =
                inside ? to_float(b.start[(start + line) * b.stride + first_column + c]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < PLAIN_DEPTH; k++) {
            const float4 w =
                *reinterpret_cast<const float4 *>(transposed + (start + k) * PLAIN_PITCH + row);
            const float ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int c = 0; c < COLUMNS / 64; c++) {
                const float4 y =
                    *reinterpret_cast<const float4 *>(slices + k * PITCH + c * 64 + column);
                const float ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) out[i][c][j] = fmaf(ws[i], ys[j], out[i][c][j]);
                }
            }
        }
    }
}

/// Writes a thread's part of rows of a contiguous tensor (batch, size, heads, head_dim).
template <typename T, int COLUMNS>
__device__ __forceinline__ void
plain_store(void *result, const float (&out)[4][COLUMNS / 64][4], const float (&by)[4],
            int64_t batch, int size, int heads, int head, int first_row, int first_column, int d) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = first_row + threadIdx.x / 16 * 4 + i;
        if (row >= size) continue;
        T *const to = static_cast<T *>(result) + ((batch * size + row) * heads + head) * d;
#pragma unroll
        for (int c = 0; c < COLUMNS / 64; c++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int column = first_column + c * 64 + threadIdx.x % 16 * 4 + j;
                if (column < d) to[column] = from_float<T>(out[i][c][j] * by[i]);
            }
        }
    }
}

/// Over the sixteen lanes that hold a row.
__device__ __forceinline__ float plain_row_max(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

__device__ __forceinline__ float plain_row_sum(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}

/// The lowest key that any of a tile of queries sees, INT_MAX for none. Whole warps call it.
__device__ __forceinline__ int plain_tile_lowest(const Parameters &p, int batch, int first) {
    if (!p.ragged) return 0;
    int smallest = INT_MAX;
    for (int row = threadIdx.x % WARP; row < PLAIN_TILE; row += WARP) {
        if (first + row >= p.queries) break;
        const int low = lowest_key(p, batch, first + row);
        if (low <= p.keys - p.queries + first + row) smallest = min(smallest, low);
    }
    return max(warp_min(smallest), 0);
}

/// `f(inner·q·k)`; see `Parameters`.
__device__ __forceinline__ float plain_score(const Parameters &p, float product) {
    if (p.mode == CAPPED) return tanhf(product * p.inner);
    return p.mode == SCALED ? product * p.inner : product;
}

template <typename T, int COLUMNS>
__device__ __forceinline__ void plain_forward(const Parameters &p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    float *const slices = reinterpret_cast<float *>(shared);
    const int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int first_query = (gridDim.y - 1 - blockIdx.y) * PLAIN_TILE;
    const int first_column = blockIdx.z * COLUMNS;
    const int before = p.keys - p.queries;
    const int last_position = before + min(first_query + PLAIN_TILE, p.queries) - 1;
    const PlainRows<T> q = plain_rows<T>(p.q, p.q_strides, batch, head, first_query, p.queries);

    int position[4], lowest[4];
    float top[4], total[4] = {}, out[4][COLUMNS / 64][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int query = first_query + threadIdx.x / 16 * 4 + i;
        const bool inside = query < p.queries;
        position[i] = inside ? before + query : -1;
        lowest[i] = p.ragged && inside ? lowest_key(p, batch, query) : 0;
        top[i] = -INFINITY;
    }
    const int smallest = plain_tile_lowest(p, batch, first_query);
    for (int tile = smallest / PLAIN_TILE; tile <= last_position / PLAIN_TILE; tile++) {
        const int first_key = tile * PLAIN_TILE;
        float scores[4][4] = {};
        plain_multiply_rows<T>(scores, q,
                               plain_rows<T>(p.k, p.k_strides, batch, kv_head, first_key, p.keys),
                               p.head_dim, slices);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float best = -INFINITY;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int key = first_key + threadIdx.x % 16 * 4 + j;
                const bool seen = key >= lowest[i] && key <= position[i];
                scores[i][j] = seen ? plain_score(p, scores[i][j]) : -INFINITY;
                best = fmaxf(best, scores[i][j]);
            }
            const float new_top = fmaxf(top[i], plain_row_max(best) * p.factor);
            const float base = new_top == -INFINITY ? 0.0f : new_top;
            const float shrink = exp2f(top[i] - base);
            top[i] = new_top;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][j] = exp2f(fmaf(scores[i][j], p.factor, -base));
                sum += scores[i][j];
            }
            total[i] = fmaf(total[i], shrink, sum);
#pragma unroll
            for (int c = 0; c < COLUMNS / 64; c++) {
#pragma unroll
                for (int j = 0; j < 4; j++) out[i][c][j] *= shrink;
            }
        }
        plain_multiply_columns<T, COLUMNS>(
            out, scores, plain_rows<T>(p.v, p.v_strides, batch, kv_head, first_key, p.keys),
            first_column, p.head_dim, slices);
    }
    float inverse[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const RowEnd end = end_row<T>(p, head, {top[i], plain_row_sum(total[i])});
        inverse[i] = end.factor;
        const int query = first_query + threadIdx.x / 16 * 4 + i;
        if (threadIdx.x % 16 == 0 && blockIdx.z == 0 && query < p.queries)
            p.log_sum_exp[sum_row(p, batch, query, head)] = end.log_sum_exp;
    }
    plain_store<T, COLUMNS>(p.o, out, inverse, batch, p.queries, p.heads, head, first_query,
                            first_column, p.head_dim);
}

/// A block owns rows of queries or of keys, as in backward.cuh.
template <typename T, int COLUMNS, Role ROLE>
__device__ __forceinline__ void plain_backward(const Parameters &p) {
    constexpr bool BY_KEYS = ROLE == KEYS;
    extern __shared__ __align__(1024) unsigned char shared[];
    float *const slices = reinterpret_cast<float *>(shared);
    const int owners = BY_KEYS ? p.kv_heads : p.heads, group = p.heads / p.kv_heads;
    const int batch = blockIdx.x / owners, owner = blockIdx.x % owners;
    const int kv_head = BY_KEYS ? owner : owner / group;
    const int before = p.keys - p.queries, size = BY_KEYS ? p.keys : p.queries;
    const int first_row = (BY_KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y) * PLAIN_TILE;
    const int first_column = blockIdx.z * COLUMNS;
    const int64_t d_o_strides[3] = {static_cast<int64_t>(p.queries) * p.heads * p.head_dim,
                                    static_cast<int64_t>(p.heads) * p.head_dim, p.head_dim};
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;

    float first[4][COLUMNS / 64][4] = {}, second[4][BY_KEYS ? COLUMNS / 64 : 1][4] = {};
    const int first_head = BY_KEYS ? kv_head * group : owner;
    const int end_head = BY_KEYS ? first_head + group : first_head + 1;
    const int tile_lowest = BY_KEYS ? 0 : plain_tile_lowest(p, batch, first_row);
    const int first_tile = (BY_KEYS ? max(0, first_row - before) : tile_lowest) / PLAIN_TILE;
    const int last_position = before + min(first_row + PLAIN_TILE, p.queries) - 1;
    const int end_tile =
        BY_KEYS ? (p.queries + PLAIN_TILE - 1) / PLAIN_TILE : last_position / PLAIN_TILE + 1;
    for (int head = first_head; head < end_head; head++) {
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int first_query = BY_KEYS ? tile * PLAIN_TILE : first_row;
            const int first_key = BY_KEYS ? first_row : tile * PLAIN_TILE;
            if (BY_KEYS && plain_tile_lowest(p, batch, first_query) >= first_row + PLAIN_TILE)
                continue;
            const PlainRows<T> q =
                plain_rows<T>(p.q, p.q_strides, batch, head, first_query, p.queries);
            const PlainRows<T> d_o =
                plain_rows<T>(p.d_o, d_o_strides, batch, head, first_query, p.queries);
            const PlainRows<T> k =
                plain_rows<T>(p.k, p.k_strides, batch, kv_head, first_key, p.keys);
            const PlainRows<T> v =
                plain_rows<T>(p.v, p.v_strides, batch, kv_head, first_key, p.keys);
            float s[4][4] = {}, dp[4][4] = {};
            plain_multiply_rows<T>(s, BY_KEYS ? k : q, BY_KEYS ? q : k, p.head_dim, slices);
            plain_multiply_rows<T>(dp, BY_KEYS ? v : d_o, BY_KEYS ? d_o : v, p.head_dim, slices);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query = first_query + (BY_KEYS ? column : row) + i;
                const bool inside = query < p.queries;
                const int64_t at = inside ? sum_row(p, batch, query, head) : 0;
                const int low = p.ragged && inside ? lowest_key(p, batch, query) : 0;
                const float scaled_sum = p.scaled_sums[at], correction = p.corrections[at];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int key = first_key + (BY_KEYS ? row : column) + j;
                    float &score = BY_KEYS ? s[j][i] : s[i][j];
                    float &gradient = BY_KEYS ? dp[j][i] : dp[i][j];
                    const float x = plain_score(p, score);
                    const bool seen = inside && key >= low && key <= before + query;
                    score = seen ? exp2f(fmaf(x, p.factor, -scaled_sum)) : 0.0f;
                    gradient = score * (gradient - correction);
                    if (p.mode == CAPPED) gradient *= 1.0f - x * x;
                }
            }
            if constexpr (BY_KEYS)
                plain_multiply_columns<T, COLUMNS>(second, s, d_o, first_column, p.head_dim,
                                                   slices);
            plain_multiply_columns<T, COLUMNS>(first, dp, BY_KEYS ? q : k, first_column, p.head_dim,
                                               slices);
        }
    }
    const float scale[4] = {p.scale, p.scale, p.scale, p.scale};
    plain_store<T, COLUMNS>(BY_KEYS ? p.dk : p.dq, first, scale, batch, size, owners, owner,
                            first_row, first_column, p.head_dim);
    if constexpr (BY_KEYS) {
        const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        plain_store<T, COLUMNS>(p.dv, second, one, batch, size, owners, owner, first_row,
                                first_column, p.head_dim);
    }
}
