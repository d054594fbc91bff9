// The forward pass for few queries, as in decoding, where reading keys and values is all the time:
// a block takes the queries of all heads that share a key head, so that it reads that once, and one
// of `splits` ranges of the keys. Each warp goes over every fourth group of keys by itself; their
// results, and then those of the ranges, are combined in order.
#pragma once

#include "tiles.cuh"

/// Row `index` of a key head's queries: those of one query lie together.
struct FewRow {
    int query, head;
    bool inside;
};

__device__ __forceinline__ FewRow few_row(const Parameters &p, int kv_head, int index) {
    const int group = p.heads / p.kv_heads;
    return {index / group, kv_head * group + index % group, index < p.queries * group};
}

/// The keys from `x` up to `y` of a range that any of `rows` rows from `first` on sees.
__device__ __forceinline__ int2 few_keys(const Parameters &p, int range, int batch, int kv_head,
                                         int first, int rows, int lane) {
    int smallest = INT_MAX, end = 0;
    for (int row = lane; row < rows; row += WARP) {
        const FewRow mine = few_row(p, kv_head, first + row);
        if (!mine.inside) continue;
        const int position = p.keys - p.queries + mine.query;
        const int low = lowest_key(p, batch, mine.query);
        if (low > position) continue;
        smallest = min(smallest, low);
        end = max(end, position + 1);
    }
    const int split = p.split_start + range * p.split_keys;
    return make_int2(max(warp_min(smallest), split), min(warp_max(end), split + p.split_keys));
}

/// Writes four columns of a row: the result if keys aren't split, else the part to be combined.
/// `top` is the largest score in log2 units and `total` the sum of powers relative to it.
template <typename T>
__device__ __forceinline__ void store_part(const Parameters &p, int range, int batch,
                                           const FewRow &row, int column, int columns,
                                           const float *values, float top, float total) {
    const int64_t at = query_row(p, batch, row.query, row.head);
    if (p.splits == 1) {
        const float inverse = inverse_of(total);
        T *const o = static_cast<T *>(p.o) + at * p.head_dim + column;
        for (int i = 0; i < columns; i++) o[i] = from_float<T>(values[i] * inverse);
        if (column == 0 && p.log_sum_exp != nullptr)
            p.log_sum_exp[sum_row(p, batch, row.query, row.head)] = log_of_sum(top, total);
    } else {
        const int64_t part = at * p.splits + range;
        for (int i = 0; i < columns; i++) p.partial_o[part * p.head_dim + column + i] = values[i];
        if (column == 0) p.partial_sums[part] = make_float2(top, total);
    }
}

constexpr int few_warps(int d) { return d <= 128 ? 4 : 2; }
constexpr int few_stages(int d) { return d <= 64 ? 4 : 2; }

