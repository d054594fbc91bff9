// Low-rank adapters of rows that have different ones: xa = x·A by `down`, in parts of the inner dimension, and
// y += s·xa·B by `up`, which adds the parts up. The formulas are in mod.rs.
//
// Both take items, of up to 16 or 64 rows of one adapter, and each row is computed in the same way in either: a product
// is cut along its depth at fixed places, and its sums are added up in their order.
//
// A tensor core takes 16 numbers along the depth of which a thread has two neighbours and two more 8 further on. The
// order along the depth doesn't matter as long as both sides have the same. So a thread loads 8 neighbours of both
// sides, 16 bytes, for two such products, straight from memory, where A and B lie transposed.
#include "tensor.cuh"

namespace {

/// The depth of a part of x·A, and of a warp's share of it.
constexpr int SPLIT = 1024;
constexpr int DOWN_WARPS = 8;
constexpr int SHARE = SPLIT / DOWN_WARPS;
/// Columns of y that a block of `up` has at a time.
constexpr int UP_COLUMNS = 256;
/// Ranks that are taken at once.
constexpr int CHUNK = 64;
/// Numbers from one row of such to the next in shared memory, against bank conflicts.
constexpr int PITCH = 96;
constexpr int PLAIN_THREADS = 128;
constexpr int ITEM_NUMBERS = 4;
constexpr int MOST_LAYERS = 4;

/// The factors of an adapter for a layer, as `table` in cuda.rs writes them; none where the rank is 0.
struct RowFactors {
    const void *a; // (rank filled up to a multiple of 8, in)
    const void *b; // (out, the same)
    int rank;
    float scale;
};

struct RowLayer {
    const RowFactors *adapters; // by adapter
    void *y;                    // (rows, out)
    int64_t y_stride;
    int outer;
    int unused;
};

struct LoraRows {
    const void *x;           // (rows, in)
    const uint32_t *numbers; // `Rows::numbers`
    float *parts;            // (parts, layers, places, pitch)
    int64_t x_stride;
    int inner;
    /// Rows of `parts` for a layer, and numbers of such a row.
    int places, pitch;
    /// Where the order of the rows, their adapters and the items of this launch are among the numbers, and the number
    /// of those.
    int order, adapters, items, count;
    int layer_count;
    /// How many times UP_COLUMNS a block of `up` has, one after the other.
    int turns;
    int unused;
    RowLayer layers[MOST_LAYERS];
};

/// What a block works on.
struct Item {
    int first, rows;
    const uint32_t *order;
    RowFactors factors;
};

/// Whether there is such an item, and its adapter has the layer.
__device__ __forceinline__ bool find_item(const LoraRows &p, int index, int layer, Item &item) {
    // There is room for as many items as there are blocks, so all is read at once.
    const uint32_t *const at = p.numbers + p.items + ITEM_NUMBERS * index;
    const uint32_t adapter = at[3];
    item.first = at[0];
    item.rows = at[1];
    if (index >= static_cast<int>(p.numbers[p.count])) return false;
    item.order = p.numbers + p.order + item.first;
    item.factors = p.layers[layer].adapters[adapter];
    return item.factors.rank > 0;
}

__device__ __forceinline__ int filled_up(int rank) { return (rank + 7) / 8 * 8; }

/// Where row `place` of a part for a layer begins.
__device__ __forceinline__ float *part_of(const LoraRows &p, int part, int layer, int place) {
    const int64_t row = (static_cast<int64_t>(part) * p.layer_count + layer) * p.places + place;
    return p.parts + row * p.pitch;
}

__device__ __forceinline__ uint4 load_or_zero(const void *address, bool exists) {
    return exists ? *static_cast<const uint4 *>(address) : make_uint4(0, 0, 0, 0);
}

/// `c += a·b` of 32 numbers along the depth: of rows `group` and `group + 8` of a, and of column `group` of b.
template <typename T>
__device__ __forceinline__ void multiply_add_32(float (&c)[4], const uint4 &upper,
                                                const uint4 &lower, const uint4 &b) {
    multiply_add<T>(c, {upper.x, lower.x, upper.y, lower.y}, b.x, b.y);
    multiply_add<T>(c, {upper.z, lower.z, upper.w, lower.w}, b.z, b.w);
}

/// `8·TILES` ranks of a part of x·A for 16·M rows.
template <typename T, int M, int TILES>
__device__ __forceinline__ void down_ranks(const LoraRows &p, const Item &item, int first_rank,
                                           float *sums) {
    // Loads that are under way at once.
    constexpr int STEPS = TILES >= 8 ? 1 : TILES >= 4 ? 2 : 4;
    constexpr int COLUMNS = 8 * TILES;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, own = lane % 4 * 8;
    const int begin = blockIdx.y * SPLIT + warp * SHARE;
    const int ranks = filled_up(item.factors.rank);

    const T *x[M][2];
    bool is_row[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + group;
            is_row[m][half] = row < item.rows;
            const int64_t index = is_row[m][half] ? item.order[row] : 0;
            x[m][half] = static_cast<const T *>(p.x) + index * p.x_stride;
        }
    const T *const a = static_cast<const T *>(item.factors.a);
    float c[M][TILES][4] = {};
    for (int step = begin; step < min(begin + SHARE, p.inner); step += 32 * STEPS) {
        uint4 left[STEPS][M][2], right[STEPS][TILES];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int k = step + 32 * s + own;
            const bool is_inside = k < p.inner;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const int rank = first_rank + 8 * tile + group;
                right[s][tile] =
                    load_or_zero(a + static_cast<int64_t>(rank) * p.inner + k, is_inside && rank < ranks);
            }
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    left[s][m][half] = load_or_zero(x[m][half] + k, is_inside && is_row[m][half]);
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    multiply_add_32<T>(c[m][tile], left[s][m][0], left[s][m][1], right[s][tile]);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = group + i / 2 * 8, column = 8 * tile + lane % 4 * 2 + i % 2;
                sums[(warp * 16 + row) * COLUMNS + column] = c[m][tile][i];
            }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * COLUMNS; i += DOWN_WARPS * WARP) {
            const int row = 16 * m + i / COLUMNS, rank = first_rank + i % COLUMNS;
            if (row >= item.rows || rank >= ranks) continue;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < DOWN_WARPS; other++) sum += sums[other * 16 * COLUMNS + i];
            part_of(p, blockIdx.y, blockIdx.z, item.first + row)[rank] = sum;
        }
    }
}

