// Attention over blocks of pools on CUDA, by the kernels of one sequence (few_queries.cuh, forward.cuh): a block
// finds the sequence that it works for, and the rows of its keys by that one's table. What segments at fixed positions
// give is joined in their order, so that a query gives the same bits in any company.

#include "../../rope/rotation.cuh"
#include "../few_queries.cuh"
#include "../forward.cuh"
#include "rounded/rounded.cuh"

/// Keys of an item, for up to 16 queries. Where a block takes several items of a sequence, that of the first one does, and
/// those of the others leave; or several blocks have parts of an item.
constexpr int PAGED_SPLIT = 256;
/// Queries of an item where there are more.
constexpr int PAGED_QUERIES = 128;
/// Numbers of a sequence.
constexpr int SPAN_NUMBERS = 4;

/// What every kernel is given beside `Parameters`, of which blocks fill in what belongs to their sequence.
/// `PagedBatch` in cuda.rs has the same fields in the same order.
struct PagedBatch {
    /// `Sequences::numbers`.
    const uint32_t *numbers;
    /// Of codes, where pools are rounded to 8 bits.
    const uint8_t *k_scales, *v_scales;
    /// Where among them the sequences, their tables, the items of this launch, and the number of those are.
    int spans, tables, items, count;
    /// Entries of a table, tokens of a block, and blocks of a pool.
    int width, block, blocks;
    /// Blocks of this launch for an item.
    int item_blocks;
    /// Keys that a block takes of a sequence with one query, and of one with a few.
    int single_keys, few_keys;
    /// Whether the kernel before has other items of this batch, so that both may run beside each other.
    int is_beside;
};

/// New tokens, one of each sequence, whose queries, in `Parameters`, and keys aren't rotated yet, and whose keys and
/// values aren't in the pools. `NewRows` in cuda.rs has the same fields in the same order.
struct NewRows {
    /// (tokens, kv_heads, head_dim), by strides of tokens and heads in elements.
    const void *k, *v;
    /// (tokens, half)
    const float *cosines, *sines;
    /// (tokens): the row of the pools that keys and values become.
    const uint32_t *places;
    int64_t k_strides[2], v_strides[2];
    int half;
    int unused;
};

/// Where a sequence is: its keys in the pools, and its first query in the batch.
struct PagedRows {
    const uint32_t *table;
    int width, block, blocks;
    int64_t first;

    /// The row of a key in the pool, negative where the table has no block for it.
    __device__ __forceinline__ int64_t row(int key) const {
        // Most blocks have sixteen, and divisions take long.
        const int index = block == 16 ? key / 16 : key / block;
        if (index >= width) return -1;
        const uint32_t entry = table[index];
        if (entry >= static_cast<uint32_t>(blocks)) return -1;
        return static_cast<int64_t>(entry) * block + (key - index * block);
    }
};

/// Keys and values in blocks of a pool.
struct PagedKeys : PagedRows, DenseKeys {
    __device__ __forceinline__ PagedKeys(const PagedRows &rows, const PagedBatch &)
        : PagedRows(rows) {}

    /// Starts to copy the rows of `count` keys into a tile: sixteen at a time, which are in one block. Zeros
    /// where there is no block.
    template <typename T, int ROWS, int D, int THREADS>
    __device__ __forceinline__ void load(uint32_t tile, const Rows<T> &rows, int key, int count,
                                         int head_dim, int thread) const {
        constexpr int CHUNKS = D / 8, COPIES = 16 * CHUNKS;
#pragma unroll
        for (int part = 0; part < ROWS; part += 16) {
            const int64_t at = part < count ? row(key + part) : -1;
            const T *const from = rows.start + max(at, int64_t(0)) * rows.stride;
            const int end = at < 0 ? 0 : count - part;
#pragma unroll
            for (int start = 0; start < COPIES; start += THREADS) {
                const int index = start + thread;
                if (COPIES % THREADS != 0 && index >= COPIES) break;
                const int line = index / CHUNKS, chunk = index % CHUNKS;
                copy_async(tile + place<ROWS>(part + line, chunk),
                           from + line * rows.stride + chunk * 8,
                           line < end && chunk * 8 < head_dim);
            }
        }
    }
};

