// DoRA, see mod.rs for the formulas.
//
// Where columns are multiplied, a thread has neighbouring columns of a group of rows: `VECTOR` of them, a pack,
// or 1 where packs don't fit. It asks for `AHEAD` rows before it works on the first. Sums over rows are kept in
// registers, written once for a group, and added up by `sum_groups`.
#include "rows.cuh"
#include "vector.cuh"

/// Rows that a thread asks for at once.
constexpr int AHEAD = 4;

/// Where a thread works: its first column, and its rows.
struct Tile {
    int64_t column, first, end;
};

template <int VECTOR>
__device__ __forceinline__ Tile tile(int64_t rows, int64_t rows_of_group) {
    const int64_t first = blockIdx.y * rows_of_group;
    return {(int64_t(blockIdx.x) * ANY_THREADS + threadIdx.x) * VECTOR, first,
            min(first + rows_of_group, rows)};
}

/// `z = y ⊙ factor + bias`; `y` has rows at a distance of its own, and the bias may have no address.
template <typename T, int VECTOR>
__device__ __forceinline__ void scale_columns(const T *y, const float *factor, Parameter bias,
                                              T *z, int64_t rows, int64_t columns,
                                              int64_t y_stride, int64_t rows_of_group) {
    follow_previous();
    const Tile own = tile<VECTOR>(rows, rows_of_group);
    if (own.column >= columns) return;
    float scale[VECTOR], shift[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        scale[i] = factor[own.column + i];
        shift[i] = bias.address ? parameter(bias, own.column + i) : 0.0f;
    }
    for (int64_t row = own.first; row < own.end; row += AHEAD) {
        Vector<T, VECTOR> loaded[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k < own.end)
                loaded[k] = load_vector<VECTOR>(y + (row + k) * y_stride + own.column);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k >= own.end) break;
            Vector<T, VECTOR> out;
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                out.at[i] = from_float<T>(to_float(loaded[k].at[i]) * scale[i] + shift[i]);
            store_vector(z + (row + k) * columns + own.column, out);
        }
    }
}

/// `dy = dz ⊙ factor`, and in `partial` `(1 or 2, groups, columns)` the sums of `dz·y` over each group of rows,
/// followed by those of `dz` where `need_dbias`.
template <typename T, int VECTOR>
__device__ __forceinline__ void backward(const T *y, const float *factor, const T *dz, T *dy,
                                         float *partial, int64_t rows, int64_t columns,
                                         int64_t y_stride, int64_t dz_stride,
                                         int64_t rows_of_group, int need_dbias) {
    follow_previous();
    const Tile own = tile<VECTOR>(rows, rows_of_group);
    if (own.column >= columns) return;
    float scale[VECTOR], dfactor[VECTOR], dbias[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        scale[i] = factor[own.column + i];
        dfactor[i] = dbias[i] = 0.0f;
    }
    for (int64_t row = own.first; row < own.end; row += AHEAD) {
        Vector<T, VECTOR> of_y[AHEAD], of_dz[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k < own.end) {
                of_y[k] = load_vector<VECTOR>(y + (row + k) * y_stride + own.column);
                of_dz[k] = load_vector<VECTOR>(dz + (row + k) * dz_stride + own.column);
            }
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k >= own.end) break;
            Vector<T, VECTOR> out;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                const float d = to_float(of_dz[k].at[i]);
                dfactor[i] += d * to_float(of_y[k].at[i]);
                dbias[i] += d;
                out.at[i] = from_float<T>(d * scale[i]);
            }
            store_vector(dy + (row + k) * columns + own.column, out);
        }
    }
    float *out = partial + blockIdx.y * columns + own.column;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) out[i] = dfactor[i];
    if (need_dbias) {
        out += gridDim.y * columns;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) out[i] = dbias[i];
    }
}

