// Linear layers of a few rows, and what large ones need beside cuBLAS: a bias in every row, and sums
// of columns.
//
// With a few rows a linear layer costs the reading of its weight. Every warp keeps several 16-byte loads
// of it in flight, and computes one or a few outputs of all rows; the grid is as large as what fits the
// GPU at once, and warps go from output to output. Several projections of the same x share a launch, and
// their low-rank parts are some more terms of the same sums.
#include "barrier.cuh"
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

/// Loads 1 or 4 floats where `valid`, and leaves them as they are elsewhere.
template <int N>
__device__ __forceinline__ void load_if(float (&values)[N], const float *address, int valid) {
    if constexpr (N == 4) {
        asm volatile("{\n.reg .pred p;\n"
                     "setp.ne.s32 p, %5, 0;\n"
                     "@p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n}\n"
                     : "+f"(values[0]), "+f"(values[1]), "+f"(values[2]), "+f"(values[3])
                     : "l"(address), "r"(valid));
    } else {
        asm volatile("{\n.reg .pred p;\n"
                     "setp.ne.s32 p, %2, 0;\n"
                     "@p ld.global.nc.f32 %0, [%1];\n}\n"
                     : "+f"(values[0])
                     : "l"(address), "r"(valid));
    }
}

/// x as it lies.
template <typename T> struct Stored {
    const T *x;
    int64_t stride;

    using Loaded = T;
    __device__ __forceinline__ T load(int row, int k) const { return x[row * stride + k]; }
    __device__ __forceinline__ float value(T loaded) const { return to_float(loaded); }
};

/// The RMS norm of x and a residual before it is divided by the root of the mean square: the sum as it would be
/// stored, times the weight.
template <typename T> struct Undivided {
    const T *x, *residual, *weight;
    int64_t x_stride, residual_stride;
    float offset;

    struct Loaded {
        T x, residual, weight;
    };
    __device__ __forceinline__ Loaded load(int row, int k) const {
        return {x[row * x_stride + k], residual[row * residual_stride + k], weight[k]};
    }
    __device__ __forceinline__ float value(const Loaded &loaded) const {
        const T sum = from_float<T>(to_float(loaded.x) + to_float(loaded.residual));
        return to_float(sum) * (offset + to_float(loaded.weight));
    }
};

/// x·A of the inner indices from `begin` to `end` for one adapter, whose `rank` is at most THREADS. Threads
/// are set out over A as it lies, so that its elements are read in order; `meanwhile()` is called when the
/// last has come. Then the sums of all threads are added up, always in the same order, and given to
/// `emit(row, column, sum)`, each in one thread. `scratch` is shared memory of 4·THREADS·ROWS floats. Where
/// it is WIDE, the rank is a multiple of four and A begins at 16 bytes.
template <int ROWS, bool WIDE, typename X, typename Meanwhile, typename Emit>
__device__ __forceinline__ void times_a(const X &x, int rows, const float *__restrict__ a, int rank,
                                        int begin, int end, float *scratch, Meanwhile meanwhile,
                                        Emit emit) {
    // Loads of A that a thread has in flight.
    constexpr int AHEAD = ROWS == 1 ? 8 : ROWS == 8 ? 2 : 4;
    constexpr int N = WIDE ? 4 : 1;
    const int columns = rank / N, groups = THREADS / columns;
    const int column = threadIdx.x % columns, group = threadIdx.x / columns;
    float sum[ROWS][N];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int e = 0; e < N; e++) sum[r][e] = 0.0f;
    }
    for (int k = group < groups ? begin + group : end; k < end; k += AHEAD * groups) {
        // Without branches, which would keep the loads apart.
        float values[AHEAD][N] = {};
        typename X::Loaded xs[AHEAD][ROWS];
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            const int at = k + s * groups, valid = at < end;
            load_if<N>(values[s], a + (int64_t)at * rank + column * N, valid);
#pragma unroll
            for (int r = 0; r < ROWS; r++) xs[s][r] = x.load(min(r, rows - 1), valid ? at : k);
        }
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            const bool valid = k + s * groups < end;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float xk = valid ? x.value(xs[s][r]) : 0.0f;
#pragma unroll
                for (int e = 0; e < N; e++) sum[r][e] += xk * values[s][e];
            }
        }
    }
    meanwhile();
    // Where lanes of a warp have the same columns, their sums are added up first.
    const bool together = columns <= WARP && WARP % columns == 0;
    const int place = together ? threadIdx.x / WARP : group;
    const int places = together ? WARPS : groups;
    if (together) {
        for (int offset = WARP / 2; offset >= columns; offset /= 2) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int e = 0; e < N; e++) sum[r][e] += __shfl_xor_sync(FULL, sum[r][e], offset);
            }
        }
    }
    if (together ? threadIdx.x % WARP < columns : place < places) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float *to = scratch + (place * ROWS + r) * rank + column * N;
