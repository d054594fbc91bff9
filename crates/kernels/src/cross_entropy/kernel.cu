// The passes of the head and cross entropy beside the matrix products: gathering the rows that count,
// the loss and gradient of a row of logits, and the sum of the losses.
#include "common.cuh"

#include <float.h>

namespace {

constexpr int THREADS = 512;
constexpr uint32_t NOWHERE = 0xffffffffu;

/// Copies a row, with 16 bytes at a time where they fit.
template <typename T>
__device__ __forceinline__ void copy_row(const T *from, T *to, int columns, bool aligned) {
    constexpr int N = Pack<T>::N;
    if (aligned) {
        for (int i = threadIdx.x * N; i < columns; i += blockDim.x * N)
            store_pack(to + i, load_pack(from + i));
    } else {
        for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = from[i];
    }
}

/// out[i] = x[rows[i]]: block i copies a row.
template <typename T>
__device__ __forceinline__ void gather_rows(const T *x, int64_t stride, const uint32_t *rows, T *out,
                                            int columns, int aligned) {
    const int64_t row = rows[blockIdx.x];
    copy_row(x + row * stride, out + (int64_t)blockIdx.x * columns, columns, aligned);
}

/// out[n] = x[places[n]], or zeros where that is nowhere: block n writes a row.
template <typename T>
__device__ __forceinline__ void scatter_rows(const T *x, const uint32_t *places, T *out, int columns,
                                             int aligned) {
    const uint32_t place = places[blockIdx.x];
    T *to = out + (int64_t)blockIdx.x * columns;
    if (place != NOWHERE) {
        copy_row(x + (int64_t)place * columns, to, columns, aligned);
    } else {
        for (int i = threadIdx.x; i < columns; i += blockDim.x) to[i] = from_float<T>(0.0f);
    }
}

/// What a product of the head becomes: times the scale, then capped.
struct Logit {
    float scale, cap, inverse;

    __device__ __forceinline__ float operator()(float product) const {
        const float raw = product * scale;
        return cap > 0.0f ? cap * tanhf(raw * inverse) : raw;
    }

    /// The derivative of the logit with respect to the product.
    __device__ __forceinline__ float slope(float logit) const {
        if (!(cap > 0.0f)) return scale;
        const float ratio = logit * inverse;
        return scale * (1.0f - ratio * ratio);
    }
};

/// Four elements at once.
__device__ __forceinline__ void store_four(float *to, const float (&value)[4]) {
    *reinterpret_cast<float4 *>(to) = make_float4(value[0], value[1], value[2], value[3]);
}
template <typename T> __device__ __forceinline__ void store_four(T *to, const float (&value)[4]) {
    alignas(8) T four[4];
#pragma unroll
    for (int e = 0; e < 4; e++) four[e] = from_float<T>(value[e]);
    *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(four);
}

/// Where what is found of the rows goes, each in its place among all; what isn't wanted is null.
struct OfRows {
    float *losses, *entropies, *hits;
};

/// The targets of each row, `width` of them or NOWHERE, their shares, and room for their logits.
struct Targets {
    const uint32_t *tokens;
    const float *shares;
    float *logits;
    int width;
};

/// Which of all each row is, its weight and the sum of its targets' shares.
struct Counted {
    const uint32_t *rows;
    const float *weights, *shares;
};

/// The loss of row blockIdx.x, which is row `rows[blockIdx.x]` of all, and, unless `gradient` is null, its gradient
/// with respect to the products of the head, times the row's weight. The gradient may lie where the products do. Rows
/// of both are `stride` elements apart and begin at 16 bytes.
template <typename T>
__device__ __forceinline__ void loss_rows(const float *products, T *gradient, Targets targets,
                                          Counted counted, OfRows out, int64_t stride, int columns,
                                          Logit logit) {
    __shared__ float scratch[WARP];
    const float *row = products + blockIdx.x * stride;
    const float weight = counted.weights[blockIdx.x], share = counted.shares[blockIdx.x];
    const int64_t first_target = static_cast<int64_t>(blockIdx.x) * targets.width;
    targets.tokens += first_target;
    targets.shares += first_target;
    targets.logits += first_target;
    const float first_logit = logit(row[targets.tokens[0]]);
    float of_targets = 0.0f;
    for (int i = threadIdx.x; i < targets.width; i += THREADS) {
        if (targets.tokens[i] == NOWHERE) continue;
        const float z = logit(row[targets.tokens[i]]);
        targets.logits[i] = z;
        of_targets += targets.shares[i] * z;
    }
    of_targets = block_sum(of_targets, scratch);
    const int fours = columns / 4;

    // The largest, and the sum of e to the differences from it, so far. It starts finite, so that
    // negative infinities add nothing.
    float largest = -FLT_MAX, total = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < fours; i += THREADS) {
        const float4 four = reinterpret_cast<const float4 *>(row)[i];
        const float z[4] = {logit(four.x), logit(four.y), logit(four.z), logit(four.w)};
        const float most = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
        if (most > largest) {
            total *= __expf(largest - most);
            largest = most;
        }
        total += __expf(z[0] - largest) + __expf(z[1] - largest) + __expf(z[2] - largest) +
                 __expf(z[3] - largest);
    }
    for (int i = fours * 4 + threadIdx.x; i < columns; i += THREADS) {
        const float z = logit(row[i]);
        if (z > largest) {
            total *= __expf(largest - z);
            largest = z;
        }
        total += __expf(z - largest);
    }
    const float most = block_max(largest, scratch);
    const float sum = block_sum(total * __expf(largest - most), scratch);
    const float log_sum_exp = most + logf(sum);
    const uint32_t place = counted.rows[blockIdx.x];
    if (threadIdx.x == 0) out.losses[place] = share * log_sum_exp - of_targets;
    if (out.entropies != nullptr) {
        float spread = 0.0f;
        // Of several logits that are the largest, the first token's counts.
        bool is_before = false;
        const int first_token = static_cast<int>(targets.tokens[0]);
        for (int i = threadIdx.x; i < columns; i += THREADS) {
            const float z = logit(row[i]);
            is_before |= z >= most && i < first_token;
            // Finite, so that a logit of negative infinity adds nothing.
            const float below = fmaxf(z - most, -FLT_MAX);
            spread += __expf(below) * below;
        }
        spread = block_sum(spread, scratch);
        is_before = __syncthreads_or(is_before);
        if (threadIdx.x == 0) {
            out.entropies[place] = logf(sum) - spread / sum;
            out.hits[place] = first_logit >= most && !is_before ? 1.0f : 0.0f;
        }
    }
    if (gradient == nullptr) return;

