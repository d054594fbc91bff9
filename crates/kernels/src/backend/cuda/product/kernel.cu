// Sums of matrix products for bf16 and f16 on Hopper:
//
//   C = Σ_t A_t·B_t + bias     C (rows, columns), A_t (rows, depth_t), B_t (depth_t, columns)
//
// of several C of the same rows in one launch. The first term of each may be of e4m3 codes, which stand for
// multiples of a scale for each row of A and each column of B:
//
//   C[n, m] = r[n]·c[m]·(A_0·B_0)[n, m] + Σ_t (A_t·B_t)[n, m] + bias[m]
//
// The tensor cores add up products of codes in fewer bits than an f32 has, about 14 of mantissa. Two blocks of a cluster, of 128 rows each, have a tile of
// 256 by 256 of a C, or of fewer columns where tiles then come out even with the GPU's multiprocessors; they share its tiles of
// B, of which each brings a part to both. In a block, one
// thread of the first warpgroup has the tensor memory accelerator bring tiles of A and B, 64 deep, and two
// warpgroups multiply 64 rows each. What lies beyond a matrix is zeros when it is read, and isn't written.
#include "tma.cuh"

namespace {

constexpr int MOST_TERMS = 8;
constexpr int MOST_OUTPUTS = 4;

struct TermDescriptors {
    TmaDescriptor a, b;
};

struct Output {
    const void *bias;           // (columns), or null
    const float *row_scales;    // of codes: as many as the rows of all tiles
    const float *column_scales; // of codes: (columns), at 16 bytes, or null for 1
    int first_term, terms, first_tile, columns;
};

struct Products {
    TermDescriptors terms[MOST_TERMS];
    TmaDescriptor c[MOST_OUTPUTS];
    Output outputs[MOST_OUTPUTS];
    int depths[MOST_TERMS];
    int count;        // of outputs
    int tiles_down;   // of 256 rows
    int tiles_across; // of all outputs
    int unused;
};

#ifdef HOPPER

// Of a block.
constexpr int ROWS = 128;
constexpr int DEPTH = 64;
constexpr int CODES_DEPTH = 128;

constexpr int A_BYTES = ROWS * DEPTH * 2;
/// Of 64 columns of B, or of C, by 64.
constexpr int PANEL = 64;
constexpr int PANEL_BYTES = PANEL * 64 * 2;
/// Of 64 rows and two panels of C.
constexpr int OUT_BYTES = 2 * PANEL_BYTES;
constexpr int SCALES_BYTES = 256 * 4;

/// Rows of tiles whose tiles run at a time, so that what they read is in the cache.
constexpr int GROUP = 8;

__device__ __forceinline__ void load_pair(float &x, float &y, uint32_t from) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from) : "memory");
}

/// A tile of C, of one block.
struct Place {
    int row, column, output;
};

template <int COLUMNS>
__device__ __forceinline__ Place place_of(const Products &p, int tile, int block) {
    const int of_group = GROUP * p.tiles_across, group = tile / of_group;
    const int height = min(GROUP, p.tiles_down - group * GROUP);
    const int inside = tile - group * of_group, across = inside / height;
    const int down = group * GROUP + inside - across * height;
    int output = 0;
#pragma unroll
    for (int i = 1; i < MOST_OUTPUTS; i++)
        output += i < p.count && across >= p.outputs[i].first_tile;
    return {(2 * down + block) * ROWS, (across - p.outputs[output].first_tile) * COLUMNS, output};
}

