// The forward pass for few queries, as in decoding, where reading keys and values is all the time: a block takes queries
// of all heads that share a key head, so that it reads that once, and a range of the keys. It joins what the segments of
// that give, or, where other blocks have other ranges, leaves them as parts, which a kernel joins later, or the blocks of a
// cluster among themselves.
#pragma once

#include "tiles.cuh"
#include "warpgroup.cuh"

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

/// The keys of a range that any of `rows` rows from `first_row` on sees, but for the first keys of queries; none where the
/// second number isn't larger.
__device__ __forceinline__ int2 few_keys(const Parameters &p, int range, int first_row, int rows) {
    const int group = p.heads / p.kv_heads, end = p.queries * group;
    if (first_row >= end) return make_int2(0, 0);
    const int before = p.keys - p.queries;
    const bool is_one = p.queries == 1;
    const int first = before + (is_one ? 0 : first_row / group);
    const int last = before + (is_one ? 0 : (min(first_row + rows, end) - 1) / group);
    const int start = p.split_start + range * p.split_keys;
    const int64_t beyond = static_cast<int64_t>(start) + p.split_keys;
    return make_int2(max(first - p.window + 1, start), static_cast<int>(min(last + int64_t(1), beyond)));
}

/// The part that begins with a key.
__device__ __forceinline__ int part_of(const Parameters &p, int key) { return (key - p.split_start) / p.part_keys; }

/// Writes neighbouring columns of a row of the result.
template <typename T, int COLUMNS>
__device__ __forceinline__ void store_result(const Parameters &p, int64_t row, int column, const float (&values)[COLUMNS],
                                             float inverse) {
    if (column >= p.head_dim) return;
    T *const o = static_cast<T *>(p.o) + row * p.head_dim + column;
    if constexpr (COLUMNS == 2)
        *reinterpret_cast<uint32_t *>(o) = pack_pair<T>(values[0] * inverse, values[1] * inverse);
    else
        *o = from_float<T>(values[0] * inverse);
}

/// The same of a part that is to be joined with others.
template <int COLUMNS>
__device__ __forceinline__ void store_part(const Parameters &p, int64_t row, int part, int column,
                                           const float (&values)[COLUMNS]) {
    if (column >= p.head_dim) return;
    float *const o = p.partial_o + (row * p.parts + part) * p.head_dim + column;
    if constexpr (COLUMNS == 2)
        *reinterpret_cast<float2 *>(o) = make_float2(values[0], values[1]);
    else
        *o = values[0];
}

__device__ __forceinline__ void store_sums(const Parameters &p, int64_t row, int part, const RowSums &sums) {
    p.partial_sums[row * p.parts + part] = make_float2(sums.top, sums.total);
}

__device__ __forceinline__ void store_log_sum_exp(const Parameters &p, int64_t row, const RowEnd &end) {
    if (p.log_sum_exp == nullptr) return;
    const int head = row % p.heads;
    const int64_t token = row / p.heads;
    p.log_sum_exp[sum_row(p, token / p.queries, token % p.queries, head)] = end.log_sum_exp;
}

/// Warps of a block, each of which brings a quarter of a segment's keys and values, and segments that there is room for.
constexpr int FEW_WARPS = 4, FEW_THREADS = FEW_WARPS * WARP, FEW_ROWS = 16;
constexpr int few_stages(int d) { return d <= 128 ? 2 : 1; }

/// The last key of a sequence and its value, in chunks, where they are brought with the queries.
template <int CHUNKS> struct BroughtKey {
    uint4 key[CHUNKS], value[CHUNKS];
    bool is_there;

    /// Puts a row into a tile of sixteen, by a warp.
    __device__ __forceinline__ static void put(uint32_t tile, int row, const uint4 (&from)[CHUNKS], int chunks,
                                               int lane) {
        for (int chunk = lane; chunk < chunks; chunk += WARP) store_chunk(tile + place<16>(row, chunk), from[chunk]);
    }
};

