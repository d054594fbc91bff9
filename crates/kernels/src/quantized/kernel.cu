// Matrices in fewer bits: all of their numbers, some of their rows, and products with a few rows.
#include "few_rows.cuh"
#include "numbers.cuh"
#include "streamed.cuh"
#include "vector.cuh"

namespace {

/// Where numbers are written, eight at a time: `count` from element `first` on.
template <typename T, int BITS, int KIND>
__device__ __forceinline__ void write_eights(const Packed &q, int64_t first, int64_t count, T *out,
                                             uint32_t start, uint32_t step, const float *levels) {
    const float zero = zero_of(q);
    const uint32_t from = first / 8, group = q.group / 8, eights = count / 8;
#pragma unroll 4
    for (uint32_t i = start; i < eights; i += step) {
        const uint32_t eight = from + i;
        const uint64_t codes = eight_codes<BITS>(q, eight);
        const uint32_t place = q.shift >= 3 ? eight >> (q.shift - 3) : eight / group;
        const ScaleAndOffset scale = scale_of(q, place, static_cast<int64_t>(eight) * 8);
        constexpr int N = Pack<T>::N;
#pragma unroll
        for (int half = 0; half < 8; half += N) {
            Vector<T, N> vector;
#pragma unroll
            for (int e = 0; e < N; e++) {
                const uint32_t code = (codes >> ((half + e) * BITS)) & ((1u << BITS) - 1);
                const float level = level_of<KIND>(code, zero, levels);
                vector.at[e] = from_float<T>(__fadd_rn(__fmul_rn(level, scale.scale), scale.offset));
            }
            store_vector(out + static_cast<int64_t>(i) * 8 + half, vector);
        }
    }
}

/// Writes the `count` numbers from element `first` on of a matrix of `elements`. `start` and `step` say which of
/// them the thread has. By `eights`, they begin at a multiple of eight, and so do groups.
template <typename T>
__device__ __forceinline__ void write_numbers(const Packed &q, int64_t first, int64_t count,
                                              int64_t elements, T *out, uint32_t start,
                                              uint32_t step, int eights) {
    __shared__ float levels[16];
    if (threadIdx.x < 16) levels[threadIdx.x] = q.levels[threadIdx.x];
    __syncthreads();
    int64_t done = 0;
    if (eights) {
        done = count / 8 * 8;
        if (q.kind == TABLE) {
            write_eights<T, 4, TABLE>(q, first, count, out, start, step, levels);
        } else if (q.kind == E4M3) {
            write_eights<T, 8, E4M3>(q, first, count, out, start, step, levels);
        } else {
            switch (q.bits) {
                case 2: write_eights<T, 2, INTEGERS>(q, first, count, out, start, step, levels); break;
                case 3: write_eights<T, 3, INTEGERS>(q, first, count, out, start, step, levels); break;
                case 4: write_eights<T, 4, INTEGERS>(q, first, count, out, start, step, levels); break;
                case 5: write_eights<T, 5, INTEGERS>(q, first, count, out, start, step, levels); break;
                case 6: write_eights<T, 6, INTEGERS>(q, first, count, out, start, step, levels); break;
                default: write_eights<T, 8, INTEGERS>(q, first, count, out, start, step, levels);
            }
        }
    }
    for (int64_t i = done + start; i < count; i += step)
        out[i] = from_float<T>(any_number(q, first + i, elements));
}

struct Unpacked {
    Packed weight;
    void *to;
    int64_t elements;
    int eights;
    int unused;
};

/// Matrices of one launch, for each of which `blockIdx.y` has blocks.
struct AllUnpacked {
    Unpacked at[MOST];
};

template <typename T> __device__ __forceinline__ void dequantize(const AllUnpacked &all) {
    const Unpacked &own = all.at[blockIdx.y];
    const uint32_t start = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    // The first codes come while the kernel before ends: the first thread with codes in a line of 128 bytes asks for it.
    const int64_t first = static_cast<int64_t>(start) * own.weight.bits;
    if (own.eights && first % 128 < own.weight.bits && start < own.elements / 8)
        fetch_ahead(static_cast<const char *>(own.weight.codes) + first);
    follow_previous();
    write_numbers(own.weight, 0, own.elements, own.elements, static_cast<T *>(own.to), start, step, own.eights);
}

/// A block has the row of an id; one that isn't below `outer` gives NaN.
template <typename T>
__device__ __forceinline__ void quantized_rows(const Packed &q, const unsigned *ids, T *out,
                                               int64_t outer, int64_t inner, int eights) {
    follow_previous();
    const int64_t id = ids[blockIdx.x];
    out += blockIdx.x * inner;
    if (id >= outer) {
        for (int64_t i = threadIdx.x; i < inner; i += blockDim.x) out[i] = from_float<T>(NAN);
        return;
    }
    write_numbers(q, id * inner, inner, outer * inner, out, threadIdx.x, blockDim.x, eights);
}

} // namespace

FOR_EACH_DTYPE(dequantize, THREADS, (const __grid_constant__ AllUnpacked all), (all))
FOR_EACH_DTYPE(quantized_rows, THREADS,
               (const __grid_constant__ Packed q, const unsigned *ids, T *out, int64_t outer,
                int64_t inner, int eights),
               (q, ids, out, outer, inner, eights))

