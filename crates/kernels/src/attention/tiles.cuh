// What the attention kernels share: their parameters, which keys a query sees, tiles of rows in
// shared memory, and products of such tiles on tensor cores.
#pragma once

#include "tensor.cuh"
#include <limits.h>

/// What every kernel is given. `Parameters` in cuda.rs has the same fields in the same order.
struct Parameters {
    /// (batch, queries, heads, head_dim) and twice (batch, keys, kv_heads, head_dim), found by
    /// strides.
    const void *q, *k, *v;
    /// Contiguous, like q; `o` is written forward and read backward.
    void *o;
    const void *d_o;
    /// Contiguous, like q, k and v.
    void *dq, *dk, *dv;
    /// (batch, queries), or null.
    const uint32_t *first_key;
    /// (batch, heads, queries), written forward and read backward.
    float *log_sum_exp;
    /// For the backward pass, (batch, heads, queries): log2(e)·log_sum_exp and Σ do·o.
    float *scaled_sums, *corrections;
    /// For the backward pass, when `ragged`, (batch, queries): the lowest key that a query sees;
    /// and (batch, tiles): of a tile of queries, the smallest of those that see any, and the
    /// largest.
    int *lowest;
    int2 *tile_lowest;
    /// For hopper_backward.cuh, the number of blocks that have started, then (batch, heads, tiles): whose
    /// turn it is to add to a tile of dq; and the tiles' sums in f32, as its threads hold them.
    int *turns;
    float4 *dq_sums;
    /// For split keys, (batch, queries, heads, parts, head_dim): unnormalised outputs; and without
    /// the last dimension: the largest score, in log2 units, and the sum.
    float *partial_o;
    float2 *partial_sums;
    /// For hopper_backward.cuh, when head_splits isn't 1, (head_splits, 2, batch, keys, kv_heads, head_dim): the parts of
    /// dk and dv that some of the heads give.
    float *partial_keys;
    /// (heads), of the dtype of q, or null.
    const void *sinks;
    /// In elements, of batch, seq and heads.
    int64_t q_strides[3], k_strides[3], v_strides[3];
    int batch, queries, keys, heads, kv_heads, head_dim;
    /// At least 1; INT_MAX for all.
    int window;
    /// Whether there are a window or first keys: otherwise every query sees from key 0 on.
    int ragged;
    /// One of the `Scores`; then a score in log2 units is `factor·f(inner·q·k)`.
    int mode;
    float factor, inner;
    /// What q·k is multiplied by.
    float scale;
    /// Keys from `split_start` on are split into ranges of `split_keys`. Each `part_keys` of them give a part, of which a
    /// query has this many; if 1, that is the result.
    int split_start, split_keys, part_keys, parts;
    /// Tiles of queries of a head in the backward pass.
    int tiles;
    /// Tiles that the backward kernels hold at once, 1 or 2.
    int stages;
    /// Blocks that share the heads of a group in hopper_backward.cuh: it divides how many a group has.
    int head_splits;
};

/// How a product becomes a score, before `factor`: as it is, `tanh(inner·x)`, or `inner·x`, which
/// is for scales that aren't positive.
enum Scores { AS_IS, CAPPED, SCALED };

/// The element types and padded head dimensions that there are kernels on tensor cores for.
#define FOR_EACH_TILE_KERNEL(define)                                                               \
    define(bf16, 64) define(bf16, 96) define(bf16, 128) define(bf16, 256) define(f16, 64)          \
        define(f16, 96) define(f16, 128) define(f16, 256)

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

/// tanh with an absolute error of about 1e-7.
__device__ __forceinline__ float fast_tanh(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + fast_exp2(2.0f * LOG2_E * x));
}