/// Queries as they are.
struct GivenQueries {
    /// Whether the last of the keys comes with the queries, and is not where the others are.
    static constexpr bool BRING_A_KEY = false;

    /// Starts to copy the rows of a key head's queries from `first_row` on into a tile.
    template <typename T, int D, int ROWS, int THREADS, typename Key>
    __device__ __forceinline__ void bring(const Parameters &p, uint32_t tile, bool, Key &, int batch, int kv_head,
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

/// What the warps of a block tell each other of a segment: the largest score of each row, every thread's sums, and the
/// powers as they are multiplied with values.
struct FewExchange {
    float tops[FEW_WARPS][FEW_ROWS];
    float2 sums[FEW_WARPS][WARP];
    uint4 weights[FEW_WARPS][WARP];
};

/// Parts that are left in memory, unless a block has all keys of its rows, and joins them itself.
struct PartsInMemory {
    __device__ __forceinline__ static bool are_left(const Parameters &p) { return p.parts != 1; }
    __device__ __forceinline__ void begin() const {}

    template <int COLUMNS>
    __device__ __forceinline__ void store(const Parameters &p, int64_t row, int, int segment, int column,
                                          const float (&values)[COLUMNS]) const {
        store_part(p, row, part_of_segment(p, segment), column, values);
    }
    __device__ __forceinline__ void store_sums_of(const Parameters &p, int64_t row, int, int segment, int warp, int lane,
                                                  const RowSums &sums) const {
        if (warp == 0 && lane % 4 == 0) store_sums(p, row, part_of_segment(p, segment), sums);
    }

  private:
    /// On tensor cores parts are segments.
    __device__ __forceinline__ static int part_of_segment(const Parameters &p, int segment) {
        return segment - p.split_start / SEGMENT;
    }
};

/// On tensor cores, FEW_ROWS rows from `first_row` on of a key head's, for the keys from `seen.x` up to `seen.y`. Keys
/// and queries are where `keys_at` and `queries_at` say, and `parts` is where parts are left. Every warp makes the scores
/// of sixteen keys of a segment, and gives some of the columns.
template <typename T, int D, typename Keys, typename Queries, typename Parts>
__device__ __forceinline__ void few_block(const Parameters &p, const Keys &keys_at,
                                          const Queries &queries_at, const Parts &parts, int2 seen, int batch,
                                          int kv_head, int first_row) {
    constexpr int ROWS = FEW_ROWS, SIXTEENS = (D / 16 + FEW_WARPS - 1) / FEW_WARPS, STAGES = few_stages(D);
    // Segments of keys, and then as many of values: a tile of sixteen for each warp.
    constexpr int TILE = tile_bytes(16, D), PANEL = 16 * ROW_BYTES, OF_SEGMENT = FEW_WARPS * TILE;
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ FewExchange exchange;
    __shared__ BroughtKey<Queries::BRING_A_KEY ? D / 8 : 1> brought;
    const uint32_t q_shared = shared_address(shared), k_shared = q_shared + tile_bytes(ROWS, D);
    const uint32_t v_shared = k_shared + STAGES * OF_SEGMENT;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    const int first_segment = seen.x / SEGMENT;
    const int segments = (seen.y + SEGMENT - 1) / SEGMENT - first_segment;
    const int mine = first_segment * SEGMENT + warp * 16;
    // Where the next keys are is asked for a step ahead.
    int64_t row_of_keys = keys_at.row(mine), row_of_values = -1;
    const auto count = [&](int step) { return seen.y - (mine + step * SEGMENT); };
    const auto load_keys = [&](int step) {
        if (step < segments) {
            row_of_values = count(step) > 0 ? row_of_keys : -1;
            if (step + 1 < segments) row_of_keys = keys_at.row(mine + (step + 1) * SEGMENT);
            keys_at.template load_sixteen<T, D, WARP>(k_shared + step % STAGES * OF_SEGMENT + warp * TILE, k, row_of_values,
                                                      count(step), p.head_dim, lane);
        }
        copy_async_commit();
    };
    const auto load_values = [&](int step, int64_t row) {
        if (step < segments)
            keys_at.template load_sixteen<T, D, WARP>(v_shared + step % STAGES * OF_SEGMENT + warp * TILE, v, row, count(step),
                                                      p.head_dim, lane);
        copy_async_commit();
    };
    if constexpr (Queries::BRING_A_KEY) {
        // Whoever writes them, keys and values are asked for while the kernel before ends.
        if (lane < 16 && row_of_keys >= 0 && lane < count(0)) {
            k.fetch_ahead(row_of_keys + lane, p.head_dim);
            v.fetch_ahead(row_of_keys + lane, p.head_dim);
        }
        follow_previous();
        load_keys(0);
        load_values(0, row_of_values);
    }
    const bool brings = Queries::BRING_A_KEY && seen.y == p.keys;
    queries_at.template bring<T, D, ROWS, FEW_THREADS>(p, q_shared, brings, brought, batch, kv_head, first_row);
    if constexpr (!Queries::BRING_A_KEY) copy_async_commit();
    int position[2], lowest[2];
    int64_t to[2];
    bool inside[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const FewRow mine = few_row(p, kv_head, first_row + half * 8 + lane / 4);
        // Rows that don't exist see everything, so that they hide nothing.
        position[half] = mine.inside ? min(p.keys - p.queries + mine.query, seen.y - 1) : seen.y - 1;
        lowest[half] = mine.inside ? max(lowest_key(p, batch, mine.query), seen.x) : seen.x;
        to[half] = query_row(p, batch, mine.query, mine.head);
        inside[half] = mine.inside;
    }
    // Most often there are few heads of a key head, and one query.
    const int halves = p.queries * (p.heads / p.kv_heads) - first_row > 8 ? 2 : 1;
    // The keys that all of the rows see.
    const int all_from = warp_max(max(lowest[0], lowest[1]));
    const int all_to = warp_min(min(position[0], position[1]));

    if constexpr (!Queries::BRING_A_KEY) {
        load_keys(0);
        load_values(0, row_of_values);
    }
    if constexpr (STAGES == 2) {
        load_keys(1);
        copy_async_commit();
    }
    if constexpr (!Queries::BRING_A_KEY) copy_async_wait<STAGES == 2 ? 4 : 2>();
    // The queries are there, and what came with them.
    __syncthreads();
    // The row of the key that is brought among a warp's of the last step.
    const int brought_row = brings && brought.is_there ? p.keys - 1 - (mine + (segments - 1) * SEGMENT) : -1;
    const auto put_brought = [&](int step, uint32_t tile, const auto &from) {
        if (Queries::BRING_A_KEY && step == segments - 1 && brought_row >= 0 && brought_row < 16)
            brought.put(tile, brought_row, from, p.head_dim / 8, lane);
    };
    const Sixteen<D> queries(q_shared, lane);
    float out[SIXTEENS][2][4] = {};
    RowSums sums[2];
    parts.begin();
    for (int step = 0; step < segments; step++) {
        const uint32_t keys = k_shared + step % STAGES * OF_SEGMENT + warp * TILE, values = v_shared + step % STAGES * OF_SEGMENT;
        copy_async_wait<STAGES == 2 ? 3 : 1>();
        keys_at.template land<T, 16, D, WARP>(keys, k, lane);
        __syncwarp();
        if constexpr (Queries::BRING_A_KEY) {
            put_brought(step, keys, brought.key);
            __syncwarp();
        }
        float scores[1][2][4] = {};
        multiply_sixteen<T, D>(scores[0], queries, keys, lane);
        __syncwarp();
        const int64_t row_of_next = row_of_values;
        load_keys(step + STAGES);
        shape_scores<16>(p, scores[0]);
        const int first_key = mine + step * SEGMENT;
        const bool hides = first_key < all_from || first_key + 15 > all_to;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half == halves) break;
            if (hides) hide_scores<16>(scores[0], half, first_key, lowest[half], position[half], lane);
            const float top = largest_score<16>(scores[0], half, p.factor);
            if (lane % 4 == 0) exchange.tops[warp][half * 8 + lane / 4] = top;
        }
        // Every warp is done with the values before, too.
        __syncthreads();
        if constexpr (STAGES == 2) load_values(step + 1, row_of_next);
        RowSums next[2];
        float own_sums[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            own_sums[half] = 0.0f;
            if (half == halves) break;
#pragma unroll
            for (int other = 0; other < FEW_WARPS; other++)
                next[half].top = fmaxf(next[half].top, exchange.tops[other][half * 8 + lane / 4]);
            own_sums[half] = raise_scores<16>(scores[0], half, p.factor, base_of(next[half].top));
        }
        uint32_t of_sixteen[1][1][4];
        pack_weights<T, 16, 1>(of_sixteen, scores);
        exchange.sums[warp][lane] = make_float2(own_sums[0], own_sums[1]);
        const uint32_t(&own)[4] = of_sixteen[0][0];
        exchange.weights[warp][lane] = make_uint4(own[0], own[1], own[2], own[3]);
        copy_async_wait<STAGES == 2 ? 2 : 1>();
        keys_at.template land<T, 16, D, WARP>(values + warp * TILE, v, lane);
        if constexpr (Queries::BRING_A_KEY) {
            __syncwarp();
            put_brought(step, values + warp * TILE, brought.value);
        }
        __syncthreads();
        uint32_t weights[1][SEGMENT / 16][4];
#pragma unroll
        for (int other = 0; other < FEW_WARPS; other++) {
            const uint4 of_keys = exchange.weights[other][lane];
            weights[0][other][0] = of_keys.x;
            weights[0][other][1] = of_keys.y;
            weights[0][other][2] = of_keys.z;
            weights[0][other][3] = of_keys.w;
            const float2 sum = exchange.sums[other][lane];
            next[0].total += sum.x;
            next[1].total += sum.y;
        }
        float after[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half == halves) break;
            next[half].total = row_sum(next[half].total);
            if (parts.are_left(p)) continue;
            const Joint joint = join(sums[half], next[half]);
#pragma unroll
            for (int i = 0; i < SIXTEENS; i++) scale_row<16>(out[i], half, joint.before);
            after[half] = joint.after;
        }
#pragma unroll
        for (int i = 0; i < SIXTEENS; i++) {
            float part[1][2][4] = {};
            if (D % 64 != 0 && i * 64 + warp * 16 >= D) break;
            multiply_sixteen_columns<T, SEGMENT, 1, TILE, PANEL>(part, weights, values, i, warp, lane);
            if (!parts.are_left(p)) {
                add_columns(after, out[i][0], out[i][1], part[0]);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = i * 64 + warp * 16 + lane % 4 * 2, row = half * 8 + lane / 4;
                const int segment = first_segment + step;
                if (!inside[half]) continue;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float pair[2] = {part[0][n][half * 2], part[0][n][half * 2 + 1]};
                    parts.store(p, to[half], row, segment, column + n * 8, pair);
                }
                if (i == 0) parts.store_sums_of(p, to[half], row, segment, warp, lane, next[half]);
            }
        }
        if constexpr (STAGES == 1) {
            __syncthreads();
            load_values(step + 1, row_of_values);
        }
    }
    if (parts.are_left(p)) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (!inside[half]) continue;
        const int head = few_row(p, kv_head, first_row + half * 8 + lane / 4).head;
        const RowEnd end = end_row<T>(p, head, sums[half]);
