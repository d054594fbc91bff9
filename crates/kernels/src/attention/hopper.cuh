// Attention on Hopper's tensor cores: one warpgroup of a block has tiles brought into shared memory, and
// two others, of 64 rows each, compute. Barriers in shared memory say that a tile is there or done
// with.
#pragma once

#include "backward.cuh"
#include "tma.cuh"

/// q, k, v and do, in boxes of 64 columns of the tiles that a kernel takes of them.
struct TmaDescriptors {
    TmaDescriptor q, k, v, d_o;
};

#if defined(HOPPER)

constexpr int CONSUMERS = 2, HOPPER_ROWS = 64 * CONSUMERS, HOPPER_THREADS = 128 * (1 + CONSUMERS);
/// Registers of a thread: of the 504 that three threads start with, a copying one needs few.
constexpr int COPY_REGISTERS = 56, COMPUTE_REGISTERS = 224;

/// Keys of a tile forward.
constexpr int hopper_keys(int d) { return d <= 128 ? 128 : 64; }

/// Has `ROWS` rows of a head brought as the panels of a tile.
template <int ROWS, int D>
__device__ __forceinline__ void load_panels(uint32_t tile, const TmaDescriptor &descriptor, int row,
                                            int head, int batch, uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++)
        load_box(tile + panel * (ROWS * ROW_BYTES), descriptor, panel * 64, row, head, batch,
                 barrier);
}

/// Arrives once what this thread copies is there.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// `scores = a·bᵀ` over D, of tile `a` of A_ROWS the 64 rows from `first` on, and of the B_ROWS rows of a tile the N from `b`
/// on.
template <typename T, int D, int A_ROWS, int N, int B_ROWS = N>
__device__ __forceinline__ void start_rows(float (&scores)[N / 8][4], uint32_t a, int first,
                                           uint32_t b) {
    const uint64_t a_tile = describe_tile(a + first * ROW_BYTES, 16), b_tile = describe_tile(b, 16);
    warpgroup_hold(scores);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint32_t panel = k / 4 * ROW_BYTES, step = k % 4 * 32;
        warpgroup_multiply<T, N>(scores, moved_tile(a_tile, panel * A_ROWS + step),
                                 moved_tile(b_tile, panel * B_ROWS + step), k != 0);
    }
    warpgroup_commit();
}

/// `out += weights·b` over the N rows of tile `b`.
template <typename T, int D, int N>
__device__ __forceinline__ void start_columns(float (&out)[D / 8][4],
                                              const uint32_t (&weights)[N / 16][4], uint32_t b) {
    // Columns of one product.
    constexpr int AT_ONCE = D < 128 ? D : 128;
    const uint64_t tile = describe_tile(b, N * ROW_BYTES);
    warpgroup_hold(out);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int c = 0; c < D; c += AT_ONCE) {
            warpgroup_multiply_add<T, AT_ONCE>(
                reinterpret_cast<float (&)[AT_ONCE / 8][4]>(out[c / 8]), weights[k],
                moved_tile(tile, (c / 64 * N + k * 16) * ROW_BYTES));
        }
    }
    warpgroup_commit();
}