/// The lowest key that a query sees, if it is not above its position.
__device__ __forceinline__ int lowest_key(const Parameters &p, int batch, int query) {
    const int after_window = p.keys - p.queries + query - p.window + 1;
    const int64_t row = static_cast<int64_t>(batch) * p.queries + query;
    const unsigned first = p.first_key == nullptr ? 0 : p.first_key[row];
    return max(after_window, static_cast<int>(min(first, static_cast<unsigned>(p.keys))));
}

template <typename T>
__device__ __forceinline__ T *head_start(T *tensor, const int64_t (&strides)[3], int batch,
                                         int head) {
    return tensor + batch * strides[0] + head * strides[2];
}

/// The row of a query's head in q-like contiguous tensors, in rows.
__device__ __forceinline__ int64_t query_row(const Parameters &p, int batch, int query, int head) {
    return (static_cast<int64_t>(batch) * p.queries + query) * p.heads + head;
}

/// The same in (batch, heads, queries).
__device__ __forceinline__ int64_t sum_row(const Parameters &p, int batch, int query, int head) {
    return (static_cast<int64_t>(batch) * p.heads + head) * p.queries + query;
}

__device__ __forceinline__ int warp_min(int x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = min(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

__device__ __forceinline__ int warp_max(int x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = max(x, __shfl_xor_sync(FULL, x, offset));
    return x;
}

/// The sum, or the largest, over the four lanes that hold a row of a 16 x 8 tile.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL, x, 1);
    return x + __shfl_xor_sync(FULL, x, 2);
}

__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
}

/// The smallest and the largest lowest key of a tile of queries, of the smallest only those that
/// see any; in `lowest` those of the queries, then room for two of every warp. For a whole block;
/// when not `ragged`, zeros, and `lowest` isn't written.
template <int ROWS, int THREADS>
__device__ __forceinline__ int2 lowest_keys(const Parameters &p, int batch, int first_query,
                                            int *lowest) {
    if (!p.ragged) return make_int2(0, 0);
    constexpr int WARPS = THREADS / WARP;
    int *const of_warps = lowest + ROWS;
    int smallest = INT_MAX, largest = 0;
    for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const int query = first_query + row;
        int low = 0;
        if (query < p.queries) {
            low = max(0, lowest_key(p, batch, query));
            largest = max(largest, low);
            if (low <= p.keys - p.queries + query) smallest = min(smallest, low);
        }
        lowest[row] = low;
    }
    smallest = warp_min(smallest);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) {
        of_warps[threadIdx.x / WARP] = smallest;
        of_warps[WARPS + threadIdx.x / WARP] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        smallest = min(smallest, of_warps[warp]);
        largest = max(largest, of_warps[WARPS + warp]);
    }
    return make_int2(smallest, largest);
}

// A tile is `ROWS` rows of D elements of 2 bytes in shared memory, as panels of 64 columns: a row
// of a panel is 128 bytes, eight chunks of 16 bytes, and chunk `c` of row `r` lies at place `c ^ r
// % 8`, so that neither eight rows of a chunk nor eight chunks of a row share banks. Elements
// beyond the head's dimension or the last row are zeros.

constexpr int ROW_BYTES = 128;

/// The bytes of a tile.
constexpr int tile_bytes(int rows, int d) { return (d + 63) / 64 * rows * ROW_BYTES; }

/// Where a chunk of a row lies in a tile.
template <int ROWS> __device__ __forceinline__ uint32_t place(int row, int chunk) {
    return chunk / 8 * (ROWS * ROW_BYTES) + row * ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
}

/// Reads a chunk.
__device__ __forceinline__ uint4 load_chunk(uint32_t from) {
    uint4 chunk;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(from)
                 : "memory");
    return chunk;
}

/// Reads the first four bytes of one.
__device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

/// Writes a chunk.
__device__ __forceinline__ void store_chunk(uint32_t to, const uint4 &chunk) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y),
                 "r"(chunk.z), "r"(chunk.w)
                 : "memory");
}