/// On tensor cores, sixteen rows from `first_row` on of a key head's, for a range of the keys, which are where
/// `keys` says.
template <typename T, int D, typename Keys>
__device__ __forceinline__ void few_block(const Parameters &p, const Keys &keys_at, int range,
                                          int batch, int kv_head, int first_row) {
    constexpr int ROWS = 16, WARPS = few_warps(D), STAGES = few_stages(D), THREADS = WARP * WARPS;
    constexpr int TILE = tile_bytes(16, D), CHUNKS = D / 8;
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t q_shared = shared_address(shared);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const FewRow from = few_row(p, kv_head, first_row + row);
        const bool valid = from.inside && chunk * 8 < p.head_dim;
        const T *q = static_cast<const T *>(p.q);
        if (valid)
            q = head_start(q, p.q_strides, batch, from.head) + from.query * p.q_strides[1] +
                chunk * 8;
        copy_async(q_shared + place<ROWS>(row, chunk), q, valid);
    }
    copy_async_commit();

    const int2 seen = few_keys(p, range, batch, kv_head, first_row, ROWS, lane);
    const int start = keys_at.template first<16 * WARPS>(seen.x);
    const int steps = (max(seen.y - start, 0) + 16 * WARPS - 1) / (16 * WARPS);
    int position[2], lowest[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const FewRow mine = few_row(p, kv_head, first_row + half * 8 + lane / 4);
        // Rows that don't exist see nothing.
        position[half] = mine.inside ? min(p.keys - p.queries + mine.query, seen.y - 1) : -1;
        lowest[half] = mine.inside ? max(lowest_key(p, batch, mine.query), seen.x) : 0;
    }

    const uint32_t mine = q_shared + TILE * (1 + warp * STAGES * 2);
    const auto stage = [&](int step) { return mine + step % STAGES * 2 * TILE; };
    const auto load = [&](int step) {
        if (step < steps) {
            const int first_key = start + (step * WARPS + warp) * 16, count = seen.y - first_key;
            const uint32_t to = stage(step);
            keys_at.template load<T, 16, D, WARP>(to, k, first_key, count, p.head_dim, lane);
            keys_at.template load<T, 16, D, WARP>(to + TILE, v, first_key, count, p.head_dim, lane);
        }
        copy_async_commit();
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);
    copy_async_wait<STAGES - 1>();
    // The queries are there.
    __syncthreads();

    float out[1][D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int step = 0; step < steps; step++) {
        load(step + STAGES - 1);
        const uint32_t keys = stage(step);
        copy_async_wait<STAGES - 1>();
        keys_at.template land<T, 16, D, WARP>(keys, k, lane);
        keys_at.template land<T, 16, D, WARP>(keys + TILE, v, lane);
        __syncwarp();
        const int first_key = start + (step * WARPS + warp) * 16;
        float scores[1][2][4] = {};
        multiply_rows<T, D, ROWS, 16, 1>(scores, q_shared, 0, keys, lane);
        shape_scores<16>(p, scores[0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            hide_scores<16>(scores[0], half, first_key, lowest[half], position[half], lane);
            const float shrink =
                soften_scores<16>(scores[0], half, p.factor, top[half], total[half]);
            scale_row<D>(out[0], half, shrink);
        }
        uint32_t weights[1][1][4];
        pack_weights<T, 16, 1>(weights, scores);
        multiply_columns<T, D, 16, 1>(out, weights, keys + TILE, lane);
        // The stage may be overwritten.
        __syncwarp();
    }
    copy_async_wait<0>();
    __syncthreads();

    // The warps' parts, in the place of their keys and values: (WARPS, ROWS, D), tops and totals.
    static_assert(ROWS * D * 4 <= STAGES * 2 * TILE, "a warp's part fits in its stages");
    float *const parts = reinterpret_cast<float *>(shared + TILE);
    constexpr int PART = STAGES * 2 * TILE / 4;
    float *const tops = parts + WARPS * PART, *const totals = tops + WARPS * ROWS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + lane / 4;
        const float sum = row_sum(total[half]);
        if (lane % 4 == 0) {
            tops[warp * ROWS + row] = top[half];
            totals[warp * ROWS + row] = sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float *const to = parts + warp * PART + row * D + n * 8 + lane % 4 * 2;
            to[0] = out[0][n][half * 2];
            to[1] = out[0][n][half * 2 + 1];
        }
    }
    __syncthreads();
    for (int index = threadIdx.x; index < ROWS * (D / 4); index += THREADS) {
        const int row = index / (D / 4), column = index % (D / 4) * 4;
        const FewRow to = few_row(p, kv_head, first_row + row);
        if (!to.inside || column >= p.head_dim) continue;
        float best = -INFINITY;
#pragma unroll
        for (int other = 0; other < WARPS; other++) best = fmaxf(best, tops[other * ROWS + row]);
        const float base = best == -INFINITY ? 0.0f : best;
        float sum = 0.0f, values[4] = {};
#pragma unroll
        for (int other = 0; other < WARPS; other++) {
            const float weight = fast_exp2(tops[other * ROWS + row] - base);
            const float4 part =
                *reinterpret_cast<const float4 *>(parts + other * PART + row * D + column);
            sum = fmaf(weight, totals[other * ROWS + row], sum);
            values[0] = fmaf(weight, part.x, values[0]);
            values[1] = fmaf(weight, part.y, values[1]);
            values[2] = fmaf(weight, part.z, values[2]);
            values[3] = fmaf(weight, part.w, values[3]);
        }
        store_part<T>(p, range, batch, to, column, 4, values, best, sum);
    }
}

template <typename T, int D> __device__ __forceinline__ void few_tiles(const Parameters &p) {
    follow_previous();
    const int row_tiles = (p.queries * (p.heads / p.kv_heads) + 15) / 16;
    few_block<T, D>(p, KeysInARow(), blockIdx.y, blockIdx.x / row_tiles / p.kv_heads,
                    blockIdx.x / row_tiles % p.kv_heads, blockIdx.x % row_tiles * 16);
}

