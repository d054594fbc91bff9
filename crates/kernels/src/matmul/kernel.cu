// Linear layers of a few rows, and what large ones need beside cuBLAS: a bias in every row, and sums
// of columns.
//
// With a few rows a linear layer costs the reading of its weight. Every warp keeps several 16-byte loads
// of it in flight, and computes one or a few outputs of all rows; the grid is as
// large as what fits the GPU at once, and warps go from output to output. Several projections of the
// same x share a launch, and their low-rank parts are some more terms of the same sums.
#include "common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
/// Projections of one launch.
constexpr int MOST = 4;
/// Blocks that compute x·A together; the grid is a multiple of it. Four divide the blocks of every part
/// of the GPU that clusters cannot cross. Before Hopper there are none.
#if __CUDA_ARCH__ >= 900
constexpr int CLUSTER = 4;
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
constexpr int CLUSTER = 1;
#define IN_CLUSTERS
#endif

struct Projection {
    const void *weight; // (outer, inner)
    const void *bias;   // (outer), or null
    const float *a;     // (inner, rank)
    const float *b;     // (rank, outer)
    void *y;            // (rows, outer)
    int64_t stride;     // of the weight's rows
    int outer;
    int rank;       // 0 without an adapter
    int first_task; // the tasks of the projections stand one behind the other
    int column;     // of all x·A
    float scale;
    int unused;
};

struct Projections {
    Projection at[MOST];
    int count;
    int ranks; // columns of all x·A
    int tasks;
    int aligned; // whether 16-byte loads fit x and all weights
};

/// One of the elements that share a register.
template <typename T> __device__ __forceinline__ float element(uint32_t word, int index);
template <> __device__ __forceinline__ float element<float>(uint32_t word, int) {
    return __uint_as_float(word);
}
template <> __device__ __forceinline__ float element<bf16>(uint32_t word, int index) {
    return __uint_as_float(index == 0 ? word << 16 : word & 0xffff0000u);
}
template <> __device__ __forceinline__ float element<f16>(uint32_t word, int index) {
    return __half2float(__ushort_as_half(index == 0 ? word & 0xffff : word >> 16));
}

/// What a lane loads at once. It stays as it was loaded until it is used: taking it apart would wait for
/// it.
template <typename T, bool ALIGNED> struct Piece;
template <typename T> struct Piece<T, true> {
    static constexpr int N = Pack<T>::N;
    uint32_t words[4];

    __device__ __forceinline__ float operator[](int e) const {
        constexpr int OF_WORD = N / 4;
        return element<T>(words[e / OF_WORD], e % OF_WORD);
    }
    __device__ __forceinline__ void load(const T *address) {
        const uint4 four = *reinterpret_cast<const uint4 *>(address);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
    /// Elements of a weight, which are read once: they need no place in the first cache, where x is.
    __device__ __forceinline__ void stream(const T *address) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
            : "l"(address));
    }
};
template <typename T> struct Piece<T, false> {
    static constexpr int N = 1;
    T value;

    __device__ __forceinline__ float operator[](int) const { return to_float(value); }
    __device__ __forceinline__ void load(const T *address) { value = *address; }
    __device__ __forceinline__ void stream(const T *address) { value = *address; }
};

