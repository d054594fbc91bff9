// Layer norm over rows, see mod.rs for the formulas.
//
// The variance is the mean of squares of what is left when the mean is taken away, so a large mean costs
// no digits. A row in registers is summed about the means of its warps' parts, which are then merged
// (Chan, Golub and LeVeque, 1979), so that its threads meet once. The gradients of the parameters: every warp or block keeps sums over the rows that it has,
// which are then added up by `sum_groups`. For rows that aren't kept in registers, the first pass leaves
// the mean and 1 / deviation of every row, and a thread of a second pass has a column and a range of
// rows.
#include "rows.cuh"

/// What is known of a row, or of the part of it that a warp has.
struct Part {
    float count, mean;
    /// The sum of `(x - mean)²`.
    float squares;
    /// The sums of `g` and of `g·(x - mean)`.
    float g, gx;
};

/// Elements of a row that warp `warp` has.
template <int PACKS, int N>
__device__ __forceinline__ int elements_of_warp(int packs, int warp, int row_threads) {
    int count = 0;
#pragma unroll
    for (int p = 0; p < PACKS; p++)
        count += min(max(packs - warp * WARP - p * row_threads, 0), WARP) * N;
    return count;
}

/// The whole row, in all of its threads. With `G`, also the sums with `g`. `scratch` may be used again
/// after another barrier that comes after this.
template <bool G>
__device__ __forceinline__ Part merged(Part part, int row_threads, int columns,
                                       Part (&scratch)[ROW_THREADS / WARP]) {
    if (row_threads == WARP) return part;
    constexpr int MOST = ROW_THREADS / WARP;
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = part;
    __syncthreads();
    // A lane has the part of a warp, so that no sum waits for one part after the other.
    const auto sum = [](float x) {
#pragma unroll
        for (int offset = MOST / 2; offset > 0; offset /= 2)
            x += __shfl_xor_sync(FULL, x, offset);
        return x;
    };
    const int warp = threadIdx.x % MOST;
    Part of_warp = {};
    if (warp < row_threads / WARP) of_warp = scratch[warp];
    Part row = {float(columns), 0.0f, 0.0f, 0.0f, 0.0f};
    row.mean = sum(of_warp.count * of_warp.mean) * (1.0f / row.count);
    const float apart = of_warp.mean - row.mean;
    row.squares = sum(of_warp.squares + of_warp.count * apart * apart);
    if constexpr (G) {
        row.g = sum(of_warp.g);
        row.gx = sum(of_warp.gx + of_warp.g * apart);
    }
    return row;
}

/// The mean of a warp's part of a row.
template <typename T, int PACKS>
__device__ __forceinline__ Part part_with_mean(const Pack<T> (&loaded)[PACKS], int packs,
                                               int index, int row_threads) {
    constexpr int N = Pack<T>::N;
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (index + p * row_threads < packs) {
#pragma unroll
            for (int i = 0; i < N; i++) sum += to_float(loaded[p].at[i]);
        }
    }
    const int count = elements_of_warp<PACKS, N>(packs, index / WARP, row_threads);
    return {float(count), count ? warp_sum(sum) * (1.0f / float(count)) : 0.0f, 0.0f, 0.0f, 0.0f};
}

template <typename T>
__device__ __forceinline__ void layer_norm_forward(const T *x, Parameter weight, Parameter bias,
                                                   float eps, T *y, int64_t rows, int columns,
                                                   int row_threads) {
    follow_previous();
    constexpr int PACKS = 4, N = Pack<T>::N;
    __shared__ Part scratch[ROW_THREADS / WARP];
    const Place place = place_in_rows(row_threads);
    // Whole warps only, and none that others wait for.
    if (place.row >= rows) return;
    const int packs = columns / N;
    const int64_t start = place.row * columns;
    Pack<T> loaded[PACKS];
    load_row(x + start, packs, place.index, row_threads, loaded);
    Part part = part_with_mean(loaded, packs, place.index, row_threads);
    keep_packed(loaded);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place.index + p * row_threads < packs) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float centred = to_float(loaded[p].at[i]) - part.mean;
                part.squares += centred * centred;
            }
        }
    }
    keep_packed(loaded);
    part.squares = warp_sum(part.squares);
    const Part all = merged<false>(part, row_threads, columns, scratch);
    const float mean = all.mean, r = rsqrtf(all.squares / all.count + eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int pack = place.index + p * row_threads;
        if (pack < packs) {
            // Not before the sums: rows in flight are worth more than the registers.
            float scale[N], shift[N];
            load_parameters<N>(weight, pack * N, scale);
#pragma unroll
            for (int i = 0; i < N; i++) shift[i] = 0.0f;
            if (bias.address) load_parameters<N>(bias, pack * N, shift);
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float normed = (to_float(loaded[p].at[i]) - mean) * r;
                out.at[i] = from_float<T>(normed * scale[i] + shift[i]);
            }
            store_pack(y + start + pack * N, out);
        }
    }
}