constexpr int PLAIN_FEW_ROWS = 4, PLAIN_FEW_WARPS = 4, PLAIN_FEW_COLUMNS = 256;

/// As `few_block` for any element type and up to 256 columns, four rows: a warp takes 32 keys at a time, eight
/// lanes a key for the scores, all lanes a row of values.
template <typename T, typename Keys>
__device__ __forceinline__ void plain_few_block(const Parameters &p, const Keys &keys_at, int range,
                                                int batch, int kv_head, int first_row) {
    constexpr int ROWS = PLAIN_FEW_ROWS, WARPS = PLAIN_FEW_WARPS, COLUMNS = PLAIN_FEW_COLUMNS;
    constexpr int PER_LANE = COLUMNS / WARP;
    extern __shared__ __align__(1024) unsigned char shared[];
    // (ROWS, COLUMNS) queries, (WARPS, ROWS, WARP) scores, (WARPS, ROWS, COLUMNS) parts, and their
    // tops and totals.
    float *const q = reinterpret_cast<float *>(shared);
    float *const scores = q + ROWS * COLUMNS;
    float *const parts = scores + WARPS * ROWS * WARP;
    float *const tops = parts + WARPS * ROWS * COLUMNS, *const totals = tops + WARPS * ROWS;

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = p.head_dim;
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    for (int index = threadIdx.x; index < ROWS * d; index += WARP * WARPS) {
        const int row = index / d, column = index % d;
        const FewRow from = few_row(p, kv_head, first_row + row);
        const T *const start = head_start(static_cast<const T *>(p.q), p.q_strides, batch,
                                          from.inside ? from.head : 0);
        q[row * COLUMNS + column] =
            from.inside ? to_float(start[from.query * p.q_strides[1] + column]) : 0.0f;
    }
    const int2 seen = few_keys(p, range, batch, kv_head, first_row, ROWS, lane);
    int position[ROWS], lowest[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const FewRow mine = few_row(p, kv_head, first_row + row);
        position[row] = mine.inside ? min(p.keys - p.queries + mine.query, seen.y - 1) : -1;
        lowest[row] = mine.inside ? lowest_key(p, batch, mine.query) : 0;
    }
    __syncthreads();

    float out[ROWS][PER_LANE] = {}, top[ROWS], total[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; row++) top[row] = -INFINITY;
    float *const my_scores = scores + warp * ROWS * WARP;
    const int start_key = keys_at.template first<WARPS * WARP>(seen.x);
    for (int first_key = start_key + warp * WARP; first_key < seen.y;
         first_key += WARPS * WARP) {
        const int count = min(WARP, seen.y - first_key);
        for (int start = 0; start < count; start += 4) {
            // Beyond the last key, a key that exists, not to be used.
            const int key = min(first_key + start + lane / 8, seen.y - 1);
            // That of a block that isn't there is hidden.
            const auto line = k.line(max(keys_at.row(key), int64_t(0)));
            float sum[ROWS] = {};
#pragma unroll 8
            for (int column = lane % 8; column < d; column += 8) {
                const float x = line[column];
#pragma unroll
                for (int row = 0; row < ROWS; row++)
                    sum[row] = fmaf(x, q[row * COLUMNS + column], sum[row]);
            }
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
#pragma unroll
                for (int offset = 4; offset > 0; offset /= 2)
                    sum[row] += __shfl_xor_sync(FULL, sum[row], offset);
                if (lane % 8 == 0) my_scores[row * WARP + start + lane / 8] = sum[row];
            }
        }
        __syncwarp();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const int key = first_key + lane;
            const bool visible = key >= max(lowest[row], seen.x) && key <= position[row];
            float score = visible ? my_scores[row * WARP + lane] : -INFINITY;
            if (p.mode == SCALED) score = visible ? score * p.inner : -INFINITY;
            if (p.mode == CAPPED && visible) score = tanhf(score * p.inner);
            const float new_top = fmaxf(top[row], warp_max(score) * p.factor);
            const float base = new_top == -INFINITY ? 0.0f : new_top;
            const float shrink = exp2f(top[row] - base);
            const float power = exp2f(fmaf(score, p.factor, -base));
            top[row] = new_top;
            total[row] = fmaf(total[row], shrink, warp_sum(power));
            my_scores[row * WARP + lane] = power;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) out[row][i] *= shrink;
        }
        __syncwarp();