/// A row of a head in codes: its numbers, as rounded to `T`.
template <typename T> struct RoundedLine {
    const uint8_t *codes, *scales;

    __device__ __forceinline__ float operator[](int column) const {
        const float step = step_of(scales[column / ROUNDED_GROUP]);
        return to_float(from_float<T>(static_cast<int8_t>(codes[column]) * step));
    }
};

/// The rows of a head in codes, and their scales, so many bytes apart.
template <typename T> struct RoundedRows {
    const uint8_t *codes, *scales;
    int64_t stride, scale_stride;

    __device__ __forceinline__ RoundedLine<T> line(int64_t row) const {
        return {codes + row * stride, scales + row * scale_stride};
    }

    /// Where the scale of a column of a row is.
    __device__ __forceinline__ uint64_t scale(int64_t row, int column) const {
        return reinterpret_cast<uint64_t>(scales + row * scale_stride + column / ROUNDED_GROUP);
    }
};

/// Eight neighbouring elements and those `half` behind them, rotated.
template <typename T>
__device__ __forceinline__ void rotate_chunks(const T *from, const float *cosines, const float *sines,
                                              int half, uint4 &low, uint4 &high) {
    const Pack<T> a = load_pack(from), b = load_pack(from + half);
    Pack<T> rotated_a, rotated_b;
#pragma unroll
    for (int start = 0; start < 8; start += 4) {
        const float4 c = *reinterpret_cast<const float4 *>(cosines + start);
        const float4 s = *reinterpret_cast<const float4 *>(sines + start);
        const float c4[4] = {c.x, c.y, c.z, c.w}, s4[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = rotated_pair(to_float(a.at[start + i]), to_float(b.at[start + i]),
                                             c4[i], s4[i]);
            rotated_a.at[start + i] = from_float<T>(pair.x);
            rotated_b.at[start + i] = from_float<T>(pair.y);
        }
    }
    low = *reinterpret_cast<const uint4 *>(&rotated_a);
    high = *reinterpret_cast<const uint4 *>(&rotated_b);
}

/// The query of a new token, which is rotated on the way. A block that sees its key puts this and the value into the
/// pools, too.
struct NewQueries {
    static constexpr bool BRING_A_KEY = true;

    const NewRows &tokens;
    const PagedRows &rows;

    template <typename T, int D, int ROWS, int THREADS>
    __device__ __forceinline__ void bring(const Parameters &p, uint32_t tile, bool is_last, BroughtKey<D / 8> &brought,
                                          int batch, int kv_head, int first_row) const {
        constexpr int CHUNKS = D / 8;
        const int chunks = p.head_dim / 8, turning = tokens.half / 8;
        const float *const cosines = tokens.cosines + rows.first * tokens.half;
        const float *const sines = tokens.sines + rows.first * tokens.half;
        if (is_last) write<T, D, THREADS>(p, brought, kv_head, cosines, sines);
        for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
            const int row = index / CHUNKS, chunk = index % CHUNKS;
            if (chunk >= turning && chunk < 2 * turning) continue;
            const FewRow from = few_row(p, kv_head, first_row + row);
            const T *const q = head_start(static_cast<const T *>(p.q), p.q_strides, batch,
                                          from.inside ? from.head : 0) +
                               chunk * 8;
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (chunk < turning) {
                if (from.inside)
                    rotate_chunks(q, cosines + chunk * 8, sines + chunk * 8, tokens.half, low, high);
                store_chunk(tile + place<ROWS>(row, chunk + turning), high);
            } else if (from.inside && chunk < chunks) {
                low = *reinterpret_cast<const uint4 *>(q);
            }
            store_chunk(tile + place<ROWS>(row, chunk), low);
        }
    }

    /// Brings the key and the value, and puts them into the pools, if these have a place for them.
    template <typename T, int D, int THREADS>
    __device__ __forceinline__ void write(const Parameters &p, BroughtKey<D / 8> &brought, int kv_head,
                                          const float *cosines, const float *sines) const {
        const int64_t place = tokens.places[rows.first];
        const bool is_there = place < static_cast<int64_t>(rows.blocks) * rows.block;
        if (threadIdx.x == 0) brought.is_there = is_there;
        if (!is_there) return;
        const int chunks = p.head_dim / 8, turning = tokens.half / 8;
        const int64_t to = (place * p.kv_heads + kv_head) * p.head_dim;
        T *const k_to = static_cast<T *>(const_cast<void *>(p.k)) + to;
        T *const v_to = static_cast<T *>(const_cast<void *>(p.v)) + to;
        const T *const k = static_cast<const T *>(tokens.k) + rows.first * tokens.k_strides[0] +
                           kv_head * tokens.k_strides[1];
        const T *const v = static_cast<const T *>(tokens.v) + rows.first * tokens.v_strides[0] +
                           kv_head * tokens.v_strides[1];
        for (int chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
            const auto put = [&](T *to, uint4 (&here)[D / 8], int at, const uint4 &values) {
                *reinterpret_cast<uint4 *>(to + at * 8) = values;
                here[at] = values;
            };
            put(v_to, brought.value, chunk, *reinterpret_cast<const uint4 *>(v + chunk * 8));
            uint4 low, high;
            if (chunk < turning) {
                rotate_chunks(k + chunk * 8, cosines + chunk * 8, sines + chunk * 8, tokens.half, low, high);
                put(k_to, brought.key, chunk, low);
                put(k_to, brought.key, chunk + turning, high);
            } else if (chunk >= 2 * turning) {
                put(k_to, brought.key, chunk, *reinterpret_cast<const uint4 *>(k + chunk * 8));
            }
        }
    }
};

