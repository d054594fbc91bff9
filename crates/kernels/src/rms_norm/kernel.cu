// RMS norm over rows, see mod.rs for the formulas.
//
// The gradient of the weight: every warp or block keeps sums over the rows that it has, which are then
// added up by `sum_groups`. For rows that aren't kept in registers, the first pass leaves 1 / rms of
// every row, and a thread of a second pass has a column and a range of rows.
#include "rows.cuh"

__device__ __forceinline__ float inverse_rms(float squares, int64_t count, float eps) {
    return rsqrtf(squares / float(count) + eps);
}

/// With `residual`, the norm is that of `x + residual` as it is stored in `sum`.
template <typename T, bool RESIDUAL>
__device__ __forceinline__ void forward(const T *x, const T *residual, Parameter weight,
                                        float offset, float eps, T *sum, T *y, int64_t rows,
                                        int columns, int row_threads) {
    follow_previous();
    constexpr int PACKS = 4, N = Pack<T>::N;
    __shared__ float scratch[1][WARP];
    const Place place = place_in_rows(row_threads);
    // Whole warps only, and none that others wait for.
    if (place.row >= rows) return;
    const int packs = columns / N;
    const int64_t start = place.row * columns;
    Pack<T> loaded[PACKS];
    load_row(x + start, packs, place.index, row_threads, loaded);
    if constexpr (RESIDUAL) {
        Pack<T> other[PACKS];
        load_row(residual + start, packs, place.index, row_threads, other);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int pack = place.index + p * row_threads;
            if (pack < packs) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float a = to_float(loaded[p].at[i]), b = to_float(other[p].at[i]);
                    loaded[p].at[i] = from_float<T>(a + b);
                }
                store_pack(sum + start + pack * N, loaded[p]);
            }
        }
    }
    // Asked for before the sums, so that they don't have to be waited for afterwards.
    float scale[PACKS][N];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = place.index + p * row_threads;
        if (pack < packs) load_parameters<N>(weight, pack * N, scale[p]);
    }
    float squares[1] = {0.0f};
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place.index + p * row_threads < packs) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float x_i = to_float(loaded[p].at[i]);
                squares[0] += x_i * x_i;
            }
        }
    }
    keep_packed(loaded);
    row_sums(squares, row_threads, scratch);
    const float r = inverse_rms(squares[0], columns, eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = place.index + p * row_threads;
        if (pack < packs) {
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < N; i++)
                out.at[i] = from_float<T>(to_float(loaded[p].at[i]) * r * (offset + scale[p][i]));
            store_pack(y + start + pack * N, out);
        }
    }
}

/// `residual` and `sum` are null or neither is.
template <typename T>
__device__ __forceinline__ void rms_norm_forward_any(const T *x, const T *residual,
                                                     Parameter weight, float offset, float eps,
                                                     T *sum, T *y, int64_t columns) {
    __shared__ float scratch[1][WARP];
    const int64_t start = blockIdx.x * columns;
    float squares[1] = {0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        T stored = x[start + i];
        if (residual) {
            stored = from_float<T>(to_float(stored) + to_float(residual[start + i]));
            sum[start + i] = stored;
        }
        squares[0] += to_float(stored) * to_float(stored);
    }
    row_sums(squares, ANY_THREADS, scratch);
    const float r = inverse_rms(squares[0], columns, eps);
    // What a thread has written itself it may read again.
    const T *normed = residual ? sum : x;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS)
        y[start + i] =
            from_float<T>(to_float(normed[start + i]) * r * (offset + parameter(weight, i)));
}