#pragma unroll
            for (int e = 0; e < N; e++) to[e] = sum[r][e];
        }
    }
    __syncthreads();
    const int count = ROWS * rank;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float total = 0.0f;
#pragma unroll 8
        for (int p = 0; p < places; p++) total += scratch[p * count + i];
        emit(i / rank, i % rank, total);
    }
    __syncthreads();
}

/// `times_a` as A lies.
template <int ROWS, typename X, typename Meanwhile, typename Emit>
__device__ __forceinline__ void times_any_a(const X &x, int rows, const float *a, int rank, int begin,
                                            int end, float *scratch, Meanwhile meanwhile, Emit emit) {
    if (rank % 4 == 0 && reinterpret_cast<uintptr_t>(a) % 16 == 0)
        times_a<ROWS, true>(x, rows, a, rank, begin, end, scratch, meanwhile, emit);
    else
        times_a<ROWS, false>(x, rows, a, rank, begin, end, scratch, meanwhile, emit);
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

#if __CUDA_ARCH__ >= 900
/// Makes the barrier that will be told of so many floats by all blocks of the cluster, this one too.
__device__ __forceinline__ void begin_cluster(uint64_t *parts_told, int floats) {
    if (threadIdx.x == 0) {
        barrier_init(shared_address(parts_told), 1);
        barrier_expect(shared_address(parts_told), floats * sizeof(float));
        fence_barriers();
    }
    cluster_begin();
}

/// Writes to what `place` is in a block of the cluster, whose barrier is told.
__device__ __forceinline__ void write_in_block(float *place, int block, float value,
                                               uint64_t *parts_told) {
    store_and_tell(in_block(shared_address(place), block), value,
                   in_block(shared_address(parts_told), block));
}

__device__ __forceinline__ void wait_for_parts(uint64_t *parts_told) {
    barrier_wait_for_cluster(shared_address(parts_told), 0);
}
#else
// A block is its own cluster, and what it has written is there after `times_a`.
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void begin_cluster(uint64_t *, int) {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void write_in_block(float *place, int, float value, uint64_t *) {
    *place = value;
}
__device__ __forceinline__ void wait_for_parts(uint64_t *) {}
#endif

/// y = x·Wᵀ + bias + scale·(x·A)·B of up to ROWS rows. A task is OUTPUTS outputs of one projection.
/// CLUSTERED, the blocks of a cluster take a part of the inner indices each for x·A, and write what they
/// found to all of them; otherwise `parts` holds x·A of `slices` slices of the inner indices,
/// `(slices, ROWS, ranks)`. `xa_out` may be null.
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
    // Parts of x·A that are added up where they are read.
    constexpr int PARTS = CLUSTERED ? CLUSTER : 1;
    extern __shared__ float4 shared[];
    float *scratch = reinterpret_cast<float *>(shared);
    float *xa = CLUSTERED ? scratch + 4 * THREADS * ROWS : scratch; // (PARTS, ROWS, ranks)
    const int count = ROWS * all.ranks;

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
    // B at ranks `lane`, `lane + WARP`.. for the task's outputs, and the bias of the one that the lane writes.
    constexpr int B_AHEAD = 2;
    float b[B_AHEAD][OUTPUTS], bias = 0.0f;
    // What the cluster's blocks write here of x·A is told to a barrier; none writes before all have begun.
    __shared__ uint64_t parts_told;
    if constexpr (CLUSTERED) begin_cluster(&parts_told, PARTS * count);
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
    if constexpr (CLUSTERED) cluster_wait();
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
#pragma unroll
            for (int s = 0; s < B_AHEAD; s++) {
                const int c = s * WARP + lane;
                if (EARLY && c < projection.rank)
                    b[s][j] = __ldg(projection.b + (int64_t)c * projection.outer + output);
            }
        }
        if (projection.bias != nullptr) {
            const int output = min(first + lane / ROWS, projection.outer - 1);
            bias = to_float(static_cast<const T *>(projection.bias)[output]);
        } else {
            bias = 0.0f;
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
    float sum[OUTPUTS][ROWS];
    auto clear = [&]() {
#pragma unroll
        for (int j = 0; j < OUTPUTS; j++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) sum[j][r] = 0.0f;
        }
    };
    clear();
    auto start = [&]() {
        if (task < all.tasks) {
            begin_task();
            if (EARLY) load_batch(now, 0);
        }
    };
    bool waits = false;
    if constexpr (CLUSTERED) {
        const int block = cluster_rank();
        const int share = (inner + CLUSTER - 1) / CLUSTER;
        const int begin = min(inner, block * share), end = min(inner, begin + share);
        bool started = false;
        for (int q = 0; q < all.count; q++) {
            const Projection &projection = all.at[q];
            if (projection.rank == 0) continue;
            float *part = xa + block * count + projection.column;
            times_any_a<ROWS>(
                Stored<T>{x, x_stride}, rows, projection.a, projection.rank, begin, end, scratch,
                [&]() {
                    if (started) return;
                    started = true;
                    if (EARLY) start();
                },
                [&](int r, int c, float total) {
#pragma unroll
                    for (int to = 0; to < CLUSTER; to++)
                        write_in_block(part + r * all.ranks + c, to, total, &parts_told);
                });
        }
        waits = true;
        if (!EARLY) start();
    } else {
        start();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            float total = 0.0f;
#pragma unroll 8
            for (int slice = 0; slice < slices; slice++) total += parts[slice * count + i];
            xa[i] = total;
        }
        if (all.ranks > 0) __syncthreads();
    }
    auto low_rank = [&](int i) {
        float total = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS; part++) total += xa[part * count + i];
        return total;
    };

    while (task < all.tasks) {
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

        if (waits) wait_for_parts(&parts_told);
        waits = false;
        // The low-rank part: a lane has a term of the sum over the rank.
        const Projection &projection = all.at[p];
        auto add_term = [&](int c, const float(&factor)[OUTPUTS]) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float term =
                    projection.scale * low_rank(r * all.ranks + projection.column + c);
#pragma unroll
                for (int j = 0; j < OUTPUTS; j++) sum[j][r] += term * factor[j];
            }
        };
        if constexpr (EARLY) {
#pragma unroll
            for (int s = 0; s < B_AHEAD; s++) {
                if (s * WARP + lane < projection.rank) add_term(s * WARP + lane, b[s]);
            }
        }
        for (int c = lane + (EARLY ? B_AHEAD * WARP : 0); c < projection.rank; c += WARP) {
            float factor[OUTPUTS];
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const int output = min(first + j, projection.outer - 1);
                factor[j] = __ldg(projection.b + (int64_t)c * projection.outer + output);
            }
            add_term(c, factor);
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
            static_cast<T *>(projection.y)[(int64_t)row * projection.outer + output] =
                from_float<T>(mine + bias);
        }

        task += tasks_at_once;
        clear();
        start();
    }
    // What other blocks write here comes before this one ends.
    if (waits) wait_for_parts(&parts_told);
    if (blockIdx.x == 0 && xa_out != nullptr) {
        for (int i = threadIdx.x; i < rows * all.ranks; i += THREADS)
            xa_out[i] = from_float<T>(low_rank(i));
    }
}