/// Keys and values in blocks of pools that are rounded to 8 bits. Tiles have their numbers, so all that follows is as
/// it is for `PagedKeys`: a thread copies sixteen codes to where half of their numbers will be, and four bytes with
/// their scale to where the other half will be.
struct RoundedKeys : PagedRows {
    const uint8_t *k_scales, *v_scales;

    __device__ __forceinline__ RoundedKeys(const PagedRows &rows, const PagedBatch &batch)
        : PagedRows(rows), k_scales(batch.k_scales), v_scales(batch.v_scales) {}

    template <typename T>
    __device__ __forceinline__ RoundedRows<T> rows_of(const Parameters &p, const void *codes,
                                                      const uint8_t *scales, int kv_head) const {
        const int groups = (p.head_dim + ROUNDED_GROUP - 1) / ROUNDED_GROUP;
        return {static_cast<const uint8_t *>(codes) + kv_head * p.head_dim,
                scales + kv_head * groups, int64_t(p.kv_heads) * p.head_dim,
                int64_t(p.kv_heads) * groups};
    }

    template <typename T>
    __device__ __forceinline__ RoundedRows<T> keys(const Parameters &p, int, int kv_head) const {
        return rows_of<T>(p, p.k, k_scales, kv_head);
    }

    template <typename T>
    __device__ __forceinline__ RoundedRows<T> values(const Parameters &p, int, int kv_head) const {
        return rows_of<T>(p, p.v, v_scales, kv_head);
    }

    /// Starts to copy the codes of lines and their scales: `row_of` says where one lies, and is negative where there is none.
    template <typename T, int ROWS, int D, int THREADS, typename Row>
    __device__ __forceinline__ void copy_codes(uint32_t tile, const RoundedRows<T> &rows, const Row &row_of,
                                               int head_dim, int thread) const {
        constexpr int OF_ROW = D / 16, COPIES = ROWS * OF_ROW;
#pragma unroll
        for (int start = 0; start < COPIES; start += THREADS) {
            const int index = start + thread, line = index / OF_ROW;
            if (COPIES % THREADS != 0 && index >= COPIES) break;
            const int piece = index % OF_ROW;
            const int64_t at = row_of(line);
            const bool inside = at >= 0 && piece * 16 < head_dim;
            const int64_t from = inside ? at : 0;
            const int column = inside ? piece * 16 : 0;
            copy_async(tile + place<ROWS>(line, piece * 2),
                       rows.codes + from * rows.stride + column, inside);
            copy_async_word(tile + place<ROWS>(line, piece * 2 + 1),
                            reinterpret_cast<const uint32_t *>(rows.scale(from, column) & ~3ull),
                            inside);
        }
    }

    /// Starts to copy the codes of `count` keys and their scales; zeros where there is no block.
    template <typename T, int ROWS, int D, int THREADS>
    __device__ __forceinline__ void load(uint32_t tile, const RoundedRows<T> &rows, int key,
                                         int count, int head_dim, int thread) const {
        const auto row_of = [&](int line) {
            // Sixteen keys are in one block.
            const int part = line / 16 * 16;
            const int64_t first = line < count ? row(key + part) : -1;
            return first < 0 ? -1 : first + line - part;
        };
        copy_codes<T, ROWS, D, THREADS>(tile, rows, row_of, head_dim, thread);
    }