/// `quantized_two_rows_format_dtype` and `quantized_eight_rows_format_dtype`. A kernel for all formats would have
/// registers for none.
#define FEW_ROWS_OF_ONE_DTYPE(name, ROWS, BITS, KIND, UNIT, suffix, T)                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name##_##suffix(                      \
        const __grid_constant__ Projections all, const T *x, int64_t x_stride, int rows,           \
        int inner, T *xa, const float *parts, int slices, int part_rows) {                         \
        few_rows<ROWS, BITS, KIND, UNIT>(all, x, x_stride, rows, inner, xa, parts, slices,         \
                                         part_rows);                                               \
    }
#define FEW_ROWS_OF_EACH_DTYPE(name, ROWS, BITS, KIND, UNIT)                                       \
    FEW_ROWS_OF_ONE_DTYPE(name, ROWS, BITS, KIND, UNIT, f32, float)                                \
    FEW_ROWS_OF_ONE_DTYPE(name, ROWS, BITS, KIND, UNIT, bf16, bf16)                                \
    FEW_ROWS_OF_ONE_DTYPE(name, ROWS, BITS, KIND, UNIT, f16, f16)
#define FEW_ROWS(format, BITS, KIND, UNIT)                                                         \
    FEW_ROWS_OF_EACH_DTYPE(quantized_two_rows_##format, 2, BITS, KIND, UNIT)                       \
    FEW_ROWS_OF_EACH_DTYPE(quantized_eight_rows_##format, 8, BITS, KIND, UNIT)

FEW_ROWS(table_16, 4, TABLE, 16)
FEW_ROWS(table_32, 4, TABLE, 32)
FEW_ROWS(table_64, 4, TABLE, 64)
FEW_ROWS(e4m3, 8, E4M3, 32)
FEW_ROWS(2_bits_16, 2, INTEGERS, 16)
FEW_ROWS(2_bits_64, 2, INTEGERS, 64)
FEW_ROWS(3_bits_16, 3, INTEGERS, 16)
FEW_ROWS(3_bits_64, 3, INTEGERS, 64)
FEW_ROWS(4_bits_32, 4, INTEGERS, 32)
FEW_ROWS(4_bits_64, 4, INTEGERS, 64)
FEW_ROWS(5_bits_32, 5, INTEGERS, 32)
FEW_ROWS(5_bits_64, 5, INTEGERS, 64)
FEW_ROWS(6_bits_16, 6, INTEGERS, 16)
FEW_ROWS(6_bits_64, 6, INTEGERS, 64)
FEW_ROWS(8_bits, 8, INTEGERS, 32)

#if defined(HOPPER)

/// `quantized_streamed_1_format`, `_2_` and `_4_`: for so many rows at most of bf16 or f16.
#define STREAMED_ROWS(format, ROWS, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(STREAMED_THREADS, 1)                              \
        quantized_streamed_##ROWS##_##format(                                                      \
            const __grid_constant__ Projections all, const __grid_constant__ Source source,        \
            int rows, int inner, void *xa, const float *parts, int slices, int part_rows) {        \
        streamed_rows<Streamed<ROWS, __VA_ARGS__>>(all, source, rows, inner, xa, parts, slices,    \
                                                   part_rows);                                     \
    }
#define STREAMED(format, ...)                                                                      \
    STREAMED_ROWS(format, 1, __VA_ARGS__)                                                          \
    STREAMED_ROWS(format, 2, __VA_ARGS__)                                                          \
    STREAMED_ROWS(format, 4, __VA_ARGS__)

STREAMED(table_64, 4, TABLE, 64, IN_FLOATS, 2, 2)
STREAMED(table_64_nested, 4, TABLE, 64, IN_NESTED, 2, 2)
STREAMED(table_32, 4, TABLE, 32, IN_FLOATS, 2, 1)
STREAMED(table_32_coded, 4, TABLE, 32, IN_CODES, 2, 2)
STREAMED(table_16_coded, 4, TABLE, 16, IN_CODES, 2, 2)
STREAMED(e4m3_64, 8, E4M3, 64, IN_FLOATS, 1, 2)
STREAMED(e4m3_32_coded, 8, E4M3, 32, IN_CODES, 1, 2)
STREAMED(2_bits_64, 2, INTEGERS, 64, IN_FLOATS, 2, 2)
STREAMED(3_bits_64, 3, INTEGERS, 64, IN_FLOATS, 2, 2)
STREAMED(4_bits_64, 4, INTEGERS, 64, IN_FLOATS, 2, 2)
STREAMED(5_bits_64, 5, INTEGERS, 64, IN_FLOATS, 2, 2)
STREAMED(6_bits_64, 6, INTEGERS, 64, IN_FLOATS, 1, 2)
STREAMED(8_bits_64, 8, INTEGERS, 64, IN_FLOATS, 1, 2)
STREAMED(4_bits_32, 4, INTEGERS, 32, IN_FLOATS, 2, 1)
STREAMED(5_bits_32, 5, INTEGERS, 32, IN_FLOATS, 2, 1)
STREAMED(8_bits_32, 8, INTEGERS, 32, IN_FLOATS, 1, 2)
STREAMED(2_bits_16_blocks, 2, INTEGERS, 16, IN_BLOCKS, 2, 2)
STREAMED(3_bits_16_blocks, 3, INTEGERS, 16, IN_BLOCKS, 2, 2)
STREAMED(4_bits_32_blocks, 4, INTEGERS, 32, IN_BLOCKS, 2, 2)
STREAMED(5_bits_32_blocks, 5, INTEGERS, 32, IN_BLOCKS, 2, 2)
STREAMED(6_bits_16_blocks, 6, INTEGERS, 16, IN_BLOCKS, 1, 2)

#endif
