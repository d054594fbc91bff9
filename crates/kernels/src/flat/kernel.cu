// The passes over flat gradients that every optimiser shares, see mod.rs.
#include "flat.cuh"

/// Vectors of a thread, as in cuda.rs.
constexpr int AHEAD = 2;

/// The sum of squares of the block's share, of all elements from `blockIdx.x` on in steps of the grid.
template <typename T, int VECTOR>
__device__ __forceinline__ void sum_squares(const T *grads, int64_t count, double *partial) {
    const int64_t vectors = count / VECTOR;
    const int64_t step = int64_t(gridDim.x) * THREADS;
    const int64_t thread = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t vector = thread; vector < vectors; vector += step) {
        const Vector<T, VECTOR> values = load_vector<VECTOR>(grads + vector * VECTOR);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const double g = double(to_float(values.at[i]));
            sum += g * g;
        }
    }
    const int64_t i = vectors * VECTOR + thread;
    if (VECTOR > 1 && i < count) {
        const double g = double(to_float(grads[i]));
        sum += g * g;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__device__ __forceinline__ void squares(const T *grads, int64_t count, double *partial) {
    sum_squares<T, Pack<T>::N>(grads, count, partial);
}

template <typename T>
__device__ __forceinline__ void squares_any(const T *grads, int64_t count, double *partial) {
    sum_squares<T, 1>(grads, count, partial);
}

FOR_EACH_DTYPE(squares, THREADS, (const T *grads, int64_t count, double *partial),
               (grads, count, partial))
FOR_EACH_DTYPE(squares_any, THREADS, (const T *grads, int64_t count, double *partial),
               (grads, count, partial))

extern "C" __global__ void __launch_bounds__(THREADS)
    flat_norm(const double *partial, int parts, double *out) {
    const double result = norm_of(partial, parts);
    if (threadIdx.x == 0) *out = result;
}

/// A gradient, of any dtype, and the part of a buffer that it is added to.
struct Addition {
    float *destination;
    const void *source;
    int64_t count;
};

constexpr int MOST_ADDITIONS = 32;

/// Those of a launch, for each of which `blockIdx.y` has blocks.
struct Additions {
    Addition at[MOST_ADDITIONS];
};

/// `destination += factor·source`, by vectors of 4 or, where they don't fit, by elements.
template <typename T, int VECTOR>
__device__ __forceinline__ void add_to(float *destination, const T *source, float factor,
                                       int64_t count) {
    const int64_t vectors = count / VECTOR;
    const int64_t first = int64_t(blockIdx.x) * (AHEAD * THREADS) + threadIdx.x;
    Vector<float, VECTOR> sum[AHEAD];
    Vector<T, VECTOR> more[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
            sum[k] = load_vector<VECTOR>(destination + vector * VECTOR);
            more[k] = load_vector<VECTOR>(source + vector * VECTOR);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[k].at[i] += factor * to_float(more[k].at[i]);
            store_vector(destination + vector * VECTOR, sum[k]);
        }
    }
    const int64_t i = vectors * VECTOR + threadIdx.x;
    if (VECTOR > 1 && blockIdx.x == 0 && i < count)
        destination[i] += factor * to_float(source[i]);
}

template <typename T, int VECTOR>
__device__ __forceinline__ void add_own(const Additions &all, float factor) {
    follow_previous();
    const Addition &own = all.at[blockIdx.y];
    add_to<T, VECTOR>(own.destination, static_cast<const T *>(own.source), factor, own.count);
}

template <typename T>
__device__ __forceinline__ void accumulate(const Additions &all, float factor) {
    add_own<T, 4>(all, factor);
}

template <typename T>
__device__ __forceinline__ void accumulate_any(const Additions &all, float factor) {
    add_own<T, 1>(all, factor);
}

FOR_EACH_DTYPE(accumulate, THREADS, (const __grid_constant__ Additions all, float factor), (all, factor))
FOR_EACH_DTYPE(accumulate_any, THREADS, (const __grid_constant__ Additions all, float factor), (all, factor))