#pragma unroll
        for (int i = 0; i < SIXTEENS; i++) {
            const int column = i * 64 + warp * 16 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float pair[2] = {out[i][n][half * 2], out[i][n][half * 2 + 1]};
                store_result<T, 2>(p, to[half], column + n * 8, pair, end.factor);
            }
        }
        if (warp == 0 && lane % 4 == 0) store_log_sum_exp(p, to[half], end);
    }
}

#if defined(HOPPER)

/// Blocks of a cluster that share the keys of a query, and segments of these at most. `cluster_shared` in cuda.rs knows the
/// sizes.
constexpr int SHARING_BLOCKS = 8, SHARED_SEGMENTS = 24;

/// Parts in the shared memory of a cluster's blocks. Each joins every SHARING_BLOCKS-th sixteen of the columns: it is given
/// these of all segments, and the sums. Of one segment none is left.
template <int D> struct PartsInCluster {
    static constexpr int SIXTEENS = (D / 16 + SHARING_BLOCKS - 1) / SHARING_BLOCKS;
    static constexpr int OF_SIXTEEN = FEW_ROWS * 16, OF_SEGMENT = SIXTEENS * OF_SIXTEEN;

    /// (SHARED_SEGMENTS, SIXTEENS, FEW_ROWS, 16), and (SHARED_SEGMENTS, FEW_ROWS) sums.
    float *values;
    float2 *sums;
    int first_segment, segments;

    __device__ __forceinline__ PartsInCluster(unsigned char *shared, int first_segment, int segments)
        : values(reinterpret_cast<float *>(shared)),
          sums(reinterpret_cast<float2 *>(values + SHARED_SEGMENTS * OF_SEGMENT)), first_segment(first_segment),
          segments(segments) {}

    __device__ __forceinline__ bool are_left(const Parameters &) const { return segments > 1; }

    /// Until the others have begun, nothing may be given to them.
    __device__ __forceinline__ void begin() const {
        if (segments > 1) cluster_wait();
    }

    __device__ __forceinline__ void store(const Parameters &, int64_t, int row, int segment, int column,
                                          const float (&pair)[2]) const {
        const int sixteen = column / 16;
        const float *const to = values + (segment - first_segment) * OF_SEGMENT +
                                sixteen / SHARING_BLOCKS * OF_SIXTEEN + row * 16 + column % 16;
        store_in_block(in_block(shared_address(to), sixteen % SHARING_BLOCKS), make_float2(pair[0], pair[1]));
    }
    __device__ __forceinline__ void store_sums_of(const Parameters &, int64_t, int row, int segment, int warp, int lane,
                                                  const RowSums &of_row) const {
        constexpr int OF_WARP = SHARING_BLOCKS / FEW_WARPS;
        if (lane % 4 >= OF_WARP) return;
        const float2 *const to = sums + (segment - first_segment) * FEW_ROWS + row;
        store_in_block(in_block(shared_address(to), warp * OF_WARP + lane % 4), make_float2(of_row.top, of_row.total));
    }

    /// Joins this block's columns.
    template <typename T>
    __device__ __forceinline__ void join_columns(const Parameters &p, int batch, int kv_head, int first_row) const {
        static_assert(FEW_THREADS == FEW_ROWS * 8, "a pair of columns for each thread");
        const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 2;
        const FewRow mine = few_row(p, kv_head, first_row + row);
        if (!mine.inside) return;
#pragma unroll
        for (int i = 0; i < SIXTEENS; i++) {
            const int first_column = (i * SHARING_BLOCKS + cluster_rank()) * 16;
            if (first_column >= p.head_dim) return;
            RowSums of_row;
            float pair[2] = {};
#pragma unroll 8
            for (int segment = 0; segment < segments; segment++) {
                const float2 next_sums = sums[segment * FEW_ROWS + row];
                const float2 next = *reinterpret_cast<const float2 *>(values + segment * OF_SEGMENT +
                                                                      i * OF_SIXTEEN + row * 16 + column);
                const Joint joint = join(of_row, {next_sums.x, next_sums.y});
                pair[0] = joint.of(pair[0], next.x);
                pair[1] = joint.of(pair[1], next.y);
            }
            store_result<T, 2>(p, query_row(p, batch, mine.query, mine.head), first_column + column, pair,
                               end_row<T>(p, mine.head, of_row).factor);
        }
    }
};