/// x·A of slice `blockIdx.x` of the inner indices and adapter `blockIdx.y`, for `few_rows`.
template <int ROWS, typename X>
__device__ __forceinline__ void slices_of(const Projections &all, const X &x, int rows, int inner,
                                          float *parts) {
    follow_previous();
    extern __shared__ float4 shared[];
    const Projection &projection = all.at[blockIdx.y];
    if (projection.rank == 0) return;
    const int share = (inner + gridDim.x - 1) / gridDim.x;
    const int begin = min(inner, (int)blockIdx.x * share), end = min(inner, begin + share);
    float *part = parts + (int64_t)blockIdx.x * ROWS * all.ranks + projection.column;
    times_any_a<ROWS>(
        x, rows, projection.a, projection.rank, begin, end, reinterpret_cast<float *>(shared),
        []() {}, [&](int r, int c, float total) { part[r * all.ranks + c] = total; });
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
    }
#define ADAPTER_SLICES(ROWS, suffix, element)                                                      \
    namespace adapter_slices_##ROWS##_##suffix##_types {                                           \
    using T = element;                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                       \
        adapter_slices_##ROWS##_##suffix(const __grid_constant__ Projections all, const T *x,      \
                                         int64_t x_stride, int rows, int inner, float *parts) {    \
        slices_of<ROWS>(all, Stored<T>{x, x_stride}, rows, inner, parts);                          \
    }                                                                                              \
    }
