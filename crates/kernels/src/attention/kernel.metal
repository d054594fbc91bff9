// Attention in tiles, with the simdgroups' products of 8 x 8 matrices. The formulas are in mod.rs; scores
// are in log2 units here.
//
// A lane has two neighbours of a row of such a matrix, at `Lane::row` and `Lane::column`. That is how
// Apple's GPUs lay them out, and what lets scores and sums stay in registers. Which element of a head
// stands where in a product is free as long as both factors agree: so a lane reads four neighbours, a
// quad, at once, and uses them in four products.
//
// A simdgroup has 8 rows. Threadgroups have any number of whole simdgroups up to the kernel's most, which
// follows from the 32 KiB of threadgroup memory and is what metal.rs asks for: a row of a tile takes
// D·sizeof(T) + 16 bytes, the 16 against bank conflicts.
#include "common.metal.h"

#define UNROLL _Pragma("clang loop unroll(full)")

/// Four neighbours.
template <typename T> using Quad = vec<T, 4>;

/// No key, no query.
constant constexpr uint NO_KEY = 0xffffffff;

// What a call's code is made for; the indices are those of metal.rs.
/// Elements of a head.
constant ushort SHORT_HEAD_DIM [[function_constant(0)]];
/// Whether all rows start at multiples of four elements and have a multiple of four of them.
constant bool WHOLE_QUADS [[function_constant(1)]];
/// Whether a query sees `AttentionSizes::window` keys at most.
constant bool WINDOWED [[function_constant(2)]];
/// Whether every query has a first key, as in packed rows.
constant bool PACKED [[function_constant(3)]];
/// A score is `factor·x`, or `factor·tanh(inner·x)` where it is capped.
constant bool CAPPED [[function_constant(4)]];
/// Whether what a threadgroup of `attention_few` finds is a part of the result only; of a batch of sequences,
/// whether that is so for any of them.
constant bool SPLIT [[function_constant(5)]];
/// Whether there is a batch of sequences, whose keys and values are in blocks of a pool.
constant bool PAGED [[function_constant(6)]];
/// Whether those are codes of 8 bits; see paged/rounded/mod.rs.
constant bool ROUNDED [[function_constant(7)]];
/// Whether heads have sinks: scores that no key has.
constant bool SINKS [[function_constant(8)]];
constant bool GIVES_O = !SPLIT || PAGED;
constant bool GIVES_SUM = !SPLIT && !PAGED;
constant bool ONE_SEQUENCE = !PAGED;
constant uint HEAD_DIM = SHORT_HEAD_DIM;

/// As metal.rs fills it.
struct AttentionSizes {
    uint queries, keys, heads, kv_heads;
    /// At least 1.
    uint window;
    float factor, inner;
    /// What q·k is multiplied by.
    float scale;
    /// For few queries: keys from `split_start` on are split into this many ranges of `split_keys`.
    uint splits, split_start, split_keys;
};

/// In elements, of batch, seq and heads.
struct AttentionStrides {
    ulong q[3], k[3], v[3];
};

/// What is known of a batch of sequences, as paged/metal.rs fills it.
struct PagedBatch {
    /// Where among the numbers of the batch the sequences, their tables, the items of this dispatch and the
    /// number of those are.
    uint spans, tables, items, count;
    /// Entries of a table, tokens of a block, and blocks of a pool.
    uint width, block, blocks;
};

/// Keys of a range of its own, for a few queries, and those for which the batch has room for a part; queries of an item
/// where there are many.
constant constexpr uint PAGED_SPLIT = 256, PAGED_SEGMENT = 64, PAGED_QUERIES = 128;
/// Numbers of a sequence.
constant constexpr uint SPAN_NUMBERS = 4;

/// A sequence, of a batch or by itself.
struct AttentionSpan {
    /// Its first query and its parts of results before this one's, in a batch.
    uint first, part;
    uint queries, keys;
    /// Which of its items this is.
    uint item;
    /// Ranges of its keys.
    uint splits;
    device const uint *table;
};

/// The sequence of an item of a batch.
inline AttentionSpan span_of(device const uint *numbers, constant PagedBatch &paged, uint item) {
    device const uint *const at = numbers + paged.items + 2 * item;
    device const uint *const span = numbers + paged.spans + SPAN_NUMBERS * at[0];
    // There is room for parts of segments, and here is one of each range.
    return {span[0],
            span[3] / (PAGED_SPLIT / PAGED_SEGMENT),
            span[1],
            span[2],
            at[1],
            (span[2] + PAGED_SPLIT - 1) / PAGED_SPLIT,
            numbers + paged.tables + ulong(at[0]) * paged.width};
}

/// The row of a key in the pool.
inline ulong paged_row(device const uint *table, constant PagedBatch &paged, uint key) {
    const uint index = min(key / paged.block, paged.width - 1);
    return ulong(min(table[index], paged.blocks - 1)) * paged.block + key % paged.block;
}

/// Where the two elements of a lane are in an 8 x 8 matrix.
struct Lane {
    uint row, column;
};

inline Lane lane_place(uint lane) {
    return {(lane / 4 & 4) + lane / 2 % 4, (lane / 4 & 2) * 2 + lane % 2 * 2};
}

/// `sum += a·b`.
inline void multiply_add(thread float2 &sum, float2 a, float2 b) {
    simdgroup_float8x8 left, right, result;
    reinterpret_cast<thread float2 &>(left.thread_elements()) = a;
    reinterpret_cast<thread float2 &>(right.thread_elements()) = b;
    reinterpret_cast<thread float2 &>(result.thread_elements()) = sum;
    simdgroup_multiply_accumulate(result, left, right, result);
    sum = reinterpret_cast<thread float2 &>(result.thread_elements());
}

/// Over the four lanes that have a row.
inline float row_sum(float x) {
    x += simd_shuffle_xor(x, 1);
    return x + simd_shuffle_xor(x, 8);
}

inline float row_max(float x) {
    x = max(x, simd_shuffle_xor(x, 1));
    return max(x, simd_shuffle_xor(x, 8));
}

template <typename T> inline float4 to_floats(Quad<T> x) {
    return float4(float(x.x), float(x.y), float(x.z), float(x.w));
}

/// Four elements of a row from `column` on, zeros beyond its end, which is a multiple of four.
template <typename T>
inline Quad<T> whole_quad(device const T *row, uint column) {
    // Without a branch, so that reads don't wait for each other.
    device const T *const from = row + min(column, HEAD_DIM - 4);
    const Quad<T> x = *reinterpret_cast<device const Quad<T> *>(from);
    return column < HEAD_DIM ? x : Quad<T>(static_cast<T>(0.0f));
}

/// The same one by one, for rows of any length that start anywhere.
template <typename T>
inline Quad<T> gathered_quad(device const T *row, uint column) {
    Quad<T> x = Quad<T>(static_cast<T>(0.0f));
    for (uint i = 0; i < 4; i++)
        if (column + i < HEAD_DIM) x[i] = row[column + i];
    return x;
}

