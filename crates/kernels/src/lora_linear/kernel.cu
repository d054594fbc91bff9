// What LoRA layers need beside matrix products: dropout, and the adapters' factors side by side in the
// dtype of the activations.
#include "common.cuh"
#include "dropout.cuh"

namespace {

constexpr int THREADS = 256;
/// Matrices that a launch copies.
constexpr int MOST = 8;

/// A matrix to be copied, converted and multiplied by `scale`: `rows` of `columns`, and zeros from there to
/// `height`. An element is from_row elements from that of the next row, and from_column from that of the
/// next column.
struct Segment {
    const void *from;
    void *to;
    int64_t from_row, from_column, to_row;
    int rows, columns, height;
    int single; // whether it is in f32
    float scale;
};

struct Segments {
    Segment at[MOST];
};

/// Elements that a thread copies at a time, as it has to wait for what it reads.
constexpr int AHEAD = 4;

/// Block `(b, s)` copies every gridDim.x-th part of segment s.
template <typename T> __device__ __forceinline__ void pack(const Segments &segments) {
    const Segment &segment = segments.at[blockIdx.y];
    const int columns = segment.columns, count = segment.height * columns;
    const int step = gridDim.x * THREADS;
    // Adapters have been there for long: their first lines come nearer while the kernel before ends.
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int i = blockIdx.x * THREADS + threadIdx.x + k * step;
        if (i >= count) break;
        const int row = i / columns;
        const int64_t from = row * segment.from_row + (i - row * columns) * segment.from_column;
        if (segment.single && from % (128 / int(sizeof(float))) == 0 && row < segment.rows)
            fetch_ahead(static_cast<const float *>(segment.from) + from);
    }
    follow_previous();
    for (int first = blockIdx.x * THREADS + threadIdx.x; first < count; first += AHEAD * step) {
        float values[AHEAD];
        int64_t to[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = first + k * step, row = i / columns, column = i - row * columns;
            const int64_t from = row * segment.from_row + column * segment.from_column;
            to[k] = row * segment.to_row + column;
            values[k] = 0.0f;
            if (i < count && row < segment.rows)
                values[k] = segment.scale *
                            (segment.single ? static_cast<const float *>(segment.from)[from]
                                            : to_float(static_cast<const T *>(segment.from)[from]));
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k * step < count)
                static_cast<T *>(segment.to)[to[k]] = from_float<T>(values[k]);
        }
    }
}

/// Elements of 16 bytes at a time, one at a time at the end: `work(pack, index of the first, count)`.
template <typename T, typename Work>
__device__ __forceinline__ void for_each_pack(int64_t count, Work work) {
    constexpr int N = Pack<T>::N;
    const int64_t step = (int64_t)gridDim.x * THREADS * N;
    for (int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; i < count; i += step)
        work(i, min((int64_t)N, count - i));
}

/// out = kept·x, and 0 where dropped. x begins at an element, out at 16 bytes.
template <typename T>
__device__ __forceinline__ void dropout(const T *__restrict__ x, T *__restrict__ out, int64_t count,
                                        uint64_t seed, uint32_t threshold, float kept) {
    constexpr int N = Pack<T>::N;
    const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
    for_each_pack<T>(count, [&](int64_t i, int64_t valid) {
        Pack<T> pack;
        if (aligned && valid == N) {
            pack = load_pack(x + i);
        } else {
#pragma unroll
            for (int e = 0; e < N; e++) pack.at[e] = e < valid ? x[i + e] : from_float<T>(0.0f);
        }
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float value =
                dropped(seed, i + e, threshold) ? 0.0f : to_float(pack.at[e]) * kept;
            pack.at[e] = from_float<T>(value);
        }
        if (valid == N) {
            store_pack(out + i, pack);
        } else {
#pragma unroll
            for (int e = 0; e < N; e++) {
                if (e < valid) out[i + e] = pack.at[e];
            }
        }
    });
}

/// out = (first ? 0 : out) + kept·x where x isn't dropped. Both begin at 16 bytes.
template <typename T>
__device__ __forceinline__ void dropout_add(const T *__restrict__ x, T *__restrict__ out,
                                            int64_t count, uint64_t seed, uint32_t threshold,
                                            float kept, int first) {
    constexpr int N = Pack<T>::N;
    for_each_pack<T>(count, [&](int64_t i, int64_t valid) {
        Pack<T> pack, sum;
        if (valid == N) {
            pack = load_pack(x + i);
            if (!first) sum = load_pack(out + i);
        } else {
#pragma unroll
            for (int e = 0; e < N; e++) {
                pack.at[e] = e < valid ? x[i + e] : from_float<T>(0.0f);
                if (!first) sum.at[e] = e < valid ? out[i + e] : from_float<T>(0.0f);
            }
        }
#pragma unroll
        for (int e = 0; e < N; e++) {
            const float before = first ? 0.0f : to_float(sum.at[e]);
            const float added =
                dropped(seed, i + e, threshold) ? 0.0f : to_float(pack.at[e]) * kept;
            sum.at[e] = from_float<T>(before + added);
        }
        if (valid == N) {
            store_pack(out + i, sum);
        } else {
#pragma unroll
            for (int e = 0; e < N; e++) {
                if (e < valid) out[i + e] = sum.at[e];
            }
        }
    });
}

} // namespace

FOR_EACH_DTYPE(pack, THREADS, (const __grid_constant__ Segments segments), (segments))
FOR_EACH_DTYPE(dropout, THREADS,
               (const T *x, T *out, int64_t count, uint64_t seed, uint32_t threshold, float kept),
               (x, out, count, seed, threshold, kept))
FOR_EACH_DTYPE(dropout_add, THREADS,
               (const T *x, T *out, int64_t count, uint64_t seed, uint32_t threshold, float kept,
                int first),
               (x, out, count, seed, threshold, kept, first))
