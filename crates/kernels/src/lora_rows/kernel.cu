// Low-rank adapters of rows that have different ones: xa = x·A by `down`, in parts of the inner dimension, and
// y += s·xa·B by `up`, which adds the parts up. The formulas are in mod.rs.
//
// Both take items, of up to 16 rows of one adapter. A product is cut along its depth at places that follow from that
// alone, and its sums are added up in their order.
//
// A tensor core takes 16 numbers along the depth of which a thread has two neighbours and two more 8 further on. The
// order along the depth doesn't matter as long as both sides have the same. So a thread takes 8 neighbours of both
// sides, 16 bytes, for two such products, from where A and B lie transposed. It copies them into shared memory for
// itself, some products ahead, so that much is on its way and no thread waits for another.
#include "tensor.cuh"

namespace {

constexpr int ITEM_ROWS = 16;
/// Ranks and warps of a block of `down`, and products that are copied ahead.
constexpr int DOWN_RANKS = 16, DOWN_WARPS = 8, DOWN_STAGES = 6;
/// The same of `up`, and the columns of a warp.
constexpr int UP_WARPS = 4, UP_STAGES = 4, UP_COLUMNS = 32;
/// Ranks that `up` takes at once.
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
    /// Parts of x·A, and how deep each is.
    int part_count, split;
    /// How many times UP_COLUMNS a warp of `up` has, one after the other.
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

/// Operands that a thread copies ahead, of which it alone reads its own: `STAGES` times `PACKS` of 16 bytes, in turns.
template <int PACKS, int STAGES> struct Ahead {
    uint4 *own;
    /// Where the next are taken from, and copied to.
    int taken = 0, copied = 0;

    __device__ __forceinline__ explicit Ahead(uint4 *shared)
        : own(shared + threadIdx.x / WARP * (PACKS * STAGES * WARP) + threadIdx.x % WARP) {}

    __device__ __forceinline__ static void follow(int &stage) { stage = stage + 1 == STAGES ? 0 : stage + 1; }

    /// Zeros unless it `exists`.
    __device__ __forceinline__ void copy(int pack, const void *from, bool exists) const {
        copy_async(shared_address(&own[(copied * PACKS + pack) * WARP]), from, exists);
    }

    __device__ __forceinline__ void end_copies() {
        copy_async_commit();
        follow(copied);
    }

    /// Waits for the next, of which the copies of `STAGES` - 1 are under way.
    __device__ __forceinline__ void wait() const { copy_async_wait<STAGES - 2>(); }

    __device__ __forceinline__ uint4 at(int pack) const { return own[(taken * PACKS + pack) * WARP]; }

    __device__ __forceinline__ void end_taking() { follow(taken); }
};

extern __shared__ uint4 operands[];

/// `c += a·b` of 32 numbers along the depth: of rows `group` and `group + 8` of a, and of column `group` of b.
template <typename T>
__device__ __forceinline__ void multiply_add_32(float (&c)[4], const uint4 &upper,
                                                const uint4 &lower, const uint4 &b) {
    multiply_add<T>(c, {upper.x, lower.x, upper.y, lower.y}, b.x, b.y);
    multiply_add<T>(c, {upper.z, lower.z, upper.w, lower.w}, b.z, b.w);
}

/// DOWN_RANKS of a part of x·A, of blocks (item, part of such ranks, layer), whose warps have 32 of the depth in turns.
/// Items and factors aren't what the kernel before it writes, so they are read before that is done.
template <typename T> __device__ __forceinline__ void down(const LoraRows &p) {
    constexpr int TILES = DOWN_RANKS / 8, DEPTH = 32 * DOWN_WARPS;
    const int part = blockIdx.y % p.part_count, first = blockIdx.y / p.part_count * DOWN_RANKS;
    Item item;
    if (!find_item(p, blockIdx.x, blockIdx.z, item) || first >= item.factors.rank) {
        follow_previous();
        return;
    }
    Ahead<TILES + 2, DOWN_STAGES> ahead(operands);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4;
    const int ranks = filled_up(item.factors.rank);
    const int begin = part * p.split, end = min(begin + p.split, p.inner), own = 32 * warp + lane % 4 * 8;

    const uint4 *const a = static_cast<const uint4 *>(item.factors.a);
    const uint4 *const x = static_cast<const uint4 *>(p.x);
    uint32_t a_rows[TILES], x_rows[2];
    bool is_rank[TILES], is_row[2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int rank = first + 8 * tile + group;
        is_rank[tile] = rank < ranks;
        a_rows[tile] = rank * static_cast<uint32_t>(p.inner / 8);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + group;
        is_row[half] = row < item.rows;
        x_rows[half] = is_row[half] ? item.order[row] * static_cast<uint32_t>(p.x_stride / 8) : 0;
    }
    auto copy_a = [&](int k) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            ahead.copy(tile, a + (a_rows[tile] + k / 8), k < end && is_rank[tile]);
    };
    auto copy_x = [&](int k) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            ahead.copy(TILES + half, x + (x_rows[half] + k / 8), k < end && is_row[half]);
        ahead.end_copies();
    };
    int next = begin + own;
    // These come with the first x, in its group of copies.