template <typename T>
inline Quad<T> read_quad(device const T *row, uint column) {
    return WHOLE_QUADS ? whole_quad(row, column) : gathered_quad(row, column);
}

/// COUNT of them, at once, from rows that start so many elements after `from`.
template <typename T, uint COUNT>
inline void read_quads(thread Quad<T> *x, device const T *from, thread const ulong *rows,
                       thread const uint *columns) {
    if (WHOLE_QUADS) {
        UNROLL for (uint i = 0; i < COUNT; i++)
            x[i] = whole_quad(from + rows[i], columns[i]);
    } else {
        UNROLL for (uint i = 0; i < COUNT; i++)
            x[i] = gathered_quad(from + rows[i], columns[i]);
    }
}

template <typename T>
inline void write_quad(device T *row, uint column, float4 x) {
    const Quad<T> stored = Quad<T>(static_cast<T>(x.x), static_cast<T>(x.y),
                                   static_cast<T>(x.z), static_cast<T>(x.w));
    if (WHOLE_QUADS) {
        if (column < HEAD_DIM) *reinterpret_cast<device Quad<T> *>(row + column) = stored;
    } else {
        for (uint i = 0; i < 4; i++)
            if (column + i < HEAD_DIM) row[column + i] = stored[i];
    }
}

/// Quads from a row of a tile to the next.
template <typename T, uint D> constexpr uint tile_pitch() { return D / 4 + 4 / sizeof(T); }

/// A thread writes its quads of a tile, zeros from the row `count` on.
template <typename T, uint D>
inline void write_tile(threadgroup Quad<T> *tile, thread const Quad<T> *x, uint rows, uint count,
                       uint start, uint threads) {
    constexpr uint QUADS = D / 4;
    UNROLL for (uint a = 0; a < AHEAD; a++) {
        const uint i = start + a * threads, row = i / QUADS;
        if (row < rows)
            tile[row * tile_pitch<T, D>() + i % QUADS] =
                row < count ? x[a] : Quad<T>(static_cast<T>(0.0f));
    }
}

/// Neighbours of a head that share a scale, and the byte of the least one.
constant constexpr uint ROUNDED_GROUP = 32, LEAST_SCALE = 7;

/// What a code is multiplied by: a 64th of the scale.
inline float step_of(uint scale) {
    return scale == 255 ? NAN : as_type<float>((max(scale, LEAST_SCALE) - 6) << 23);
}

/// `whole_quad` or `gathered_quad` of a row in codes.
template <typename T>
inline Quad<T> rounded_quad(device const uchar *codes, device const uchar *scales, uint column) {
    const float step = step_of(scales[min(column, HEAD_DIM - 1) / ROUNDED_GROUP]);
    Quad<T> x = Quad<T>(static_cast<T>(0.0f));
    if (WHOLE_QUADS) {
        const vec<char, 4> code =
            *reinterpret_cast<device const vec<char, 4> *>(codes + min(column, HEAD_DIM - 4));
        UNROLL for (uint i = 0; i < 4; i++)
            if (column < HEAD_DIM) x[i] = static_cast<T>(float(code[i]) * step);
    } else {
        for (uint i = 0; i < 4; i++)
            if (column + i < HEAD_DIM)
                x[i] = static_cast<T>(float(static_cast<char>(codes[column + i])) * step);
    }
    return x;
}

/// The rows of a head at one distance from each other; in codes, if so, with those of its scales.
template <typename T> struct HeadRows {
    device const T *start;
    ulong stride;
    device const uchar *scales;
    ulong scale_stride;
};

template <typename T>
inline HeadRows<T> head_rows(device const T *from, constant ulong *strides, uint batch, uint head,
                             uint heads, device const uchar *scales) {
    if (ROUNDED) {
        const uint groups = (HEAD_DIM + ROUNDED_GROUP - 1) / ROUNDED_GROUP;
        device const uchar *const codes =
            reinterpret_cast<device const uchar *>(from) + head * strides[2];
        return {reinterpret_cast<device const T *>(codes), strides[1], scales + head * groups,
                ulong(heads) * groups};
    }
    return {from + batch * strides[0] + head * strides[2], strides[1], nullptr, 0};
}

/// COUNT quads of such rows, at once.
template <typename T, uint COUNT>
inline void read_quads_of(thread Quad<T> *x, HeadRows<T> from, thread ulong *rows,
                          thread const uint *columns) {
    if (ROUNDED) {
        device const uchar *const codes = reinterpret_cast<device const uchar *>(from.start);
        UNROLL for (uint i = 0; i < COUNT; i++)
            x[i] = rounded_quad<T>(codes + rows[i] * from.stride,
                                   from.scales + rows[i] * from.scale_stride, columns[i]);
    } else {
        UNROLL for (uint i = 0; i < COUNT; i++) rows[i] *= from.stride;
        read_quads<T, COUNT>(x, from.start, rows, columns);
    }
}

/// Where the rows of a sequence's keys are in the pool, from `first` on; those before `seen` are hidden, and may not
/// be there.
struct PagedRows {
    device const uint *table;
    constant PagedBatch *paged;
    uint first, seen;
};

/// The threadgroup reads `rows` rows from `from` on, `stride` elements apart, zeros from the row `count` on; there has
/// to be one.
template <typename T, uint D>
inline void read_tile(threadgroup Quad<T> *tile, uint rows, device const T *from, ulong stride,
                      uint count, uint thread_index, uint threads) {
    constexpr uint QUADS = D / 4;
    for (uint start = thread_index; start < rows * QUADS; start += AHEAD * threads) {
        Quad<T> x[AHEAD];
        ulong row_starts[AHEAD];
        uint columns[AHEAD];
        UNROLL for (uint a = 0; a < AHEAD; a++) {
            const uint i = start + a * threads;
            row_starts[a] = min(i / QUADS, min(rows, count) - 1) * stride;
            columns[a] = i % QUADS * 4;
        }
        read_quads<T, AHEAD>(x, from, row_starts, columns);
        write_tile<T, D>(tile, x, rows, count, start, threads);
    }
}

/// The same of a sequence's keys or values.
template <typename T, uint D>
inline void read_paged_tile(threadgroup Quad<T> *tile, uint rows, HeadRows<T> from,
                            PagedRows places, uint count, uint thread_index, uint threads) {
    constexpr uint QUADS = D / 4;
    for (uint start = thread_index; start < rows * QUADS; start += AHEAD * threads) {
        Quad<T> x[AHEAD];
        ulong places_of[AHEAD];
        uint columns[AHEAD];
        UNROLL for (uint a = 0; a < AHEAD; a++) {
            const uint i = start + a * threads, row = min(i / QUADS, min(rows, count) - 1);
            places_of[a] =
                paged_row(places.table, *places.paged, max(places.first + row, places.seen));
            columns[a] = i % QUADS * 4;
        }
        read_quads_of<T, AHEAD>(x, from, places_of, columns);
        write_tile<T, D>(tile, x, rows, count, start, threads);
    }
}