/// A part of x·A: of blocks (item, part, layer).
template <typename T, int M> __device__ __forceinline__ void down(const LoraRows &p) {
    follow_previous();
    // Sums of many rows take registers.
    constexpr int MOST = M == 1 ? 8 : 4;
    __shared__ float sums[DOWN_WARPS * 16 * 8 * MOST];
    Item item;
    if (!find_item(p, blockIdx.x, blockIdx.z, item)) return;
    for (int first = 0; first < item.factors.rank; first += 8 * MOST) {
        const int left = item.factors.rank - first;
        if (MOST > 4 && left > 32) {
            down_ranks<T, M, MOST>(p, item, first, sums);
        } else if (left > 16) {
            down_ranks<T, M, 4>(p, item, first, sums);
        } else if (left > 8) {
            down_ranks<T, M, 2>(p, item, first, sums);
        } else {
            down_ranks<T, M, 1>(p, item, first, sums);
        }
    }
}

/// y += s·xa·B for columns of an item: of blocks (item, columns, layer). A warp has 8·TILES columns at a time, 32 of
/// which are four tiles: column `8·(n / 2) + 2·tile + n % 2` of them is column `n` of a tile, so that a thread has 8
/// neighbours in a row of y. x·A is multiplied as the sum of two numbers, so that little of it is lost.
///
/// What it begins with was there before `down`, which is the kernel before it or comes before that: the first of B are
/// on their way while x·A is still made, and the next ones while a result is written.
template <typename T, int M, int WARPS, int TILES>
__device__ __forceinline__ void up(const LoraRows &p) {
    static_assert(WARPS * TILES * 8 == UP_COLUMNS);
    constexpr int ROWS = 16 * M;
    alignas(16) __shared__ T high[ROWS][PITCH], low[ROWS][PITCH];
    Item item;
    const RowLayer &layer = p.layers[blockIdx.z];
    const int columns = UP_COLUMNS * p.turns, begin = static_cast<int>(blockIdx.y) * columns;
    const int end = min(begin + columns, layer.outer);
    // The same for all threads.
    if (begin >= end || !find_item(p, blockIdx.x, blockIdx.z, item)) {
        follow_previous();
        return;
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, own = lane % 4 * 8;
    const int ranks = filled_up(item.factors.rank), parts = (p.inner + SPLIT - 1) / SPLIT;
    const T *const b = static_cast<const T *>(item.factors.b);
    uint4 right[TILES];
    auto load_right = [&](int base, int first) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int column = base + warp * 8 * TILES + tile / 4 * 32 + group / 2 * 8 +
                               tile % 4 * 2 + group % 2;
            right[tile] = load_or_zero(b + static_cast<int64_t>(column) * ranks + first + own,
                                       column < layer.outer && first + own < ranks);
        }
    };
    load_right(begin, 0);
    follow_previous();
    for (int base = begin; base < end; base += UP_COLUMNS) {
        float c[M][TILES][4] = {};
        for (int first = 0; first < ranks; first += CHUNK) {
            // Where they are all there is, they stay for the next columns.
            if (base == begin || ranks > CHUNK) {
                __syncthreads();
                for (int i = threadIdx.x; i < ROWS * CHUNK; i += WARPS * WARP) {
                    const int row = i / CHUNK, rank = first + i % CHUNK;
                    float sum = 0.0f;
                    if (row < item.rows && rank < ranks) {
                        for (int part = 0; part < parts; part++)
                            sum += part_of(p, part, blockIdx.z, item.first + row)[rank];
                    }
                    sum *= item.factors.scale;
                    high[row][i % CHUNK] = from_float<T>(sum);
                    low[row][i % CHUNK] = from_float<T>(sum - to_float(high[row][i % CHUNK]));
                }
                __syncthreads();
            }
#pragma unroll
            for (int block = 0; block < CHUNK; block += 32) {
                if (first + block >= ranks) break;
#pragma unroll
                for (int m = 0; m < M; m++) {
                    const int upper = 16 * m + group, lower = upper + 8, at = block + own;
                    const uint4 highs[2] = {*reinterpret_cast<const uint4 *>(&high[upper][at]),
                                            *reinterpret_cast<const uint4 *>(&high[lower][at])};
                    const uint4 lows[2] = {*reinterpret_cast<const uint4 *>(&low[upper][at]),
                                           *reinterpret_cast<const uint4 *>(&low[lower][at])};
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        multiply_add_32<T>(c[m][tile], lows[0], lows[1], right[tile]);
                        multiply_add_32<T>(c[m][tile], highs[0], highs[1], right[tile]);
                    }
                }
                if (first + block + 32 < ranks)
                    load_right(base, first + block + 32);
                else if (base + UP_COLUMNS < end)
                    load_right(base + UP_COLUMNS, 0);
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + group;
                if (row >= item.rows) continue;
                T *const y = static_cast<T *>(layer.y) + item.order[row] * layer.y_stride;
#pragma unroll
                for (int tiles = 0; tiles < TILES; tiles += 4) {
                    const int column = base + warp * 8 * TILES + tiles * 8 + own;
                    if (column >= layer.outer) continue;
                    Pack<T> pack = load_pack(y + column);
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        pack.at[i] = from_float<T>(to_float(pack.at[i]) +
                                                   c[m][tiles + i / 2][2 * half + i % 2]);
                    store_pack(y + column, pack);
                }
            }
    }
}

