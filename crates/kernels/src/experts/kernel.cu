// Sums of what experts give, see mod.rs for the formulas.
//
// A place that is none of y's rows can't be reported from here: it gives NaN.
#include "../glu/activation.cuh"
#include "fragments.cuh"
#include "grouped.cuh"
#include "packed.cuh"
#include "routed.cuh"
#include "sorted.cuh"
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

/// The order of `f32::total_cmp` as whole numbers.
__device__ __forceinline__ int total_order(float x) {
    const int bits = __float_as_int(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/// Logits of a lane at most.
constexpr int MOST_LOGITS = 32;
static_assert(MOST_LOGITS * WARP == MOST_COUNT, "as many experts are chosen of as are put into an order");

/// A warp has a token: the experts with the largest logits, the first of equals, the largest first, in `chosen`, where each choice
/// stands in `chosen + choices`, and their shares.
template <typename T>
__device__ __forceinline__ void experts_route(const T *logits, unsigned *chosen, float *shares,
                                              int count, int active, int normalized) {
    follow_previous();
    const int lane = threadIdx.x, first = blockIdx.x * active, choices = gridDim.x * active;
    logits += int64_t(blockIdx.x) * count;
    float own[MOST_LOGITS];
    unsigned taken = 0;
#pragma unroll
    for (int k = 0; k < MOST_LOGITS; k++) {
        const int expert = k * WARP + lane;
        own[k] = expert < count ? to_float(logits[expert]) : 0.0f;
        if (expert >= count) taken |= 1u << k;
    }
    float largest = 0.0f, sum = 0.0f;
    for (int j = 0; j < active; j++) {
        int best = INT_MIN, expert = INT_MAX;
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < MOST_LOGITS; k++) {
            const int order = total_order(own[k]);
            if (!(taken >> k & 1) && (expert == INT_MAX || order > best)) {
                best = order;
                expert = k * WARP + lane;
                value = own[k];
            }
        }
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            const int other = __shfl_xor_sync(FULL, best, offset);
            const int of_other = __shfl_xor_sync(FULL, expert, offset);
            const float its = __shfl_xor_sync(FULL, value, offset);
            const bool is_better = expert == INT_MAX || other > best || (other == best && of_other < expert);
            if (of_other != INT_MAX && is_better) {
                best = other;
                expert = of_other;
                value = its;
            }
        }
        if (expert % WARP == lane) taken |= 1u << (expert / WARP);
        if (j == 0) largest = value;
        const float share = expf(value - largest);
        sum += share;
        if (lane == 0) {
            chosen[first + j] = expert;
            chosen[choices + first + j] = first + j;
            shares[first + j] = share;
        }
    }
    if (!normalized) {
        sum = 0.0f;
#pragma unroll
        for (int k = 0; k < MOST_LOGITS; k++)
            if (k * WARP + lane < count) sum += expf(own[k] - largest);
        sum = warp_sum(sum);
    }
    __syncwarp();
    for (int j = lane; j < active; j += WARP) shares[first + j] /= sum;
}

constexpr int FEW_THREADS = 256;
/// Columns of a block, and of one of its warps.
constexpr int FEW_COLUMNS = 16, OF_WARP = FEW_COLUMNS / (FEW_THREADS / WARP);

/// Matrices as they are.
struct DenseMatrices {
    template <typename T> using Entry = const T *;