/// `sums = x·yᵀ`, 8 rows of `x` and 8·N of `y`. Product `j` takes from every quad its element `j`.
template <typename T, uint D, uint N>
inline void multiply_rows(thread float2 *sums, threadgroup const Quad<T> *x,
                          threadgroup const Quad<T> *y, Lane at) {
    constexpr uint PITCH = tile_pitch<T, D>();
    UNROLL for (uint n = 0; n < N; n++) sums[n] = float2(0.0f);
    x += at.row * PITCH + at.column;
    y += at.column * PITCH + at.row;
    UNROLL for (uint b = 0; b < D / 32; b++) {
        const float4 x0 = to_floats(x[b * 8]), x1 = to_floats(x[b * 8 + 1]);
        UNROLL for (uint n = 0; n < N; n++) {
            const float4 y0 = to_floats(y[n * 8 * PITCH + b * 8]);
            const float4 y1 = to_floats(y[(n * 8 + 1) * PITCH + b * 8]);
            UNROLL for (uint j = 0; j < 4; j++)
                multiply_add(sums[n], float2(x0[j], x1[j]), float2(y0[j], y1[j]));
        }
    }
}

/// `sums += weights·y`, 8 rows of D columns, from 8·N rows of `y`. Of 32 columns a lane has the quads
/// `at.column / 2` and four quads further on, each in two matrices.
template <typename T, uint D, uint N>
inline void multiply_columns(thread float2 *sums, thread const float2 *weights,
                             threadgroup const Quad<T> *y, Lane at) {
    constexpr uint PITCH = tile_pitch<T, D>();
    y += at.row * PITCH + at.column / 2;
    UNROLL for (uint b = 0; b < D / 32; b++) {
        UNROLL for (uint n = 0; n < N; n++) {
            const float4 y0 = to_floats(y[n * 8 * PITCH + b * 8]);
            const float4 y1 = to_floats(y[n * 8 * PITCH + b * 8 + 4]);
            multiply_add(sums[b * 4], weights[n], y0.xy);
            multiply_add(sums[b * 4 + 1], weights[n], y0.zw);
            multiply_add(sums[b * 4 + 2], weights[n], y1.xy);
            multiply_add(sums[b * 4 + 3], weights[n], y1.zw);
        }
    }
}

/// A lane writes what `multiply_columns` gave it of its row, times `factor`.
template <typename T, uint D>
inline void write_row(device T *row, thread const float2 *sums, float factor, Lane at) {
    UNROLL for (uint i = 0; i < D / 16; i++)
        write_quad(row, (i * 4 + at.column / 2) * 4,
                   factor * float4(sums[i * 2], sums[i * 2 + 1]));
}

/// The first key in the window of a query that sees keys up to `end`.
inline uint window_start(constant AttentionSizes &p, uint end) {
    return WINDOWED && end > p.window ? end - p.window : 0;
}

/// The first key that a query sees, if it isn't beyond its position.
inline uint lowest_key(constant AttentionSizes &p, device const uint *first_key, uint batch,
                       uint query) {
    const uint low = window_start(p, p.keys - p.queries + query + 1);
    return PACKED ? max(low, first_key[ulong(batch) * p.queries + query]) : low;
}

/// 2^x, and zero for what is lost beside 1, which is not left to how the fast function treats infinity.
inline float power(float x) { return x < -150.0f ? 0.0f : fast::exp2(x); }

/// The score of a product q·k, and `1 - (z/c)²` for its gradient.
inline float score(float product, thread float &slope, constant AttentionSizes &p) {
    slope = 1.0f;
    if (!CAPPED) return product * p.factor;
    // tanh, to about 1e-7; beyond ±10 it is ±1 in f32.
    const float x = clamp(product * p.inner, -10.0f, 10.0f);
    const float bent = 1.0f - 2.0f / (1.0f + fast::exp2(2.0f * M_LOG2E_F * x));
    slope = 1.0f - bent * bent;
    return bent * p.factor;
}

/// Products of a row become weights relative to its largest score; `sums` and `total` shrink when that
/// grows. With `masked`, keys from `low` up to `end` count; `first` is that of this lane's first product.
template <uint D, uint N>
inline void soften(thread float2 *scores, thread float2 *sums, thread float &top,
                   thread float &total, bool masked, uint first, uint low, uint end,
                   constant AttentionSizes &p) {
    float best = -INFINITY;
    UNROLL for (uint n = 0; n < N; n++) {
        UNROLL for (uint e = 0; e < 2; e++) {
            float slope;
            const uint key = first + n * 8 + e;
            const bool seen = !masked || (key >= low && key < end);
            scores[n][e] = seen ? score(scores[n][e], slope, p) : -INFINITY;
            best = max(best, scores[n][e]);
        }
    }
    const float new_top = max(top, row_max(best));
    const float base = new_top == -INFINITY ? 0.0f : new_top;
    const float shrink = power(top - base);
    top = new_top;
    float sum = 0.0f;
    UNROLL for (uint n = 0; n < N; n++) {
        UNROLL for (uint e = 0; e < 2; e++) {
            scores[n][e] = power(scores[n][e] - base);
            sum += scores[n][e];
        }
    }
    total = total * shrink + sum;
    UNROLL for (uint i = 0; i < D / 8; i++) sums[i] *= shrink;
}

/// ln of a sum of powers relative to `top`, -∞ where there is no key.
inline float log_of_sum(float top, float total) {
    return total == 0.0f ? -INFINITY : (top + log2(total)) * M_LN2_F;
}

inline float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

/// What a row's sums of powers times values are multiplied by, and its `log_sum_exp`.
struct RowEnd {
    float factor, log_sum_exp;
};

/// The end of a row whose keys are all seen, with the sink of its head, if it has one.
template <typename T>
inline RowEnd end_row(device const T *sinks, uint head, float top, float total) {
    float shrink = 1.0f;
    if (SINKS) {
        const float sink = M_LOG2E_F * float(sinks[head]);
        const float highest = max(top, sink), base = highest == -INFINITY ? 0.0f : highest;
        shrink = power(top - base);
        total = fma(total, shrink, power(sink - base));
        top = highest;
    }
    return {shrink * inverse_of(total), log_of_sum(top, total)};
}

