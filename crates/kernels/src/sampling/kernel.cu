// The index of the largest logit of each row.
#include "common.cuh"

namespace {

constexpr int THREADS = 1024;

/// The larger of two logits, of equals the one that comes first.
__device__ __forceinline__ void keep_first_largest(float &value, int &index, float other, int place) {
    if (other > value || (other == value && place < index)) {
        value = other;
        index = place;
    }
}

/// Block i finds the first of the largest in row i. NaN and negative infinity are never chosen; 0 when
/// nothing else is there.
template <typename T>
__device__ __forceinline__ void greedy(const T *__restrict__ logits, int64_t stride,
                                       uint32_t *__restrict__ ids, int columns, int aligned) {
    constexpr int N = Pack<T>::N;
    constexpr int WARPS = THREADS / WARP;
    __shared__ float values[WARPS];
    __shared__ int places[WARPS];
    const T *row = logits + blockIdx.x * stride;
    float value = -INFINITY;
    int index = columns;
    int done = 0;
    if (aligned) {
        const int packs = columns / N;
        done = packs * N;
#pragma unroll 4
        for (int i = threadIdx.x; i < packs; i += THREADS) {
            const Pack<T> pack = load_pack(row + i * N);
#pragma unroll
            for (int e = 0; e < N; e++)
                keep_first_largest(value, index, to_float(pack.at[e]), i * N + e);
        }
    }
    for (int i = done + threadIdx.x; i < columns; i += THREADS)
        keep_first_largest(value, index, to_float(row[i]), i);
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(FULL, value, offset);
        const int place = __shfl_xor_sync(FULL, index, offset);
        keep_first_largest(value, index, other, place);
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) {
        values[warp] = value;
        places[warp] = index;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < WARPS; w++) keep_first_largest(value, index, values[w], places[w]);
        ids[blockIdx.x] = value > -INFINITY ? index : 0;
    }
}

} // namespace

FOR_EACH_DTYPE(greedy, THREADS,
               (const T *logits, int64_t stride, uint32_t *ids, int columns, int aligned),
               (logits, stride, ids, columns, aligned))