/// The forward pass. A warpgroup computes the scores of the next tile while it uses those of this
/// one.
template <typename T, int D>
__device__ __forceinline__ void hopper_forward(const Parameters &p,
                                               const TmaDescriptors &descriptors) {
    constexpr int BM = HOPPER_ROWS, BN = hopper_keys(D), STAGES = 2;
    constexpr int K_BYTES = tile_bytes(BN, D);
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *const q_tile = shared;
    const uint32_t q_shared = shared_address(q_tile);
    const uint32_t k_shared = q_shared + tile_bytes(BM, D);
    const uint32_t v_shared = k_shared + STAGES * K_BYTES;
    unsigned char *const rest = shared + tile_bytes(BM, D) + 2 * STAGES * K_BYTES;
    // Barriers, of keys and values the full and the empty ones of the stages; lowest keys.
    const uint32_t barriers = shared_address(rest);
    int *const lowest = reinterpret_cast<int *>(rest + 4 * STAGES * 8);
    const auto full_keys = [&](int stage) { return barriers + stage * 8; };
    const auto full_values = [&](int stage) { return barriers + (STAGES + stage) * 8; };
    const auto empty_keys = [&](int stage) { return barriers + (2 * STAGES + stage) * 8; };
    const auto empty_values = [&](int stage) { return barriers + (3 * STAGES + stage) * 8; };

    const int thread = threadIdx.x % 128, lane = threadIdx.x % WARP;
    const int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    const int kv_head = head / (p.heads / p.kv_heads);
    // The queries that see the most keys first.
    const int first_query = (gridDim.y - 1 - blockIdx.y) * BM;
    const int rows = min(BM, p.queries - first_query);
    const int first_position = p.keys - p.queries + first_query;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full_keys(stage), 1);
            barrier_init(full_values(stage), 1);
            barrier_init(empty_keys(stage), 4 * CONSUMERS);
            barrier_init(empty_values(stage), 4 * CONSUMERS);
        }
        fence_shared_writes();
    }
    const int2 range = lowest_keys<BM, HOPPER_THREADS>(p, batch, first_query, lowest);
    const int first_tile = range.x / BN, end_tile = (first_position + rows - 1) / BN + 1;
    const int tiles = max(end_tile - first_tile, 0);
    __syncthreads();

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        // Keys run one tile ahead of values.
        for (int tile = 0; threadIdx.x == 0 && tiles > 0 && tile <= tiles; tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2 ^ 1;
            if (tile < tiles) {
                const uint32_t barrier = full_keys(stage);
                barrier_wait(empty_keys(stage), parity);
                barrier_expect(barrier, K_BYTES + (tile == 0 ? tile_bytes(BM, D) : 0));
                if (tile == 0)
                    load_panels<BM, D>(q_shared, descriptors.q, first_query, head, batch, barrier);
                load_panels<BN, D>(k_shared + stage * K_BYTES, descriptors.k,
                                   (first_tile + tile) * BN, kv_head, batch, barrier);
            }
            if (tile > 0) {
                const int before = (tile - 1) % STAGES, turn = (tile - 1) / STAGES % 2 ^ 1;
                const uint32_t barrier = full_values(before);
                barrier_wait(empty_values(before), turn);
                barrier_expect(barrier, K_BYTES);
                load_panels<BN, D>(v_shared + before * K_BYTES, descriptors.v,
                                   (first_tile + tile - 1) * BN, kv_head, batch, barrier);
            }
        }
        return;
    }

    take_registers<COMPUTE_REGISTERS>();
    const int group = threadIdx.x / 128 - 1, first_row = group * 64;
    // The first of this warp's rows.
    const int warp_row = first_row + thread / WARP * 16;
    float out[1][D / 8][4] = {};
    float scores[BN / 8][4];
    uint32_t weights[1][BN / 16][4];
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {};
    const auto soften = [&](int tile, float (&shrink)[2]) {
        const int first_key = (first_tile + tile) * BN;
        const bool hides = first_key < range.y || first_key + BN - 1 > first_position + first_row;
        shape_scores<BN>(p, scores);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (hides) {
                const int row = warp_row + half * 8 + lane / 4;
                hide_scores<BN>(scores, half, first_key, p.ragged ? lowest[row] : 0,
                                first_position + row, lane);
            }
            shrink[half] = soften_scores<BN>(scores, half, p.factor, top[half], total[half]);
        }
    };
    const auto pack = [&] {
        pack_weights<T, BN, 1>(weights, reinterpret_cast<const float (&)[1][BN / 8][4]>(scores));
    };
    if (tiles > 0) {
        float shrink[2];
        barrier_wait(full_keys(0), 0);
        start_rows<T, D, BM, BN>(scores, q_shared, first_row, k_shared);
        warpgroup_wait<0>();
        warpgroup_hold(scores);
        if (lane == 0) barrier_arrive(empty_keys(0));
        soften(0, shrink);
        pack();
        for (int tile = 1; tile < tiles; tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2;
            const int before = (tile - 1) % STAGES, turn = (tile - 1) / STAGES % 2;
            barrier_wait(full_keys(stage), parity);
            start_rows<T, D, BM, BN>(scores, q_shared, first_row, k_shared + stage * K_BYTES);
            barrier_wait(full_values(before), turn);
            start_columns<T, D, BN>(out[0], weights[0], v_shared + before * K_BYTES);
            warpgroup_wait<1>();
            warpgroup_hold(scores);
            if (lane == 0) barrier_arrive(empty_keys(stage));
            soften(tile, shrink);
            warpgroup_wait<0>();
            warpgroup_hold(out[0]);
            if (lane == 0) barrier_arrive(empty_values(before));
            scale_row<D>(out[0], 0, shrink[0]);
            scale_row<D>(out[0], 1, shrink[1]);
            pack();
        }
        const int last = (tiles - 1) % STAGES;
        barrier_wait(full_values(last), (tiles - 1) / STAGES % 2);
        start_columns<T, D, BN>(out[0], weights[0], v_shared + last * K_BYTES);
        warpgroup_wait<0>();
        warpgroup_hold(out[0]);
    }
    float inverse[1][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const RowEnd end = end_row<T>(p, head, {top[half], row_sum(total[half])});
        inverse[0][half] = end.factor;
        const int row = warp_row + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < rows)
            p.log_sum_exp[sum_row(p, batch, first_query + row, head)] = end.log_sum_exp;
    }
    // This warpgroup's queries have been read, and no other reads them: their place serves for the
    // result.
    named_barrier<128>(1 + group);
    store_rows<T, D, BM, 1>(q_tile, warp_row, out, inverse, p.head_dim, lane, [&](int row) -> T * {
        const int query = first_query + warp_row + row;
        if (query >= p.queries) return nullptr;
        return static_cast<T *>(p.o) + query_row(p, batch, query, head) * p.head_dim;
    });
}

