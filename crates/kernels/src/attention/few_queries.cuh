// The forward pass for few queries, as in decoding, where reading keys and values is all the time, and for any number of
// them with batch invariance: a block takes queries of all heads that share a key head, so that it reads that once, and
// one of `splits` ranges of the keys. Warps take turns with groups of keys; their results, and then those of the ranges,
// are combined in order. Positions alone say which warp takes a key, so where ranges begin at fixed ones, what a query
// gives depends on it and the keys that it sees alone.
#pragma once

#include "tiles.cuh"

/// Row `index` of a key head's queries: those of one query lie together.
struct FewRow {
    int query, head;
    bool inside;
};

__device__ __forceinline__ FewRow few_row(const Parameters &p, int kv_head, int index) {
    const int group = p.heads / p.kv_heads;
    // Decoding has one, and divisions take long.
    if (p.queries == 1) return {0, kv_head * group + index, index < group};
    return {index / group, kv_head * group + index % group, index < p.queries * group};
}

/// Where a block starts that sees keys from `key` on, and takes STEP of them at a time.
template <int STEP> __device__ __forceinline__ int first_of_step(int key) {
    return key / STEP * STEP;
}

/// The keys from `x` up to `y` of a range that any of `rows` rows from `first` on sees.
__device__ __forceinline__ int2 few_keys(const Parameters &p, int range, int batch, int kv_head,
                                         int first, int rows, int lane) {
    const int split = p.split_start + range * p.split_keys;
    if (p.queries == 1) {
        const int low = lowest_key(p, batch, 0);
        if (low >= p.keys) return make_int2(0, 0);
        return make_int2(max(low, split), min(p.keys, split + p.split_keys));
    }
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
    return make_int2(max(warp_min(smallest), split), min(warp_max(end), split + p.split_keys));
}

/// Writes one or four columns of a row: the result if keys aren't split, else the part to be combined.
/// `top` is the largest score in log2 units and `total` the sum of powers relative to it.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_part(const Parameters &p, int range, int batch,
                                           const FewRow &row, int column,
                                           const float (&values)[COLUMNS], float top, float total) {
    const int64_t at = query_row(p, batch, row.query, row.head);
    const bool inside = column < p.head_dim;
    if (p.splits == 1) {
        const float inverse = inverse_of(total);
        T *const o = static_cast<T *>(p.o) + at * p.head_dim + column;
        if constexpr (COLUMNS == 4) {
            if (inside)
                *reinterpret_cast<uint2 *>(o) =
                    make_uint2(pack_pair<T>(values[0] * inverse, values[1] * inverse),
                               pack_pair<T>(values[2] * inverse, values[3] * inverse));
        } else {
            if (inside) *o = from_float<T>(values[0] * inverse);
        }
        if (column == 0 && p.log_sum_exp != nullptr)
            p.log_sum_exp[sum_row(p, batch, row.query, row.head)] = log_of_sum(top, total);
    } else {
        const int64_t part = at * p.splits + range;
        float *const o = p.partial_o + part * p.head_dim + column;
        if constexpr (COLUMNS == 4) {
            if (inside)
                *reinterpret_cast<float4 *>(o) =
                    make_float4(values[0], values[1], values[2], values[3]);
        } else {
            if (inside) *o = values[0];
        }
        if (column == 0) p.partial_sums[part] = make_float2(top, total);
    }
}

/// Whether any of `rows` rows from `first_row` on sees a key of a range, but for the first keys of queries. Otherwise
/// nobody reads what the range gives.
__device__ __forceinline__ bool reaches(const Parameters &p, int range, int first_row, int rows) {
    const int group = p.heads / p.kv_heads, end = p.queries * group;
    if (first_row >= end) return false;
    const int before = p.keys - p.queries - p.split_start;
    const bool is_one = p.queries == 1;
    const int lowest = before + (is_one ? 0 : first_row / group) - p.window + 1;
    const int highest = before + (is_one ? 0 : (min(first_row + rows, end) - 1) / group);
    return range * p.split_keys <= highest && (range + 1) * p.split_keys > lowest;
}