    /// The same of 16 keys, from row `at` on, or zeros where that is negative.
    template <typename T, int D, int THREADS>
    __device__ __forceinline__ void load_sixteen(uint32_t tile, const RoundedRows<T> &rows, int64_t at, int count,
                                                 int head_dim, int thread) const {
        const int end = at < 0 ? 0 : count;
        const auto row_of = [&](int line) { return line < end ? at + line : -1; };
        copy_codes<T, 16, D, THREADS>(tile, rows, row_of, head_dim, thread);
    }

    /// Makes what a thread has copied into numbers.
    template <typename T, int ROWS, int D, int THREADS>
    __device__ __forceinline__ void land(uint32_t tile, const RoundedRows<T> &rows,
                                         int thread) const {
        constexpr int OF_ROW = D / 16, COPIES = ROWS * OF_ROW;
#pragma unroll
        for (int start = 0; start < COPIES; start += THREADS) {
            const int index = start + thread, line = index / OF_ROW;
            if (COPIES % THREADS != 0 && index >= COPIES) break;
            const int piece = index % OF_ROW;
            const uint32_t first = tile + place<ROWS>(line, piece * 2);
            const uint32_t second = tile + place<ROWS>(line, piece * 2 + 1);
            const uint4 codes = load_chunk(first);
            // Blocks begin at multiples of sixteen rows, so the line tells which of the four bytes it is.
            const uint32_t byte = rows.scale(line % 16, piece * 16) % 4;
            const float step = step_of(load_word(second) >> 8 * byte & 0xff);
            store_chunk(first, eight_numbers<T>(codes.x, codes.y, step));
            store_chunk(second, eight_numbers<T>(codes.z, codes.w, step));
        }
    }
};

/// The parameters of a sequence by itself.
template <typename T>
__device__ __forceinline__ Parameters of_sequence(const Parameters &given, const PagedBatch &batch,
                                                  int sequence) {
    const uint32_t *const span = batch.numbers + batch.spans + SPAN_NUMBERS * sequence;
    Parameters p = given;
    const int64_t first = span[0], part = span[3];
    p.queries = static_cast<int>(span[1]);
    p.keys = static_cast<int>(span[2]);
    p.q = static_cast<const T *>(p.q) + first * p.q_strides[1];
    p.o = static_cast<T *>(p.o) + first * p.heads * p.head_dim;
    p.partial_o += part * p.heads * p.head_dim;
    p.partial_sums += part * p.heads;
    p.split_keys = p.queries == 1 ? batch.single_keys : batch.few_keys;
    p.parts = p.keys <= p.split_keys ? 1 : (p.keys + p.part_keys - 1) / p.part_keys;
    return p;
}

/// Calls `work` with the parameters and keys of the sequence that this block's item is of, the item's place in
/// that sequence, and which of the item's blocks this is. Where it `IS_AHEAD`, the kernel before may not have ended, for which
/// the work waits: the numbers of a batch are copied by the host, not written by a kernel. Where that kernel has other items
/// of the batch, it is waited for at the end.
template <typename T, typename Keys, bool IS_AHEAD = false, typename Work>
__device__ __forceinline__ void for_item(const Parameters &given, const PagedBatch &batch,
                                         const Work &work) {
    const bool is_beside = !IS_AHEAD && batch.is_beside;
    if (!IS_AHEAD && !is_beside) follow_previous();
    const int item = blockIdx.x / batch.item_blocks;
    // There is room for an item of every block, so it is read beside the number of those that there are.
    const uint32_t *const at = batch.numbers + batch.items + 2 * item;
    const int sequence = at[0], part = at[1];
    if (item >= static_cast<int>(batch.numbers[batch.count])) {
        // Those of a launch without items must not end before the kernel before.
        if (IS_AHEAD || is_beside) follow_previous();
        return;
    }
    const uint32_t *const table =
        batch.numbers + batch.tables + static_cast<int64_t>(sequence) * batch.width;
    const int64_t first = batch.numbers[batch.spans + SPAN_NUMBERS * sequence];
    const PagedRows rows{table, batch.width, batch.block, batch.blocks, first};
    work(of_sequence<T>(given, batch, sequence), Keys(rows, batch), part,
         static_cast<int>(blockIdx.x % batch.item_blocks));
    if (is_beside) follow_previous();
}