/// Starts to copy `rows` rows, `stride` elements apart, into a tile.
template <typename T, int ROWS, int D, int THREADS>
__device__ __forceinline__ void load_tile(uint32_t tile, const T *source, int64_t stride, int rows,
                                          int head_dim, int thread) {
    constexpr int CHUNKS = D / 8;
    if constexpr (THREADS % CHUNKS == 0) {
        // A thread keeps to one chunk, so there is one address to move on.
        constexpr int STEP = THREADS / CHUNKS;
        static_assert(ROWS % STEP == 0, "whole steps");
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const T *from = source + row * stride + chunk * 8;
        const int end = chunk * 8 < head_dim ? rows : 0;
#pragma unroll
        for (int start = 0; start < ROWS; start += STEP) {
            copy_async(tile + place<ROWS>(start + row, chunk), from, start + row < end);
            from += STEP * stride;
        }
    } else {
#pragma unroll
        for (int start = 0; start < ROWS * CHUNKS; start += THREADS) {
            const int index = start + thread;
            if (ROWS * CHUNKS % THREADS != 0 && index >= ROWS * CHUNKS) break;
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            const bool valid = row < rows && chunk * 8 < head_dim;
            copy_async(tile + place<ROWS>(row, chunk), source + row * stride + chunk * 8, valid);
        }
    }
}

/// A row of a head.
template <typename T> struct Line {
    const T *start;

    __device__ __forceinline__ float operator[](int column) const {
        return to_float(start[column]);
    }
};

/// The rows of a head, `stride` elements apart.
template <typename T> struct Rows {
    const T *start;
    int64_t stride;

    __device__ __forceinline__ Line<T> line(int64_t row) const { return {start + row * stride}; }

    /// Brings a row nearer, whoever writes it.
    __device__ __forceinline__ void fetch_ahead(int64_t row, int head_dim) const {
        constexpr int OF_LINE = 128 / sizeof(T);
        for (int column = 0; column < head_dim; column += OF_LINE) ::fetch_ahead(start + row * stride + column);
    }
};

/// Keys and values as they are.
struct DenseKeys {
    template <typename T>
    __device__ __forceinline__ Rows<T> keys(const Parameters &p, int batch, int kv_head) const {
        return {head_start(static_cast<const T *>(p.k), p.k_strides, batch, kv_head),
                p.k_strides[1]};
    }

    template <typename T>
    __device__ __forceinline__ Rows<T> values(const Parameters &p, int batch, int kv_head) const {
        return {head_start(static_cast<const T *>(p.v), p.v_strides, batch, kv_head),
                p.v_strides[1]};
    }

    /// Starts to copy `count` of 16 rows into a tile, from row `at` on, or zeros where that is negative. Once a thread has
    /// waited for its copies, it calls `land`.
    template <typename T, int D, int THREADS>
    __device__ __forceinline__ void load_sixteen(uint32_t tile, const Rows<T> &rows, int64_t at, int count, int head_dim,
                                                 int thread) const {
        const T *const from = rows.start + max(at, int64_t(0)) * rows.stride;
        load_tile<T, 16, D, THREADS>(tile, from, rows.stride, at < 0 ? 0 : count, head_dim, thread);
    }

    /// Makes what a thread has copied into a tile into numbers, which they are.
    template <typename T, int ROWS, int D, int THREADS>
    __device__ __forceinline__ void land(uint32_t, const Rows<T> &, int) const {}
};

/// Keys and values that lie one after the other.
struct KeysInARow : DenseKeys {
    /// The row of a key.
    __device__ __forceinline__ int64_t row(int key) const { return key; }

    /// Starts to copy `count` rows from that of a key on into a tile. Once a thread has waited for its copies, it
    /// calls `land`.
    template <typename T, int ROWS, int D, int THREADS>
    __device__ __forceinline__ void load(uint32_t tile, const Rows<T> &rows, int key, int count,
                                         int head_dim, int thread) const {
        load_tile<T, ROWS, D, THREADS>(tile, rows.start + key * rows.stride, rows.stride, count,
                                       head_dim, thread);
    }
};