/// Warps that take turns with groups of 16 keys, and groups that one has room for.
constexpr int few_warps(int d) { return d <= 128 ? 4 : 2; }
constexpr int few_stages(int d, int tiles) { return d <= 64 || tiles > 1 ? 4 : 2; }
constexpr int few_threads(int d, int tiles) { return few_warps(d) * tiles * WARP; }

/// Queries as they are.
struct GivenQueries {
    /// Whether the last of the keys is there once `bring` has ended, and not before.
    static constexpr bool BRING_A_KEY = false;

    /// Starts to copy the rows of a key head's queries from `first_row` on into a tile.
    template <typename T, int D, int ROWS, int THREADS>
    __device__ __forceinline__ void bring(const Parameters &p, uint32_t tile, int, int batch, int kv_head,
                                          int first_row) const {
        constexpr int CHUNKS = D / 8;
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            const FewRow from = few_row(p, kv_head, first_row + row);
            const bool valid = from.inside && chunk * 8 < p.head_dim;
            const T *q = static_cast<const T *>(p.q);
            if (valid)
                q = head_start(q, p.q_strides, batch, from.head) + from.query * p.q_strides[1] +
                    chunk * 8;
            copy_async(tile + place<ROWS>(row, chunk), q, valid);
        }
    }
};

