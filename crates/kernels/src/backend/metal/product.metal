// Matrix products: tiles of simdgroup matrices, and rows of dot products where there are few rows. What
// the host may ask for is in product.rs.
#include "common.metal.h"

// What a launch's code is made for; the indices are those of product.rs.

/// The code of the result's dtype.
constant ushort RESULT_DTYPE [[function_constant(10)]];
/// The code of the bias's dtype and 1; 0 without a bias.
constant ushort BIAS_DTYPE [[function_constant(11)]];
constant bool BIASED = BIAS_DTYPE > 0;
/// Whether the result is added to what is there.
constant bool ADDED [[function_constant(12)]];
/// Whether elements of the result are dropped.
constant bool THINNED [[function_constant(13)]];

/// How many products are summed up by tiles.
constant ushort TERMS [[function_constant(20)]];
constant bool TERM_0 = TERMS > 0, TERM_1 = TERMS > 1, TERM_2 = TERMS > 2;
constant bool TERM_3 = TERMS > 3, TERM_4 = TERMS > 4, TERM_5 = TERMS > 5;
/// The flags that all terms have, and those that any has: what they don't differ in is known.
constant ushort ALL_FLAGS [[function_constant(21)]];
constant ushort ANY_FLAGS [[function_constant(22)]];
/// Whether the inner dimension is cut into slices.
constant bool SLICED [[function_constant(23)]];
/// Whether the result's rows, and its columns, fill whole tiles.
constant bool WHOLE_ROWS [[function_constant(24)]];
constant bool WHOLE_COLUMNS [[function_constant(25)]];

/// The adapter's rank in the kernels for few rows; 0 without one.
constant ushort RANK [[function_constant(30)]];
constant bool ADAPTED = RANK > 0;
/// The code of the weight's dtype there; 3 for one in fewer bits.
constant ushort WEIGHT_DTYPE [[function_constant(31)]];
constant bool IN_FEWER_BITS = WEIGHT_DTYPE == 3;
/// Whether all rows begin at multiples of four elements there.
constant bool FOURS [[function_constant(32)]];
/// Whether x·A has been made there, in slices.
constant bool GATHERED [[function_constant(33)]];

/// One of the products that are summed up, as `Term::numbers` in product.rs lays it out. Strides count
/// elements; what is transposed is stored so.
struct Term {
    ulong left_stride, right_stride, seed;
    uint inner, flags;
    float factor;
    uint threshold;
};

constant constexpr uint LEFT_TRANSPOSED = 1, RIGHT_TRANSPOSED = 2, LEFT_ALIGNED = 4, RIGHT_ALIGNED = 8;
constant constexpr uint LEFT_DTYPE = 4, RIGHT_DTYPE = 6;
/// Elements of the left matrix are dropped; the inner dimension fills whole tiles.
constant constexpr uint MASKED = 256, WHOLE_INNER = 512;

/// Where the results go, and what is done to them, as `Product::result` lays it out.
struct Result {
    ulong stride, seed;
    uint rows, columns;
    float kept;
    uint threshold, depth;
};

inline void store_at(device char *out, uint dtype, ulong i, float value) {
    switch (dtype) {
        case 0:
            reinterpret_cast<device float *>(out)[i] = value;
            break;
        case 1:
            reinterpret_cast<device half *>(out)[i] = static_cast<half>(value);
            break;
        default:
            reinterpret_cast<device bfloat *>(out)[i] = static_cast<bfloat>(value);
    }
}

/// Puts a result where it belongs: without what is dropped, with the bias, added to what is there.
inline void finish(constant Result &result, device char *out, device const char *bias, uint row,
                   uint column, float value) {
    if (THINNED) {
        const ulong index = ulong(row) * result.columns + column;
        value = dropped(result.seed, index, result.threshold) ? 0.0f : value * result.kept;
    }
    if (BIASED) value += parameter_at(bias, BIAS_DTYPE - 1, column);
    const ulong i = ulong(row) * result.stride + column;
    if (ADDED) value += parameter_at(out, RESULT_DTYPE, i);
    store_at(out, RESULT_DTYPE, i, value);
}

// Tiles.

