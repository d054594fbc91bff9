// Sums and multiples of tensors, and caps, element by element.
//
// A thread has two packs, or two elements where packs don't fit. The elements after the last whole pack
// go to the threads of the first block, one each.
#include "vector.cuh"

constexpr int THREADS = 256;
/// Vectors of a thread.
constexpr int AHEAD = 2;

struct Add {
    __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
};

struct Scale {
    float factor;
    __device__ __forceinline__ float operator()(float x, float) const { return factor * x; }
};

struct Softcap {
    float cap;
    __device__ __forceinline__ float operator()(float x, float) const { return cap * tanhf(x / cap); }
};

/// `out = f(x, y)`, where `BOTH`, else `f(x, 0)`.
template <typename T, int VECTOR, bool BOTH, typename F>
__device__ __forceinline__ void map(const T *x, const T *y, T *out, int64_t count, F f) {
    const int64_t vectors = count / VECTOR;
    const int64_t first = int64_t(blockIdx.x) * (AHEAD * THREADS) + threadIdx.x;
    Vector<T, VECTOR> a[AHEAD], b[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
            a[k] = load_vector<VECTOR>(x + vector * VECTOR);
            if constexpr (BOTH) b[k] = load_vector<VECTOR>(y + vector * VECTOR);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
            Vector<T, VECTOR> result;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float other = 0.0f;
                if constexpr (BOTH) other = to_float(b[k].at[i]);
                result.at[i] = from_float<T>(f(to_float(a[k].at[i]), other));
            }
            store_vector(out + vector * VECTOR, result);
        }
    }
    if constexpr (VECTOR > 1) {
        const int64_t i = vectors * VECTOR + threadIdx.x;
        if (blockIdx.x == 0 && i < count) {
            float other = 0.0f;
            if constexpr (BOTH) other = to_float(y[i]);
            out[i] = from_float<T>(f(to_float(x[i]), other));
        }
    }
}

template <typename T>
__device__ __forceinline__ void add(const T *x, const T *y, T *out, int64_t count) {
    map<T, Pack<T>::N, true>(x, y, out, count, Add{});
}

template <typename T>
__device__ __forceinline__ void add_any(const T *x, const T *y, T *out, int64_t count) {
    map<T, 1, true>(x, y, out, count, Add{});
}

template <typename T>
__device__ __forceinline__ void scale(const T *x, float factor, T *out, int64_t count) {
    map<T, Pack<T>::N, false>(x, static_cast<const T *>(nullptr), out, count, Scale{factor});
}

template <typename T>
__device__ __forceinline__ void scale_any(const T *x, float factor, T *out, int64_t count) {
    map<T, 1, false>(x, static_cast<const T *>(nullptr), out, count, Scale{factor});
}

template <typename T>
__device__ __forceinline__ void softcap(const T *x, float cap, T *out, int64_t count) {
    map<T, Pack<T>::N, false>(x, static_cast<const T *>(nullptr), out, count, Softcap{cap});
}

template <typename T>
__device__ __forceinline__ void softcap_any(const T *x, float cap, T *out, int64_t count) {
    map<T, 1, false>(x, static_cast<const T *>(nullptr), out, count, Softcap{cap});
}

template <typename T>
__device__ __forceinline__ void scale_by(const T *x, const float *factor, T *out, int64_t count) {
    scale(x, *factor, out, count);
}

template <typename T>
__device__ __forceinline__ void scale_by_any(const T *x, const float *factor, T *out,
                                             int64_t count) {
    scale_any(x, *factor, out, count);
}

/// A block has a part of the row blockIdx.y.
template <typename T>
__device__ __forceinline__ void scale_rows(const T *x, const float *factors, T *out, int64_t columns) {
    const int64_t row = blockIdx.y * columns;
    const float factor = factors[blockIdx.y];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t i = (int64_t(blockIdx.x) * AHEAD + k) * THREADS + threadIdx.x;
        if (i < columns) out[row + i] = from_float<T>(factor * to_float(x[row + i]));
    }
}

FOR_EACH_DTYPE(add, THREADS, (const T *x, const T *y, T *out, int64_t count), (x, y, out, count))
FOR_EACH_DTYPE(add_any, THREADS, (const T *x, const T *y, T *out, int64_t count),
               (x, y, out, count))
FOR_EACH_DTYPE(scale, THREADS, (const T *x, float factor, T *out, int64_t count),
               (x, factor, out, count))
FOR_EACH_DTYPE(scale_any, THREADS, (const T *x, float factor, T *out, int64_t count),
               (x, factor, out, count))
FOR_EACH_DTYPE(softcap, THREADS, (const T *x, float cap, T *out, int64_t count),
               (x, cap, out, count))
FOR_EACH_DTYPE(softcap_any, THREADS, (const T *x, float cap, T *out, int64_t count),
               (x, cap, out, count))
FOR_EACH_DTYPE(scale_by, THREADS, (const T *x, const float *factor, T *out, int64_t count),
               (x, factor, out, count))
FOR_EACH_DTYPE(scale_by_any, THREADS, (const T *x, const float *factor, T *out, int64_t count),
               (x, factor, out, count))
FOR_EACH_DTYPE(scale_rows, THREADS, (const T *x, const float *factors, T *out, int64_t columns),
               (x, factors, out, columns))