/// `(mean, 1 / deviation)` of a row.
template <typename T>
__device__ __forceinline__ float2 statistics_any(const T *x, float eps, int64_t columns,
                                                 float (*scratch)[1][WARP]) {
    float sum[1] = {0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) sum[0] += to_float(x[i]);
    row_sums(sum, ANY_THREADS, scratch[0]);
    const float mean = sum[0] / float(columns);
    float squares[1] = {0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float centred = to_float(x[i]) - mean;
        squares[0] += centred * centred;
    }
    row_sums(squares, ANY_THREADS, scratch[1]);
    return make_float2(mean, rsqrtf(squares[0] / float(columns) + eps));
}

template <typename T>
__device__ __forceinline__ void layer_norm_forward_any(const T *x, Parameter weight,
                                                       Parameter bias, float eps, T *y,
                                                       int64_t columns) {
    __shared__ float scratch[2][1][WARP];
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    const float2 statistics = statistics_any(x, eps, columns, scratch);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float normed = (to_float(x[i]) - statistics.x) * statistics.y;
        const float shift = bias.address ? parameter(bias, i) : 0.0f;
        y[i] = from_float<T>(normed * parameter(weight, i) + shift);
    }
}

/// What dx takes of a row beside r and the mean: with n = r·(x - mean),
/// dx = r·(g - mean of g - n·mean of g·n) = r·g + (x - mean)·slope + shift.
struct Correction {
    float r, slope, shift;
};

__device__ __forceinline__ Correction correction(const Part &row, float eps) {
    const float each = 1.0f / row.count, r = rsqrtf(row.squares * each + eps);
    return {r, -r * r * r * (row.gx * each), -r * (row.g * each)};
}

template <typename T>
__device__ __forceinline__ void layer_norm_backward(const T *x, const T *dy, Parameter weight,
                                                    float eps, T *dx, int64_t rows, int columns,
                                                    int row_threads) {
    follow_previous();
    constexpr int N = Pack<T>::N, PACKS = 16 / N;
    __shared__ Part scratch[2][ROW_THREADS / WARP];
    const Place place = place_in_rows(row_threads);
    const int packs = columns / N;
    // Rows in turn use the one scratch and the other: a barrier lies between two uses of the same.
    int turn = 0;
    for (int64_t row = place.row; row < rows; row += place.step, turn ^= 1) {
        const int64_t start = row * columns;
        Pack<T> x_packs[PACKS], dy_packs[PACKS];
        load_row(x + start, packs, place.index, row_threads, x_packs);
        load_row(dy + start, packs, place.index, row_threads, dy_packs);
        Part part = part_with_mean(x_packs, packs, place.index, row_threads);
        keep_packed(x_packs);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int pack = place.index + p * row_threads;
            if (pack < packs) {
                float scale[N];
                load_parameters<N>(weight, pack * N, scale);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float centred = to_float(x_packs[p].at[i]) - part.mean;
                    const float g = to_float(dy_packs[p].at[i]) * scale[i];
                    part.squares += centred * centred;
                    part.g += g;
                    part.gx += g * centred;
                }
            }
        }
        keep_packed(x_packs);
        keep_packed(dy_packs);
        part.squares = warp_sum(part.squares);
        part.g = warp_sum(part.g);
        part.gx = warp_sum(part.gx);
        const Part all = merged<true>(part, row_threads, columns, scratch[turn]);
        const Correction of_row = correction(all, eps);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            const int pack = place.index + p * row_threads;
            if (pack < packs) {
                // Read again rather than kept: registers are scarcer than the cache's bandwidth.
                float scale[N];
                load_parameters<N>(weight, pack * N, scale);
                Pack<T> out;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float centred = to_float(x_packs[p].at[i]) - all.mean;
                    const float g = to_float(dy_packs[p].at[i]) * scale[i];
                    out.at[i] = from_float<T>(
                        of_row.r * g + (centred * of_row.slope + of_row.shift));
                }
                store_pack(dx + start + pack * N, out);
            }
        }
    }
}

