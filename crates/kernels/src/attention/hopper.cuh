// Attention on Hopper's tensor cores: one warpgroup of a block copies tiles into shared memory, and
// two others, of 64 rows each, compute. Barriers in shared memory say that a tile is there or done
// with.
#pragma once

#include "backward.cuh"
#include "warpgroup.cuh"

#if defined(HOPPER)

constexpr int CONSUMERS = 2, HOPPER_ROWS = 64 * CONSUMERS, HOPPER_THREADS = 128 * (1 + CONSUMERS);
/// Registers of a thread: of the 504 that three threads start with, a copying one needs few.
constexpr int COPY_REGISTERS = 56, COMPUTE_REGISTERS = 224;

/// Keys of a tile forward.
constexpr int hopper_keys(int d) { return d <= 128 ? 128 : 64; }

/// Copies tiles one after another: while one is on its way, the next waits for its place.
struct Copies {
    /// The barrier that has yet to hear that the latest tile is there, or 0.
    uint32_t pending = 0;

    __device__ __forceinline__ void say() {
        fence_shared_writes();
        barrier_arrive(pending);
    }

    /// `load` starts the copies, after `empty` passed the phase of `parity`.
    template <typename Load>
    __device__ __forceinline__ void copy(uint32_t full, uint32_t empty, int parity, Load load) {
        if (pending != 0 && !barrier_passed(empty, parity)) {
            copy_async_wait<0>();
            say();
            pending = 0;
        }
        barrier_wait(empty, parity);
        load();
        copy_async_commit();
        if (pending != 0) {
            copy_async_wait<1>();
            say();
        }
        pending = full;
    }

    __device__ __forceinline__ void finish() {
        copy_async_wait<0>();
        if (pending != 0) say();
    }
};

/// `scores = a·bᵀ` over D, of tile `a` of A_ROWS the 64 rows from `first` on, of tile `b` all N
/// rows.
template <typename T, int D, int A_ROWS, int N>
__device__ __forceinline__ void start_rows(float (&scores)[N / 8][4], uint32_t a, int first,
                                           uint32_t b) {
    warpgroup_hold(scores);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint32_t panel = k / 4, step = k % 4 * 32;
        warpgroup_multiply<T, N>(
            scores, describe_tile(a + panel * (A_ROWS * ROW_BYTES) + first * ROW_BYTES + step, 16),
            describe_tile(b + panel * (N * ROW_BYTES) + step, 16), k != 0);
    }
    warpgroup_commit();
}

/// `out += weights·b` over the N rows of tile `b`.
template <typename T, int D, int N>
__device__ __forceinline__ void start_columns(float (&out)[D / 8][4],
                                              const uint32_t (&weights)[N / 16][4], uint32_t b) {
    // Columns of one product.
    constexpr int AT_ONCE = D < 128 ? D : 128;
    warpgroup_hold(out);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
#pragma unroll
        for (int c = 0; c < D; c += AT_ONCE) {
            warpgroup_multiply_add<T, AT_ONCE>(
                reinterpret_cast<float (&)[AT_ONCE / 8][4]>(out[c / 8]), weights[k],
                describe_tile(b + c / 64 * (N * ROW_BYTES) + k * 16 * ROW_BYTES, N * ROW_BYTES));
        }
    }
    warpgroup_commit();
}