#define NORMED_SLICES(ROWS, suffix, element)                                                       \
    namespace normed_slices_##ROWS##_##suffix##_types {                                            \
    using T = element;                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) normed_slices_##ROWS##_##suffix(      \
        const __grid_constant__ Projections all, const T *x, int64_t x_stride, const T *residual,  \
        int64_t residual_stride, const T *weight, float offset, int rows, int inner,               \
        float *parts) {                                                                            \
        const Undivided<T> normed{x, residual, weight, x_stride, residual_stride, offset};         \
        slices_of<ROWS>(all, normed, rows, inner, parts);                                          \
    }                                                                                              \
    }
#define OF_EACH_DTYPE(KERNELS, ROWS)                                                               \
    KERNELS(ROWS, f32, float)                                                                      \
    KERNELS(ROWS, bf16, bf16)                                                                      \
    KERNELS(ROWS, f16, f16)

OF_EACH_DTYPE(FEW_ROWS, 1)
OF_EACH_DTYPE(FEW_ROWS, 2)
OF_EACH_DTYPE(FEW_ROWS, 4)
// Matrices in fewer bits are multiplied by up to 8 rows.
OF_EACH_DTYPE(ADAPTER_SLICES, 1)
OF_EACH_DTYPE(ADAPTER_SLICES, 2)
OF_EACH_DTYPE(ADAPTER_SLICES, 4)
OF_EACH_DTYPE(ADAPTER_SLICES, 8)
// Of a norm that is made by what reads it, of up to 4 rows.
#define OF_EACH_HALF(KERNELS, ROWS)                                                                \
    KERNELS(ROWS, bf16, bf16)                                                                      \
    KERNELS(ROWS, f16, f16)
OF_EACH_HALF(NORMED_SLICES, 1)
OF_EACH_HALF(NORMED_SLICES, 2)
OF_EACH_HALF(NORMED_SLICES, 4)

FOR_EACH_DTYPE(bias_rows, THREADS, (const T *bias, T *out, int rows, int columns),
               (bias, out, rows, columns))
FOR_EACH_DTYPE(column_sums, THREADS,
               (const T *x, int64_t stride, float *out, int rows, int columns),
               (x, stride, out, rows, columns))