/// Calls `work` with the sequence's parameters and keys, and with the range of keys, the key head and the first of ROWS rows
/// of its queries that the block has, if any of these sees the range.
template <typename T, typename Keys, int ROWS, bool IS_AHEAD = false, typename Work>
__device__ __forceinline__ void for_range(const Parameters &given, const PagedBatch &batch, const Work &work) {
    for_item<T, Keys, IS_AHEAD>(given, batch, [&](const Parameters &p, const Keys &keys, int item, int block) {
        // One of these is 1.
        const int items = max(p.split_keys / PAGED_SPLIT, 1), blocks = max(PAGED_SPLIT / p.split_keys, 1);
        if (item % items != 0) return;
        const int range = item / items * blocks + block / p.kv_heads % blocks;
        const int first_row = block / p.kv_heads / blocks * ROWS;
        const int2 seen = few_keys(p, range, first_row, ROWS);
        if (seen.x < seen.y) work(p, keys, seen, block % p.kv_heads, first_row);
    });
}

/// A range of a sequence's keys for FEW_ROWS rows of a key head.
template <typename T, typename Keys, int D>
__device__ __forceinline__ void paged_few(const Parameters &given, const PagedBatch &batch) {
    for_range<T, Keys, FEW_ROWS>(given, batch, [](const Parameters &p, const Keys &keys, int2 seen, int head, int row) {
        few_block<T, D>(p, keys, GivenQueries(), PartsInMemory(), seen, 0, head, row);
    });
}

/// The same of new tokens.
template <typename T, int D>
__device__ __forceinline__ void paged_new(const Parameters &given, const PagedBatch &batch,
                                          const NewRows &tokens) {
    for_range<T, PagedKeys, FEW_ROWS, true>(given, batch, [&](Parameters p, const PagedKeys &keys, int2 seen, int head, int row) {
        // As the compiler should know.
        p.queries = 1;
        few_block<T, D>(p, keys, NewQueries{tokens, keys}, PartsInMemory(), seen, 0, head, row);
    });
}

#if defined(HOPPER)

/// The same by clusters, each of which has all keys of a sequence, whose first item this is.
template <typename T, int D>
__device__ __forceinline__ void paged_shared(const Parameters &given, const PagedBatch &batch, const NewRows &tokens) {
    for_item<T, PagedKeys, true>(given, batch, [&](Parameters p, const PagedKeys &keys, int, int block) {
        p.queries = 1;
        const int tile = block / SHARING_BLOCKS, head = tile % p.kv_heads, first_row = tile / p.kv_heads * FEW_ROWS;
        const int2 seen = few_keys(p, 0, first_row, FEW_ROWS);
        few_blocks_together<T, D>(p, keys, NewQueries{tokens, keys}, seen, 0, head, first_row);
    });
}

#endif

/// The same without tensor cores.
template <typename T, typename Keys>
__device__ __forceinline__ void paged_plain_few_of(const Parameters &given, const PagedBatch &batch) {
    constexpr int ROWS = PLAIN_FEW_ROWS;
    for_range<T, Keys, ROWS>(given, batch, [](const Parameters &p, const Keys &keys, int2 seen, int head, int row) {
        plain_few_block<T>(p, keys, seen, 0, head, row);
    });
}

/// Joins the parts that a query has of a head.
template <typename T>
__device__ __forceinline__ void paged_combine(const Parameters &given, const PagedBatch &batch) {
    for_item<T, PagedKeys>(given, batch, [](const Parameters &p, const PagedKeys &, int query, int head) {
        if (p.parts == 1) return;
        combine_query<T>(p, static_cast<int64_t>(query) * p.heads + head, query);
    });
}

/// All keys for a tile of queries of a sequence with many.
template <typename T, typename Keys, int D>
__device__ __forceinline__ void paged_forward(const Parameters &given, const PagedBatch &batch) {
    constexpr int M = D <= 128 ? 2 : 1, WARPS = 4;
    for_item<T, Keys>(given, batch, [](const Parameters &p, const Keys &keys, int item, int block) {
        const int first_query = item * PAGED_QUERIES + block / p.heads * (16 * M * WARPS);
        if (first_query < p.queries)
            forward_block<T, D, M, WARPS>(p, keys, 0, block % p.heads, first_query);
    });
}