/// A threadgroup has 8·simdgroups queries of a head, and goes over tiles of the keys that they see.
///
/// Rows of tiles: 32 of queries, 16 in f32 with D = 256; of keys and of values as many as COLUMNS, which
/// follow each other in one tile where they are SHARED. That is 25 616 bytes at most.
template <typename T, uint D>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_forward(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]],
    device const T *v [[buffer(2)]],
    device const uint *first_key [[buffer(3), function_constant(PACKED)]],
    device T *o [[buffer(4)]],
    device float *log_sum_exp [[buffer(5), function_constant(ONE_SEQUENCE)]],
    constant AttentionSizes &p [[buffer(6)]], constant AttentionStrides &strides [[buffer(7)]],
    device const uint *numbers [[buffer(8), function_constant(PAGED)]],
    constant PagedBatch &paged [[buffer(9), function_constant(PAGED)]],
    device const uchar *k_scales [[buffer(10), function_constant(ROUNDED)]],
    device const uchar *v_scales [[buffer(11), function_constant(ROUNDED)]],
    device const T *sinks [[buffer(12), function_constant(SINKS)]], PLACE, SIMD_PLACE) {
    constexpr uint BYTES = D * sizeof(T), MOST_SIMDGROUPS = BYTES == 1024 ? 2 : 4;
    constexpr uint COLUMNS = BYTES <= 192 ? 32 : BYTES <= 512 ? 16 : 8, N = COLUMNS / 8;
    constexpr bool SHARED = BYTES >= 512;
    constexpr uint PITCH = tile_pitch<T, D>();
    threadgroup Quad<T> q_tile[8 * MOST_SIMDGROUPS * PITCH];
    threadgroup Quad<T> k_tile[COLUMNS * PITCH];
    threadgroup Quad<T> other_tile[SHARED ? 1 : COLUMNS * PITCH];
    threadgroup Quad<T> *const v_tile = SHARED ? k_tile : other_tile;

    const uint batch = group.x / p.heads, head = group.x % p.heads;
    const uint kv_head = head / (p.heads / p.kv_heads), rows = 8 * simdgroups;
    AttentionSpan span = {0, 0, p.queries, p.keys, 0, 1, nullptr};
    // Late queries, which see the most keys, first.
    uint first_query = ((p.queries + rows - 1) / rows - 1 - group.y) * rows;
    uint end_query = p.queries;
    if (PAGED) {
        const uint tiles = (PAGED_QUERIES + rows - 1) / rows;
        if (group.y / tiles >= numbers[paged.count]) return;
        span = span_of(numbers, paged, group.y / tiles);
        first_query = span.item * PAGED_QUERIES + group.y % tiles * rows;
        end_query = min(span.queries, (span.item + 1) * PAGED_QUERIES);
        if (first_query >= end_query) return;
        q += span.first * strides.q[1];
        o += ulong(span.first) * p.heads * HEAD_DIM;
    }
    const uint before = span.keys - span.queries;
    end_query = min(first_query + rows, end_query);
    q += batch * strides.q[0] + head * strides.q[2];
    const HeadRows<T> keys = head_rows(k, strides.k, batch, kv_head, p.kv_heads, k_scales);
    const HeadRows<T> values = head_rows(v, strides.v, batch, kv_head, p.kv_heads, v_scales);
    read_tile<T, D>(q_tile, rows, q + first_query * strides.q[1], strides.q[1],
                    end_query - first_query, own.x, threads.x);

    // The first key that any query of the threadgroup sees.
    uint smallest = NO_KEY;
    for (uint i = first_query + lane; i < end_query; i += 32) {
        const uint lowest =
            PAGED ? window_start(p, before + i + 1) : lowest_key(p, first_key, batch, i);
        if (lowest <= before + i) smallest = min(smallest, lowest);
    }
    smallest = simd_min(smallest);

    const Lane at = lane_place(lane);
    const uint query = first_query + 8 * simdgroup + at.row;
    const bool inside = query < end_query;
    const uint low = !inside ? NO_KEY
                     : PAGED ? window_start(p, before + query + 1)
                             : lowest_key(p, first_key, batch, query);
    const uint end = inside ? before + query + 1 : 0;
    // Of the simdgroup: the keys that any query sees, and those that all do.
    const uint any_from = simd_min(low < end ? low : NO_KEY), any_to = simd_max(end);
    const uint all_from = simd_max(low), all_to = simd_min(end);

    float2 sums[D / 8];
    UNROLL for (uint i = 0; i < D / 8; i++) sums[i] = float2(0.0f);
    float top = -INFINITY, total = 0.0f;
    // Of a batch, tiles start at positions that are the same for all queries of a sequence.
    for (uint first = PAGED ? smallest / COLUMNS * COLUMNS : smallest; first < before + end_query;
         first += COLUMNS) {
        const uint count = before + end_query - first;
        // What was there has been read.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (PAGED)
            read_paged_tile<T, D>(k_tile, COLUMNS, keys,
                                  PagedRows{span.table, &paged, first, smallest}, count, own.x,
                                  threads.x);
        else
            read_tile<T, D>(k_tile, COLUMNS, keys.start + first * keys.stride, keys.stride, count, own.x,
                            threads.x);
        if (!SHARED && PAGED)
            read_paged_tile<T, D>(v_tile, COLUMNS, values,
                                  PagedRows{span.table, &paged, first, smallest}, count, own.x,
                                  threads.x);
        else if (!SHARED)
            read_tile<T, D>(v_tile, COLUMNS, values.start + first * values.stride, values.stride,
                            count, own.x, threads.x);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool active = first < any_to && first + COLUMNS > any_from;
        float2 scores[N];
        if (active) {
            multiply_rows<T, D, N>(scores, q_tile + 8 * simdgroup * PITCH, k_tile, at);
            const bool masked = first < all_from || first + COLUMNS > all_to;
            soften<D, N>(scores, sums, top, total, masked, first + at.column, low, end, p);
        }
        if (SHARED) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (PAGED)
                read_paged_tile<T, D>(v_tile, COLUMNS, values,
                                      PagedRows{span.table, &paged, first, smallest}, count, own.x,
                                      threads.x);
            else
                read_tile<T, D>(v_tile, COLUMNS, values.start + first * values.stride, values.stride,
                                count, own.x, threads.x);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        if (active) multiply_columns<T, D, N>(sums, scores, v_tile, at);
    }
    const RowEnd row_end = end_row(sinks, head, top, row_sum(total));
    if (!inside) return;
    if (ONE_SEQUENCE && at.column == 0)
        log_sum_exp[(ulong(batch) * p.heads + head) * p.queries + query] = row_end.log_sum_exp;
    o += ((ulong(batch) * p.queries + query) * p.heads + head) * HEAD_DIM;
    write_row<T, D>(o, sums, row_end.factor, at);
}

/// Σ do·o of every query and head; a simdgroup a row.
template <typename T>
[[kernel]] void attention_corrections(device const T *o [[buffer(0)]],
                                      device const T *d_o [[buffer(1)]],
                                      device float *corrections [[buffer(2)]],
                                      constant AttentionSizes &p [[buffer(3)]],
                                      constant uint &rows [[buffer(4)]], PLACE, SIMD_PLACE) {
    const uint row = group.x * simdgroups + simdgroup;
    if (row >= rows) return;
    o += ulong(row) * HEAD_DIM;
    d_o += ulong(row) * HEAD_DIM;
    float sum = 0.0f;
    for (uint column = lane * 4; column < HEAD_DIM; column += 128)
        sum += dot(to_floats(read_quad(o, column)), to_floats(read_quad(d_o, column)));
    sum = simd_sum(sum);
    const uint token = row / p.heads, head = row % p.heads;
    const uint batch = token / p.queries, query = token % p.queries;
    if (lane == 0) corrections[(ulong(batch) * p.heads + head) * p.queries + query] = sum;
}