    T *to = gradient + blockIdx.x * stride;
    auto of_logit = [&](float z, float of_target) {
        return (share * __expf(z - log_sum_exp) - of_target) * logit.slope(z) * weight;
    };
    auto of = [&](float product) { return of_logit(logit(product), 0.0f); };
    // From the end, which was read last and may still be near.
    for (int i = fours * 4 + threadIdx.x; i < columns; i += THREADS)
        to[i] = from_float<T>(of(row[i]));
#pragma unroll 4
    for (int i = fours - 1 - threadIdx.x; i >= 0; i -= THREADS) {
        const float4 four = reinterpret_cast<const float4 *>(row)[i];
        const float value[4] = {of(four.x), of(four.y), of(four.z), of(four.w)};
        store_four(to + 4 * i, value);
    }
    // Targets last, as others wrote there: exactly p - 1 rather than p minus a rounded product.
    __syncthreads();
    for (int i = threadIdx.x; i < targets.width; i += THREADS) {
        if (targets.tokens[i] == NOWHERE) continue;
        to[targets.tokens[i]] = from_float<T>(of_logit(targets.logits[i], targets.shares[i]));
    }
}

} // namespace

FOR_EACH_DTYPE(gather_rows, 256,
               (const T *x, int64_t stride, const uint32_t *rows, T *out, int columns, int aligned),
               (x, stride, rows, out, columns, aligned))
FOR_EACH_DTYPE(scatter_rows, 256,
               (const T *x, const uint32_t *places, T *out, int columns, int aligned),
               (x, places, out, columns, aligned))
FOR_EACH_DTYPE(loss_rows, THREADS,
               (const float *products, T *gradient, const uint32_t *tokens, const float *shares,
                float *logits, const uint32_t *rows, const float *weights, const float *share_sums,
                float *losses, float *entropies, float *hits, int width, int64_t stride, int columns,
                float scale, float cap),
               (products, gradient, Targets{tokens, shares, logits, width},
                Counted{rows, weights, share_sums}, OfRows{losses, entropies, hits}, stride, columns,
                Logit{scale, cap, cap > 0.0f ? 1.0f / cap : 0.0f}))

/// The weighted sum of the losses of `rows`, by one block, in f64 and always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_losses(const float *__restrict__ losses, const uint32_t *__restrict__ rows,
               const float *__restrict__ weights, float *__restrict__ out, int count) {
    __shared__ double parts[THREADS];
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += static_cast<double>(weights[i]) * losses[rows[i]];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = static_cast<float>(parts[0]);
}