/// x·A of the inner indices from `begin` to `end` for one adapter: `out[row·out_stride + column]`, in
/// shared or global memory. Threads are set out over A as it lies, so that its elements are read in
/// order; their sums are added up in shared memory, always in the same order. `scratch` holds
/// 4·THREADS·ROWS floats and begins at 16 bytes. `rank` is at most THREADS.
template <typename T, int ROWS>
__device__ __forceinline__ void times_a(const T *__restrict__ x, int64_t x_stride, int rows,
                                        const float *__restrict__ a, int rank, int begin, int end,
                                        float *out, int out_stride, float *scratch) {
    const bool wide = rank % 4 == 0 && reinterpret_cast<uintptr_t>(a) % 16 == 0;
    const int columns = wide ? rank / 4 : rank, groups = THREADS / columns;
    const int column = threadIdx.x % columns, group = threadIdx.x / columns;
    float sum[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[r][e] = 0.0f;
    }
    if (group < groups) {
        if (wide) {
#pragma unroll 4
            for (int k = begin + group; k < end; k += groups) {
                const float4 v =
                    __ldg(reinterpret_cast<const float4 *>(a + (int64_t)k * rank) + column);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float xk = to_float(x[min(r, rows - 1) * x_stride + k]);
                    sum[r][0] += xk * v.x;
                    sum[r][1] += xk * v.y;
                    sum[r][2] += xk * v.z;
                    sum[r][3] += xk * v.w;
                }
            }
        } else {
#pragma unroll 4
            for (int k = begin + group; k < end; k += groups) {
                const float v = __ldg(a + (int64_t)k * rank + column);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sum[r][0] += to_float(x[min(r, rows - 1) * x_stride + k]) * v;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float *place = scratch + (group * ROWS + r) * rank;
            if (wide) {
                reinterpret_cast<float4 *>(place)[column] =
                    make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
            } else {
                place[column] = sum[r][0];
            }
        }
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < ROWS * rank; i += WARPS) {
        const int r = i / rank, c = i % rank;
        float total = 0.0f;
        for (int g = lane; g < groups; g += WARP) total += scratch[(g * ROWS + r) * rank + c];
        total = warp_sum(total);
        if (lane == 0) out[r * out_stride + c] = total;
    }
    __syncthreads();
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// What stands at `address` of this block's shared memory in that of another block of the cluster.
__device__ __forceinline__ float in_block(const float *address, int block) {
    const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(address));
    uint32_t there;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}
#else
__device__ __forceinline__ void cluster_sync() { __syncthreads(); }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ float in_block(const float *address, int) { return *address; }
#endif

/// All x·A into `xa` `(ROWS, ranks)` of shared memory. The blocks of a cluster take a part of the inner
/// indices each.
template <typename T, int ROWS>
__device__ __forceinline__ void inputs_of_adapters(const Projections &all, const T *x,
                                                   int64_t x_stride, int rows, int inner, float *xa,
                                                   float *scratch) {
    const int count = ROWS * all.ranks;
    float *part = xa + count;
    const int share = (inner + CLUSTER - 1) / CLUSTER;
    const int begin = min(inner, cluster_rank() * share), end = min(inner, begin + share);
    for (int p = 0; p < all.count; p++) {
        const Projection &projection = all.at[p];
        if (projection.rank > 0)
            times_a<T, ROWS>(x, x_stride, rows, projection.a, projection.rank, begin, end,
                             part + projection.column, all.ranks, scratch);
    }
    cluster_sync();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float total = 0.0f;
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) total += in_block(part + i, block);
        xa[i] = total;
    }
    // No block ends, or writes over its part, while another reads it.
    cluster_sync();
}

/// Adds to the sums what a batch of loads from index `k` of the weight's rows on gives. Where it is
/// WHOLE, there are no branches that keep the loads of x apart.
template <typename T, bool WHOLE, int OUTPUTS, int ROWS, int STEPS, typename Loaded>
__device__ __forceinline__ void add_loads(float (&sum)[OUTPUTS][ROWS],
                                          const Loaded (&batch)[OUTPUTS][STEPS], const T *x,
                                          int64_t x_stride, int rows, int inner, int k) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int at = k + (s * WARP + threadIdx.x % WARP) * Loaded::N;
        if (WHOLE || at < inner) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                Loaded xs;
                xs.load(x + min(r, rows - 1) * x_stride + at);
#pragma unroll
                for (int e = 0; e < Loaded::N; e++) {
#pragma unroll
                    for (int j = 0; j < OUTPUTS; j++) sum[j][r] += batch[j][s][e] * xs[e];
                }
            }
        }
    }
}