/// Threads of a threadgroup of tiles, four simdgroups; as in product.rs.
constant constexpr uint TILE_THREADS = 128;

/// Elements of 16 bytes, from a place of `S` that is aligned to as many.
template <typename S, typename T> struct Unit {
    static inline void copy(device const S *from, threadgroup T *to) {
        for (uint e = 0; e < 16 / sizeof(T); e += 4) {
            const vec<S, 4> four = *reinterpret_cast<device const vec<S, 4> *>(from + e);
            to[e] = static_cast<T>(float(four.x));
            to[e + 1] = static_cast<T>(float(four.y));
            to[e + 2] = static_cast<T>(float(four.z));
            to[e + 3] = static_cast<T>(float(four.w));
        }
    }
};
template <typename T> struct Unit<T, T> {
    static inline void copy(device const T *from, threadgroup T *to) {
        *reinterpret_cast<threadgroup uint4 *>(to) = *reinterpret_cast<device const uint4 *>(from);
    }
};

/// How the elements of a matrix are read.
struct Reading {
    /// Whether 16 bytes of a tile's elements can be read at once; whether a tile is inside of the matrix.
    bool aligned, whole;
    /// Which elements are dropped, found by their index in the matrix if it were contiguous.
    bool masked;
    ulong seed, width;
    uint threshold;
};

/// Copies `HEIGHT` by `WIDTH` elements from `corner` (row, column) of a matrix of `sizes` into a tile
/// whose rows begin 16 bytes further apart than they are long, with zeros outside of the matrix and where
/// elements are dropped.
template <typename S, typename T, uint HEIGHT, uint WIDTH>
inline void stage(device const S *from, ulong stride, uint2 corner, uint2 sizes, Reading how,
                  threadgroup T *tile, uint thread_index) {
    constexpr uint UNIT = 16 / sizeof(T);
    constexpr uint ACROSS = WIDTH / UNIT;
    for (uint unit = thread_index; unit < HEIGHT * ACROSS; unit += TILE_THREADS) {
        const uint i = unit / ACROSS, j = unit % ACROSS * UNIT;
        const uint row = corner.x + i, column = corner.y + j;
        threadgroup T *to = tile + i * (WIDTH + UNIT) + j;
        device const S *source = from + (ulong(row) * stride + column);
        const bool inside = how.whole || (row < sizes.x && column + UNIT <= sizes.y);
        if (how.aligned && !how.masked && inside) {
            Unit<S, T>::copy(source, to);
            continue;
        }
        for (uint e = 0; e < UNIT; e++) {
            bool kept = how.whole || (row < sizes.x && column + e < sizes.y);
            if (kept && how.masked)
                kept = !dropped(how.seed, row * how.width + column + e, how.threshold);
            to[e] = kept ? static_cast<T>(float(source[e])) : static_cast<T>(0.0f);
        }
    }
}

/// Like `stage`, of a matrix of the dtype of that code.
template <typename T, uint HEIGHT, uint WIDTH>
inline void stage_any(device const char *from, uint dtype, ulong stride, uint2 corner,
                      uint2 sizes, Reading how, threadgroup T *tile, uint thread_index) {
    switch (dtype) {
        case 0:
            stage<float, T, HEIGHT, WIDTH>(reinterpret_cast<device const float *>(from),
                                           stride, corner, sizes, how, tile, thread_index);
            break;
        case 1:
            stage<half, T, HEIGHT, WIDTH>(reinterpret_cast<device const half *>(from),
                                          stride, corner, sizes, how, tile, thread_index);
            break;
        default:
            stage<bfloat, T, HEIGHT, WIDTH>(reinterpret_cast<device const bfloat *>(from),
                                            stride, corner, sizes, how, tile, thread_index);
    }
}

