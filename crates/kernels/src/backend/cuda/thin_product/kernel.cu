// Products of up to 256 rows with several matrices in one launch, for bf16 and f16 on Hopper:
//
//   y = x·Wᵀ + bias     x (rows, depth), W (columns, depth), y (rows, columns)
//
// or of the gated unit `activation(gate)·up` of two, each rounded as it would be stored.
//
// Each element is one sum along the depth, 16 at a time, as in product/kernel.cu, so both give the same bits, whatever
// the number of rows. A block has all rows and COLUMNS columns, and each warpgroup multiplies 64 of the rows; four blocks of
// a cluster share the tiles of x, of which each brings a quarter to all. One thread has the tensor memory accelerator
// bring tiles, 64 deep. What lies beyond a matrix is zeros when it is read.
#include "../../../glu/activation.cuh"
#include "../tma.cuh"

namespace {

constexpr int MOST_OUTPUTS = 4;

struct Output {
    const void *bias; // (columns), or null
    void *y;
    int columns, first_tile;
};

struct Products {
    TmaDescriptor x;
    TmaDescriptor weights[MOST_OUTPUTS];
    Output outputs[MOST_OUTPUTS];
    int count, rows, depth;
    /// 0, or one more than the activation of a unit, of which the first output is; the second has the bias of up.
    int gate;
};

#ifdef HOPPER

constexpr int CLUSTER = 4;
constexpr int DEPTH = 64;

template <typename T, int GROUPS, int COLUMNS, int STAGES>
__device__ __forceinline__ void thin_products(const Products &p) {
    constexpr int WARPS = 4 * GROUPS, ROWS = 64 * GROUPS;
    constexpr int X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2;
    constexpr int STAGE = X_BYTES + W_BYTES;
    extern __shared__ uint4 shared[];
    const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
    // Barriers of each stage: its tiles are there; nobody in the cluster reads them any more.
    const uint32_t full = base + STAGES * STAGE, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, CLUSTER * WARPS);
        }
        fence_barriers();
    }
    cluster_barrier();
    follow_previous();

    // A tile of W has two halves: neighbouring columns, or the same ones of gate and up.
    constexpr int HALF = COLUMNS / 2;
    const bool is_unit = p.gate != 0;
    int output = 0;
