// Softmax over rows, see mod.rs for the formulas.
//
// Forward: a thread takes the exponentials of its elements relative to the largest of its own, so that
// one exchange over the row is enough for the largest of all and the sum.
#include "rows.cuh"

/// What exponents are relative to: the largest number, or 0 where there is none above -infinity.
__device__ __forceinline__ float reference(float largest) {
    return largest == -INFINITY ? 0.0f : largest;
}

/// What a thread has to multiply its exponentials by, from its own largest element and the sum of its
/// exponentials relative to that.
__device__ __forceinline__ float share(float largest, float total, int row_threads,
                                       float (*scratch)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float of_all = warp_max(largest);
    total = warp_sum(total * expf(largest - reference(of_all)));
    if (row_threads != WARP) {
        if (lane == 0) {
            scratch[0][warp] = of_all;
            scratch[1][warp] = total;
        }
        __syncthreads();
        const bool used = lane < row_threads / WARP;
        const float of_warp = used ? scratch[0][lane] : -INFINITY;
        of_all = warp_max(of_warp);
        const float part = used ? scratch[1][lane] : 0.0f;
        total = warp_sum(part * expf(of_warp - reference(of_all)));
    }
    return expf(largest - reference(of_all)) / total;
}

template <typename T>
__device__ __forceinline__ void softmax_forward(const T *x, T *y, int64_t rows, int columns,
                                                int row_threads) {
    constexpr int PACKS = 4, N = Pack<T>::N;
    __shared__ float scratch[2][WARP];
    const Place place = place_in_rows(row_threads);
    // Whole warps only, and none that others wait for.
    if (place.row >= rows) return;
    const int packs = columns / N;
    Pack<T> loaded[PACKS];
    load_row(x + place.row * columns, packs, place.index, row_threads, loaded);
    float value[PACKS][N];
    float largest = -INFINITY;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const bool used = place.index + p * row_threads < packs;
#pragma unroll
        for (int i = 0; i < N; i++) {
            value[p][i] = used ? to_float(loaded[p].at[i]) : -INFINITY;
            largest = fmaxf(largest, value[p][i]);
        }
    }
    const float own = reference(largest);
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place.index + p * row_threads < packs) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                value[p][i] = expf(value[p][i] - own);
                total += value[p][i];
            }
        }
    }
    const float factor = share(largest, total, row_threads, scratch);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = place.index + p * row_threads;
        if (pack < packs) {
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < N; i++) out.at[i] = from_float<T>(value[p][i] * factor);
            store_pack(y + place.row * columns + pack * N, out);
        }
    }
}

template <typename T>
__device__ __forceinline__ void softmax_forward_any(const T *x, T *y, int64_t columns) {
    // Elements that are on their way at once.
    constexpr int AHEAD = 4;
    __shared__ float scratch[2][WARP];
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float largest = -INFINITY, total = 0.0f;
    for (int64_t start = threadIdx.x; start < columns; start += AHEAD * ANY_THREADS) {
        float value[AHEAD], top = largest;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t i = start + k * ANY_THREADS;
            value[k] = i < columns ? to_float(x[i]) : -INFINITY;
            top = fmaxf(top, value[k]);
        }
        total *= expf(largest - reference(top));
#pragma unroll
        for (int k = 0; k < AHEAD; k++) total += expf(value[k] - reference(top));
        largest = top;
    }
    const float factor = share(largest, total, ANY_THREADS, scratch);
    const float own = reference(largest);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS)
        y[i] = from_float<T>(expf(to_float(x[i]) - own) * factor);
}

template <typename T>
__device__ __forceinline__ void softmax_backward(const T *y, const T *dy, T *dx, int64_t rows,
                                                 int columns, int row_threads) {
    constexpr int PACKS = 4, N = Pack<T>::N;
    __shared__ float scratch[1][WARP];
    const Place place = place_in_rows(row_threads);
    if (place.row >= rows) return;
    const int packs = columns / N;
    Pack<T> y_packs[PACKS], dy_packs[PACKS];
    load_row(y + place.row * columns, packs, place.index, row_threads, y_packs);
    load_row(dy + place.row * columns, packs, place.index, row_threads, dy_packs);
    float total[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place.index + p * row_threads < packs) {
#pragma unroll
            for (int i = 0; i < N; i++)
                total[0] += to_float(y_packs[p].at[i]) * to_float(dy_packs[p].at[i]);
        }
    }
    keep_packed(y_packs);
    keep_packed(dy_packs);
    row_sums(total, row_threads, scratch);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = place.index + p * row_threads;
        if (pack < packs) {
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float y_i = to_float(y_packs[p].at[i]), dy_i = to_float(dy_packs[p].at[i]);
                out.at[i] = from_float<T>(y_i * (dy_i - total[0]));
            }
            store_pack(dx + place.row * columns + pack * N, out);
        }
    }
}

template <typename T>
__device__ __forceinline__ void softmax_backward_any(const T *y, const T *dy, T *dx,
                                                     int64_t columns) {
    __shared__ float scratch[1][WARP];
    y += blockIdx.x * columns;
    dy += blockIdx.x * columns;
    dx += blockIdx.x * columns;
    float total[1] = {0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS)
        total[0] += to_float(y[i]) * to_float(dy[i]);
    row_sums(total, ANY_THREADS, scratch);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS)
        dx[i] = from_float<T>(to_float(y[i]) * (to_float(dy[i]) - total[0]));
}

FOR_EACH_DTYPE(softmax_forward, ROW_THREADS,
               (const T *x, T *y, int64_t rows, int columns, int row_threads),
               (x, y, rows, columns, row_threads))
FOR_EACH_DTYPE(softmax_forward_any, ANY_THREADS, (const T *x, T *y, int64_t columns),
               (x, y, columns))
FOR_EACH_DTYPE(softmax_backward, ROW_THREADS,
               (const T *y, const T *dy, T *dx, int64_t rows, int columns, int row_threads),
               (y, dy, dx, rows, columns, row_threads))
FOR_EACH_DTYPE(softmax_backward_any, ANY_THREADS,
               (const T *y, const T *dy, T *dx, int64_t columns), (y, dy, dx, columns))
