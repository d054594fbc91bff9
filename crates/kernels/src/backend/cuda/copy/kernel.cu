// Copies of tensors that aren't contiguous, and conversions between dtypes.
#include "vector.cuh"

constexpr int THREADS = 256;
constexpr int DIMENSIONS = 6;
/// Elements of a thread.
constexpr int AHEAD = 4;

/// A layout in numbers of the size that is copied. Dimensions that aren't there have size 1 and come
/// first.
struct Layout {
    int64_t sizes[DIMENSIONS], strides[DIMENSIONS];
};

/// `out[i] = in[where element i of the layout lies]`. `Index` is what positions are counted in: division
/// is much faster in 32 bits.
template <typename Bits, typename Index>
__device__ __forceinline__ void copy_as(const Bits *in, Bits *out, Index count,
                                        const Layout &layout) {
    const Index first = Index(blockIdx.x) * (AHEAD * THREADS) + threadIdx.x;
    Bits value[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const Index i = first + k * THREADS;
        if (i < count) {
            Index rest = i;
            int64_t offset = 0;
#pragma unroll
            for (int d = DIMENSIONS - 1; d > 0; d--) {
                // The same for all threads, so dimensions that aren't there cost little.
                if (layout.sizes[d] > 1) {
                    const Index size = Index(layout.sizes[d]), quotient = rest / size;
                    offset += int64_t(rest - quotient * size) * layout.strides[d];
                    rest = quotient;
                }
            }
            value[k] = in[offset + int64_t(rest) * layout.strides[0]];
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const Index i = first + k * THREADS;
        if (i < count) out[i] = value[k];
    }
}

/// Counts in 32 bits what leaves room for the index of a thread beyond the end.
template <typename Bits>
__device__ __forceinline__ void copy(const void *in, void *out, int64_t count,
                                     const Layout &layout) {
    const Bits *from = static_cast<const Bits *>(in);
    Bits *to = static_cast<Bits *>(out);
    if (count < (int64_t(1) << 31))
        copy_as<Bits, unsigned>(from, to, unsigned(count), layout);
    else
        copy_as<Bits, int64_t>(from, to, count, layout);
}

#define COPY(bytes, Bits)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        copy_##bytes(const void *in, void *out, int64_t count, const __grid_constant__ Layout l) { \
        copy<Bits>(in, out, count, l);                                                             \
    }
COPY(1, unsigned char)
COPY(2, unsigned short)
COPY(4, unsigned)
COPY(8, uint2)
COPY(16, uint4)

/// Rows of two tensors `(tokens, heads, width)`, found by the strides of tokens and heads, and where they go:
/// `blockIdx.y` says which. In packs.
struct PlacedRows {
    const void *from[2];
    void *to[2];
    int64_t token_strides[2], head_strides[2];
};

/// A token's row becomes that of its place among `room` rows that lie one behind the other, if it is one of them.
template <typename Bits>
__device__ __forceinline__ void write_rows(const PlacedRows &rows, const uint32_t *places,
                                           int64_t tokens, int64_t heads, int64_t width,
                                           int64_t room) {
    follow_previous();
    const Bits *const from = static_cast<const Bits *>(rows.from[blockIdx.y]);
    Bits *const to = static_cast<Bits *>(rows.to[blockIdx.y]);
    const int64_t token_stride = rows.token_strides[blockIdx.y];
    const int64_t head_stride = rows.head_strides[blockIdx.y];
    const int64_t row = heads * width, step = int64_t(gridDim.x) * THREADS;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < tokens * row; i += step) {
        const int64_t token = i / row, rest = i % row;
        const int64_t place = places[token];
        if (place < room)
            to[place * row + rest] =
                from[token * token_stride + rest / width * head_stride + rest % width];
    }
}

#define WRITE_ROWS(bytes, Bits)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        write_rows_##bytes(const __grid_constant__ PlacedRows rows, const uint32_t *places,        \
                           int64_t tokens, int64_t heads, int64_t width, int64_t room) {           \
        write_rows<Bits>(rows, places, tokens, heads, width, room);                                \
    }