/// On tensor cores, 16·TILES rows from `first_row` on of a key head's, for a range of the keys. Keys and queries are
/// where `keys_at` and `queries_at` say. Warps that have the same keys for one tile of rows each share them. A row has
/// the same bits whatever TILES is.
template <typename T, int D, int TILES, typename Keys, typename Queries>
__device__ __forceinline__ void few_block(const Parameters &p, const Keys &keys_at,
                                          const Queries &queries_at, int range, int batch,
                                          int kv_head, int first_row) {
    constexpr int ROWS = 16 * TILES, WARPS = few_warps(D), STAGES = few_stages(D, TILES);
    constexpr int THREADS = few_threads(D, TILES), SHARING = WARP * TILES;
    constexpr int TILE = tile_bytes(16, D), QUERIES = tile_bytes(ROWS, D);
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t q_shared = shared_address(shared);

    // Which keys this warp has, and which rows.
    const int warp = threadIdx.x / SHARING, thread = threadIdx.x % SHARING;
    const int lane = thread % WARP, tile = thread / WARP;
    const auto meet = [&] {
        if constexpr (TILES == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + warp), "n"(SHARING) : "memory");
    };
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    const int2 seen = few_keys(p, range, batch, kv_head, first_row, ROWS, lane);
    const int start = first_of_step<16 * WARPS>(seen.x);
    const int steps = (max(seen.y - start, 0) + 16 * WARPS - 1) / (16 * WARPS);
    const uint32_t mine = q_shared + QUERIES + TILE * warp * STAGES * 2;
    const auto stage = [&](int step) { return mine + step % STAGES * 2 * TILE; };
    // Where the next keys are is asked for a step ahead.
    int64_t row = steps > 0 ? keys_at.row(start + warp * 16) : -1;
    const auto load = [&](int step) {
        if (step < steps) {
            const int first_key = start + (step * WARPS + warp) * 16, count = seen.y - first_key;
            const int64_t at = count > 0 ? row : -1;
            if (step + 1 < steps) row = keys_at.row(first_key + 16 * WARPS);
            keys_at.template load_sixteen<T, D, SHARING>(stage(step), k, v, at, count, p.head_dim, thread);
        }
        copy_async_commit();
    };
    bool has_begun = false;
    if constexpr (Queries::BRING_A_KEY) {
        has_begun = start + (warp + 1) * 16 < p.keys;
        if (has_begun) load(0);
    }
    queries_at.template bring<T, D, ROWS, THREADS>(p, q_shared, range, batch, kv_head, first_row);
    copy_async_commit();
    int position[2], lowest[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const FewRow mine = few_row(p, kv_head, first_row + tile * 16 + half * 8 + lane / 4);
        // Rows that don't exist see nothing.
        position[half] = mine.inside ? min(p.keys - p.queries + mine.query, seen.y - 1) : -1;
        lowest[half] = mine.inside ? max(lowest_key(p, batch, mine.query), seen.x) : 0;
    }

    // The keys that all of the rows see. Few rows are seldom whole tiles.
    int all_from = INT_MAX, all_to = -1;
    if constexpr (TILES > 1) {
        all_from = warp_max(max(lowest[0], lowest[1]));
        all_to = warp_min(min(position[0], position[1]));
    }

    for (int step = has_begun; step < STAGES - 1; step++) load(step);
    if constexpr (!Queries::BRING_A_KEY) copy_async_wait<STAGES - 1>();
    // The queries are there.
    __syncthreads();

    float out[1][D / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int step = 0; step < steps; step++) {
        load(step + STAGES - 1);
        const uint32_t keys = stage(step);
        copy_async_wait<STAGES - 1>();
        keys_at.template land<T, 16, D, SHARING>(keys, k, thread);
        keys_at.template land<T, 16, D, SHARING>(keys + TILE, v, thread);
        meet();
        const int first_key = start + (step * WARPS + warp) * 16;
        const bool hides = first_key < all_from || first_key + 15 > all_to;
        float scores[1][2][4] = {};
        multiply_rows<T, D, ROWS, 16, 1>(scores, q_shared, tile * 16, keys, lane);
        shape_scores<16>(p, scores[0]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (hides)
                hide_scores<16>(scores[0], half, first_key, lowest[half], position[half], lane);
            const float shrink =
                soften_scores<16>(scores[0], half, p.factor, top[half], total[half]);
            // Most often by 1, as the largest score is found early.
            if (__any_sync(FULL, shrink != 1.0f)) scale_row<D>(out[0], half, shrink);
        }
        uint32_t weights[1][1][4];
        pack_weights<T, 16, 1>(weights, scores);
        multiply_columns<T, D, 16, 1>(out, weights, keys + TILE, lane);
        // The stage may be overwritten.
        meet();
    }
    copy_async_wait<0>();
    __syncthreads();

    // The warps' parts, in the place of their keys and values: (WARPS, ROWS, D), tops and totals. Four neighbouring
    // columns lie where the row says, so that rows don't share banks.
    static_assert(ROWS * D * 4 <= STAGES * 2 * TILE, "a warp's part fits in its stages");
    float *const parts = reinterpret_cast<float *>(shared + QUERIES);
    constexpr int PART = STAGES * 2 * TILE / 4;
    float *const tops = parts + WARPS * PART, *const totals = tops + WARPS * ROWS;
    const auto part_of = [&](int of, int row, int four) {
        return parts + of * PART + row * D + (four ^ row % 4 * 2) * 4;
    };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int first = tile * 16 + half * 8, row = first + lane / 4;
        if (!few_row(p, kv_head, first_row + first).inside) break;
        const float sum = row_sum(total[half]);
        if (lane % 4 == 0) {
            tops[warp * ROWS + row] = top[half];
            totals[warp * ROWS + row] = sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            float *const to = part_of(warp, row, n * 2 + lane % 4 / 2) + lane % 2 * 2;
            *reinterpret_cast<float2 *>(to) =
                make_float2(out[0][n][half * 2], out[0][n][half * 2 + 1]);
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
            const float4 part = *reinterpret_cast<const float4 *>(part_of(other, row, column / 4));
            sum = fmaf(weight, totals[other * ROWS + row], sum);
            values[0] = fmaf(weight, part.x, values[0]);
            values[1] = fmaf(weight, part.y, values[1]);
            values[2] = fmaf(weight, part.z, values[2]);
            values[3] = fmaf(weight, part.w, values[3]);
        }
        store_part<T, 4>(p, range, batch, to, column, values, best, sum);
    }
}

/// Calls `work` with the range, the row of the batch, the key head, and the first row of it that this block has, if any
/// of its rows sees the range.
template <int ROWS, typename Work>
__device__ __forceinline__ void for_few(const Parameters &p, const Work &work) {
    follow_previous();
    const int row_tiles = (p.queries * (p.heads / p.kv_heads) + ROWS - 1) / ROWS;
    const int range = blockIdx.y, head = blockIdx.x / row_tiles;
    const int first_row = blockIdx.x % row_tiles * ROWS;
    if (reaches(p, range, first_row, ROWS))
        work(range, head / p.kv_heads, head % p.kv_heads, first_row);
}