#pragma unroll
    for (int i = 1; i < MOST_OUTPUTS; i++)
        output += !is_unit && i < p.count && static_cast<int>(blockIdx.x) >= p.outputs[i].first_tile;
    const Output &to = p.outputs[output];
    const int first_column = (static_cast<int>(blockIdx.x) - to.first_tile) * (is_unit ? HALF : COLUMNS);
    int stage = 0, parity = 0;
    if (warp == WARPS) {
        const int quarter = cluster_rank();
        const TmaDescriptor &second = p.weights[is_unit ? 1 : output];
        const int second_column = is_unit ? first_column : first_column + HALF;
        for (int k = 0; lane == 0 && k < p.depth; k += DEPTH) {
            barrier_wait(empty + 8 * stage, parity ^ 1);
            const uint32_t place = base + stage * STAGE, barrier = full + 8 * stage;
            barrier_expect(barrier, STAGE);
            load_box(place + X_BYTES, p.weights[output], k, first_column, barrier);
            load_box(place + X_BYTES + W_BYTES / 2, second, k, second_column, barrier);
            load_box_for_all<CLUSTER>(place + quarter * (X_BYTES / CLUSTER), p.x, k,
                                      quarter * (ROWS / CLUSTER), barrier);
            next_stage<STAGES>(stage, parity);
        }
    } else {
        const int group = warp / 4;
        float c[COLUMNS / 8][4];
        bool add = false;
        uint64_t a, b;
        auto begin = [&]() {
            barrier_wait(full + 8 * stage, parity);
            const uint32_t place = base + stage * STAGE;
            a = describe_tile(place + group * (64 * DEPTH * 2), 0);
            b = describe_tile(place + X_BYTES, 0);
        };
        auto multiply = [&](int i) {
            warpgroup_multiply<T, COLUMNS>(c, a + i * (32 >> 4), b + i * (32 >> 4), add);
            add = true;
        };
        auto fence = [&]() {
            warpgroup_hold(c);
            warpgroup_fence();
        };
        auto end = [&]() {
            warpgroup_wait<0>();
            warpgroup_hold(c);
        };
        const int whole = (p.depth + 15) / DEPTH, rest = p.depth - whole * DEPTH;
        // One warpgroup or two keep the tensor cores busy if they give a stage back when these have the next; of three
        // stages that would leave too few to be brought meanwhile.
        constexpr bool KEEPS_ONE = GROUPS <= 2 && STAGES > 3;
        int before = 0;
        for (int step = 0; step < whole; step++) {
            begin();
            fence();
#pragma unroll
            for (int i = 0; i < DEPTH / 16; i++) multiply(i);
            warpgroup_commit();
            warpgroup_wait<KEEPS_ONE>();
            const int read = KEEPS_ONE ? before : stage;
            if ((!KEEPS_ONE || step > 0) && lane < CLUSTER) barrier_arrive_at(empty + 8 * read, lane);
            before = stage;
            next_stage<STAGES>(stage, parity);
        }
        end();
        // Nothing is brought for the last two stages any more, so nobody waits for these.
        if (rest > 0) {
            begin();
            for (int i = 0; i * 16 < rest; i++) {
                fence();
                multiply(i);
                warpgroup_commit();
                end();
            }
        }

        const int row = group * 64 + warp % 4 * 16 + lane / 4;
        // The number at place `i` of `c[n]`, a column of an output, with its bias.
        auto biased = [&](const Output &of, int column, int n, int i) {
            const T *const bias = static_cast<const T *>(of.bias);
            return c[n][i] + (bias != nullptr ? to_float(bias[column + i % 2]) : 0.0f);
        };
        auto as_stored = [](float x) { return to_float(from_float<T>(x)); };
        auto unit = [&](int column, int n, int i) {
            const float up = as_stored(biased(p.outputs[1], column, n + HALF / 8, i));
            return gated(as_stored(biased(to, column, n, i)), up, p.gate - 1);
        };
        auto write = [&](int column, int half, float low, float high) {
            const int at = row + half * 8;
            if (at >= p.rows) return;
            T *const y = static_cast<T *>(to.y) + static_cast<int64_t>(at) * to.columns + column;
            *reinterpret_cast<uint32_t *>(y) = pack_pair<T>(low, high);
        };
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const int column = first_column + n * 8 + lane % 4 * 2;
            if (is_unit || column >= to.columns) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                write(column, half, biased(to, column, n, 2 * half), biased(to, column, n, 2 * half + 1));
        }
#pragma unroll
        for (int n = 0; n < HALF / 8; n++) {
            const int column = first_column + n * 8 + lane % 4 * 2;
            if (!is_unit || column >= to.columns) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
                write(column, half, unit(column, n, 2 * half), unit(column, n, 2 * half + 1));
        }
    }
    __syncwarp();
    // Other blocks may still write into this one's shared memory, or arrive there.
    cluster_barrier();
}

#endif

} // namespace

#ifdef HOPPER
// `LONE` and `PAIRED` in mod.rs name the same.
#define THIN(element, groups, columns, stages, at_once)                                            \
    extern "C" __global__ void __cluster_dims__(4, 1, 1)                                           \
        __launch_bounds__(128 * groups + 32, at_once)                                              \
            thin_products_##groups##_##columns##_##stages##_##element(                             \
                const __grid_constant__ Products p) {                                              \
        thin_products<element, groups, columns, stages>(p);                                        \
    }
#define THIN_KERNELS(element)                                                                      \
    THIN(element, 1, 64, 13, 1)                                                                    \
    THIN(element, 1, 64, 6, 2)                                                                     \
    THIN(element, 1, 128, 4, 2)                                                                    \
    THIN(element, 2, 64, 9, 1)                                                                     \
    THIN(element, 2, 64, 4, 2)                                                                     \
    THIN(element, 2, 128, 3, 2)                                                                    \
    THIN(element, 4, 64, 5, 1)
THIN_KERNELS(bf16)
THIN_KERNELS(f16)
#endif