template <typename T, int OUTPUTS, int ROWS, int STEPS, typename Loaded>
__device__ __forceinline__ void add_batch(float (&sum)[OUTPUTS][ROWS],
                                          const Loaded (&batch)[OUTPUTS][STEPS], const T *x,
                                          int64_t x_stride, int rows, int inner, int k) {
    if (STEPS > 1 && k + STEPS * WARP * Loaded::N <= inner) {
        add_loads<T, true>(sum, batch, x, x_stride, rows, inner, k);
    } else {
        add_loads<T, false>(sum, batch, x, x_stride, rows, inner, k);
    }
}

/// y = x·Wᵀ + bias + scale·(x·A)·B of up to ROWS rows. A task is OUTPUTS outputs of one projection.
/// Where the grid has no clusters, `parts` holds x·A of `slices` slices of the inner indices,
/// `(slices, ROWS, ranks)`.
template <typename T, int ROWS, bool CLUSTERED, bool ALIGNED>
__device__ __forceinline__ void few_rows(const Projections &all, const T *__restrict__ x,
                                         int64_t x_stride, int rows, int inner, T *xa_out,
                                         const float *__restrict__ parts, int slices) {
    using Loaded = Piece<T, ALIGNED>;
    constexpr int N = Loaded::N;
    constexpr int OUTPUTS = ROWS >= 4 ? ROWS / 2 : 1;
    // 16-byte loads of an output in a batch; there are registers for two batches.
    constexpr int STEPS = (ROWS == 1 ? 8 : 4) / OUTPUTS;
    constexpr int BATCH = STEPS * WARP * N;
    extern __shared__ float4 shared[];
    float *scratch = reinterpret_cast<float *>(shared);
    float *xa = CLUSTERED ? scratch + 4 * THREADS * ROWS : scratch;

    const int lane = threadIdx.x % WARP;
    int task = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int tasks_at_once = gridDim.x * WARPS;

    // What the task is: its projection, its first output, and the rows of the weight it reads.
    int p = 0, first = 0;
    // Its first row, and elements from there to the others: 32 bits less than an address each.
    const T *weights;
    uint32_t offsets[OUTPUTS];
    // With few rows loads come long before they are used. With more there are no registers for that, but
    // enough to do meanwhile for other warps.
    constexpr bool EARLY = ROWS < 8;
    float b[OUTPUTS];
    // What the first task reads of the weight may be asked for before its x is there.
    if (task < all.tasks) {
        constexpr int LINE = 128 / sizeof(T), LINES = 64;
        while (p + 1 < all.count && task >= all.at[p + 1].first_task) p++;
        const Projection &projection = all.at[p];
        const int output = (task - projection.first_task) * OUTPUTS;
        const T *row = static_cast<const T *>(projection.weight) + output * projection.stride;
        for (int at = lane * LINE; at < min(inner, LINES * LINE); at += WARP * LINE)
            fetch_ahead(row + at);
    }
    follow_previous();
    auto begin_task = [&]() {
        p = 0;
        while (p + 1 < all.count && task >= all.at[p + 1].first_task) p++;
        const Projection &projection = all.at[p];
        first = (task - projection.first_task) * OUTPUTS;
        weights = static_cast<const T *>(projection.weight) + first * projection.stride;
#pragma unroll
        for (int j = 0; j < OUTPUTS; j++) {
            const int output = min(first + j, projection.outer - 1);
            offsets[j] = (output - first) * static_cast<uint32_t>(projection.stride);
            if (EARLY && lane < projection.rank)
                b[j] = __ldg(projection.b + (int64_t)lane * projection.outer + output);
        }
    };
    auto load_batch = [&](Loaded(&batch)[OUTPUTS][STEPS], int k) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int at = k + (s * WARP + lane) * N;
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                if (at < inner) batch[j][s].stream(weights + offsets[j] + at);
            }
        }
    };

    Loaded now[OUTPUTS][STEPS], next[OUTPUTS][STEPS];
    if (EARLY && task < all.tasks) {
        begin_task();
        load_batch(now, 0);
    }
    if (all.ranks > 0) {
        if constexpr (CLUSTERED) {
            inputs_of_adapters<T, ROWS>(all, x, x_stride, rows, inner, xa, scratch);
        } else {
            const int count = ROWS * all.ranks;
            for (int i = threadIdx.x; i < count; i += THREADS) {
                float total = 0.0f;
#pragma unroll 8
                for (int slice = 0; slice < slices; slice++) total += parts[slice * count + i];
                xa[i] = total;
            }
            __syncthreads();
        }
        if (blockIdx.x == 0) {
            for (int i = threadIdx.x; i < rows * all.ranks; i += THREADS)
                xa_out[i] = from_float<T>(xa[i]);
        }
    }
    if (!EARLY && task < all.tasks) begin_task();

    while (task < all.tasks) {
        float sum[OUTPUTS][ROWS];
#pragma unroll
        for (int j = 0; j < OUTPUTS; j++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[j][r] = 0.0f;
        }
        if constexpr (EARLY) {
            // Two batches in turn: copying one to the other would wait for it.
            for (int k = 0; k < inner; k += 2 * BATCH) {
                load_batch(next, k + BATCH);
                add_batch<T>(sum, now, x, x_stride, rows, inner, k);
                load_batch(now, k + 2 * BATCH);
                add_batch<T>(sum, next, x, x_stride, rows, inner, k + BATCH);
            }
        } else {
            for (int k = 0; k < inner; k += BATCH) {
                load_batch(now, k);
                add_batch<T>(sum, now, x, x_stride, rows, inner, k);
            }
        }

        // The low-rank part: a lane has a term of the sum over the rank.
        const Projection &projection = all.at[p];
        for (int c = lane; c < projection.rank; c += WARP) {
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const int output = min(first + j, projection.outer - 1);
                const float factor =
                    EARLY && c < WARP
                        ? b[j]
                        : __ldg(projection.b + (int64_t)c * projection.outer + output);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sum[j][r] +=
                        projection.scale * xa[r * all.ranks + projection.column + c] * factor;
            }
        }

        // Lane j·ROWS + r writes output j of row r.
        float mine = 0.0f;