/// `scores += a·bᵀ` over D, for 16·M rows of tile `a` from `first` on and all N rows of tile `b`.
template <typename T, int D, int ROWS, int N, int M>
__device__ __forceinline__ void multiply_rows(float (&scores)[M][N / 8][4], uint32_t a, int first,
                                              uint32_t b, int lane) {
    const uint32_t a_row = a + (first + lane % 16) * ROW_BYTES;
    const uint32_t a_chunk = (lane / 16 ^ lane % 8) * 16;
    const uint32_t b_row = b + (lane % 8 + lane / 16 * 8) * ROW_BYTES;
    const uint32_t b_chunk = (lane / 8 % 2 ^ lane % 8) * 16;
    // Unrolled further, addresses take the registers that sums need.
#pragma unroll 4
    for (int k = 0; k < D / 16; k++) {
        const uint32_t step = k % 4 * 32;
        uint32_t x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_tiles(x[m],
                       a_row + m * 16 * ROW_BYTES + k / 4 * (ROWS * ROW_BYTES) + (a_chunk ^ step));
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t y[4];
            load_tiles(y, b_row + n * 16 * ROW_BYTES + k / 4 * (N * ROW_BYTES) + (b_chunk ^ step));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(scores[m][2 * n], x[m], y[0], y[1]);
                multiply_add<T>(scores[m][2 * n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

/// Sixteen rows of a tile as the left side of products.
template <int D> struct Sixteen {
    uint32_t at[D / 16][4];

    __device__ __forceinline__ Sixteen(uint32_t tile, int lane) {
        const uint32_t row = tile + lane % 16 * ROW_BYTES, chunk = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int k = 0; k < D / 16; k++) load_tiles(at[k], row + k / 4 * (16 * ROW_BYTES) + (chunk ^ k % 4 * 32));
    }
};

/// `scores += a·bᵀ` over D, for sixteen rows and the sixteen of tile `b`, as `multiply_rows` adds up.
template <typename T, int D>
__device__ __forceinline__ void multiply_sixteen(float (&scores)[2][4], const Sixteen<D> &a, uint32_t b, int lane) {
    const uint32_t row = b + (lane % 8 + lane / 16 * 8) * ROW_BYTES, chunk = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t y[4];
        load_tiles(y, row + k / 4 * (16 * ROW_BYTES) + (chunk ^ k % 4 * 32));
        multiply_add<T>(scores[0], a.at[k], y[0], y[1]);
        multiply_add<T>(scores[1], a.at[k], y[2], y[3]);
    }
}

/// `out += weights·b` over the N rows of tile `b`.
template <typename T, int D, int N, int M>
__device__ __forceinline__ void multiply_columns(float (&out)[M][D / 8][4],
                                                 const uint32_t (&weights)[M][N / 16][4],
                                                 uint32_t b, int lane) {
    const uint32_t b_row = b + lane % 16 * ROW_BYTES;
    const uint32_t b_chunk = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t y[4];
            load_tiles_transposed(y, b_row + k * 16 * ROW_BYTES + c / 4 * (N * ROW_BYTES) +
                                         (b_chunk ^ c % 4 * 32));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(out[m][2 * c], weights[m][k], y[0], y[1]);
                multiply_add<T>(out[m][2 * c + 1], weights[m][k], y[2], y[3]);
            }
        }
    }
}

/// `out += weights·b` over N rows of `b`, for the sixteen columns from 64·panel + 16·place on. Sixteens of rows are GROUP bytes
/// apart, and panels PANEL: a tile, or several.
template <typename T, int N, int M, int GROUP, int PANEL>
__device__ __forceinline__ void multiply_sixteen_columns(float (&out)[M][2][4], const uint32_t (&weights)[M][N / 16][4],
                                                         uint32_t b, int panel, int place, int lane) {
    const uint32_t from = b + lane % 16 * ROW_BYTES + panel * PANEL + ((lane / 16 ^ lane % 8) * 16 ^ place * 32);
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        uint32_t y[4];
        load_tiles_transposed(y, from + k * GROUP);
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply_add<T>(out[m][0], weights[m][k], y[0], y[1]);
            multiply_add<T>(out[m][1], weights[m][k], y[2], y[3]);
        }
    }
}