WRITE_ROWS(2, unsigned short)
WRITE_ROWS(4, unsigned)
WRITE_ROWS(8, uint2)
WRITE_ROWS(16, uint4)

/// Matrices `(rows, columns)` whose columns are contiguous, to be written by rows: by tiles of 32 by 32
/// through shared memory, so that both sides are read and written in stretches. `blockIdx.z` counts
/// matrices.
template <typename Bits>
__device__ __forceinline__ void transpose(const void *in, void *out, int64_t rows, int64_t columns,
                                          int64_t column_stride, int64_t matrix_stride) {
    constexpr int TILE = 32, ROWS = THREADS / TILE;
    // A column more, so that a column of the tile lies in different banks.
    __shared__ Bits tile[TILE][TILE + 1];
    const int64_t row_tiles = (rows + TILE - 1) / TILE;
    const int64_t row = int64_t(blockIdx.x) % row_tiles * TILE;
    const int64_t column = int64_t(blockIdx.x) / row_tiles * TILE;
    const int lane = threadIdx.x % TILE, group = threadIdx.x / TILE;
    const Bits *from = static_cast<const Bits *>(in) + blockIdx.z * matrix_stride;
    Bits *to = static_cast<Bits *>(out) + blockIdx.z * rows * columns;
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        const int64_t c = column + group + k;
        if (c < columns && row + lane < rows)
            tile[group + k][lane] = from[c * column_stride + row + lane];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE; k += ROWS) {
        const int64_t r = row + group + k;
        if (r < rows && column + lane < columns)
            to[r * columns + column + lane] = tile[lane][group + k];
    }
}

#define TRANSPOSE(bytes, Bits)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        transpose_##bytes(const void *in, void *out, int64_t rows, int64_t columns,                \
                          int64_t column_stride, int64_t matrix_stride) {                          \
        transpose<Bits>(in, out, rows, columns, column_stride, matrix_stride);                     \
    }
TRANSPOSE(2, unsigned short)
TRANSPOSE(4, unsigned)

/// Converts contiguous elements, `VECTOR` at a time: 8, or 1 where vectors don't fit. The elements after
/// the last whole vector go to the threads of the first block, one each.
template <typename To, typename From, int VECTOR>
__device__ __forceinline__ void cast_as(const From *in, To *out, int64_t count) {
    const int64_t vectors = count / VECTOR;
    const int64_t vector = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (vector < vectors) {
        if constexpr (VECTOR == 1) {
            out[vector] = from_float<To>(to_float(in[vector]));
        } else {
            // As many elements at a time as fit into 16 bytes on both sides.
            constexpr int PART = sizeof(From) == 2 && sizeof(To) == 2 ? 8 : 4;
            Vector<From, PART> value[VECTOR / PART];
#pragma unroll
            for (int p = 0; p < VECTOR / PART; p++)
                value[p] = load_vector<PART>(in + vector * VECTOR + p * PART);
#pragma unroll
            for (int p = 0; p < VECTOR / PART; p++) {
                Vector<To, PART> result;
#pragma unroll
                for (int i = 0; i < PART; i++)
                    result.at[i] = from_float<To>(to_float(value[p].at[i]));
                store_vector(out + vector * VECTOR + p * PART, result);
            }
        }
    }
    if constexpr (VECTOR > 1) {
        const int64_t i = vectors * VECTOR + threadIdx.x;
        if (blockIdx.x == 0 && i < count) out[i] = from_float<To>(to_float(in[i]));
    }
}

#define CAST(from, From, to, To)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        cast_##from##_##to(const From *in, To *out, int64_t count) {                               \
        cast_as<To, From, 8>(in, out, count);                                                      \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        cast_any_##from##_##to(const From *in, To *out, int64_t count) {                           \
        cast_as<To, From, 1>(in, out, count);                                                      \
    }
CAST(f32, float, bf16, bf16)
CAST(f32, float, f16, f16)
CAST(bf16, bf16, f32, float)
CAST(bf16, bf16, f16, f16)
CAST(f16, f16, f32, float)
CAST(f16, f16, bf16, bf16)
