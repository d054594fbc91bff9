// Sums of what experts give, see mod.rs for the formulas.
//
// A place that is none of y's rows can't be reported from here: it gives NaN.
#include "rows.cuh"
#include "vector.cuh"

/// A thread has `VECTOR` neighbouring columns of token `blockIdx.x`.
template <typename T, int VECTOR>
__device__ __forceinline__ void combine(const T *y, const float *weights, const unsigned *places,
                                        T *out, int64_t rows, int64_t columns, int active) {
    follow_previous();
    const int64_t column = (int64_t(blockIdx.y) * ANY_THREADS + threadIdx.x) * VECTOR;
    if (column >= columns) return;
    weights += int64_t(blockIdx.x) * active;
    places += int64_t(blockIdx.x) * active;
    float sum[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum[i] = 0.0f;
#pragma unroll 4
    for (int j = 0; j < active; j++) {
        const int64_t place = places[j];
        const bool known = place < rows;
        const Vector<T, VECTOR> read = load_vector<VECTOR>(y + (known ? place : 0) * columns + column);
        const float weight = known ? weights[j] : NAN;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[i] += weight * to_float(read.at[i]);
    }
    Vector<T, VECTOR> result;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) result.at[i] = from_float<T>(sum[i]);
    store_vector(out + int64_t(blockIdx.x) * columns + column, result);
}

/// Block `blockIdx.x` has one choice: a row of dy, and its weight's gradient.
template <typename T>
__device__ __forceinline__ void experts_backward(const T *y, const float *weights,
                                                 const unsigned *places, const T *dout, T *dy,
                                                 float *dweights, int64_t rows, int64_t columns,
                                                 int active) {
    follow_previous();
    __shared__ float scratch[WARP];
    const int64_t place = places[blockIdx.x];
    if (place >= rows) {
        if (threadIdx.x == 0) dweights[blockIdx.x] = NAN;
        return;
    }
    const float weight = weights[blockIdx.x];
    y += place * columns;
    dy += place * columns;
    dout += int64_t(blockIdx.x) / active * columns;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float d = to_float(dout[i]);
        sum += d * to_float(y[i]);
        dy[i] = from_float<T>(weight * d);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dweights[blockIdx.x] = sum;
}

template <typename T>
__device__ __forceinline__ void experts_combine(const T *y, const float *weights,
                                                const unsigned *places, T *out, int64_t rows,
                                                int64_t columns, int active) {
    combine<T, Pack<T>::N>(y, weights, places, out, rows, columns, active);
}

template <typename T>
__device__ __forceinline__ void experts_combine_any(const T *y, const float *weights,
                                                    const unsigned *places, T *out, int64_t rows,
                                                    int64_t columns, int active) {
    combine<T, 1>(y, weights, places, out, rows, columns, active);
}

#define COMBINE_PARAMETERS                                                                         \
    (const T *y, const float *weights, const unsigned *places, T *out, int64_t rows,               \
     int64_t columns, int active)
#define COMBINE_ARGUMENTS (y, weights, places, out, rows, columns, active)

FOR_EACH_DTYPE(experts_combine, ANY_THREADS, COMBINE_PARAMETERS, COMBINE_ARGUMENTS)
FOR_EACH_DTYPE(experts_combine_any, ANY_THREADS, COMBINE_PARAMETERS, COMBINE_ARGUMENTS)
FOR_EACH_DTYPE(experts_backward, ANY_THREADS,
               (const T *y, const float *weights, const unsigned *places, const T *dout, T *dy,
                float *dweights, int64_t rows, int64_t columns, int active),
               (y, weights, places, dout, dy, dweights, rows, columns, active))