/// A part of x·A without tensor cores, of blocks (place, part, layer): a warp has every fourth rank.
template <typename T> __device__ __forceinline__ void plain_down(const LoraRows &p) {
    follow_previous();
    const int place = blockIdx.x;
    if (place >= static_cast<int>(p.numbers[p.count])) return;
    const uint32_t adapter = p.numbers[p.adapters + place];
    const RowFactors factors = p.layers[blockIdx.z].adapters[adapter];
    const int64_t row = p.numbers[p.order + place];
    const T *const x = static_cast<const T *>(p.x) + row * p.x_stride;
    const int lane = threadIdx.x % WARP, begin = blockIdx.y * SPLIT;
    const int end = min(begin + SPLIT, p.inner);
    float *const out = part_of(p, blockIdx.y, blockIdx.z, place);
    for (int rank = threadIdx.x / WARP; rank < factors.rank; rank += PLAIN_THREADS / WARP) {
        const T *const a = static_cast<const T *>(factors.a) + static_cast<int64_t>(rank) * p.inner;
        float sum = 0.0f;
        for (int k = begin + lane; k < end; k += WARP) sum += to_float(x[k]) * to_float(a[k]);
        sum = warp_sum(sum);
        if (lane == 0) out[rank] = sum;
    }
}

/// y += s·xa·B without tensor cores, of blocks (place, columns, layer): a thread has a column.
template <typename T> __device__ __forceinline__ void plain_up(const LoraRows &p) {
    follow_previous();
    __shared__ float xa[CHUNK];
    const int place = blockIdx.x;
    if (place >= static_cast<int>(p.numbers[p.count])) return;
    const RowLayer &layer = p.layers[blockIdx.z];
    const RowFactors factors = layer.adapters[p.numbers[p.adapters + place]];
    const int column = blockIdx.y * PLAIN_THREADS + threadIdx.x;
    const int ranks = filled_up(factors.rank), parts = (p.inner + SPLIT - 1) / SPLIT;
    const T *const b = static_cast<const T *>(factors.b) + static_cast<int64_t>(column) * ranks;
    float sum = 0.0f;
    for (int first = 0; first < factors.rank; first += CHUNK) {
        const int count = min(CHUNK, factors.rank - first);
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < count) {
            float whole = 0.0f;
            for (int part = 0; part < parts; part++)
                whole += part_of(p, part, blockIdx.z, place)[first + threadIdx.x];
            xa[threadIdx.x] = factors.scale * whole;
        }
        __syncthreads();
        if (column < layer.outer)
            for (int rank = 0; rank < count; rank++) sum += xa[rank] * to_float(b[first + rank]);
    }
    if (factors.rank == 0 || column >= layer.outer) return;
    const int64_t row = p.numbers[p.order + place];
    T *const y = static_cast<T *>(layer.y) + row * layer.y_stride + column;
    *y = from_float<T>(to_float(*y) + sum);
}

} // namespace

#define LORA_ROWS_ARGUMENTS (const __grid_constant__ LoraRows p)

#define TILE_KERNELS(element)                                                                      \
    extern "C" __global__ void __launch_bounds__(DOWN_WARPS *WARP)                                 \
        lora_rows_down_##element LORA_ROWS_ARGUMENTS {                                             \
        down<element, 1>(p);                                                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(DOWN_WARPS *WARP)                                 \
        lora_rows_down_large_##element LORA_ROWS_ARGUMENTS {                                       \
        down<element, 4>(p);                                                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(4 * WARP)                                         \
        lora_rows_up_##element LORA_ROWS_ARGUMENTS {                                               \
        up<element, 1, 4, 8>(p);                                                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(8 * WARP)                                         \
        lora_rows_up_large_##element LORA_ROWS_ARGUMENTS {                                         \
        up<element, 4, 8, 4>(p);                                                                   \
    }
TILE_KERNELS(bf16)
TILE_KERNELS(f16)

FOR_EACH_DTYPE(plain_down, PLAIN_THREADS, LORA_ROWS_ARGUMENTS, (p))
FOR_EACH_DTYPE(plain_up, PLAIN_THREADS, LORA_ROWS_ARGUMENTS, (p))