/// Scores as the left side of `multiply_columns`.
template <typename T, int N, int M>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[M][N / 16][4],
                                             const float (&scores)[M][N / 8][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const float *pair = &scores[m][2 * k + part / 2][part % 2 * 2];
                weights[m][k][part] = pack_pair<T>(pair[0], pair[1]);
            }
        }
    }
}

/// Writes a warp's 16·M rows, row `r` multiplied by `by`, where `target(r)` says, if not null. They
/// go through the rows from `first` on of a tile that no other warp reads or writes.
template <typename T, int D, int ROWS, int M, typename Target>
__device__ __forceinline__ void store_rows(unsigned char *tile, int first,
                                           const float (&out)[M][D / 8][4], const float (&by)[M][2],
                                           int head_dim, int lane, Target target) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first + m * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                const float *pair = &out[m][n][half * 2];
                *reinterpret_cast<uint32_t *>(tile + place<ROWS>(row, n) + lane % 4 * 4) =
                    pack_pair<T>(pair[0] * by[m][half], pair[1] * by[m][half]);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int index = lane; index < 16 * M * (D / 8); index += WARP) {
        const int row = index / (D / 8), chunk = index % (D / 8);
        T *to = target(row);
        if (to == nullptr || chunk * 8 >= head_dim) continue;
        store_pack(to + chunk * 8,
                   load_pack(reinterpret_cast<const T *>(tile + place<ROWS>(first + row, chunk))));
    }
}

/// Products become scores, but for `factor`.
template <int N>
__device__ __forceinline__ void shape_scores(const Parameters &p, float (&scores)[N / 8][4]) {
    if (p.mode == AS_IS) return;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float x = scores[n][e] * p.inner;
            scores[n][e] = p.mode == CAPPED ? fast_tanh(x) : x;
        }
    }
}

/// Hides the keys, `first_key` that of the first score, below `lowest` or above `highest` of a
/// thread's row `half`.
template <int N>
__device__ __forceinline__ void hide_scores(float (&scores)[N / 8][4], int half, int first_key,
                                            int lowest, int highest, int lane) {
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = first_key + n * 8 + lane % 4 * 2 + e;
            if (key < lowest || key > highest) scores[n][half * 2 + e] = -INFINITY;
        }
    }
}

/// The largest score of a thread's row `half`, in log2 units.
template <int N>
__device__ __forceinline__ float largest_score(const float (&scores)[N / 8][4], int half, float factor) {
    float best = -INFINITY;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        best = fmaxf(best, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
    return row_max(best) * factor;
}

/// What scores are taken relative to, of which `top` is the largest. Where nothing is seen yet, every power has to be zero.
__device__ __forceinline__ float base_of(float top) { return top == -INFINITY ? 0.0f : top; }

/// Scores of a thread's row `half` become powers relative to `base`. Gives the sum of the thread's: what sixteens of keys
/// sum up to, added up.
template <int N>
__device__ __forceinline__ float raise_scores(float (&scores)[N / 8][4], int half, float factor, float base) {
    float total = 0.0f;
#pragma unroll
    for (int first = 0; first < N / 8; first += 2) {
        float sum = 0.0f;
#pragma unroll
        for (int n = first; n < first + 2; n++) {
#pragma unroll
            for (int e = half * 2; e < half * 2 + 2; e++) {
                scores[n][e] = fast_exp2(fmaf(scores[n][e], factor, -base));
                sum += scores[n][e];
            }
        }
        total += sum;
    }
    return total;
}

/// Scores of a thread's row `half` become powers relative to the new `top`, in log2 units, and are
/// added to its part of `total`. Gives what earlier powers have to be multiplied by.
template <int N>
__device__ __forceinline__ float soften_scores(float (&scores)[N / 8][4], int half, float factor,
                                               float &top, float &total) {
    const float new_top = fmaxf(top, largest_score<N>(scores, half, factor));
    const float base = base_of(new_top), shrink = fast_exp2(top - base);
    top = new_top;
    total = fmaf(total, shrink, raise_scores<N>(scores, half, factor, base));
    return shrink;
}

/// Multiplies a thread's row `half`.
template <int COLUMNS>
__device__ __forceinline__ void scale_row(float (&out)[COLUMNS / 8][4], int half, float by) {
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        out[n][half * 2] *= by;
        out[n][half * 2 + 1] *= by;
    }
}