/// With the gradients of the parameters: `partial` is `(2, groups, columns)` with a group for every warp or
/// block, first the sums for the weight, then those for the bias. `dx` may be null. `FULL` says that all
/// threads of a row have `PACKS` packs.
template <typename T, bool FULL>
__device__ __forceinline__ void backward_parameters(const T *x, const T *dy, Parameter weight,
                                                    float eps, T *dx, float *partial,
                                                    int64_t groups, int64_t rows, int columns,
                                                    int row_threads) {
    constexpr int N = Pack<T>::N, PACKS = 16 / N;
    __shared__ Part scratch[2][ROW_THREADS / WARP];
    const Place place = place_in_rows(row_threads);
    const int packs = columns / N;
    const auto has = [&](int p) { return FULL || place.index + p * row_threads < packs; };
    // Few threads are on a multiprocessor, as sums take registers: so they ask for rows in advance, and
    // there are registers for the weight, too.
    extern __shared__ uint4 memory[];
    const RowsAhead<T, PACKS, 2> ahead(memory, 2, {x, dy}, packs, place.index, row_threads);
    const auto request = [&](int64_t row, int slot) {
        ahead.request(row < rows, row * columns, slot);
    };
    request(place.row, 0);
    request(place.row + place.step, 1);
    float scale[PACKS][N], dweight[PACKS][N], dbias[PACKS][N];
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (has(p)) load_parameters<N>(weight, (place.index + p * row_threads) * N, scale[p]);
#pragma unroll
        for (int i = 0; i < N; i++) dweight[p][i] = dbias[p][i] = 0.0f;
    }
    const int own = elements_of_warp<PACKS, N>(packs, place.index / WARP, row_threads);
    const float count = float(own), each = own ? 1.0f / count : 0.0f;
    // Rows in turn use the one scratch and the other: a barrier lies between two uses of the same.
    int turn = 0;
    for (int64_t row = place.row; row < rows; row += place.step, turn ^= 1) {
        ahead.wait();
        Pack<T> x_packs[PACKS], dy_packs[PACKS];
        ahead.take(turn, 0, x_packs);
        ahead.take(turn, 1, dy_packs);
        float x_row[PACKS][N], dy_row[PACKS][N], sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            unpack(x_packs[p], x_row[p]);
            unpack(dy_packs[p], dy_row[p]);
            if (has(p)) {
#pragma unroll
                for (int i = 0; i < N; i++) sum += x_row[p][i];
            }
        }
        Part part = {count, warp_sum(sum) * each, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (has(p)) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float centred = x_row[p][i] - part.mean, g = dy_row[p][i] * scale[p][i];
                    part.squares += centred * centred;
                    part.g += g;
                    part.gx += g * centred;
                }
            }
        }
        part.squares = warp_sum(part.squares);
        part.g = warp_sum(part.g);
        part.gx = warp_sum(part.gx);
        // What the slot held is in registers by now.
        request(row + 2 * place.step, turn);
        const Part all = merged<true>(part, row_threads, columns, scratch[turn]);
        const Correction of_row = correction(all, eps);
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (has(p)) {
                Pack<T> out;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const float centred = x_row[p][i] - all.mean, scaled = dy_row[p][i] * of_row.r;
                    dweight[p][i] += scaled * centred;
                    dbias[p][i] += dy_row[p][i];
                    out.at[i] = from_float<T>(
                        scaled * scale[p][i] + (centred * of_row.slope + of_row.shift));
                }
                if (dx)
                    store_pack(dx + row * columns + (place.index + p * row_threads) * N, out);
            }
        }
    }
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (has(p)) {
            // place.row is where the warp or block began: its number.
            float *of_weight =
                partial + place.row * columns + (place.index + p * row_threads) * N;
            float *of_bias = of_weight + groups * columns;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float *w = dweight[p] + i, *b = dbias[p] + i;
                *reinterpret_cast<float4 *>(of_weight + i) = make_float4(w[0], w[1], w[2], w[3]);
                *reinterpret_cast<float4 *>(of_bias + i) = make_float4(b[0], b[1], b[2], b[3]);
            }
        }
    }
}