/// The gradients of sinks; a threadgroup has a head, and its simdgroups take turns of the rows.
template <typename T>
[[kernel]] void attention_backward_sinks(
    device const T *sinks [[buffer(0)]], device const T *o [[buffer(1)]],
    device const float *log_sum_exp [[buffer(2)]], device const T *d_o [[buffer(3)]],
    device float *gradients [[buffer(4)]], constant uint &tokens [[buffer(5)]],
    constant uint &queries [[buffer(6)]], constant uint &heads [[buffer(7)]],
    constant uint &head_dim [[buffer(8)]], PLACE, SIMD_PLACE) {
    threadgroup float scratch[SIMDGROUPS];
    const uint head = group.x;
    float total = 0.0f;
    for (uint token = simdgroup; token < tokens; token += simdgroups) {
        const ulong start = (ulong(token) * heads + head) * head_dim;
        float sum = 0.0f;
        for (uint i = lane; i < head_dim; i += 32) sum += float(o[start + i]) * float(d_o[start + i]);
        const ulong row = (ulong(token / queries) * heads + head) * queries + token % queries;
        total += exp(float(sinks[head]) - log_sum_exp[row]) * sum;
    }
    total = group_sum(total, scratch, lane, simdgroup, simdgroups);
    if (own.x == 0) gradients[head] = -total;
}

/// What a threadgroup of `attention_backward` gives. It has rows x₁ and x₂ and goes over tiles of columns
/// y₁ and y₂; of its rows it computes
///   s = x₁·y₁ᵀ,  dp = x₂·y₂ᵀ,  p and ds from them,  first += ds·y₁,  second += p·y₂.
/// Queries: x = q, do; y = k, v; dq = first. Keys: x = k, v; y = q, do; dk = first, dv = second, summed
/// over the queries of all heads that share the key head.
enum AttentionRole : uint { GIVE_DQ, GIVE_DK_DV, GIVE_DK, GIVE_DV };