#pragma unroll
        for (int j = 0; j < OUTPUTS; j++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float total = warp_sum(sum[j][r]);
                if (lane == j * ROWS + r) mine = total;
            }
        }
        const int output = first + lane / ROWS, row = lane % ROWS;
        if (lane < OUTPUTS * ROWS && output < projection.outer && row < rows) {
            if (projection.bias != nullptr)
                mine += to_float(static_cast<const T *>(projection.bias)[output]);
            static_cast<T *>(projection.y)[(int64_t)row * projection.outer + output] =
                from_float<T>(mine);
        }

        task += tasks_at_once;
        if (task < all.tasks) {
            begin_task();
            if (EARLY) load_batch(now, 0);
        }
    }
}

/// x·A of slice `blockIdx.x` of the inner indices and adapter `blockIdx.y`, for `few_rows`.
template <typename T, int ROWS>
__device__ __forceinline__ void adapter_slices(const Projections &all, const T *x, int64_t x_stride,
                                               int rows, int inner, float *parts) {
    follow_previous();
    extern __shared__ float4 shared[];
    const Projection &projection = all.at[blockIdx.y];
    if (projection.rank == 0) return;
    const int share = (inner + gridDim.x - 1) / gridDim.x;
    const int begin = min(inner, (int)blockIdx.x * share), end = min(inner, begin + share);
    float *part = parts + (int64_t)blockIdx.x * ROWS * all.ranks + projection.column;
    times_a<T, ROWS>(x, x_stride, rows, projection.a, projection.rank, begin, end, part, all.ranks,
                     reinterpret_cast<float *>(shared));
}