/// `few_block` by the blocks of a cluster, each of which has some of the segments that are seen.
template <typename T, int D, typename Keys, typename Queries>
__device__ __forceinline__ void few_blocks_together(const Parameters &p, const Keys &keys_at, const Queries &queries_at,
                                                    int2 seen, int batch, int kv_head, int first_row) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int OF_TILES = tile_bytes(FEW_ROWS, D) + 2 * few_stages(D) * FEW_WARPS * tile_bytes(16, D);
    const int first = seen.x / SEGMENT, segments = (seen.y + SEGMENT - 1) / SEGMENT - first;
    // The first block waits for the kernel before.
    if (segments == 1 && cluster_rank() > 0) return;
    if (segments > 1) cluster_begin();
    const int of_block = (segments + SHARING_BLOCKS - 1) / SHARING_BLOCKS;
    const int own = (first + cluster_rank() * of_block) * SEGMENT;
    const int2 seen_here = make_int2(max(seen.x, own), min(seen.y, own + of_block * SEGMENT));
    const PartsInCluster<D> parts(shared + OF_TILES, first, segments);
    if (seen_here.x < seen_here.y) {
        few_block<T, D>(p, keys_at, queries_at, parts, seen_here, batch, kv_head, first_row);
    } else {
        follow_previous();
        parts.begin();
    }
    if (segments == 1) return;
    __syncwarp();
    cluster_barrier();
    parts.template join_columns<T>(p, batch, kv_head, first_row);
}