/// Rows of tiles: 8·MOST_SIMDGROUPS of x₁ and x₂ each, COLUMNS of y₁ and y₂ each. With D = 256, where dk
/// and dv together are more than the registers hold, each role needs y₁ and y₂ one after the other only,
/// and they are SHARED. That is 26 112 bytes at most, and 12 for each column.
template <typename T, uint D, AttentionRole ROLE>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_backward(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]],
    device const T *v [[buffer(2)]],
    device const uint *first_key [[buffer(3), function_constant(PACKED)]],
    device const T *d_o [[buffer(4)]], device const float *log_sum_exp [[buffer(5)]],
    device const float *corrections [[buffer(6)]], device T *first_out [[buffer(7)]],
    device T *second_out [[buffer(8)]], constant AttentionSizes &p [[buffer(9)]],
    constant AttentionStrides &strides [[buffer(10)]], PLACE, SIMD_PLACE) {
    constexpr bool BY_KEYS = ROLE != GIVE_DQ, SHARED = D == 256;
    constexpr bool FIRST = ROLE != GIVE_DV, SECOND = ROLE == GIVE_DK_DV || ROLE == GIVE_DV;
    constexpr uint BYTES = D * sizeof(T);
    constexpr uint MOST_SIMDGROUPS = BYTES <= 256 ? 4 : BYTES <= 512 ? 2 : 1;
    constexpr uint COLUMNS = BYTES <= 128 ? 32 : sizeof(T) == 4 && D >= 128 ? 8 : 16;
    constexpr uint N = COLUMNS / 8, PITCH = tile_pitch<T, D>();
    threadgroup Quad<T> x1_tile[8 * MOST_SIMDGROUPS * PITCH];
    threadgroup Quad<T> x2_tile[FIRST ? 8 * MOST_SIMDGROUPS * PITCH : 1];
    threadgroup Quad<T> y1_tile[COLUMNS * PITCH];
    threadgroup Quad<T> other_tile[SHARED ? 1 : COLUMNS * PITCH];
    threadgroup Quad<T> *const y2_tile = SHARED ? y1_tile : other_tile;
    // Of columns that are queries.
    threadgroup float column_sums[COLUMNS], column_corrections[COLUMNS];
    threadgroup uint column_low[COLUMNS];

    const uint owners = BY_KEYS ? p.kv_heads : p.heads, heads_of_key = p.heads / p.kv_heads;
    const uint batch = group.x / owners, owner = group.x % owners;
    const uint kv_head = BY_KEYS ? owner : owner / heads_of_key;
    const uint before = p.keys - p.queries, size = BY_KEYS ? p.keys : p.queries;
    const uint rows = 8 * simdgroups;
    // The rows that meet the most columns first: early keys, late queries.
    const uint block = BY_KEYS ? group.y : (size + rows - 1) / rows - 1 - group.y;
    const uint first_row = block * rows, end_row = min(first_row + rows, size);
    const ulong d_o_stride = ulong(p.heads) * HEAD_DIM;
    q += batch * strides.q[0];
    k += batch * strides.k[0] + kv_head * strides.k[2];
    v += batch * strides.v[0] + kv_head * strides.v[2];
    d_o += batch * p.queries * d_o_stride;
    const uint count = end_row - first_row;
    if (BY_KEYS) {
        read_tile<T, D>(x1_tile, rows, k + first_row * strides.k[1], strides.k[1], count, own.x,
                        threads.x);
        if (FIRST)
            read_tile<T, D>(x2_tile, rows, v + first_row * strides.v[1], strides.v[1], count,
                            own.x, threads.x);
    } else {
        read_tile<T, D>(x1_tile, rows, q + first_row * strides.q[1] + owner * strides.q[2],
                        strides.q[1], count, own.x, threads.x);
        read_tile<T, D>(x2_tile, rows, d_o + first_row * d_o_stride + owner * HEAD_DIM,
                        d_o_stride, count, own.x, threads.x);
    }

    const Lane at = lane_place(lane);
    const uint own_first = first_row + 8 * simdgroup, row = own_first + at.row;
    const bool inside = row < size;
    // Of rows that are queries: the keys that this one sees, that any of the simdgroup does, and that all
    // do; its sum in log2 units, ∞ where no key is seen, since 2^(z - ∞) is 0.
    uint low = NO_KEY, end = 0, any_from = 0, any_to = 0, all_from = 0, all_to = 0;
    float row_total = INFINITY, row_correction = 0.0f;
    // The columns that any row sees.
    uint first_column, end_column;
    if (BY_KEYS) {
        first_column = first_row > before ? first_row - before : 0;
        end_column = p.queries;
        if (WINDOWED) {
            // The last key is seen up to this query, if there are so many.
            const ulong limit = ulong(end_row) - 1 + p.window;
            const ulong visible = limit > before ? limit - before : 0;
            if (visible < p.queries) end_column = uint(visible);
        }
    } else {
        uint smallest = NO_KEY;
        for (uint i = first_row + lane; i < end_row; i += 32) {
            const uint lowest = lowest_key(p, first_key, batch, i);
            if (lowest <= before + i) smallest = min(smallest, lowest);
        }
        first_column = simd_min(smallest);
        end_column = before + end_row;
        if (inside) {
            low = lowest_key(p, first_key, batch, row);
            end = before + row + 1;
            const ulong i = (ulong(batch) * p.heads + owner) * p.queries + row;
            const float sum = log_sum_exp[i];
            if (sum != -INFINITY) row_total = sum * M_LOG2E_F;
            row_correction = corrections[i];
        }
        any_from = simd_min(low < end ? low : NO_KEY);
        any_to = simd_max(end);
        all_from = simd_max(low);
        all_to = simd_min(end);
    }

    float2 first_sums[FIRST ? D / 8 : 1], second_sums[SECOND ? D / 8 : 1];
    if (FIRST) {
        UNROLL for (uint i = 0; i < D / 8; i++) first_sums[i] = float2(0.0f);
    }
    if (SECOND) {
        UNROLL for (uint i = 0; i < D / 8; i++) second_sums[i] = float2(0.0f);
    }
    const uint first_head = BY_KEYS ? kv_head * heads_of_key : owner;
    const uint end_head = BY_KEYS ? first_head + heads_of_key : first_head + 1;
    for (uint head = first_head; head < end_head; head++) {
        device const T *const y1 = BY_KEYS ? q + head * strides.q[2] : k;
        device const T *const y2 = BY_KEYS ? d_o + head * HEAD_DIM : v;
        const ulong y1_stride = BY_KEYS ? strides.q[1] : strides.k[1];
        const ulong y2_stride = BY_KEYS ? d_o_stride : strides.v[1];
        for (uint first = first_column; first < end_column; first += COLUMNS) {
            const uint columns = end_column - first;
            uint smallest = 0, largest = 0;
            if (BY_KEYS && (PACKED || WINDOWED)) {
                smallest = NO_KEY;
                for (uint i = lane; i < min(COLUMNS, columns); i += 32) {
                    const uint lowest = lowest_key(p, first_key, batch, first + i);
                    smallest = min(smallest, lowest);
                    largest = max(largest, lowest);
                }
                smallest = simd_min(smallest);
                largest = simd_max(largest);
                // For all simdgroups alike.
                if (smallest >= end_row) continue;
            }
            // What was there has been read.
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (!SHARED || !FIRST)
                read_tile<T, D>(y1_tile, COLUMNS, y1 + first * y1_stride, y1_stride, columns,
                                own.x, threads.x);
            if (!SHARED || FIRST)
                read_tile<T, D>(y2_tile, COLUMNS, y2 + first * y2_stride, y2_stride, columns,
                                own.x, threads.x);
            if (BY_KEYS) {
                for (uint i = own.x; i < COLUMNS; i += threads.x) {
                    float sum = -INFINITY, correction = 0.0f;
                    uint lowest = NO_KEY;
                    if (i < columns) {
                        const ulong from =
                            (ulong(batch) * p.heads + head) * p.queries + first + i;
                        sum = log_sum_exp[from];
                        correction = corrections[from];
                        lowest = lowest_key(p, first_key, batch, first + i);
                    }
                    column_sums[i] = sum == -INFINITY ? INFINITY : sum * M_LOG2E_F;
                    column_corrections[i] = correction;
                    column_low[i] = lowest;
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            bool active, masked;
            if (BY_KEYS) {
                const uint last = before + min(first + COLUMNS, end_column) - 1;
                active = own_first < end_row && own_first <= last && own_first + 8 > smallest;
                masked = own_first + 7 > before + first || own_first < largest;
            } else {
                active = first < any_to && first + COLUMNS > any_from;
                masked = first < all_from || first + COLUMNS > all_to;
            }
            threadgroup const Quad<T> *const x1 = x1_tile + 8 * simdgroup * PITCH;
            threadgroup const Quad<T> *const x2 = x2_tile + (FIRST ? 8 * simdgroup * PITCH : 0);
            float2 weights[N], gradients[N];
            if (active) {
                if (!SHARED || !FIRST) multiply_rows<T, D, N>(weights, x1, y1_tile, at);
                if (FIRST) multiply_rows<T, D, N>(gradients, x2, y2_tile, at);
            }
            if (SHARED) {
                threadgroup_barrier(mem_flags::mem_threadgroup);
                if (FIRST)
                    read_tile<T, D>(y1_tile, COLUMNS, y1 + first * y1_stride, y1_stride, columns,
                                    own.x, threads.x);
                else
                    read_tile<T, D>(y2_tile, COLUMNS, y2 + first * y2_stride, y2_stride, columns,
                                    own.x, threads.x);
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            if (!active) continue;
            if (SHARED && FIRST) multiply_rows<T, D, N>(weights, x1, y1_tile, at);
            UNROLL for (uint n = 0; n < N; n++) {
                UNROLL for (uint e = 0; e < 2; e++) {
                    const uint i = n * 8 + at.column + e, column = first + i;
                    const float sum = BY_KEYS ? column_sums[i] : row_total;
                    const float correction = BY_KEYS ? column_corrections[i] : row_correction;
                    bool seen = true;
                    if (masked && BY_KEYS) seen = row >= column_low[i] && row <= before + column;
                    if (masked && !BY_KEYS) seen = column >= low && column < end;
                    float slope;
                    const float z = score(weights[n][e], slope, p);
                    weights[n][e] = seen ? power(z - sum) : 0.0f;
                    if (FIRST)
                        gradients[n][e] = weights[n][e] * (gradients[n][e] - correction) * slope;
                }
            }
            if (FIRST) multiply_columns<T, D, N>(first_sums, gradients, y1_tile, at);
            if (SECOND) multiply_columns<T, D, N>(second_sums, weights, y2_tile, at);
        }
    }
    if (!inside) return;
    const ulong out = ((ulong(batch) * size + row) * owners + owner) * HEAD_DIM;
    if (FIRST) write_row<T, D>(first_out + out, first_sums, p.scale, at);
    if (SECOND) write_row<T, D>(second_out + out, second_sums, 1.0f, at);
}

/// For few queries, as in decoding, where reading keys and values is all the time: a threadgroup has 8 rows,
/// which are the queries of all heads that share a key head, and one of `splits` ranges of the keys. Its
/// simdgroups take turns of 16 keys, which they read by themselves; what they found is combined in order,
/// and written as the result if there is one range, else as a part of it.
template <typename T, uint D>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_few(
    device const T *q [[buffer(0)]], device const T *k [[buffer(1)]],
    device const T *v [[buffer(2)]],
    device const uint *first_key [[buffer(3), function_constant(PACKED)]],
    device T *o [[buffer(4), function_constant(GIVES_O)]],
    device float *log_sum_exp [[buffer(5), function_constant(GIVES_SUM)]],
    device float *partial_o [[buffer(6), function_constant(SPLIT)]],
    device float2 *partial_sums [[buffer(7), function_constant(SPLIT)]],
    constant AttentionSizes &p [[buffer(8)]], constant AttentionStrides &strides [[buffer(9)]],
    device const uint *numbers [[buffer(10), function_constant(PAGED)]],
    constant PagedBatch &paged [[buffer(11), function_constant(PAGED)]],
    device const uchar *k_scales [[buffer(12), function_constant(ROUNDED)]],
    device const uchar *v_scales [[buffer(13), function_constant(ROUNDED)]],
    device const T *sinks [[buffer(14), function_constant(SINKS)]], PLACE, SIMD_PLACE) {
    constexpr uint N = 2, MOST_SIMDGROUPS = D <= 128 ? 4 : 2, PITCH = D / 4 + 1;
    // Of so many times 32 columns a lane reads its quads at once.
    constexpr uint BLOCKS = D == 96 ? 3 : 2, QUADS = BLOCKS * N * 2;
    // The simdgroups' results, each of 8 rows; before that the queries, in the first's place.
    threadgroup float4 parts[MOST_SIMDGROUPS * 8 * PITCH];
    threadgroup float tops[MOST_SIMDGROUPS * 8], totals[MOST_SIMDGROUPS * 8];

    // Of a batch, `p.queries` are those of a sequence at most.
    const uint heads_of_key = p.heads / p.kv_heads;
    const uint tiles = (p.queries * heads_of_key + 7) / 8, first_row = group.x % tiles * 8;
    const uint kv_head = group.x / tiles % p.kv_heads, batch = group.x / tiles / p.kv_heads;
    const uint first_head = kv_head * heads_of_key;
    AttentionSpan span = {0, 0, p.queries, p.keys, group.y, p.splits, nullptr};
    uint split = p.split_start + group.y * p.split_keys, split_keys = p.split_keys;
    if (PAGED) {
        if (group.y >= numbers[paged.count]) return;
        span = span_of(numbers, paged, group.y);
        split = span.item * PAGED_SPLIT;
        split_keys = PAGED_SPLIT;
        q += span.first * strides.q[1];
        o += ulong(span.first) * p.heads * HEAD_DIM;
        if (SPLIT) {
            partial_o += ulong(span.part) * p.heads * HEAD_DIM;
            partial_sums += ulong(span.part) * p.heads;
        }
    }
    const uint rows = span.queries * heads_of_key;
    if (PAGED && first_row >= rows) return;
    q += batch * strides.q[0] + first_head * strides.q[2];
    const HeadRows<T> keys = head_rows(k, strides.k, batch, kv_head, p.kv_heads, k_scales);
    const HeadRows<T> values = head_rows(v, strides.v, batch, kv_head, p.kv_heads, v_scales);
    // Rows of one query lie together.
    for (uint i = own.x; i < 8 * (D / 4); i += threads.x) {
        const uint row = i / (D / 4), quad = i % (D / 4), index = first_row + row;
        float4 x = float4(0.0f);
        if (index < rows) {
            device const T *const from = q + index / heads_of_key * strides.q[1] +
                                         index % heads_of_key * strides.q[2];
            x = to_floats(read_quad(from, quad * 4));
        }
        parts[row * PITCH + quad] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const Lane at = lane_place(lane);
    uint low = NO_KEY, end = 0;
    if (first_row + at.row < rows) {
        const uint query = (first_row + at.row) / heads_of_key;
        end = span.keys - span.queries + query + 1;
        low = PAGED ? window_start(p, end) : lowest_key(p, first_key, batch, query);
    }
    const uint seen = max(simd_min(low < end ? low : NO_KEY), split);
    const uint stop = min(simd_max(end), split + split_keys);
    end = min(end, stop);
    // Nobody reads what a range gives that none of the rows sees.
    if (PAGED && seen >= stop) return;
    // The position of a key in the range alone says which simdgroup takes it.
    const uint turns = 8 * N * simdgroups, start = split + (seen - split) / turns * turns;

    float2 sums[D / 8];
    UNROLL for (uint i = 0; i < D / 8; i++) sums[i] = float2(0.0f);
    float top = -INFINITY, total = 0.0f;
    for (ulong turn = ulong(start) + 8 * N * simdgroup; turn < stop;
         turn += 8 * N * simdgroups) {
        const uint first = uint(turn);
        float2 scores[N];
        UNROLL for (uint n = 0; n < N; n++) scores[n] = float2(0.0f);
        Quad<T> y[QUADS];
        ulong rows_of[QUADS];
        uint columns[QUADS];
        UNROLL for (uint b = 0; b < D / 32; b += BLOCKS) {
            UNROLL for (uint i = 0; i < QUADS; i++) {
                // Beyond the last key, a key that exists, whose score doesn't count.
                const uint key = min(first + i / 2 % N * 8 + at.column + i % 2, stop - 1);
                rows_of[i] = PAGED ? paged_row(span.table, paged, max(key, seen)) : key;
                columns[i] = ((b + i / 2 / N) * 8 + at.row) * 4;
            }
            read_quads_of<T, QUADS>(y, keys, rows_of, columns);
            UNROLL for (uint i = 0; i < QUADS / 2; i++) {
                threadgroup const float4 *const x =
                    parts + at.row * PITCH + (b + i / N) * 8 + at.column;
                const float4 x0 = x[0], x1 = x[1];
                const float4 y0 = to_floats(y[i * 2]), y1 = to_floats(y[i * 2 + 1]);
                UNROLL for (uint j = 0; j < 4; j++)
                    multiply_add(scores[i % N], float2(x0[j], x1[j]), float2(y0[j], y1[j]));
            }
        }
        soften<D, N>(scores, sums, top, total, true, first + at.column, low, end, p);
        UNROLL for (uint b = 0; b < D / 32; b += BLOCKS) {
            UNROLL for (uint i = 0; i < QUADS; i++) {
                const uint key = min(first + i / 2 % N * 8 + at.row, stop - 1);
                rows_of[i] = PAGED ? paged_row(span.table, paged, max(key, seen)) : key;
                columns[i] = ((b + i / 2 / N) * 8 + i % 2 * 4 + at.column / 2) * 4;
            }
            read_quads_of<T, QUADS>(y, values, rows_of, columns);
            UNROLL for (uint i = 0; i < QUADS / 2; i++) {
                const float4 y0 = to_floats(y[i * 2]), y1 = to_floats(y[i * 2 + 1]);
                thread float2 *const to = sums + (b + i / N) * 4;
                multiply_add(to[0], scores[i % N], y0.xy);
                multiply_add(to[1], scores[i % N], y0.zw);
                multiply_add(to[2], scores[i % N], y1.xy);
                multiply_add(to[3], scores[i % N], y1.zw);
            }
        }
    }
    total = row_sum(total);
    // The queries have been read.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint own_row = simdgroup * 8 + at.row;
    if (at.column == 0) {
        tops[own_row] = top;
        totals[own_row] = total;
    }
    UNROLL for (uint i = 0; i < D / 16; i++)
        parts[own_row * PITCH + i * 4 + at.column / 2] = float4(sums[i * 2], sums[i * 2 + 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint i = own.x; i < 8 * (D / 4); i += threads.x) {
        const uint row = i / (D / 4), quad = i % (D / 4), index = first_row + row;
        if (index >= rows) continue;
        float best = -INFINITY;
        for (uint s = 0; s < simdgroups; s++) best = max(best, tops[s * 8 + row]);
        const float base = best == -INFINITY ? 0.0f : best;
        float sum = 0.0f;
        float4 values = float4(0.0f);
        for (uint s = 0; s < simdgroups; s++) {
            const float weight = power(tops[s * 8 + row] - base);
            sum += weight * totals[s * 8 + row];
            values += weight * parts[(s * 8 + row) * PITCH + quad];
        }
        const uint query = index / heads_of_key, head = first_head + index % heads_of_key;
        const ulong to = (ulong(batch) * p.queries + query) * p.heads + head;
        if (!SPLIT || (PAGED && span.splits == 1)) {
            const RowEnd row_end = end_row(sinks, head, best, sum);
            write_quad(o + to * HEAD_DIM, quad * 4, values * row_end.factor);
            if (GIVES_SUM && quad == 0)
                log_sum_exp[(ulong(batch) * p.heads + head) * p.queries + query] =
                    row_end.log_sum_exp;
        } else {
            const ulong part = to * span.splits + span.item;
            write_quad(partial_o + part * HEAD_DIM, quad * 4, values);
            if (quad == 0) partial_sums[part] = float2(best, sum);
        }
    }
}

/// Combines the parts of a row in order; a threadgroup a row.
template <typename T>
[[kernel]] void attention_combine(device const float *partial_o [[buffer(0)]],
                                  device const float2 *partial_sums [[buffer(1)]],
                                  device T *o [[buffer(2)]],
                                  device float *log_sum_exp
                                  [[buffer(3), function_constant(ONE_SEQUENCE)]],
                                  constant AttentionSizes &p [[buffer(4)]],
                                  device const uint *numbers
                                  [[buffer(5), function_constant(PAGED)]],
                                  constant PagedBatch &paged
                                  [[buffer(6), function_constant(PAGED)]],
                                  device const T *sinks [[buffer(7), function_constant(SINKS)]],
                                  PLACE) {
    // The row, and the ranges of keys that it sees.
    ulong row = group.x;
    uint first = 0, splits = p.splits, all_splits = p.splits;
    if (PAGED) {
        if (group.x / p.heads >= numbers[paged.count]) return;
        const AttentionSpan span = span_of(numbers, paged, group.x / p.heads);
        if (span.splits == 1) return;
        row = ulong(span.item) * p.heads + group.x % p.heads;
        const uint end = span.keys - span.queries + span.item + 1;
        first = window_start(p, end) / PAGED_SPLIT;
        splits = (end - 1) / PAGED_SPLIT - first + 1;
        all_splits = span.splits;
        o += ulong(span.first) * p.heads * HEAD_DIM;
        partial_o += ulong(span.part) * p.heads * HEAD_DIM;
        partial_sums += ulong(span.part) * p.heads;
    }
    partial_sums += row * all_splits + first;
    partial_o += (row * all_splits + first) * HEAD_DIM;
    float best = -INFINITY;
    for (uint split = 0; split < splits; split++) best = max(best, partial_sums[split].x);
    const float base = best == -INFINITY ? 0.0f : best;
    float total = 0.0f;
    for (uint split = 0; split < splits; split++)
        total += power(partial_sums[split].x - base) * partial_sums[split].y;
    const uint token = group.x / p.heads, head = group.x % p.heads;
    const RowEnd row_end = end_row(sinks, head, best, total);
    for (uint column = own.x; column < HEAD_DIM; column += threads.x) {
        float value = 0.0f;
        for (uint split = 0; split < splits; split++)
            value += power(partial_sums[split].x - base) *
                     partial_o[ulong(split) * HEAD_DIM + column];
        o[row * HEAD_DIM + column] = static_cast<T>(value * row_end.factor);
    }
    const uint batch = token / p.queries, query = token % p.queries;
    if (ONE_SEQUENCE && own.x == 0)
        log_sum_exp[(ulong(batch) * p.heads + head) * p.queries + query] = row_end.log_sum_exp;
}

FOR_EACH_DTYPE(attention_corrections)
FOR_EACH_DTYPE(attention_backward_sinks)
FOR_EACH_DTYPE(attention_combine)

#define FOR_EACH_HEAD_DIM(define, type, dtype)                                                     \
    define(type, dtype, 64) define(type, dtype, 96) define(type, dtype, 128)                       \
        define(type, dtype, 256)

#define FORWARD(type, dtype, d)                                                                    \
    template [[host_name("attention_forward_" #d "_" #dtype)]] [[kernel]] decltype(                \
        attention_forward<type, d>) attention_forward<type, d>;
FOR_EACH_HEAD_DIM(FORWARD, float, f32)
FOR_EACH_HEAD_DIM(FORWARD, half, f16)
FOR_EACH_HEAD_DIM(FORWARD, bfloat, bf16)

#define FEW(type, dtype, d)                                                                        \
    template [[host_name("attention_few_" #d "_" #dtype)]] [[kernel]] decltype(                    \
        attention_few<type, d>) attention_few<type, d>;
FOR_EACH_HEAD_DIM(FEW, float, f32)
FOR_EACH_HEAD_DIM(FEW, half, f16)
FOR_EACH_HEAD_DIM(FEW, bfloat, bf16)

#define BACKWARD(name, type, dtype, d, role)                                                       \
    template [[host_name("attention_" #name "_" #d "_" #dtype)]] [[kernel]] decltype(              \
        attention_backward<type, d, role>) attention_backward<type, d, role>;
#define DQ(type, dtype, d) BACKWARD(dq, type, dtype, d, GIVE_DQ)
FOR_EACH_HEAD_DIM(DQ, float, f32)
FOR_EACH_HEAD_DIM(DQ, half, f16)
FOR_EACH_HEAD_DIM(DQ, bfloat, bf16)

#define DK_DV(type, dtype)                                                                         \
    BACKWARD(dk_dv, type, dtype, 64, GIVE_DK_DV)                                                   \
    BACKWARD(dk_dv, type, dtype, 96, GIVE_DK_DV)                                                   \
    BACKWARD(dk_dv, type, dtype, 128, GIVE_DK_DV)                                                  \
    BACKWARD(dk, type, dtype, 256, GIVE_DK) BACKWARD(dv, type, dtype, 256, GIVE_DV)
DK_DV(float, f32)
DK_DV(half, f16)
DK_DV(bfloat, bf16)