#pragma unroll
    for (int stage = 0; stage < DOWN_STAGES - 1; stage++) {
        copy_a(next + stage * DEPTH);
        ahead.follow(ahead.copied);
    }
    ahead.copied = 0;
    follow_previous();
#pragma unroll
    for (int stage = 0; stage < DOWN_STAGES - 1; stage++, next += DEPTH) copy_x(next);

    float c[TILES][4] = {};
    for (int k = begin; k < end; k += DEPTH, next += DEPTH) {
        ahead.wait();
        uint4 right[TILES], left[2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) right[tile] = ahead.at(tile);
#pragma unroll
        for (int half = 0; half < 2; half++) left[half] = ahead.at(TILES + half);
        ahead.end_taking();
        copy_a(next);
        copy_x(next);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply_add_32<T>(c[tile], left[0], left[1], right[tile]);
    }
    // The sums of the warps are added up where the operands were.
    copy_async_wait<0>();
    constexpr int PLACES = ITEM_ROWS * DOWN_RANKS;
    float *const sums = reinterpret_cast<float *>(operands);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = group + i / 2 * 8, column = 8 * tile + lane % 4 * 2 + i % 2;
            sums[warp * PLACES + row * DOWN_RANKS + column] = c[tile][i];
        }
    __syncthreads();
    static_assert(PLACES == DOWN_WARPS * WARP);
    const int row = threadIdx.x / DOWN_RANKS, rank = first + threadIdx.x % DOWN_RANKS;
    if (row >= item.rows || rank >= ranks) return;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < DOWN_WARPS; other++) sum += sums[other * PLACES + threadIdx.x];
    part_of(p, part, blockIdx.z, item.first + row)[rank] = sum;
}

/// y += s·xa·B for columns of an item: of blocks (item, columns, layer), whose warps have UP_COLUMNS in turns. These are
/// four tiles: column `8·(n / 2) + 2·tile + n % 2` of them is column `n` of a tile, so that a thread has 8 neighbours
/// in a row of y. x·A is multiplied as the sum of two numbers, so that little of it is lost.
///
/// What it begins with was there before `down`, which is the kernel before it: the first of B and y are on their way
/// while x·A is still made.
template <typename T> __device__ __forceinline__ void up(const LoraRows &p) {
    constexpr int TILES = UP_COLUMNS / 8, STRIDE = UP_WARPS * UP_COLUMNS;
    alignas(16) __shared__ T high[ITEM_ROWS][PITCH], low[ITEM_ROWS][PITCH];
    Item item;
    const RowLayer &layer = p.layers[blockIdx.z];
    const int first_column = blockIdx.y * p.turns * STRIDE;
    const int end = min(first_column + p.turns * STRIDE, layer.outer);
    // The same for all threads.
    if (first_column >= end || !find_item(p, blockIdx.x, blockIdx.z, item)) {
        follow_previous();
        return;
    }
    Ahead<TILES + 2, UP_STAGES> ahead(operands);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int group = lane / 4, own = lane % 4 * 8, ranks = filled_up(item.factors.rank);
    int column = first_column + UP_COLUMNS * warp;
    uint4 *const y = static_cast<uint4 *>(layer.y) + own / 8;
    uint32_t rows[2];
    bool is_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + group;
        is_row[half] = row < item.rows;
        rows[half] = is_row[half] ? item.order[row] * static_cast<uint32_t>(layer.y_stride / 8) : 0;
    }
    // Where the next copies are from: of B, a thread's columns are neighbours but for the tile.
    int next_column = column, next_rank = 0;
    const int of_group = group / 2 * 8 + group % 2;
    const uint4 *const b = static_cast<const uint4 *>(item.factors.b);
    uint32_t b_at = (column + of_group) * static_cast<uint32_t>(ranks / 8) + own / 8;
    auto copy = [&]() {
        const bool is_b = next_column + of_group < end && next_rank + own < ranks;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            ahead.copy(tile, b + (b_at + tile * (ranks / 4)), is_b);
        b_at += 4;
        next_rank += 32;
        if (next_rank >= ranks) {
            const bool is_y = next_column + own < end;
#pragma unroll
            for (int half = 0; half < 2; half++)
                ahead.copy(TILES + half, y + rows[half] + next_column / 8, is_y && is_row[half]);
            next_column += STRIDE;
            b_at += STRIDE * (ranks / 8) - next_rank / 8;
            next_rank = 0;
        }
        ahead.end_copies();
    };