    /// The products of the block's row `x`, of which `row` has room for a copy, with the warp's rows of `MATRICES` weights from
    /// `column` on, which may lie beyond the end.
    template <int MATRICES, typename T>
    __device__ __forceinline__ static void dots(const T *x, T *row, const Entry<T> *entries, int inner, int outer,
                                                int column, float (&sums)[MATRICES][OF_WARP]) {
        constexpr int N = Pack<T>::N;
        const T *weights[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; m++) weights[m] = entries[m];
        for (int i = threadIdx.x * N; i < inner; i += FEW_THREADS * N)
            store_pack(row + i, load_pack(x + i));
        __syncthreads();
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
#pragma unroll
            for (int c = 0; c < OF_WARP; c++) sums[m][c] = 0.0f;
        }
#pragma unroll 4
        for (int i = (threadIdx.x % WARP) * N; i < inner; i += WARP * N) {
            const Pack<T> left = load_pack(row + i);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
#pragma unroll
                for (int c = 0; c < OF_WARP; c++) {
                    const int line = min(column + c, outer - 1);
                    const Pack<T> right = load_pack(weights[m] + int64_t(line) * inner + i);
#pragma unroll
                    for (int n = 0; n < N; n++)
                        sums[m][c] += to_float(left.at[n]) * to_float(right.at[n]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MATRICES; m++) {
#pragma unroll
            for (int c = 0; c < OF_WARP; c++) sums[m][c] = warp_sum(sums[m][c]);
        }
    }
};

/// Matrices in fewer bits, whose codes are of a kind.
template <int BITS, int KIND> struct PackedMatrices {
    template <typename T> using Entry = Packed;

    template <int MATRICES, typename T>
    __device__ __forceinline__ static void dots(const T *x, T *row, const Packed *entries, int inner, int outer,
                                                int column, float (&sums)[MATRICES][OF_WARP]) {
        constexpr int N = Pack<T>::N;
        __shared__ Shared<MATRICES> weights;
        weights.copy(entries);
        for (int i = threadIdx.x * N; i < inner; i += FEW_THREADS * N)
            store_pack(row + i, load_pack(x + i));
        __syncthreads();
        packed_dots<BITS, KIND>(row, weights.at, inner, outer, column, sums);
    }
};

/// The gated unit of choice `blockIdx.y`, `outer` columns, of its token's row of x.
template <typename T, typename Matrices>
__device__ __forceinline__ void unit_of(const T *x, const typename Matrices::template Entry<T> *table,
                                        const T *const *biases, const unsigned *chosen, T *unit, int inner,
                                        int outer, int active, int activation) {
    extern __shared__ __align__(16) unsigned char row[];
    follow_previous();
    const int64_t expert = chosen[blockIdx.y];
    const int column = blockIdx.x * FEW_COLUMNS + threadIdx.x / WARP * OF_WARP;
    float sums[2][OF_WARP];
    Matrices::dots(x + int64_t(blockIdx.y / active) * inner, reinterpret_cast<T *>(row), table + 2 * expert, inner,
                   outer, column, sums);
    if (threadIdx.x % WARP != 0) return;
#pragma unroll
    for (int c = 0; c < OF_WARP; c++) {
        if (column + c >= outer) continue;
        // As if gate and value had been stored.
        const float gate = to_float(from_float<T>(sums[0][c] + bias_of(biases, expert, 0, column + c)));
        const float value = to_float(from_float<T>(sums[1][c] + bias_of(biases, expert, 1, column + c)));
        unit[int64_t(blockIdx.y) * outer + column + c] = from_float<T>(gated(gate, value, activation));
    }
}

/// The product of choice `blockIdx.y`'s unit with its expert's last weight.
template <typename T, typename Matrices>
__device__ __forceinline__ void down_of(const T *unit, const typename Matrices::template Entry<T> *table,
                                        const T *const *biases, const unsigned *chosen, T *y, int inner,
                                        int outer) {
    extern __shared__ __align__(16) unsigned char row[];
    follow_previous();
    const int64_t expert = chosen[blockIdx.y];
    const int column = blockIdx.x * FEW_COLUMNS + threadIdx.x / WARP * OF_WARP;
    float sums[1][OF_WARP];
    Matrices::dots(unit + int64_t(blockIdx.y) * inner, reinterpret_cast<T *>(row), table + expert, inner, outer,
                   column, sums);
    if (threadIdx.x % WARP != 0) return;
#pragma unroll
    for (int c = 0; c < OF_WARP; c++) {
        if (column + c < outer)
            y[int64_t(blockIdx.y) * outer + column + c] =
                from_float<T>(sums[0][c] + bias_of(biases, expert, 2, column + c));
    }
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
FOR_EACH_DTYPE(experts_route, WARP,
               (const T *logits, unsigned *chosen, float *shares, int count, int active,
                int normalized),
               (logits, chosen, shares, count, active, normalized))

/// `experts_unit` and `experts_down` of matrices of a kind.
#define FEW(form, T, suffix, ...)                                                                  \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) experts_unit##form##_##suffix        \
        UNIT_PARAMETERS(T, typename __VA_ARGS__::template Entry<T>) {                              \
        unit_of<T, __VA_ARGS__>(x, table, biases, chosen, y, depth, columns, active, activation);  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) experts_down##form##_##suffix        \
        DOWN_PARAMETERS(T, typename __VA_ARGS__::template Entry<T>) {                              \
        down_of<T, __VA_ARGS__>(unit, table, biases, chosen, y, depth, columns);                   \
    }
#define FEW_OF_ALL(form, ...)                                                                      \
    FEW(form, float, f32, __VA_ARGS__) FEW(form, bf16, bf16, __VA_ARGS__) FEW(form, f16, f16, __VA_ARGS__)

FEW_OF_ALL(, DenseMatrices)
FEW_OF_ALL(_table, PackedMatrices<4, TABLE>)
FEW_OF_ALL(_e4m3, PackedMatrices<8, E4M3>)
FEW_OF_ALL(_2_bits, PackedMatrices<2, INTEGERS>)
FEW_OF_ALL(_3_bits, PackedMatrices<3, INTEGERS>)
FEW_OF_ALL(_4_bits, PackedMatrices<4, INTEGERS>)
FEW_OF_ALL(_5_bits, PackedMatrices<5, INTEGERS>)
FEW_OF_ALL(_6_bits, PackedMatrices<6, INTEGERS>)
FEW_OF_ALL(_8_bits, PackedMatrices<8, INTEGERS>)