template <typename T, int D, int TILES>
__device__ __forceinline__ void few_tiles(const Parameters &p) {
    for_few<16 * TILES>(p, [&](int range, int batch, int kv_head, int first_row) {
        few_block<T, D, TILES>(p, KeysInARow(), GivenQueries(), range, batch, kv_head, first_row);
    });
}

constexpr int COMBINE_WARPS = 4, FEW_PARTS = 8;
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
    const int start_key = first_of_step<WARPS * WARP>(seen.x);
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
        float sum = 0.0f, value[1] = {};
        for (int other = 0; other < WARPS; other++) {
            const float weight = exp2f(tops[other * ROWS + row] - base);
            sum = fmaf(weight, totals[other * ROWS + row], sum);
            value[0] = fmaf(weight, parts[(other * ROWS + row) * COLUMNS + column], value[0]);
        }
        store_part<T, 1>(p, range, batch, to, column, value, best, sum);
    }
}

template <typename T> __device__ __forceinline__ void plain_few(const Parameters &p) {
    for_few<PLAIN_FEW_ROWS>(p, [&](int range, int batch, int kv_head, int first_row) {
        plain_few_block<T>(p, KeysInARow(), range, batch, kv_head, first_row);
    });
}

/// What COLUMNS neighbouring columns from `parts` on sum up to, of every STEP-th part from `first` on, `pitch` numbers
/// apart.
template <int COLUMNS, int STEP>
__device__ __forceinline__ void sum_parts(float (&sums)[COLUMNS], const float *parts, int pitch,
                                          const float *weights, int first, int count) {
#pragma unroll 4
    for (int split = first; split < count; split += STEP) {
        const float *const part = parts + static_cast<int64_t>(split) * pitch;
        if constexpr (COLUMNS == 4) {
            const float4 four = *reinterpret_cast<const float4 *>(part);
            sums[0] = fmaf(weights[split], four.x, sums[0]);
            sums[1] = fmaf(weights[split], four.y, sums[1]);
            sums[2] = fmaf(weights[split], four.z, sums[2]);
            sums[3] = fmaf(weights[split], four.w, sums[3]);
        } else {
            sums[0] = fmaf(weights[split], *part, sums[0]);
        }
    }
}

__device__ __forceinline__ void write_log_sum_exp(const Parameters &p, int64_t row, float best, float sum) {
    if (p.log_sum_exp == nullptr) return;
    const int head = row % p.heads;
    const int64_t token = row / p.heads;
    p.log_sum_exp[sum_row(p, token / p.queries, token % p.queries, head)] = log_of_sum(best, sum);
}

/// Combines up to FEW_PARTS parts of a row from part `first` on, by a warp, with the bits of combine_row; four columns
/// are a lane's at a time.
template <typename T>
__device__ __forceinline__ void combine_few(const Parameters &p, int64_t row, int first, int count) {
    const float2 *const sums = p.partial_sums + row * p.splits + first;
    const float *const parts = p.partial_o + (row * p.splits + first) * p.head_dim;
    const int lane = threadIdx.x % WARP;
    const bool has_part = lane < count;
    const float2 part = has_part ? sums[lane] : make_float2(-INFINITY, 0.0f);
    const float best = warp_max(part.x), base = best == -INFINITY ? 0.0f : best;
    const float weight = has_part ? exp2f(part.x - base) : 0.0f;
    const float sum = warp_sum(weight * part.y);
    if (lane == 0) write_log_sum_exp(p, row, best, sum);
    const float inverse = inverse_of(sum);
    // All lanes take part in handing weights around.
    for (int start = 0; start < p.head_dim; start += 4 * WARP) {
        const int column = start + lane * 4;
        const bool inside = column < p.head_dim;
        const float *const from = parts + (inside ? column : 0);
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
        for (int split = 0; split < count; split++) {
            const float4 values = *reinterpret_cast<const float4 *>(from + split * p.head_dim);
            const float of_part = __shfl_sync(FULL, weight, split);
            four.x = fmaf(of_part, values.x, four.x);
            four.y = fmaf(of_part, values.y, four.y);
            four.z = fmaf(of_part, values.z, four.z);
            four.w = fmaf(of_part, values.w, four.w);
        }
        if (!inside) continue;
        T *const o = static_cast<T *>(p.o) + row * p.head_dim + column;
        o[0] = from_float<T>(four.x * inverse);
        o[1] = from_float<T>(four.y * inverse);
        o[2] = from_float<T>(four.z * inverse);
        o[3] = from_float<T>(four.w * inverse);
    }
}