/// Of tiles of so many columns. B lies in rows of columns with `ACROSS`, and else in columns, along the depth. With `CODES`,
/// the first term of each C is of codes, of which both lie along the depth.
template <typename T, int COLUMNS, bool ACROSS, bool CODES>
__device__ __forceinline__ void products(const Products &p) {
    constexpr int STAGES = COLUMNS > 128 ? 4 : 6;
    constexpr int B_BYTES = COLUMNS * DEPTH * 2, STAGE = A_BYTES + B_BYTES;
    constexpr int PANELS = (COLUMNS + PANEL - 1) / PANEL;
    static_assert(COLUMNS % 32 == 0 && (!ACROSS || COLUMNS % PANEL == 0) && (!CODES || COLUMNS == 256), "");
    extern __shared__ uint4 shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    const uint32_t outs = base + STAGES * STAGE;
    // Of a tile's columns.
    const uint32_t scales = outs + 2 * OUT_BYTES;
    // Barriers of each stage: its tiles are there; nobody in the cluster reads them any more. And such of scales, for
    // this block alone.
    const uint32_t full = scales + SCALES_BYTES, empty = full + 8 * STAGES;
    const uint32_t scales_full = empty + 8 * STAGES, scales_empty = scales_full + 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, block = blockIdx.x % 2;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 2 * 8);
        }
        barrier_init(scales_full, 1);
        barrier_init(scales_empty, 8);
        fence_barriers();
    }
    cluster_barrier();
    follow_previous();

    const int tiles = p.tiles_down * p.tiles_across, clusters = gridDim.x / 2;
    int stage = 0, parity = 0, scales_parity = 0;
    auto advance = [&]() { next_stage<STAGES>(stage, parity); };
    if (warp < 4) {
        give_registers<40>();
        for (int tile = blockIdx.x / 2; threadIdx.x == 0 && tile < tiles; tile += clusters) {
            const Place place = place_of<COLUMNS>(p, tile, block);
            const Output &output = p.outputs[place.output];
            for (int t = output.first_term; t < output.first_term + output.terms; t++) {
                const TermDescriptors &term = p.terms[t];
                const bool codes = CODES && t == output.first_term;
                const int deep = codes ? CODES_DEPTH : DEPTH;
                for (int k = 0; k < p.depths[t]; k += deep) {
                    barrier_wait(empty + 8 * stage, parity ^ 1);
                    const uint32_t to = base + stage * STAGE, barrier = full + 8 * stage;
                    barrier_expect(barrier, STAGE);
                    load_box(to, term.a, k, place.row, barrier);
                    if (ACROSS && !codes) {
                        constexpr int OF_FIRST = (PANELS + 1) / 2;
                        const int end = block == 0 ? OF_FIRST : PANELS;
#pragma unroll
                        for (int i = 0; i < OF_FIRST; i++) {
                            const int panel = block * OF_FIRST + i;
                            if (panel < end)
                                load_box_for_all<2>(to + A_BYTES + panel * PANEL_BYTES, term.b,
                                                    place.column + panel * PANEL, k, barrier);
                        }
                    } else {
                        load_box_for_all<2>(to + A_BYTES + block * (B_BYTES / 2), term.b, k,
                                            place.column + block * (COLUMNS / 2), barrier);
                    }
                    advance();
                }
                // Here what the tile before needs of its scales has long been read.
                if (codes && output.column_scales != nullptr) {
                    const int bytes = min(COLUMNS, output.columns - place.column) * 4;
                    barrier_wait(scales_empty, scales_parity ^ 1);
                    barrier_expect(scales_full, bytes);
                    load_bytes(scales, output.column_scales + place.column, bytes, scales_full);
                    scales_parity ^= 1;
                }
            }
        }
    } else {
        take_registers<232>();
        const int half = warp / 4 - 1;
        const uint32_t out = outs + half * OUT_BYTES;
        const bool first = threadIdx.x % 128 == 0;
        constexpr int A_STEP = 32 >> 4, B_STEP = (ACROSS ? 16 * 128 : 32) >> 4;
        float c[COLUMNS / 8][4];
        for (int tile = blockIdx.x / 2; tile < tiles; tile += clusters) {
            const Place place = place_of<COLUMNS>(p, tile, block);
            const Output &output = p.outputs[place.output];
            bool add = false;
            uint64_t a, b;
            auto begin = [&]() {
                barrier_wait(full + 8 * stage, parity);
                const uint32_t from = base + stage * STAGE;
                a = describe_tile(from + half * (A_BYTES / 2), 0);
                b = describe_tile(from + A_BYTES, PANEL_BYTES);
            };
            auto fence = [&]() {
                warpgroup_hold(c);
                warpgroup_fence();
            };
            // The other warpgroup has the tensor cores meanwhile.
            auto end = [&]() {
                warpgroup_commit();
                warpgroup_wait<0>();
                warpgroup_hold(c);
            };
            auto release = [&]() {
                if (lane < 2) barrier_arrive_at(empty + 8 * stage, lane);
                advance();
            };
            int t = output.first_term;
            const int terms_end = t + output.terms;
            if constexpr (CODES) {
                const int row = place.row + half * 64 + warp % 4 * 16 + lane / 4;
                const float upper = __ldg(output.row_scales + row), lower = __ldg(output.row_scales + row + 8);
                // Beyond the depth there are zeros.
                for (int k = 0; k < p.depths[t]; k += CODES_DEPTH) {
                    begin();
                    fence();
#pragma unroll
                    for (int i = 0; i < CODES_DEPTH / 32; i++) {
                        warpgroup_multiply<e4m3, COLUMNS>(c, a + i * (32 >> 4), b + i * (32 >> 4), add);
                        add = true;
                    }
                    end();
                    release();
                }
                t++;
                const bool of_columns = output.column_scales != nullptr;
                if (of_columns) barrier_wait(scales_full, scales_parity);
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; n++) {
                    // What lies beyond the columns isn't written.
                    float left = 1.0f, right = 1.0f;
                    if (of_columns) load_pair(left, right, scales + (n * 8 + lane % 4 * 2) * 4);
                    c[n][0] *= upper * left;
                    c[n][1] *= upper * right;
                    c[n][2] *= lower * left;
                    c[n][3] *= lower * right;
                }
                if (of_columns) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(scales_empty);
                    scales_parity ^= 1;
                }
            }
            for (; t < terms_end; t++) {
                const int depth = p.depths[t], whole = (depth + 15) / DEPTH;
                for (int k = 0; k < whole; k++) {
                    begin();
                    fence();
#pragma unroll
                    for (int i = 0; i < DEPTH / 16; i++) {
                        warpgroup_multiply<T, COLUMNS, ACROSS>(c, a + i * A_STEP, b + i * B_STEP, add);
                        add = true;
                    }
                    end();
                    release();
                }
                // What is left of the depth, such as a rank; in a loop of its own, without which the
                // compiler lets no product of the one above begin before the last has ended.
                const int rest = depth - whole * DEPTH;
                if (rest > 0) {
                    begin();
                    for (int i = 0; i * 16 < rest; i++) {
                        fence();
                        warpgroup_multiply<T, COLUMNS, ACROSS>(c, a + i * A_STEP, b + i * B_STEP, add);
                        add = true;
                        end();
                    }
                    release();
                }
            }

            const T *bias = static_cast<const T *>(output.bias);
            const int row = warp % 4 * 16 + lane % 16;