/// Tiles of columns at once in the backward pass.
constexpr int HOPPER_STAGES = 3, HOPPER_COLUMNS = 64;

/// Has the tiles of columns of a stage brought, and with `start` those of rows; by a whole warp, each of
/// whose threads arrives at the barrier, and the first one twice.
template <typename T, int D, int BM, int BN, Role ROLE>
__device__ __forceinline__ void
load_tiles_of(const BackwardBlock<T, D, BM, BN, ROLE> &block, const TmaDescriptors &descriptors,
              bool start, int head, int tile, uint32_t x, uint32_t y, uint32_t of_columns,
              uint32_t barrier) {
    using Block = BackwardBlock<T, D, BM, BN, ROLE>;
    constexpr bool BY_KEYS = Block::BY_KEYS;
    constexpr int ROWS_BYTES = Block::ROWS_BYTES, COLUMNS_BYTES = Block::COLUMNS_BYTES;
    if (threadIdx.x % WARP == 0) {
        const TmaDescriptors &d = descriptors;
        const TmaDescriptor &x1 = BY_KEYS ? d.k : d.q, &x2 = BY_KEYS ? d.v : d.d_o;
        const TmaDescriptor &y1 = BY_KEYS ? d.q : d.k, &y2 = BY_KEYS ? d.d_o : d.v;
        const int of_rows = block.owner, of_tile = BY_KEYS ? head : block.kv_head;
        const int batch = block.batch, first = tile * BN;
        barrier_expect(barrier, 2 * COLUMNS_BYTES + (start ? 2 * ROWS_BYTES : 0));
        if (start) {
            load_panels<BM, D>(x, x1, block.first_row, of_rows, batch, barrier);
            load_panels<BM, D>(x + ROWS_BYTES, x2, block.first_row, of_rows, batch, barrier);
        }
        load_panels<BN, D>(y, y1, first, of_tile, batch, barrier);
        load_panels<BN, D>(y + COLUMNS_BYTES, y2, first, of_tile, batch, barrier);
    }
    if constexpr (BY_KEYS)
        block.template load_sums<WARP>(head, tile, of_columns, threadIdx.x % WARP);
    barrier_arrive_copied(barrier);
}