/// All keys for some rows of such a sequence, without tensor cores.
template <typename T, typename Keys>
__device__ __forceinline__ void paged_plain_of(const Parameters &given, const PagedBatch &batch) {
    for_item<T, Keys>(given, batch, [](Parameters p, const Keys &keys, int item, int block) {
        p.parts = 1;
        p.split_keys = INT_MAX;
        const int group = p.heads / p.kv_heads, end = min(p.queries, (item + 1) * PAGED_QUERIES);
        const int first_row = item * PAGED_QUERIES * group + block / p.kv_heads * PLAIN_FEW_ROWS;
        if (first_row >= end * group) return;
        const int2 seen = few_keys(p, 0, first_row, PLAIN_FEW_ROWS);
        plain_few_block<T>(p, keys, seen, 0, block % p.kv_heads, first_row);
    });
}

#define PAGED_ARGUMENTS                                                                            \
    (const __grid_constant__ Parameters p, const __grid_constant__ PagedBatch batch)

#define FEW(element, d)                                                                            \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                      \
        attention_paged_few_##element##_##d PAGED_ARGUMENTS {                                      \
        paged_few<element, PagedKeys, d>(p, batch);                                                \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                      \
        attention_rounded_few_##element##_##d PAGED_ARGUMENTS {                                    \
        paged_few<element, RoundedKeys, d>(p, batch);                                              \
    }
FOR_EACH_TILE_KERNEL(FEW)

#define NEW(element, d)                                                                            \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                      \
        attention_paged_new_##element##_##d(const __grid_constant__ Parameters p,                  \
                                            const __grid_constant__ PagedBatch batch,              \
                                            const __grid_constant__ NewRows tokens) {              \
        paged_new<element, d>(p, batch, tokens);                                                   \
    }
FOR_EACH_TILE_KERNEL(NEW)

#if defined(HOPPER)
#define SHARED(element, d)                                                                         \
    extern "C" __global__ void __cluster_dims__(SHARING_BLOCKS, 1, 1) __launch_bounds__(FEW_THREADS) \
        attention_paged_shared_##element##_##d(const __grid_constant__ Parameters p,               \
                                               const __grid_constant__ PagedBatch batch,           \
                                               const __grid_constant__ NewRows tokens) {           \
        paged_shared<element, d>(p, batch, tokens);                                                \
    }
FOR_EACH_TILE_KERNEL(SHARED)
#endif

#define FORWARD(element, d)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        attention_paged_forward_##element##_##d PAGED_ARGUMENTS {                                    \
        paged_forward<element, PagedKeys, d>(p, batch);                                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        attention_rounded_forward_##element##_##d PAGED_ARGUMENTS {                                  \
        paged_forward<element, RoundedKeys, d>(p, batch);                                          \
    }
FOR_EACH_TILE_KERNEL(FORWARD)

template <typename T>
__device__ __forceinline__ void paged_plain(const Parameters &given, const PagedBatch &batch) {
    paged_plain_of<T, PagedKeys>(given, batch);
}
template <typename T>
__device__ __forceinline__ void rounded_plain(const Parameters &given, const PagedBatch &batch) {
    paged_plain_of<T, RoundedKeys>(given, batch);
}
template <typename T>
__device__ __forceinline__ void paged_plain_few(const Parameters &given, const PagedBatch &batch) {
    paged_plain_few_of<T, PagedKeys>(given, batch);
}
template <typename T>
__device__ __forceinline__ void rounded_plain_few(const Parameters &given,
                                                  const PagedBatch &batch) {
    paged_plain_few_of<T, RoundedKeys>(given, batch);
}

FOR_EACH_DTYPE(paged_plain_few, 128, PAGED_ARGUMENTS, (p, batch))
FOR_EACH_DTYPE(paged_plain, 128, PAGED_ARGUMENTS, (p, batch))
FOR_EACH_DTYPE(rounded_plain_few, 128, PAGED_ARGUMENTS, (p, batch))
FOR_EACH_DTYPE(rounded_plain, 128, PAGED_ARGUMENTS, (p, batch))
FOR_EACH_DTYPE(paged_combine, 128, PAGED_ARGUMENTS, (p, batch))