#pragma unroll
            for (int side = 0; side < (PANELS + 1) / 2; side++) {
                // The last panel begins earlier where it wouldn't be whole; what it shares with another is the same.
                auto start_of = [&](int panel) { return min((2 * side + panel) * PANEL, COLUMNS - PANEL); };
                const int panels = min(2, PANELS - 2 * side);
                // What lay there before has been read.
                if (first) store_wait_read<0>();
                named_barrier<128>(1 + half);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (j / 4 >= panels) continue;
                    uint32_t pairs[4];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int n = start_of(j / 4) / 8 + j % 4 * 2 + e;
                        const int column = place.column + n * 8 + lane % 4 * 2;
                        float low = 0.0f, high = 0.0f;
                        if (bias != nullptr && column < output.columns) {
                            low = to_float(bias[column]);
                            high = to_float(bias[column + 1]);
                        }
                        pairs[2 * e] = pack_pair<T>(c[n][0] + low, c[n][1] + high);
                        pairs[2 * e + 1] = pack_pair<T>(c[n][2] + low, c[n][3] + high);
                    }
                    const int chunk = j % 4 * 2 + lane / 16;
                    const uint32_t panel = out + j / 4 * PANEL_BYTES;
                    store_tiles(panel + row * 128 + ((chunk ^ (row & 7)) << 4), pairs);
                }
                fence_shared_writes();
                named_barrier<128>(1 + half);
                if (first) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int column = place.column + start_of(i);
                        const uint32_t from = out + i * PANEL_BYTES;
                        if (i < panels && column < output.columns)
                            store_box(p.c[place.output], column, place.row + half * 64, from);
                    }
                    store_commit();
                }
            }
        }
        if (first) store_wait<0>();
    }
    __syncwarp();
    // The other block may still write into this one's shared memory, or arrive there.
    cluster_barrier();
}

#endif

} // namespace

#ifdef HOPPER
#define PRODUCTS(name, element, columns, across, codes)                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)                 \
        name(const __grid_constant__ Products p) {                                                 \
        products<element, columns, across, codes>(p);                                              \
    }
#define PRODUCTS_OF(element)                                                                       \
    PRODUCTS(products_along_256_##element, element, 256, false, false)                             \
    PRODUCTS(products_along_224_##element, element, 224, false, false)                             \
    PRODUCTS(products_along_192_##element, element, 192, false, false)                             \
    PRODUCTS(products_along_128_##element, element, 128, false, false)                             \
    PRODUCTS(products_across_256_##element, element, 256, true, false)                             \
    PRODUCTS(products_across_192_##element, element, 192, true, false)                             \
    PRODUCTS(products_across_128_##element, element, 128, true, false)                             \
    PRODUCTS(products_of_codes_along_256_##element, element, 256, false, true)                     \
    PRODUCTS(products_of_codes_across_256_##element, element, 256, true, true)
PRODUCTS_OF(bf16)
PRODUCTS_OF(f16)
#endif