/// Writes `bias` into each of `rows` rows; a block takes some columns and strides over the rows.
template <typename T>
__device__ __forceinline__ void bias_rows(const T *__restrict__ bias, T *__restrict__ out, int rows,
                                          int columns) {
    constexpr int N = Pack<T>::N;
    if (columns % N == 0 && reinterpret_cast<uintptr_t>(bias) % 16 == 0) {
        const int column = (blockIdx.x * THREADS + threadIdx.x) * N;
        if (column >= columns) return;
        const Pack<T> pack = load_pack(bias + column);
        for (int row = blockIdx.y; row < rows; row += gridDim.y)
            store_pack(out + (int64_t)row * columns + column, pack);
        return;
    }
    // The grid is made for packs: a block takes as many columns.
    for (int e = 0; e < N; e++) {
        const int column = blockIdx.x * THREADS * N + e * THREADS + threadIdx.x;
        if (column >= columns) return;
        for (int row = blockIdx.y; row < rows; row += gridDim.y)
            out[(int64_t)row * columns + column] = bias[column];
    }
}

/// Sums of the columns of `x` over the rows of slice `blockIdx.y`, `out` `(slices, columns)`: a lane
/// takes a column, the warps take turns at rows.
template <typename T>
__device__ __forceinline__ void column_sums(const T *__restrict__ x, int64_t stride,
                                            float *__restrict__ out, int rows, int columns) {
    __shared__ float parts[WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int column = blockIdx.x * WARP + lane;
    const int share = (rows + gridDim.y - 1) / gridDim.y;
    const int begin = min(rows, (int)blockIdx.y * share), end = min(rows, begin + share);
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int row = begin + warp; row < end; row += WARPS) sum += to_float(x[row * stride + column]);
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += parts[w][lane];
    out[(int64_t)blockIdx.y * columns + column] = total;
}

} // namespace

#define FEW_ROWS_PARAMETERS                                                                        \
    (const __grid_constant__ Projections all, const T *x, int64_t x_stride, int rows, int inner,   \
     T *xa, const float *parts, int slices)
#define FEW_ROWS(ROWS, suffix, element)                                                            \
    namespace few_rows_##ROWS##_##suffix##_types {                                                 \
    using T = element;                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                       \
        few_rows_##ROWS##_##suffix FEW_ROWS_PARAMETERS {                                           \
        if (all.aligned)                                                                           \
            few_rows<T, ROWS, false, true>(all, x, x_stride, rows, inner, xa, parts, slices);      \
        else                                                                                       \
            few_rows<T, ROWS, false, false>(all, x, x_stride, rows, inner, xa, parts, slices);     \
    }                                                                                              \
    extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 2)                           \
        few_rows_clustered_##ROWS##_##suffix FEW_ROWS_PARAMETERS {                                 \
        if (all.aligned)                                                                           \
            few_rows<T, ROWS, true, true>(all, x, x_stride, rows, inner, xa, parts, slices);       \
        else                                                                                       \
            few_rows<T, ROWS, true, false>(all, x, x_stride, rows, inner, xa, parts, slices);      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        adapter_slices_##ROWS##_##suffix(const __grid_constant__ Projections all, const T *x,      \
                                         int64_t x_stride, int rows, int inner, float *parts) {    \
        adapter_slices<T, ROWS>(all, x, x_stride, rows, inner, parts);                             \
    }                                                                                              \
    }
#define FEW_ROWS_OF_EACH_DTYPE(ROWS)                                                               \
    FEW_ROWS(ROWS, f32, float)                                                                     \
    FEW_ROWS(ROWS, bf16, bf16)                                                                     \
    FEW_ROWS(ROWS, f16, f16)

FEW_ROWS_OF_EACH_DTYPE(1)
FEW_ROWS_OF_EACH_DTYPE(2)
FEW_ROWS_OF_EACH_DTYPE(4)
FEW_ROWS_OF_EACH_DTYPE(8)

FOR_EACH_DTYPE(bias_rows, THREADS, (const T *bias, T *out, int rows, int columns),
               (bias, out, rows, columns))
FOR_EACH_DTYPE(column_sums, THREADS,
               (const T *x, int64_t stride, float *out, int rows, int columns),
               (x, stride, out, rows, columns))