#endif

/// Calls `work` with the keys that this block has, the row of the batch, the key head, and the first row of it, if any of
/// its rows sees the keys.
template <int ROWS, typename Work>
__device__ __forceinline__ void for_few(const Parameters &p, const Work &work) {
    follow_previous();
    const int row_tiles = (p.queries * (p.heads / p.kv_heads) + ROWS - 1) / ROWS;
    const int head = blockIdx.x / row_tiles, first_row = blockIdx.x % row_tiles * ROWS;
    const int2 seen = few_keys(p, blockIdx.y, first_row, ROWS);
    if (seen.x < seen.y) work(seen, head / p.kv_heads, head % p.kv_heads, first_row);
}

template <typename T, int D>
__device__ __forceinline__ void few_tiles(const Parameters &p) {
    for_few<FEW_ROWS>(p, [&](int2 seen, int batch, int kv_head, int first_row) {
        few_block<T, D>(p, KeysInARow(), GivenQueries(), PartsInMemory(), seen, batch, kv_head, first_row);
    });
}

constexpr int PLAIN_FEW_ROWS = 4, PLAIN_FEW_WARPS = 4, PLAIN_FEW_COLUMNS = 256;

/// As `few_block` for any element type and up to 256 columns, four rows: a warp takes 32 keys of a part at a time, eight
/// lanes a key for the scores, all lanes a row of values.
template <typename T, typename Keys>
__device__ __forceinline__ void plain_few_block(const Parameters &p, const Keys &keys_at, int2 seen,
                                                int batch, int kv_head, int first_row) {
    constexpr int ROWS = PLAIN_FEW_ROWS, WARPS = PLAIN_FEW_WARPS, COLUMNS = PLAIN_FEW_COLUMNS;
    constexpr int PER_LANE = COLUMNS / WARP, THREADS = WARP * WARPS;
    extern __shared__ __align__(1024) unsigned char shared[];
    // (ROWS, COLUMNS) queries, (WARPS, ROWS, WARP) scores, (WARPS, ROWS, COLUMNS) parts, and their
    // tops and totals.
    float *const q = reinterpret_cast<float *>(shared);
    float *const scores = q + ROWS * COLUMNS;
    float *const parts = scores + WARPS * ROWS * WARP;
    RowSums *const of_warps = reinterpret_cast<RowSums *>(parts + WARPS * ROWS * COLUMNS);

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, d = p.head_dim;
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    for (int index = threadIdx.x; index < ROWS * d; index += THREADS) {
        const int row = index / d, column = index % d;
        const FewRow from = few_row(p, kv_head, first_row + row);
        const T *const start = head_start(static_cast<const T *>(p.q), p.q_strides, batch,
                                          from.inside ? from.head : 0);
        q[row * COLUMNS + column] =
            from.inside ? to_float(start[from.query * p.q_strides[1] + column]) : 0.0f;
    }
    int position[ROWS], lowest[ROWS];
    int64_t to[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const FewRow mine = few_row(p, kv_head, first_row + row);
        position[row] = mine.inside ? p.keys - p.queries + mine.query : -1;
        lowest[row] = mine.inside ? lowest_key(p, batch, mine.query) : 0;
        to[row] = mine.inside ? query_row(p, batch, mine.query, mine.head) : -1;
    }

    float result[ROWS][COLUMNS / THREADS] = {};
    RowSums sums[ROWS];
    float *const my_scores = scores + warp * ROWS * WARP;
    for (int part = part_of(p, seen.x), end_of_parts = part_of(p, seen.y - 1); part <= end_of_parts; part++) {
        const int part_start = p.split_start + part * p.part_keys;
        const int from = max(part_start, seen.x), end = min(part_start + p.part_keys, seen.y);
        // The queries are there, and nobody reads the part before any more.
        __syncthreads();
        float out[ROWS][PER_LANE] = {}, top[ROWS], total[ROWS] = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++) top[row] = -INFINITY;
        for (int first_key = from / THREADS * THREADS + warp * WARP; first_key < end; first_key += THREADS) {
            const int count = min(WARP, end - first_key);
            for (int start = 0; start < count; start += 4) {
                // Beyond the last key, a key that exists, not to be used.
                const int key = min(first_key + start + lane / 8, end - 1);
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
                const bool visible = key >= max(lowest[row], from) && key <= min(position[row], end - 1);
                float score = visible ? my_scores[row * WARP + lane] : -INFINITY;
                if (p.mode == SCALED) score = visible ? score * p.inner : -INFINITY;
                if (p.mode == CAPPED && visible) score = tanhf(score * p.inner);
                const float new_top = fmaxf(top[row], warp_max(score) * p.factor);
                const float base = base_of(new_top);
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
            if (lane == 0) of_warps[warp * ROWS + row] = {top[row], total[row]};
#pragma unroll
            for (int i = 0; i < PER_LANE; i++)
                parts[(warp * ROWS + row) * COLUMNS + i * WARP + lane] = out[row][i];
        }
        __syncthreads();
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            RowSums next = of_warps[row];
            for (int other = 1; other < WARPS; other++) next.top = fmaxf(next.top, of_warps[other * ROWS + row].top);
            float weights[WARPS];
            next.total = 0.0f;
#pragma unroll
            for (int other = 0; other < WARPS; other++) {
                weights[other] = exp2f(of_warps[other * ROWS + row].top - base_of(next.top));
                next.total = fmaf(weights[other], of_warps[other * ROWS + row].total, next.total);
            }
            const Joint joint = join(sums[row], next);
            if (p.parts != 1 && to[row] >= 0 && threadIdx.x == 0) store_sums(p, to[row], part, next);
#pragma unroll
            for (int i = 0; i < COLUMNS / THREADS; i++) {
                const int column = i * THREADS + threadIdx.x;
                float value[1] = {};
#pragma unroll
                for (int other = 0; other < WARPS; other++)
                    value[0] = fmaf(weights[other], parts[(other * ROWS + row) * COLUMNS + column], value[0]);
                result[row][i] = joint.of(result[row][i], value[0]);
                if (p.parts != 1 && to[row] >= 0) store_part<1>(p, to[row], part, column, value);
            }
        }
    }
    if (p.parts != 1) return;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (to[row] < 0) continue;
        const RowEnd end = end_row<T>(p, to[row] % p.heads, sums[row]);
        if (threadIdx.x == 0) store_log_sum_exp(p, to[row], end);