/// `dx` and `statistics` `(rows, 2)` may be null.
template <typename T>
__device__ __forceinline__ void layer_norm_backward_any(const T *x, const T *dy, Parameter weight,
                                                        float eps, T *dx, float2 *statistics,
                                                        int64_t columns) {
    __shared__ float scratch[2][1][WARP], sums_scratch[2][WARP];
    const int64_t start = blockIdx.x * columns;
    const float2 of_row = statistics_any(x + start, eps, columns, scratch);
    const float mean = of_row.x, r = of_row.y;
    if (statistics && threadIdx.x == 0) statistics[blockIdx.x] = of_row;
    if (!dx) return;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float g = to_float(dy[start + i]) * parameter(weight, i);
        sums[0] += g;
        sums[1] += g * ((to_float(x[start + i]) - mean) * r);
    }
    row_sums(sums, ANY_THREADS, sums_scratch);
    const float g_mean = sums[0] / float(columns), gn_mean = sums[1] / float(columns);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float n = (to_float(x[start + i]) - mean) * r;
        const float g = to_float(dy[start + i]) * parameter(weight, i);
        dx[start + i] = from_float<T>(r * (g - g_mean - n * gn_mean));
    }
}

/// Block `(c, g)` adds up columns from `c·ANY_THREADS` on over the rows from `g·rows_of_group` on, into
/// `partial` `(2, groups, columns)`.
template <typename T>
__device__ __forceinline__ void
layer_norm_parameters_any(const T *x, const T *dy, const float2 *statistics, float *partial,
                          int64_t rows, int64_t columns, int64_t rows_of_group) {
    const int64_t column = int64_t(blockIdx.x) * ANY_THREADS + threadIdx.x;
    if (column >= columns) return;
    const int64_t first = blockIdx.y * rows_of_group;
    const int64_t end = min(first + rows_of_group, rows);
    float of_weight = 0.0f, of_bias = 0.0f;
#pragma unroll 4
    for (int64_t row = first; row < end; row++) {
        const int64_t i = row * columns + column;
        const float2 of_row = statistics[row];
        const float dy_i = to_float(dy[i]);
        of_weight += dy_i * ((to_float(x[i]) - of_row.x) * of_row.y);
        of_bias += dy_i;
    }
    partial[blockIdx.y * columns + column] = of_weight;
    partial[(int64_t(gridDim.y) + blockIdx.y) * columns + column] = of_bias;
}

template <typename T>
__device__ __forceinline__ void
layer_norm_backward_parameters(const T *x, const T *dy, Parameter weight, float eps, T *dx,
                               float *partial, int64_t groups, int64_t rows, int columns,
                               int row_threads) {
    follow_previous();
    if (columns == 16 * row_threads)
        backward_parameters<T, true>(x, dy, weight, eps, dx, partial, groups, rows, columns,
                                     row_threads);
    else
        backward_parameters<T, false>(x, dy, weight, eps, dx, partial, groups, rows, columns,
                                      row_threads);
}

FOR_EACH_DTYPE(layer_norm_forward, ROW_THREADS,
               (const T *x, Parameter weight, Parameter bias, float eps, T *y, int64_t rows,
                int columns, int row_threads),
               (x, weight, bias, eps, y, rows, columns, row_threads))
FOR_EACH_DTYPE(layer_norm_forward_any, ANY_THREADS,
               (const T *x, Parameter weight, Parameter bias, float eps, T *y, int64_t columns),
               (x, weight, bias, eps, y, columns))
FOR_EACH_DTYPE(layer_norm_backward, ROW_THREADS,
               (const T *x, const T *dy, Parameter weight, float eps, T *dx, int64_t rows,
                int columns, int row_threads),
               (x, dy, weight, eps, dx, rows, columns, row_threads))
FOR_EACH_DTYPE(layer_norm_backward_parameters, ROW_THREADS,
               (const T *x, const T *dy, Parameter weight, float eps, T *dx, float *partial,
                int64_t groups, int64_t rows, int columns, int row_threads),
               (x, dy, weight, eps, dx, partial, groups, rows, columns, row_threads))
FOR_EACH_DTYPE(layer_norm_backward_any, ANY_THREADS,
               (const T *x, const T *dy, Parameter weight, float eps, T *dx, float2 *statistics,
                int64_t columns),
               (x, dy, weight, eps, dx, statistics, columns))
FOR_EACH_DTYPE(layer_norm_parameters_any, ANY_THREADS,
               (const T *x, const T *dy, const float2 *statistics, float *partial, int64_t rows,
                int64_t columns, int64_t rows_of_group),
               (x, dy, statistics, partial, rows, columns, rows_of_group))