/// `dsum` and `dx` may be null. With `DWEIGHT`, `partial` is `(warps or blocks, columns)`.
template <typename T, bool DWEIGHT>
__device__ __forceinline__ void backward(const T *x, const T *dy, const T *dsum, Parameter weight,
                                         float offset, float eps, T *dx, float *partial,
                                         int64_t rows, int columns, int row_threads) {
    follow_previous();
    constexpr int N = Pack<T>::N, PACKS = 16 / N;
    __shared__ float scratch[2][2][WARP];
    const Place place = place_in_rows(row_threads);
    const int packs = columns / N;
    // What is summed over rows leaves few threads to a multiprocessor: they ask for rows in advance, and
    // have registers for the weight.
    float scale[PACKS][N], dweight[PACKS][N];
    extern __shared__ uint4 memory[];
    const RowsAhead<T, PACKS, 3> ahead(memory, dsum ? 3 : 2, {x, dy, dsum}, packs, place.index,
                                       row_threads);
    const auto request = [&](int64_t row, int slot) {
        ahead.request(row < rows, row * columns, slot);
    };
    const auto load_scale = [&](int p) {
        load_parameters<N>(weight, (place.index + p * row_threads) * N, scale[p]);
#pragma unroll
        for (int i = 0; i < N; i++) scale[p][i] += offset;
    };
    if constexpr (DWEIGHT) {
        request(place.row, 0);
        request(place.row + place.step, 1);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (place.index + p * row_threads < packs) load_scale(p);
#pragma unroll
            for (int i = 0; i < N; i++) dweight[p][i] = 0.0f;
        }
    }
    // Rows in turn use the one scratch and the other: a barrier lies between two uses of the same.
    int turn = 0;
    for (int64_t row = place.row; row < rows; row += place.step, turn ^= 1) {
        const int64_t start = row * columns;
        Pack<T> x_packs[PACKS], dy_packs[PACKS], dsum_packs[PACKS];
        if constexpr (DWEIGHT) {
            ahead.wait();
            ahead.take(turn, 0, x_packs);
            ahead.take(turn, 1, dy_packs);
            if (dsum) ahead.take(turn, 2, dsum_packs);
        } else {
            load_row(x + start, packs, place.index, row_threads, x_packs);
            load_row(dy + start, packs, place.index, row_threads, dy_packs);
            if (dsum) load_row(dsum + start, packs, place.index, row_threads, dsum_packs);
        }
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (place.index + p * row_threads < packs) {
                if constexpr (!DWEIGHT) load_scale(p);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float x_i = to_float(x_packs[p].at[i]);
                    sums[0] += x_i * x_i;
                    sums[1] += to_float(dy_packs[p].at[i]) * scale[p][i] * x_i;
                }
            }
        }
        if constexpr (!DWEIGHT) {
            keep_packed(x_packs);
            keep_packed(dy_packs);
        }
        keep_packed(dsum_packs);
        row_sums(sums, row_threads, scratch[turn]);
        // What the slot held is in registers by now.
        if constexpr (DWEIGHT) request(row + 2 * place.step, turn);
        const float r = inverse_rms(sums[0], columns, eps);
        const float correction = r * r * r * (sums[1] / float(columns));
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int pack = place.index + p * row_threads;
            if (pack < packs) {
                // Read again rather than kept: registers are scarcer than the cache's bandwidth.
                if constexpr (!DWEIGHT) load_scale(p);
                Pack<T> out;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float x_i = to_float(x_packs[p].at[i]);
                    const float scaled = to_float(dy_packs[p].at[i]) * r;
                    if constexpr (DWEIGHT) dweight[p][i] += scaled * x_i;
                    float gradient = scaled * scale[p][i] - x_i * correction;
                    if (dsum) gradient += to_float(dsum_packs[p].at[i]);
                    out.at[i] = from_float<T>(gradient);
                }
                if (dx) store_pack(dx + start + pack * N, out);
            }
        }
    }
    if constexpr (DWEIGHT) {
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int pack = place.index + p * row_threads;
            if (pack < packs) {
                // Place.row is where the warp or block began: its number.
                float *out = partial + place.row * columns + pack * N;
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    const float *sum = dweight[p] + i;
                    *reinterpret_cast<float4 *>(out + i) =
                        make_float4(sum[0], sum[1], sum[2], sum[3]);
                }
            }
        }
    }
}

/// `dsum`, `dx` and `inverse` (rows) may be null.
template <typename T>
__device__ __forceinline__ void rms_norm_backward_any(const T *x, const T *dy, const T *dsum,
                                                      Parameter weight, float offset, float eps,
                                                      T *dx, float *inverse, int64_t columns) {
    __shared__ float scratch[2][WARP];
    const int64_t start = blockIdx.x * columns;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float x_i = to_float(x[start + i]);
        sums[0] += x_i * x_i;
        sums[1] += to_float(dy[start + i]) * (offset + parameter(weight, i)) * x_i;
    }
    row_sums(sums, ANY_THREADS, scratch);
    const float r = inverse_rms(sums[0], columns, eps);
    const float correction = r * r * r * (sums[1] / float(columns));
    if (inverse && threadIdx.x == 0) inverse[blockIdx.x] = r;
    if (!dx) return;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float x_i = to_float(x[start + i]), dy_i = to_float(dy[start + i]);
        float gradient = r * (dy_i * (offset + parameter(weight, i))) - x_i * correction;
        if (dsum) gradient += to_float(dsum[start + i]);
        dx[start + i] = from_float<T>(gradient);
    }
}