#pragma unroll
        for (int i = 0; i < COLUMNS / THREADS; i++) {
            const float value[1] = {result[row][i]};
            store_result<T, 1>(p, to[row], i * THREADS + threadIdx.x, value, end.factor);
        }
    }
}

template <typename T> __device__ __forceinline__ void plain_few(const Parameters &p) {
    for_few<PLAIN_FEW_ROWS>(p, [&](int2 seen, int batch, int kv_head, int first_row) {
        plain_few_block<T>(p, KeysInARow(), seen, batch, kv_head, first_row);
    });
}

/// Threads that join the parts of a row, of up to 256 columns, and parts that they have at once.
constexpr int COMBINE_THREADS = 128, COMBINE_COLUMNS = 2, COMBINED_AT_ONCE = 64;

/// Joins the parts of a query's head, in their order.
template <typename T>
__device__ __forceinline__ void combine_query(const Parameters &p, int64_t row, int query) {
    extern __shared__ __align__(1024) unsigned char shared[];
    // How parts are joined, their totals, and their values (COMBINED_AT_ONCE, head_dim).
    Joint *const joints = reinterpret_cast<Joint *>(shared);
    float *const totals = reinterpret_cast<float *>(joints + COMBINED_AT_ONCE);
    float *const values = totals + COMBINED_AT_ONCE;
    const int position = p.keys - p.queries + query, lane = threadIdx.x % WARP;
    const int first = part_of(p, max(position - p.window + 1, p.split_start)), end = part_of(p, position) + 1;
    RowSums sums;
    float out[COMBINE_COLUMNS] = {};
    for (int start = first; start < end; start += COMBINED_AT_ONCE) {
        const int count = min(COMBINED_AT_ONCE, end - start);
        const float *const from = p.partial_o + (row * p.parts + start) * p.head_dim;
        if (p.head_dim % 4 == 0) {
            for (int index = threadIdx.x * 4; index < count * p.head_dim; index += 4 * COMBINE_THREADS)
                copy_async(shared_address(values + index), from + index, true);
        } else {
            for (int index = threadIdx.x; index < count * p.head_dim; index += COMBINE_THREADS)
                values[index] = from[index];
        }
        copy_async_commit();
        // The largest scores so far, as `join` finds them one by one, in each warp, for each needs the last.
        for (int first_part = 0; first_part < count; first_part += WARP) {
            const int part = first_part + lane;
            const bool inside = part < count;
            const float2 next = inside ? p.partial_sums[row * p.parts + start + part] : make_float2(-INFINITY, 0.0f);
            float top = next.x;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                const float other = __shfl_up_sync(FULL, top, offset);
                if (lane >= offset) top = fmaxf(top, other);
            }
            top = fmaxf(top, sums.top);
            const float before = __shfl_up_sync(FULL, top, 1);
            if (inside && threadIdx.x < WARP) {
                joints[part] = Joint::of_tops(lane == 0 ? sums.top : before, next.x);
                totals[part] = next.y;
            }
            sums.top = __shfl_sync(FULL, top, WARP - 1);
        }
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll 8
        for (int part = 0; part < count; part++) {
            const Joint joint = joints[part];
            sums.total = joint.of(sums.total, totals[part]);
#pragma unroll
            for (int i = 0; i < COMBINE_COLUMNS; i++) {
                const int column = threadIdx.x + i * COMBINE_THREADS;
                if (column < p.head_dim) out[i] = joint.of(out[i], values[part * p.head_dim + column]);
            }
        }
        __syncthreads();
    }
    const RowEnd row_end = end_row<T>(p, row % p.heads, sums);
    if (threadIdx.x == 0) store_log_sum_exp(p, row, row_end);
#pragma unroll
    for (int i = 0; i < COMBINE_COLUMNS; i++) {
        const float value[1] = {out[i]};
        store_result<T, 1>(p, row, threadIdx.x + i * COMBINE_THREADS, value, row_end.factor);
    }
}

template <typename T> __device__ __forceinline__ void combine_parts(const Parameters &p) {
    follow_previous();
    combine_query<T>(p, blockIdx.x, blockIdx.x / p.heads % p.queries);
}