#pragma unroll 4
        for (int key = 0; key < count; key++) {
            const int64_t at = keys_at.row(first_key + key);
            const auto line = v.line(max(at, int64_t(0)));
            float weight[ROWS];
#pragma unroll
            for (int row = 0; row < ROWS; row++) weight[row] = my_scores[row * WARP + key];
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                const int column = i * WARP + lane;
                const float x = column < d && at >= 0 ? line[column] : 0.0f;
#pragma unroll
                for (int row = 0; row < ROWS; row++)
                    out[row][i] = fmaf(weight[row], x, out[row][i]);
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (lane == 0) {
            tops[warp * ROWS + row] = top[row];
            totals[warp * ROWS + row] = total[row];
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            parts[(warp * ROWS + row) * COLUMNS + i * WARP + lane] = out[row][i];
    }
    __syncthreads();
    // Also without columns, for the sum.
    const int columns = max(d, 1);
    for (int index = threadIdx.x; index < ROWS * columns; index += WARP * WARPS) {
        const int row = index / columns, column = index % columns;
        const FewRow to = few_row(p, kv_head, first_row + row);
        if (!to.inside) continue;
        float best = -INFINITY;
        for (int other = 0; other < WARPS; other++) best = fmaxf(best, tops[other * ROWS + row]);
        const float base = best == -INFINITY ? 0.0f : best;
        float sum = 0.0f, value = 0.0f;
        for (int other = 0; other < WARPS; other++) {
            const float weight = exp2f(tops[other * ROWS + row] - base);
            sum = fmaf(weight, totals[other * ROWS + row], sum);
            value = fmaf(weight, parts[(other * ROWS + row) * COLUMNS + column], value);
        }
        store_part<T>(p, range, batch, to, column, d == 0 ? 0 : 1, &value, best, sum);
    }
}

template <typename T> __device__ __forceinline__ void plain_few(const Parameters &p) {
    follow_previous();
    constexpr int ROWS = PLAIN_FEW_ROWS;
    const int row_tiles = (p.queries * (p.heads / p.kv_heads) + ROWS - 1) / ROWS;
    plain_few_block<T>(p, KeysInARow(), blockIdx.y, blockIdx.x / row_tiles / p.kv_heads,
                       blockIdx.x / row_tiles % p.kv_heads, blockIdx.x % row_tiles * ROWS);
}

/// Combines `count` parts of a row from part `first` on, by a block, with `count + 1` floats of shared memory.
template <typename T>
__device__ __forceinline__ void combine_row(const Parameters &p, int64_t row, int first,
                                            int count) {
    extern __shared__ __align__(1024) unsigned char shared[];
    float *const weights = reinterpret_cast<float *>(shared);
    float &total = weights[count];
    const float2 *const sums = p.partial_sums + row * p.splits + first;
    if (threadIdx.x < WARP) {
        float best = -INFINITY;
        for (int split = threadIdx.x; split < count; split += WARP)
            best = fmaxf(best, sums[split].x);
        best = warp_max(best);
        const float base = best == -INFINITY ? 0.0f : best;
        float sum = 0.0f;
        for (int split = threadIdx.x; split < count; split += WARP) {
            const float weight = exp2f(sums[split].x - base);
            weights[split] = weight;
            sum = fmaf(weight, sums[split].y, sum);
        }
        sum = warp_sum(sum);
        if (threadIdx.x == 0) total = sum;
        if (threadIdx.x == 0 && p.log_sum_exp != nullptr) {
            const int head = row % p.heads;
            const int64_t token = row / p.heads;
            p.log_sum_exp[sum_row(p, token / p.queries, token % p.queries, head)] =
                log_of_sum(best, sum);
        }
    }
    __syncthreads();
    const float inverse = inverse_of(total);
    const float *const parts = p.partial_o + (row * p.splits + first) * p.head_dim;
    for (int column = threadIdx.x; column < p.head_dim; column += blockDim.x) {
        float value = 0.0f;
#pragma unroll 8
        for (int split = 0; split < count; split++)
            value = fmaf(weights[split], parts[static_cast<int64_t>(split) * p.head_dim + column],
                         value);
        static_cast<T *>(p.o)[row * p.head_dim + column] = from_float<T>(value * inverse);
    }
}

template <typename T> __device__ __forceinline__ void combine_parts(const Parameters &p) {
    follow_previous();
    combine_row<T>(p, blockIdx.x, 0, p.splits);
}