// What a query gives is made of what segments of its keys give, which begin at fixed positions, each by itself, joined in
// their order: however its keys are shared out, it has the same bits.

/// Keys of a segment.
constexpr int SEGMENT = 64;

/// Of keys, the largest score of a row in log2 units, and the sum of powers relative to it.
struct RowSums {
    float top = -INFINITY, total = 0.0f;
};

/// Scores of a thread's row `half` become powers relative to the largest.
template <int N>
__device__ __forceinline__ RowSums soften_segment(float (&scores)[N / 8][4], int half, float factor) {
    const float top = largest_score<N>(scores, half, factor);
    return {top, row_sum(raise_scores<N>(scores, half, factor, base_of(top)))};
}

/// What the results of earlier keys, and of those that follow, are multiplied by to be joined.
struct Joint {
    float before, after;

    /// With the largest scores of both.
    static __device__ __forceinline__ Joint of_tops(float earlier, float later) {
        const float base = base_of(fmaxf(earlier, later));
        return {fast_exp2(earlier - base), fast_exp2(later - base)};
    }

    __device__ __forceinline__ float of(float earlier, float later) const {
        return fmaf(later, after, earlier * before);
    }
};

/// Joins the sums of keys that follow to those of earlier ones.
__device__ __forceinline__ Joint join(RowSums &sums, const RowSums &next) {
    const Joint joint = Joint::of_tops(sums.top, next.top);
    sums = {fmaxf(sums.top, next.top), joint.of(sums.total, next.total)};
    return joint;
}

/// Adds sixteen columns of keys that follow to those of earlier ones, which are multiplied already, for a thread's two rows.
__device__ __forceinline__ void add_columns(const float (&after)[2], float (&first)[4], float (&second)[4],
                                            const float (&part)[2][4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
        first[e] = fmaf(part[0][e], after[e / 2], first[e]);
        second[e] = fmaf(part[1][e], after[e / 2], second[e]);
    }
}

/// What `log_sum_exp` holds.
__device__ __forceinline__ float log_of_sum(float top, float total) {
    return total == 0.0f ? -INFINITY : (top + log2f(total)) * LN_2;
}

/// What sums of powers times values are multiplied by; 0 where no key is seen.
__device__ __forceinline__ float inverse_of(float total) {
    return total == 0.0f ? 0.0f : 1.0f / total;
}

/// What a row's sums of powers times values are multiplied by, and its `log_sum_exp`.
struct RowEnd {
    float factor, log_sum_exp;
};

/// The end of a row whose keys are all seen, with the sink of its head, if it has one.
template <typename T>
__device__ __forceinline__ RowEnd end_row(const Parameters &p, int head, RowSums sums) {
    float shrink = 1.0f;
    if (p.sinks != nullptr) {
        const float sink = LOG2_E * to_float(static_cast<const T *>(p.sinks)[head]);
        const float top = fmaxf(sums.top, sink), base = base_of(top);
        shrink = exp2f(sums.top - base);
        sums = {top, fmaf(sums.total, shrink, exp2f(sink - base))};
    }
    return {shrink * inverse_of(sums.total), log_of_sum(sums.top, sums.total)};
}