/// Tiles of `SIDE` by `SIDE` results, of which each of four simdgroups has a quarter, in f32. The inner
/// dimension is gone through `DEPTH` at a time, of one term after the other; after each the sum so far is
/// multiplied by the term's factor. Tiles are taken in panels of eight down, whose threadgroups share the
/// right matrix in the cache. Where there are slices of the inner dimension, `group.y` is the slice, and
/// the sums of the slices lie in `out` one after another in f32.
template <typename T, uint SIDE>
[[kernel, max_total_threads_per_threadgroup(128)]] void product_tiles(
    device const char *left0 [[buffer(0), function_constant(TERM_0)]],
    device const char *right0 [[buffer(1), function_constant(TERM_0)]],
    device const char *left1 [[buffer(2), function_constant(TERM_1)]],
    device const char *right1 [[buffer(3), function_constant(TERM_1)]],
    device const char *left2 [[buffer(4), function_constant(TERM_2)]],
    device const char *right2 [[buffer(5), function_constant(TERM_2)]],
    device const char *left3 [[buffer(6), function_constant(TERM_3)]],
    device const char *right3 [[buffer(7), function_constant(TERM_3)]],
    device const char *left4 [[buffer(8), function_constant(TERM_4)]],
    device const char *right4 [[buffer(9), function_constant(TERM_4)]],
    device const char *left5 [[buffer(10), function_constant(TERM_5)]],
    device const char *right5 [[buffer(11), function_constant(TERM_5)]],
    device const char *bias [[buffer(12), function_constant(BIASED)]],
    device char *out [[buffer(13)]],
    constant Term *terms [[buffer(14), function_constant(TERM_0)]],
    constant Result &result [[buffer(15)]], PLACE, SIMD_PLACE) {
    constexpr uint DEPTH = 64 / sizeof(T), UNIT = 16 / sizeof(T);
    // Distances of rows in tiles that are as wide as the depth, and as the side.
    constexpr uint DEEP = DEPTH + UNIT, WIDE = SIDE + UNIT;
    constexpr uint HALF = SIDE / 2, N = SIDE / 16;
    constexpr uint PANEL = 8;
    // Five units of 16 bytes a row hold a tile of SIDE by DEPTH; one of DEPTH by SIDE takes less.
    threadgroup uint4 memory[2 * 5 * SIDE];
    threadgroup T *left = reinterpret_cast<threadgroup T *>(memory);
    threadgroup T *right = reinterpret_cast<threadgroup T *>(memory + 5 * SIDE);

    const uint2 sizes(result.rows, result.columns);
    const uint down = (sizes.x + SIDE - 1) / SIDE, across = (sizes.y + SIDE - 1) / SIDE;
    const uint panel = group.x / (PANEL * across), of_panel = group.x % (PANEL * across);
    const uint height = min(PANEL, down - panel * PANEL);
    const uint2 corner =
        uint2(panel * PANEL + of_panel % height, of_panel / height) * SIDE;
    const uint2 own_part = uint2(simdgroup / 2, simdgroup % 2) * HALF;

    simdgroup_matrix<float, 8, 8> sums[N][N];
    for (uint i = 0; i < N; i++)
        for (uint j = 0; j < N; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

    for (uint t = 0; t < TERMS; t++) {
        constant Term &term = terms[t];
        device const char *from_left = left0, *from_right = right0;
        if (TERM_1 && t == 1) from_left = left1, from_right = right1;
        if (TERM_2 && t == 2) from_left = left2, from_right = right2;
        if (TERM_3 && t == 3) from_left = left3, from_right = right3;
        if (TERM_4 && t == 4) from_left = left4, from_right = right4;
        if (TERM_5 && t == 5) from_left = left5, from_right = right5;
        // Of these bits, the terms' own are read only where they differ.
        const uint flags = (term.flags & ANY_FLAGS) | ALL_FLAGS, inner = term.inner;
        const bool left_transposed = flags & LEFT_TRANSPOSED, right_transposed = flags & RIGHT_TRANSPOSED;
        const uint left_dtype = flags >> LEFT_DTYPE & 3, right_dtype = flags >> RIGHT_DTYPE & 3;
        const bool whole = flags & WHOLE_INNER;
        const Reading of_left = {bool(flags & LEFT_ALIGNED), WHOLE_ROWS && whole,
                                 bool(flags & MASKED),       term.seed,
                                 left_transposed ? sizes.x : inner, term.threshold};
        const Reading of_right = {bool(flags & RIGHT_ALIGNED), WHOLE_COLUMNS && whole, false, 0, 0, 0};
        const uint start = min(inner, group.y * result.depth);
        const uint end = start + min(inner - start, result.depth);
        for (uint k = start; k < end; k += DEPTH) {
            // The tiles of the step before are in use until here.
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (left_transposed)
                stage_any<T, DEPTH, SIDE>(from_left, left_dtype, term.left_stride,
                                          uint2(k, corner.x), uint2(end, sizes.x), of_left, left,
                                          own.x);
            else
                stage_any<T, SIDE, DEPTH>(from_left, left_dtype, term.left_stride,
                                          uint2(corner.x, k), uint2(sizes.x, end), of_left, left,
                                          own.x);
            if (right_transposed)
                stage_any<T, SIDE, DEPTH>(from_right, right_dtype, term.right_stride,
                                          uint2(corner.y, k), uint2(sizes.y, end), of_right, right,
                                          own.x);
            else
                stage_any<T, DEPTH, SIDE>(from_right, right_dtype, term.right_stride,
                                          uint2(k, corner.y), uint2(end, sizes.y), of_right, right,
                                          own.x);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint step = 0; step < DEPTH; step += 8) {
                simdgroup_matrix<T, 8, 8> a[N], b[N];
                for (uint i = 0; i < N; i++) {
                    const uint row = own_part.x + 8 * i;
                    if (left_transposed)
                        simdgroup_load(a[i], left + step * WIDE + row, WIDE, ulong2(0, 0), true);
                    else
                        simdgroup_load(a[i], left + row * DEEP + step, DEEP);
                }
                for (uint j = 0; j < N; j++) {
                    const uint column = own_part.y + 8 * j;
                    if (right_transposed)
                        simdgroup_load(b[j], right + column * DEEP + step, DEEP, ulong2(0, 0), true);
                    else
                        simdgroup_load(b[j], right + step * WIDE + column, WIDE);
                }
                for (uint i = 0; i < N; i++)
                    for (uint j = 0; j < N; j++)
                        simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
            }
        }
        if (term.factor != 1.0f) {
            for (uint i = 0; i < N; i++) {
                for (uint j = 0; j < N; j++) {
                    sums[i][j].thread_elements()[0] *= term.factor;
                    sums[i][j].thread_elements()[1] *= term.factor;
                }
            }
        }
    }

    // Eight rows of a simdgroup at a time go through threadgroup memory, to lie in order.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup float *strip = reinterpret_cast<threadgroup float *>(memory) + simdgroup * 8 * HALF;
    device float *slice = reinterpret_cast<device float *>(out);
    slice += ulong(group.y) * sizes.x * sizes.y;
    for (uint i = 0; i < N; i++) {
        for (uint j = 0; j < N; j++) simdgroup_store(sums[i][j], strip + 8 * j, HALF);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (uint e = lane; e < 8 * HALF; e += 32) {
            const uint row = corner.x + own_part.x + 8 * i + e / HALF;
            const uint column = corner.y + own_part.y + e % HALF;
            if (!WHOLE_ROWS && row >= sizes.x) continue;
            if (!WHOLE_COLUMNS && column >= sizes.y) continue;
            if (SLICED)
                slice[ulong(row) * sizes.y + column] = strip[e];
            else
                finish(result, out, bias, row, column, strip[e]);
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

#define PRODUCT_TILES(side)                                                                        \
    template [[host_name("product_tiles_" #side "_f32")]] [[kernel]] decltype(                     \
        product_tiles<float, side>) product_tiles<float, side>;                                    \
    template [[host_name("product_tiles_" #side "_f16")]] [[kernel]] decltype(                     \
        product_tiles<half, side>) product_tiles<half, side>;                                      \
    template [[host_name("product_tiles_" #side "_bf16")]] [[kernel]] decltype(                    \
        product_tiles<bfloat, side>) product_tiles<bfloat, side>;
PRODUCT_TILES(32)
PRODUCT_TILES(64)

/// Adds up the slices of `product_tiles`, in order; a thread has an element.
[[kernel]] void product_slices(device const float *slices [[buffer(0)]],
                               device const char *bias [[buffer(1), function_constant(BIASED)]],
                               device char *out [[buffer(2)]], constant uint &count [[buffer(3)]],
                               constant Result &result [[buffer(4)]], PLACE) {
    const uint column = group.x * threads.x + own.x, row = group.y;
    if (column >= result.columns) return;
    slices += ulong(row) * result.columns + column;
    const ulong distance = ulong(result.rows) * result.columns;
    float sum = 0.0f;
    for (uint s = 0; s < count; s++) sum += slices[s * distance];
    finish(result, out, bias, row, column, sum);
}

/// Adds `count` elements to others.
template <typename T>
[[kernel]] void product_accumulate(device const T *x [[buffer(0)]], device T *out [[buffer(1)]],
                                   constant ulong &count [[buffer(2)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<T>(float(out[i]) + float(x[i]));
    }
}

FOR_EACH_DTYPE(product_accumulate)

// Few rows.

/// A layer for few rows, as `FewRows::numbers` in product.rs lays it out.
struct FewRows {
    ulong x_stride, weight_stride, y_stride;
    uint rows, columns, inner, slices;
    float factor, scale;
};

/// Columns of a simdgroup at a time; as in product.rs.
constant constexpr uint FEW_COLUMNS = 4;
/// Ranks of an adapter at most; as in product.rs.
constant constexpr uint FEW_RANKS = 256;

/// The rows of x; rows that aren't there are the last one again.
template <typename T, uint ROWS> struct InputRows {
    device const T *at[ROWS];
};
template <typename T, uint ROWS>
inline InputRows<T, ROWS> input_rows(device const T *x, constant FewRows &of) {
    InputRows<T, ROWS> rows;
    for (uint r = 0; r < ROWS; r++) rows.at[r] = x + min(r, of.rows - 1) * of.x_stride;
    return rows;
}

/// Adds a lane's part of the dot products of `ROWS` rows with the `FEW_COLUMNS` columns from `column` on.
template <typename T, typename W, uint ROWS>
inline void dot_products(InputRows<T, ROWS> rows, device const W *weight, constant FewRows &of,
                         uint column, uint lane, uint lanes,
                         thread float (&sums)[ROWS][FEW_COLUMNS]) {
    device const W *columns[FEW_COLUMNS];
    for (uint c = 0; c < FEW_COLUMNS; c++)
        columns[c] = weight + min(column + c, of.columns - 1) * of.weight_stride;
    uint done = 0;
    if (FOURS) {
        done = of.inner / 4 * 4;
        for (uint k = 4 * lane; k < done; k += 4 * lanes) {
            float4 numbers[FEW_COLUMNS];
            for (uint c = 0; c < FEW_COLUMNS; c++)
                numbers[c] = float4(*reinterpret_cast<device const vec<W, 4> *>(columns[c] + k));
            for (uint r = 0; r < ROWS; r++) {
                const float4 x = float4(*reinterpret_cast<device const vec<T, 4> *>(rows.at[r] + k));
                for (uint c = 0; c < FEW_COLUMNS; c++) sums[r][c] += dot(x, numbers[c]);
            }
        }
    }
    for (uint k = done + lane; k < of.inner; k += lanes) {
        for (uint c = 0; c < FEW_COLUMNS; c++) {
            const float number = float(columns[c][k]);
            for (uint r = 0; r < ROWS; r++) sums[r][c] += float(rows.at[r][k]) * number;
        }
    }
}

/// The same with a matrix in fewer bits.
template <typename T, uint ROWS>
inline void packed_dot_products(InputRows<T, ROWS> rows, Packed matrix, constant FewRows &of,
                                uint column, uint lane, uint lanes,
                                thread float (&sums)[ROWS][FEW_COLUMNS]) {
    ulong starts[FEW_COLUMNS];
    for (uint c = 0; c < FEW_COLUMNS; c++)
        starts[c] = ulong(min(column + c, of.columns - 1)) * of.inner;
    if (IN_EIGHTS) {
        for (uint k = 8 * lane; k < of.inner; k += 8 * lanes) {
            for (uint c = 0; c < FEW_COLUMNS; c++) {
                float numbers[8];
                eight_numbers(matrix, (starts[c] + k) / 8, numbers);
                for (uint r = 0; r < ROWS; r++) {
                    for (uint i = 0; i < 8; i++) sums[r][c] += float(rows.at[r][k + i]) * numbers[i];
                }
            }
        }
        return;
    }
    for (uint k = lane; k < of.inner; k += lanes) {
        for (uint c = 0; c < FEW_COLUMNS; c++) {
            const float number = packed_number(matrix, starts[c] + k);
            for (uint r = 0; r < ROWS; r++) sums[r][c] += float(rows.at[r][k]) * number;
        }
    }
}

/// x·A of `ROWS` rows over the elements from `first` to `last`, by all threads, which have to call it; the
/// sums lie in `xa` (row, rank) once they have met at a barrier. A's elements are read in order: a thread
/// has a column of every so many rows.
template <typename T, uint ROWS>
inline void adapter_rows(InputRows<T, ROWS> rows, device const float *a, uint rank, uint first,
                         uint last, threadgroup float *xa, threadgroup float *scratch,
                         uint thread_index, uint count) {
    for (uint from = 0; from < rank; from += count) {
        const uint width = min(rank - from, count), parts = count / width;
        const uint part = thread_index / width, column = from + thread_index % width;
        float sums[ROWS] = {};
        if (part < parts) {
            for (uint k = first + part; k < last; k += parts) {
                const float number = a[ulong(k) * rank + column];
                for (uint r = 0; r < ROWS; r++) sums[r] += float(rows.at[r][k]) * number;
            }
        }
        for (uint r = 0; r < ROWS; r++) {
            scratch[thread_index] = sums[r];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (part == 0) {
                float sum = 0.0f;
                for (uint p = 0; p < parts; p++) sum += scratch[p * width + thread_index];
                xa[r * rank + column] = sum;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

/// y = factor·x·Wᵀ + scale·(x·A)·B + bias, added to y where `add`, and x·A where there is an adapter, for up
/// to `ROWS` rows; a simdgroup has `FEW_COLUMNS` columns. Each threadgroup finds x·A itself, or adds up
/// what `few_rows_adapter` found over slices of it. W is read once, whole rows of it in order.
template <typename T, uint ROWS>
[[kernel, max_total_threads_per_threadgroup(256)]] void few_rows(
    device const T *x [[buffer(0)]], device const char *weight [[buffer(1)]],
    device const float *a [[buffer(2), function_constant(ADAPTED)]],
    device const float *b [[buffer(3), function_constant(ADAPTED)]],
    device const char *bias [[buffer(4), function_constant(BIASED)]],
    device const float *slices [[buffer(5), function_constant(GATHERED)]],
    device char *y [[buffer(6)]], device T *xa_out [[buffer(7), function_constant(ADAPTED)]],
    constant FewRows &of [[buffer(8)]],
    device const uchar *scales [[buffer(9), function_constant(IN_FEWER_BITS)]],
    device const uchar *offsets [[buffer(10), function_constant(IN_FEWER_BITS)]],
    device const uchar *large [[buffer(11), function_constant(IN_FEWER_BITS)]],
    device const uchar *large_offsets [[buffer(12), function_constant(IN_FEWER_BITS)]],
    device const uchar *table [[buffer(13), function_constant(IN_FEWER_BITS)]],
    constant PackedNumbers &packed [[buffer(14), function_constant(IN_FEWER_BITS)]], PLACE,
    SIMD_PLACE) {
    threadgroup float xa[ROWS * FEW_RANKS];
    threadgroup float scratch[256];
    const InputRows<T, ROWS> rows = input_rows<T, ROWS>(x, of);
    if (ADAPTED) {
        if (GATHERED) {
            for (uint i = own.x; i < ROWS * RANK; i += threads.x) {
                float sum = 0.0f;
                for (uint s = 0; s < of.slices; s++) sum += slices[s * ROWS * RANK + i];
                xa[i] = sum;
            }
        } else {
            adapter_rows<T, ROWS>(rows, a, RANK, 0, of.inner, xa, scratch, own.x, threads.x);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (group.x == 0) {
            for (uint i = own.x; i < of.rows * RANK; i += threads.x)
                xa_out[i] = static_cast<T>(xa[i]);
        }
    }
    const uint column = (group.x * simdgroups + simdgroup) * FEW_COLUMNS;
    if (column >= of.columns) return;
    const uint lanes = min(32u, threads.x - 32 * simdgroup);
    float sums[ROWS][FEW_COLUMNS] = {};
    switch (WEIGHT_DTYPE) {
        case 0:
            dot_products<T, float, ROWS>(rows, reinterpret_cast<device const float *>(weight), of,
                                         column, lane, lanes, sums);
            break;
        case 1:
            dot_products<T, half, ROWS>(rows, reinterpret_cast<device const half *>(weight), of,
                                        column, lane, lanes, sums);
            break;
        case 3:
            packed_dot_products<T, ROWS>(rows,
                                         {reinterpret_cast<device const uchar *>(weight), scales,
                                          offsets, large, large_offsets, table, packed},
                                         of, column, lane, lanes, sums);
            break;
        default:
            dot_products<T, bfloat, ROWS>(rows, reinterpret_cast<device const bfloat *>(weight), of,
                                          column, lane, lanes, sums);
    }
    for (uint r = 0; r < ROWS; r++)
        for (uint c = 0; c < FEW_COLUMNS; c++) sums[r][c] *= of.factor;
    for (uint j = lane; j < RANK; j += lanes) {
        for (uint c = 0; c < FEW_COLUMNS; c++) {
            const float number =
                of.scale * b[ulong(j) * of.columns + min(column + c, of.columns - 1)];
            for (uint r = 0; r < ROWS; r++) sums[r][c] += xa[r * RANK + j] * number;
        }
    }
    for (uint r = 0; r < ROWS; r++) {
        for (uint c = 0; c < FEW_COLUMNS; c++) {
            float value = simd_sum(sums[r][c]);
            if (lane != 0 || r >= of.rows || column + c >= of.columns) continue;
            if (BIASED) value += parameter_at(bias, BIAS_DTYPE - 1, column + c);
            const ulong i = r * of.y_stride + column + c;
            if (ADDED) value += parameter_at(y, RESULT_DTYPE, i);
            store_at(y, RESULT_DTYPE, i, value);
        }
    }
}

/// x·A over slices of the inner dimension, `(slices, ROWS, rank)`; a threadgroup has a slice.
template <typename T, uint ROWS>
[[kernel, max_total_threads_per_threadgroup(256)]] void few_rows_adapter(
    device const T *x [[buffer(0)]], device const float *a [[buffer(1)]],
    device float *slices [[buffer(2)]], constant FewRows &of [[buffer(3)]], PLACE) {
    threadgroup float xa[ROWS * FEW_RANKS];
    threadgroup float scratch[256];
    const uint depth = (of.inner + of.slices - 1) / of.slices;
    const uint first = min(of.inner, group.x * depth);
    const uint last = first + min(of.inner - first, depth);
    adapter_rows<T, ROWS>(input_rows<T, ROWS>(x, of), a, RANK, first, last, xa, scratch, own.x,
                          threads.x);
    for (uint i = own.x; i < ROWS * RANK; i += threads.x)
        slices[ulong(group.x) * ROWS * RANK + i] = xa[i];
}

#define FEW_ROWS(name, rows)                                                                       \
    template [[host_name(#name "_" #rows "_f32")]] [[kernel]] decltype(name<float, rows>)          \
        name<float, rows>;                                                                         \
    template [[host_name(#name "_" #rows "_f16")]] [[kernel]] decltype(name<half, rows>)           \
        name<half, rows>;                                                                          \
    template [[host_name(#name "_" #rows "_bf16")]] [[kernel]] decltype(name<bfloat, rows>)        \
        name<bfloat, rows>;
FEW_ROWS(few_rows, 1)
FEW_ROWS(few_rows, 4)
FEW_ROWS(few_rows, 8)
FEW_ROWS(few_rows_adapter, 1)
FEW_ROWS(few_rows_adapter, 4)
FEW_ROWS(few_rows_adapter, 8)