/// The square of the norm of a row of `weight`, a block each.
template <typename T>
__device__ __forceinline__ void dora_squared_norms(const T *weight, float *squares,
                                                   int64_t columns, int64_t stride) {
    follow_previous();
    __shared__ float scratch[WARP];
    weight += blockIdx.x * stride;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < columns; i += ANY_THREADS) {
        const float w = to_float(weight[i]);
        sum += w * w;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

/// Splits A `(in, rank)` for products of bf16: `split` `(in, 2·rank)` has the nearest bf16 numbers, and beside
/// them the nearest to what those leave.
extern "C" __global__ void __launch_bounds__(ANY_THREADS)
    dora_split(const float *a, bf16 *split, int64_t count, int rank) {
    follow_previous();
    const int64_t i = int64_t(blockIdx.x) * ANY_THREADS + threadIdx.x;
    if (i >= count) return;
    const bf16 high = from_float<bf16>(a[i]);
    bf16 *out = split + i + i / rank * rank;
    out[0] = high;
    out[rank] = from_float<bf16>(a[i] - to_float(high));
}

/// The norms of the merged rows, a thread each, from `base` `(out)`, `b` and `gram_b` `(rank, out)`, and
/// `products` `(parts·rank, out)`, whose parts are added up.
extern "C" __global__ void __launch_bounds__(ANY_THREADS)
    dora_merged_norms(const float *base, const float *products, const float *gram_b,
                      const float *b, float *norms, int64_t columns, int rank, int parts,
                      float scale) {
    follow_previous();
    const int64_t column = int64_t(blockIdx.x) * ANY_THREADS + threadIdx.x;
    if (column >= columns) return;
    float sum = 0.0f;
#pragma unroll 4
    for (int r = 0; r < rank; r++) {
        const int64_t i = r * columns + column;
        float product = products[i];
        if (parts == 2) product += products[rank * columns + i];
        sum += b[i] * (2.0f * scale * product + scale * scale * gram_b[i]);
    }
    sum += base[column];
    // What is less is rounding.
    const float least = base[column] * 1.1920929e-7f;
    norms[column] = sqrtf(sum < least ? least : sum);
}

template <typename T>
__device__ __forceinline__ void dora_scale_columns(const T *y, const float *factor, Parameter bias,
                                                   T *z, int64_t rows, int64_t columns,
                                                   int64_t y_stride, int64_t rows_of_group) {
    scale_columns<T, Pack<T>::N>(y, factor, bias, z, rows, columns, y_stride, rows_of_group);
}

template <typename T>
__device__ __forceinline__ void dora_scale_columns_any(const T *y, const float *factor,
                                                       Parameter bias, T *z, int64_t rows,
                                                       int64_t columns, int64_t y_stride,
                                                       int64_t rows_of_group) {
    scale_columns<T, 1>(y, factor, bias, z, rows, columns, y_stride, rows_of_group);
}

template <typename T>
__device__ __forceinline__ void dora_backward(const T *y, const float *factor, const T *dz, T *dy,
                                              float *partial, int64_t rows, int64_t columns,
                                              int64_t y_stride, int64_t dz_stride,
                                              int64_t rows_of_group, int need_dbias) {
    backward<T, Pack<T>::N>(y, factor, dz, dy, partial, rows, columns, y_stride, dz_stride,
                            rows_of_group, need_dbias);
}

template <typename T>
__device__ __forceinline__ void dora_backward_any(const T *y, const float *factor, const T *dz,
                                                  T *dy, float *partial, int64_t rows,
                                                  int64_t columns, int64_t y_stride,
                                                  int64_t dz_stride, int64_t rows_of_group,
                                                  int need_dbias) {
    backward<T, 1>(y, factor, dz, dy, partial, rows, columns, y_stride, dz_stride, rows_of_group,
                   need_dbias);
}

#define SCALE_PARAMETERS                                                                           \
    (const T *y, const float *factor, Parameter bias, T *z, int64_t rows, int64_t columns,         \
     int64_t y_stride, int64_t rows_of_group)
#define SCALE_ARGUMENTS (y, factor, bias, z, rows, columns, y_stride, rows_of_group)
#define BACKWARD_PARAMETERS                                                                        \
    (const T *y, const float *factor, const T *dz, T *dy, float *partial, int64_t rows,            \
     int64_t columns, int64_t y_stride, int64_t dz_stride, int64_t rows_of_group, int need_dbias)
#define BACKWARD_ARGUMENTS                                                                         \
    (y, factor, dz, dy, partial, rows, columns, y_stride, dz_stride, rows_of_group, need_dbias)

FOR_EACH_DTYPE(dora_squared_norms, ANY_THREADS,
               (const T *weight, float *squares, int64_t columns, int64_t stride),
               (weight, squares, columns, stride))
FOR_EACH_DTYPE(dora_scale_columns, ANY_THREADS, SCALE_PARAMETERS, SCALE_ARGUMENTS)
FOR_EACH_DTYPE(dora_scale_columns_any, ANY_THREADS, SCALE_PARAMETERS, SCALE_ARGUMENTS)
FOR_EACH_DTYPE(dora_backward, ANY_THREADS, BACKWARD_PARAMETERS, BACKWARD_ARGUMENTS)
FOR_EACH_DTYPE(dora_backward_any, ANY_THREADS, BACKWARD_PARAMETERS, BACKWARD_ARGUMENTS)