#pragma unroll
    for (int stage = 0; stage < UP_STAGES - 1; stage++) copy();
    follow_previous();
    // As often for all threads.
    for (int base = first_column; base < end; base += STRIDE, column += STRIDE) {
        float c[TILES][4] = {};
        for (int first = 0; first < ranks; first += CHUNK) {
            // Where they are all there is, they stay for the next columns.
            if (base == first_column || ranks > CHUNK) {
                __syncthreads();
                for (int i = threadIdx.x; i < ITEM_ROWS * CHUNK; i += UP_WARPS * WARP) {
                    const int row = i / CHUNK, rank = first + i % CHUNK;
                    float sum = 0.0f;
                    if (row < item.rows && rank < ranks) {
                        for (int part = 0; part < p.part_count; part++)
                            sum += part_of(p, part, blockIdx.z, item.first + row)[rank];
                    }
                    sum *= item.factors.scale;
                    high[row][i % CHUNK] = from_float<T>(sum);
                    low[row][i % CHUNK] = from_float<T>(sum - to_float(high[row][i % CHUNK]));
                }
                __syncthreads();
            }
            for (int block = 0; block < CHUNK && first + block < ranks; block += 32) {
                ahead.wait();
                const int at = block + own;
                const uint4 highs[2] = {*reinterpret_cast<const uint4 *>(&high[group][at]),
                                        *reinterpret_cast<const uint4 *>(&high[group + 8][at])};
                const uint4 lows[2] = {*reinterpret_cast<const uint4 *>(&low[group][at]),
                                       *reinterpret_cast<const uint4 *>(&low[group + 8][at])};
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const uint4 right = ahead.at(tile);
                    multiply_add_32<T>(c[tile], lows[0], lows[1], right);
                    multiply_add_32<T>(c[tile], highs[0], highs[1], right);
                }
                if (first + block + 32 >= ranks && column + own < end) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        if (!is_row[half]) continue;
                        const uint4 old = ahead.at(TILES + half);
                        Pack<T> pack = *reinterpret_cast<const Pack<T> *>(&old);
#pragma unroll
                        for (int i = 0; i < 8; i++)
                            pack.at[i] = from_float<T>(to_float(pack.at[i]) + c[i / 2][2 * half + i % 2]);
                        y[rows[half] + column / 8] = *reinterpret_cast<const uint4 *>(&pack);
                    }
                }
                ahead.end_taking();
                copy();
            }
        }
    }
    copy_async_wait<0>();
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
    const int lane = threadIdx.x % WARP, begin = blockIdx.y * p.split;
    const int end = min(begin + p.split, p.inner);
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
    const int ranks = filled_up(factors.rank);
    const T *const b = static_cast<const T *>(factors.b) + static_cast<int64_t>(column) * ranks;
    float sum = 0.0f;
    for (int first = 0; first < factors.rank; first += CHUNK) {
        const int count = min(CHUNK, factors.rank - first);
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < count) {
            float whole = 0.0f;
            for (int part = 0; part < p.part_count; part++)
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
    extern "C" __global__ void __launch_bounds__(DOWN_WARPS *WARP, 2)                              \
        lora_rows_down_##element LORA_ROWS_ARGUMENTS {                                             \
        down<element>(p);                                                                          \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(UP_WARPS *WARP, 4)                                \
        lora_rows_up_##element LORA_ROWS_ARGUMENTS {                                               \
        up<element>(p);                                                                            \
    }
TILE_KERNELS(bf16)
TILE_KERNELS(f16)

FOR_EACH_DTYPE(plain_down, PLAIN_THREADS, LORA_ROWS_ARGUMENTS, (p))
FOR_EACH_DTYPE(plain_up, PLAIN_THREADS, LORA_ROWS_ARGUMENTS, (p))