/// The forward pass. A warpgroup computes the scores of the next tile while it uses those of this
/// one.
template <typename T, int D> __device__ __forceinline__ void hopper_forward(const Parameters &p) {
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
            barrier_init(full_keys(stage), 128);
            barrier_init(full_values(stage), 128);
            barrier_init(empty_keys(stage), 4 * CONSUMERS);
            barrier_init(empty_values(stage), 4 * CONSUMERS);
        }
    }
    const int2 range = lowest_keys<BM, HOPPER_THREADS>(p, batch, first_query, lowest);
    const int first_tile = range.x / BN, end_tile = (first_position + rows - 1) / BN + 1;
    const int tiles = max(end_tile - first_tile, 0);
    __syncthreads();

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        const T *const q = head_start(static_cast<const T *>(p.q), p.q_strides, batch, head) +
                           first_query * p.q_strides[1];
        const T *const k = head_start(static_cast<const T *>(p.k), p.k_strides, batch, kv_head);
        const T *const v = head_start(static_cast<const T *>(p.v), p.v_strides, batch, kv_head);
        Copies copies;
        // Keys run one tile ahead of values.
        for (int tile = 0; tiles > 0 && tile <= tiles; tile++) {
            const int stage = tile % STAGES, parity = tile / STAGES % 2 ^ 1;
            if (tile < tiles) {
                copies.copy(full_keys(stage), empty_keys(stage), parity, [&] {
                    const int first_key = (first_tile + tile) * BN;
                    if (tile == 0)
                        load_tile<T, BM, D, 128, 4>(q_shared, q, p.q_strides[1], rows, p.head_dim,
                                                    thread);
                    load_tile<T, BN, D, 128, 4>(k_shared + stage * K_BYTES,
                                                k + first_key * p.k_strides[1], p.k_strides[1],
                                                p.keys - first_key, p.head_dim, thread);
                });
            }
            if (tile > 0) {
                const int before = (tile - 1) % STAGES, turn = (tile - 1) / STAGES % 2 ^ 1;
                copies.copy(full_values(before), empty_values(before), turn, [&] {
                    const int first_key = (first_tile + tile - 1) * BN;
                    load_tile<T, BN, D, 128, 4>(v_shared + before * K_BYTES,
                                                v + first_key * p.v_strides[1], p.v_strides[1],
                                                p.keys - first_key, p.head_dim, thread);
                });
            }
        }
        copies.finish();
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
        const float sum = row_sum(total[half]);
        inverse[0][half] = inverse_of(sum);
        const int row = warp_row + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < rows)
            p.log_sum_exp[sum_row(p, batch, first_query + row, head)] = log_of_sum(top[half], sum);
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

/// The backward pass, as in backward.cuh. Only with ANY_SCORES may those of keys with 128 columns be
/// capped.
template <typename T, int D, Role ROLE, bool ANY_SCORES>
__device__ __forceinline__ void hopper_backward(const Parameters &p) {
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
            barrier_init(full(stage), 128);
            barrier_init(empty(stage), 4 * CONSUMERS);
        }
    }
    __syncthreads();
    const Block block(p);
    const int start_tile = block.seen_from(block.first_tile);
    int head = start_tile < block.end_tile ? block.first_head : block.end_head, tile = start_tile;
    int stage = 0, parity = 0;
    const auto next_stage = [&] {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    };

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        Copies copies;
        for (bool start = true; head < block.end_head; start = false) {
            copies.copy(full(stage), empty(stage), parity ^ 1, [&] {
                if (start) block.template load_rows<128, 4>(x_shared, threadIdx.x);
                block.template load_columns<128, 4>(
                    head, tile, y_shared + stage * 2 * COLUMNS_BYTES,
                    of_columns_shared + stage * Block::OF_COLUMNS_BYTES, threadIdx.x);
            });
            next_stage();
            block.advance(head, tile, start_tile);
        }
        copies.finish();
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
            next_stage();
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
                next_stage();
                block.advance(head, tile, start_tile);
            }
            start_sums(before);
            finish_sums();
        }
    } else if constexpr (!ANY_SCORES) {
        // Probabilities are made beside the product that gives dp, and gradients of scores beside the
        // sum of dv.
        while (head < block.end_head) {
            const unsigned char *const columns = of_columns + stage * Block::OF_COLUMNS_BYTES;
            start_products();
            warpgroup_wait<1>();
            warpgroup_hold(s[0]);
            block.probabilities(s[0], tile, columns, warp_row, lane);
            pack_weights<T, BN, 1>(of_s, s);
            const uint32_t y = y_shared + stage * 2 * COLUMNS_BYTES;
            start_columns<T, D, BN>(second[0], of_s[0], y + COLUMNS_BYTES);
            warpgroup_wait<1>();
            warpgroup_hold(dp[0]);
            // The sum of dv still reads `of_s`, as this does; nothing writes it before the sum is done.
            block.score_gradients(dp[0], of_s[0], columns, lane);
            pack_weights<T, BN, 1>(of_dp, dp);
            start_columns<T, D, BN>(first[0], of_dp[0], y);
            finish_sums();
            if (lane == 0) barrier_arrive(empty(stage));
            next_stage();
            block.advance(head, tile, start_tile);
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
            next_stage();
            block.advance(head, tile, start_tile);
        }
    }
    // This warpgroup's rows have been read, and no other reads them: their places serve for the
    // results.
    named_barrier<128>(1 + group);
    block.store(shared, first, second, warp_row, lane);
}

#endif
