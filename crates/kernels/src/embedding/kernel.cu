// Rows of a table, and the gradient of the table.
//
// An id outside the table can't be reported from here: its row of the result is NaN, and it has no
// gradient.
//
// Backward: `embedding_count` notes for every id how often and where first it occurs, which doesn't depend
// on the order in which threads come. The block of the first position adds the gradients of all positions
// with its id, in order, to what is there.
#include "vector.cuh"

constexpr int THREADS = 256;
/// Columns of a block in the backward pass, `THREADS` vectors of 4.
constexpr int COLUMNS = 4 * THREADS;
/// Positions of one id that are added up at a time.
constexpr int MATCHES = 1024;

/// The table's rows as numbers of type `Bits`, `width` of them in a row; a thread has some of one row.
template <typename Bits>
__device__ __forceinline__ void copy_rows(const Bits *table, const unsigned *ids, Bits *out,
                                          int64_t width, int64_t vocabulary, Bits nan) {
    const int64_t id = ids[blockIdx.x];
    const Bits *row = table + id * width;
    out += blockIdx.x * width;
    const bool known = id < vocabulary;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x) out[i] = known ? row[i] : nan;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_forward_16(const uint4 *table, const unsigned *ids, uint4 *out, int64_t width,
                         int64_t vocabulary) {
    // NaN in every dtype.
    copy_rows(table, ids, out, width, vocabulary,
              make_uint4(0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_forward_4(const unsigned *table, const unsigned *ids, unsigned *out, int64_t width,
                        int64_t vocabulary) {
    copy_rows(table, ids, out, width, vocabulary, 0x7fffffffu);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_forward_2(const unsigned short *table, const unsigned *ids, unsigned short *out,
                        int64_t width, int64_t vocabulary) {
    copy_rows(table, ids, out, width, vocabulary, static_cast<unsigned short>(0x7fff));
}

/// `found` `(2, vocabulary)` starts as zeros: the number of positions of an id, and `count` minus the
/// first of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_count(const unsigned *ids, unsigned count, int64_t vocabulary, unsigned *found) {
    const unsigned position = blockIdx.x * THREADS + threadIdx.x;
    if (position >= count) return;
    const int64_t id = ids[position];
    if (id >= vocabulary) return;
    atomicAdd(found + id, 1u);
    atomicMax(found + vocabulary + id, count - position);
}

/// Block `(p, c)` has the id of position `p`, if that is its first, and columns from `c·COLUMNS` on.
/// `VECTOR` is 4, or 1 where vectors don't fit.
template <typename T, int VECTOR>
__device__ __forceinline__ void add_rows(const T *dy, const unsigned *ids, const unsigned *found,
                                         float *out, unsigned count, int64_t columns,
                                         int64_t vocabulary) {
    constexpr int OWN = 4 / VECTOR, WARPS = THREADS / WARP;
    __shared__ unsigned matches[MATCHES], of_warp[WARPS];
    const unsigned start = blockIdx.x, id = ids[start];
    if (id >= vocabulary || found[vocabulary + id] != count - start) return;
    const unsigned expected = found[id];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t first = int64_t(blockIdx.y) * COLUMNS + threadIdx.x * VECTOR;
    float sum[OWN][VECTOR];
#pragma unroll
    for (int o = 0; o < OWN; o++) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum[o][i] = 0.0f;
    }
    unsigned seen = 0;
    // The next positions to look at.
    int64_t next = start;
    while (seen < expected) {
        // Every thread counts the same, so all of them leave the loop at once.
        unsigned collected = 0;
        while (seen + collected < expected && collected + THREADS <= MATCHES) {
            const int64_t position = next + threadIdx.x;
            const bool match = position < count && ids[position] == id;
            const unsigned ballot = __ballot_sync(FULL, match);
            if (lane == 0) of_warp[warp] = __popc(ballot);
            __syncthreads();
            unsigned before = collected;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                if (w < warp) before += of_warp[w];
                collected += of_warp[w];
            }
            if (match) matches[before + __popc(ballot & ((1u << lane) - 1))] = unsigned(position);
            next += THREADS;
            __syncthreads();
        }
#pragma unroll 4
        for (unsigned m = 0; m < collected; m++) {
            const T *row = dy + matches[m] * columns;
#pragma unroll
            for (int o = 0; o < OWN; o++) {
                const int64_t column = first + o * THREADS;
                if (column < columns) {
                    const Vector<T, VECTOR> values = load_vector<VECTOR>(row + column);
#pragma unroll
                    for (int i = 0; i < VECTOR; i++) sum[o][i] += to_float(values.at[i]);
                }
            }
        }
        seen += collected;
        // Before the matches are overwritten.
        __syncthreads();
    }
#pragma unroll
    for (int o = 0; o < OWN; o++) {
        const int64_t column = first + o * THREADS;
        if (column < columns) {
            float *row = out + id * columns + column;
            Vector<float, VECTOR> values = load_vector<VECTOR>(row);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values.at[i] += sum[o][i];
            store_vector(row, values);
        }
    }
}

template <typename T>
__device__ __forceinline__ void embedding_backward(const T *dy, const unsigned *ids,
                                                   const unsigned *found, float *out,
                                                   unsigned count, int64_t columns,
                                                   int64_t vocabulary) {
    add_rows<T, 4>(dy, ids, found, out, count, columns, vocabulary);
}

template <typename T>
__device__ __forceinline__ void embedding_backward_any(const T *dy, const unsigned *ids,
                                                       const unsigned *found, float *out,
                                                       unsigned count, int64_t columns,
                                                       int64_t vocabulary) {
    add_rows<T, 1>(dy, ids, found, out, count, columns, vocabulary);
}

#define PARAMETERS                                                                                 \
    (const T *dy, const unsigned *ids, const unsigned *found, float *out, unsigned count,          \
     int64_t columns, int64_t vocabulary)
#define ARGUMENTS (dy, ids, found, out, count, columns, vocabulary)

FOR_EACH_DTYPE(embedding_backward, THREADS, PARAMETERS, ARGUMENTS)
FOR_EACH_DTYPE(embedding_backward_any, THREADS, PARAMETERS, ARGUMENTS)