/// Combines `count` parts of a row from part `first` on, by a block of COMBINE_WARPS. Where there are many, each warp has
/// every fourth: a row has always as many, so its bits stay the same.
template <typename T>
__device__ __forceinline__ void combine_row(const Parameters &p, int64_t row, int first,
                                            int count) {
    // Weights of the parts, their total, and (COMBINE_WARPS, head_dim) sums.
    extern __shared__ __align__(1024) unsigned char shared[];
    float *const weights = reinterpret_cast<float *>(shared);
    float &total = weights[count];
    const float2 *const sums = p.partial_sums + row * p.splits + first;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (warp == 0) {
        float best = -INFINITY;
        for (int split = lane; split < count; split += WARP) best = fmaxf(best, sums[split].x);
        best = warp_max(best);
        const float base = best == -INFINITY ? 0.0f : best;
        float sum = 0.0f;
        for (int split = lane; split < count; split += WARP) {
            const float weight = exp2f(sums[split].x - base);
            weights[split] = weight;
            sum = fmaf(weight, sums[split].y, sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            total = sum;
            write_log_sum_exp(p, row, best, sum);
        }
    }
    __syncthreads();
    const float inverse = inverse_of(total);
    const float *const parts = p.partial_o + (row * p.splits + first) * p.head_dim;
    T *const o = static_cast<T *>(p.o) + row * p.head_dim;
    if (count <= FEW_PARTS || p.head_dim % 4 != 0) {
        for (int column = threadIdx.x; column < p.head_dim; column += COMBINE_WARPS * WARP) {
            float one[1] = {};
            sum_parts<1, 1>(one, parts + column, p.head_dim, weights, 0, count);
            o[column] = from_float<T>(one[0] * inverse);
        }
        return;
    }
    float *const sums_of_warps = weights + (count + 4) / 4 * 4;
    for (int column = lane * 4; column < p.head_dim; column += 4 * WARP) {
        float four[4] = {};
        sum_parts<4, COMBINE_WARPS>(four, parts + column, p.head_dim, weights, warp, count);
        *reinterpret_cast<float4 *>(sums_of_warps + warp * p.head_dim + column) =
            make_float4(four[0], four[1], four[2], four[3]);
    }
    __syncthreads();
    for (int column = threadIdx.x; column < p.head_dim; column += COMBINE_WARPS * WARP) {
        float value = 0.0f;
#pragma unroll
        for (int other = 0; other < COMBINE_WARPS; other++)
            value += sums_of_warps[other * p.head_dim + column];
        o[column] = from_float<T>(value * inverse);
    }
}

/// The parts that the ranges which a query sees, but for its first key, gave.
struct Parts {
    int first, count;
};

__device__ __forceinline__ Parts parts_of(const Parameters &p, int query) {
    const int position = p.keys - p.queries + query - p.split_start;
    const int first = max(position - p.window + 1, 0) / p.split_keys;
    return {first, position / p.split_keys - first + 1};
}

/// Combines what they gave a head.
template <typename T>
__device__ __forceinline__ void combine_query(const Parameters &p, int64_t row, int query) {
    const Parts parts = parts_of(p, query);
    combine_row<T>(p, row, parts.first, parts.count);
}

template <typename T> __device__ __forceinline__ void combine_parts(const Parameters &p) {
    follow_previous();
    combine_query<T>(p, blockIdx.x, blockIdx.x / p.heads % p.queries);
}