/// The backward pass, as in backward.cuh.
template <typename T, int D, Role ROLE>
__device__ __forceinline__ void hopper_backward(const Parameters &p, const TmaDescriptors &descriptors) {
    constexpr int BM = HOPPER_ROWS, BN = HOPPER_COLUMNS, STAGES = HOPPER_STAGES;
    using Block = BackwardBlock<T, D, BM, BN, ROLE>;
    static_assert(Block::FIRST, "both products are needed");
    constexpr bool SECOND = Block::SECOND;
    constexpr int COLUMNS_BYTES = Block::COLUMNS_BYTES;
    // Whether the sums of a tile run beside the gradients of the next: they hold the registers of
    // their weights.
    constexpr bool OVERLAP = !SECOND || D <= 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    // x₁, x₂, then for every stage y₁, y₂, then what belongs to their columns, then the full and
    // the empty barriers of the stages.
    const uint32_t x_shared = shared_address(shared);
    const uint32_t y_shared = x_shared + 2 * Block::ROWS_BYTES;
    unsigned char *const of_columns = shared + 2 * Block::ROWS_BYTES + STAGES * 2 * COLUMNS_BYTES;
    const uint32_t of_columns_shared = shared_address(of_columns);
    const uint32_t barriers = of_columns_shared + STAGES * Block::OF_COLUMNS_BYTES;
    const auto full = [&](int stage) { return barriers + stage * 8; };
    const auto empty = [&](int stage) { return barriers + (STAGES + stage) * 8; };

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1 + WARP);
            barrier_init(empty(stage), 4 * CONSUMERS);
        }
        fence_shared_writes();
    }
    __syncthreads();
    const Block block(p, blockIdx.x, blockIdx.y);
    const int start_tile = block.seen_from(block.first_tile);
    int head = start_tile < block.end_tile ? block.first_head : block.end_head, tile = start_tile;
    int stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        for (bool start = true; threadIdx.x < WARP && head < block.end_head; start = false) {
            barrier_wait(empty(stage), parity ^ 1);
            load_tiles_of(block, descriptors, start, head, tile, x_shared,
                          y_shared + stage * 2 * COLUMNS_BYTES,
                          of_columns_shared + stage * Block::OF_COLUMNS_BYTES, full(stage));
            next_stage<STAGES>(stage, parity);
            block.advance(head, tile, start_tile);
        }
        return;
    }

    take_registers<COMPUTE_REGISTERS>();
    const int lane = threadIdx.x % WARP, group = threadIdx.x / 128 - 1, group_row = group * 64;
    const int warp_row = group_row + threadIdx.x % 128 / WARP * 16;
    float row_sums[2], row_corrections[2];
    int row_lowest[2];
    block.row_values(row_sums, row_corrections, row_lowest, warp_row, lane);
    float first[1][D / 8][4] = {}, second[1][SECOND ? D / 8 : 1][4] = {};
    float s[1][BN / 8][4], dp[1][BN / 8][4];
    uint32_t of_s[1][BN / 16][4], of_dp[1][BN / 16][4];
    const auto start_products = [&] {
        barrier_wait(full(stage), parity);
        const uint32_t y = y_shared + stage * 2 * COLUMNS_BYTES;
        start_rows<T, D, BM, BN>(s[0], x_shared, group_row, y);
        start_rows<T, D, BM, BN>(dp[0], x_shared + Block::ROWS_BYTES, group_row, y + COLUMNS_BYTES);
    };
    const auto gradients = [&] {
        warpgroup_hold(s[0]);
        warpgroup_hold(dp[0]);
        block.gradients(s[0], dp[0], tile, of_columns + stage * Block::OF_COLUMNS_BYTES, warp_row,
                        row_sums, row_corrections, row_lowest, lane);
    };
    const auto pack = [&] {
        if constexpr (SECOND) pack_weights<T, BN, 1>(of_s, s);
        pack_weights<T, BN, 1>(of_dp, dp);
    };
    const auto start_sums = [&](int of_stage) {
        const uint32_t y = y_shared + of_stage * 2 * COLUMNS_BYTES;
        if constexpr (SECOND) start_columns<T, D, BN>(second[0], of_s[0], y + COLUMNS_BYTES);
        start_columns<T, D, BN>(first[0], of_dp[0], y);
    };
    const auto finish_sums = [&] {
        warpgroup_wait<0>();
        warpgroup_hold(first[0]);
        if constexpr (SECOND) warpgroup_hold(second[0]);
    };
    if constexpr (OVERLAP) {
        if (head < block.end_head) {
            start_products();
            warpgroup_wait<0>();
            gradients();
            pack();
            int before = stage;
            next_stage<STAGES>(stage, parity);
            block.advance(head, tile, start_tile);
            while (head < block.end_head) {
                start_products();
                start_sums(before);
                warpgroup_wait<SECOND ? 2 : 1>();
                gradients();
                finish_sums();
                if (lane == 0) barrier_arrive(empty(before));
                pack();
                before = stage;
                next_stage<STAGES>(stage, parity);
                block.advance(head, tile, start_tile);
            }
            start_sums(before);
            finish_sums();
        }
    } else {
        while (head < block.end_head) {
            start_products();
            warpgroup_wait<0>();
            gradients();
            pack();
            start_sums(stage);
            finish_sums();
            if (lane == 0) barrier_arrive(empty(stage));
            next_stage<STAGES>(stage, parity);
            block.advance(head, tile, start_tile);
        }
    }
    // This warpgroup's rows have been read, and no other reads them: their places serve for the
    // results.
    named_barrier<128>(1 + group);
    block.store(shared, first, second, warp_row, lane);
}

#endif