/// Block `(c, g)` adds up columns from `c·ANY_THREADS` on over the rows from `g·rows_of_group` on.
template <typename T>
__device__ __forceinline__ void rms_norm_weight_any(const T *x, const T *dy, const float *inverse,
                                                    float *partial, int64_t rows, int64_t columns,
                                                    int64_t rows_of_group) {
    const int64_t column = int64_t(blockIdx.x) * ANY_THREADS + threadIdx.x;
    if (column >= columns) return;
    const int64_t first = blockIdx.y * rows_of_group;
    const int64_t end = min(first + rows_of_group, rows);
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t row = first; row < end; row++) {
        const int64_t i = row * columns + column;
        sum += to_float(dy[i]) * (to_float(x[i]) * inverse[row]);
    }
    partial[blockIdx.y * columns + column] = sum;
}

template <typename T>
__device__ __forceinline__ void rms_norm_forward(const T *x, Parameter weight, float offset,
                                                 float eps, T *y, int64_t rows, int columns,
                                                 int row_threads) {
    forward<T, false>(x, nullptr, weight, offset, eps, nullptr, y, rows, columns, row_threads);
}

template <typename T>
__device__ __forceinline__ void rms_norm_forward_residual(const T *x, const T *residual,
                                                          Parameter weight, float offset,
                                                          float eps, T *sum, T *y, int64_t rows,
                                                          int columns, int row_threads) {
    forward<T, true>(x, residual, weight, offset, eps, sum, y, rows, columns, row_threads);
}

template <typename T>
__device__ __forceinline__ void rms_norm_backward(const T *x, const T *dy, const T *dsum,
                                                  Parameter weight, float offset, float eps, T *dx,
                                                  int64_t rows, int columns, int row_threads) {
    backward<T, false>(x, dy, dsum, weight, offset, eps, dx, nullptr, rows, columns, row_threads);
}

template <typename T>
__device__ __forceinline__ void rms_norm_backward_weight(const T *x, const T *dy, const T *dsum,
                                                         Parameter weight, float offset, float eps,
                                                         T *dx, float *partial, int64_t rows,
                                                         int columns, int row_threads) {
    backward<T, true>(x, dy, dsum, weight, offset, eps, dx, partial, rows, columns, row_threads);
}

FOR_EACH_DTYPE(rms_norm_forward, ROW_THREADS,
               (const T *x, Parameter weight, float offset, float eps, T *y, int64_t rows,
                int columns, int row_threads),
               (x, weight, offset, eps, y, rows, columns, row_threads))
FOR_EACH_DTYPE(rms_norm_forward_residual, ROW_THREADS,
               (const T *x, const T *residual, Parameter weight, float offset, float eps, T *sum,
                T *y, int64_t rows, int columns, int row_threads),
               (x, residual, weight, offset, eps, sum, y, rows, columns, row_threads))
FOR_EACH_DTYPE(rms_norm_forward_any, ANY_THREADS,
               (const T *x, const T *residual, Parameter weight, float offset, float eps, T *sum,
                T *y, int64_t columns),
               (x, residual, weight, offset, eps, sum, y, columns))
FOR_EACH_DTYPE(rms_norm_backward, ROW_THREADS,
               (const T *x, const T *dy, const T *dsum, Parameter weight, float offset, float eps,
                T *dx, int64_t rows, int columns, int row_threads),
               (x, dy, dsum, weight, offset, eps, dx, rows, columns, row_threads))
FOR_EACH_DTYPE(rms_norm_backward_weight, ROW_THREADS,
               (const T *x, const T *dy, const T *dsum, Parameter weight, float offset, float eps,
                T *dx, float *partial, int64_t rows, int columns, int row_threads),
               (x, dy, dsum, weight, offset, eps, dx, partial, rows, columns, row_threads))
FOR_EACH_DTYPE(rms_norm_backward_any, ANY_THREADS,
               (const T *x, const T *dy, const T *dsum, Parameter weight, float offset, float eps,
                T *dx, float *inverse, int64_t columns),
               (x, dy, dsum, weight, offset, eps, dx, inverse, columns))
FOR_EACH_DTYPE(rms_norm_weight_any, ANY_THREADS,
               (const T *x, const T *dy, const float *inverse, float *partial, int64_t rows,
                int64_t columns, int64_t rows_of_group),
               (x, dy, inverse, partial, rows, columns, rows_of_group))
