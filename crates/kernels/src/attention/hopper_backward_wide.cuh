// The backward pass on Hopper for heads padded to 256: as in backward.cuh, a block owns rows, 64 here, goes over tiles of
// 64 columns, and gives dq, or dk and dv. As no warpgroup has registers for a whole row of these, each of the two makes
// the scores of half of a tile's columns, which the other reads from shared memory, and gives half of the columns of a
// head. What a score becomes is computed while the tensor cores make the sums of the tile before, or of dv.
#pragma once

#include "hopper.cuh"

#if defined(HOPPER)

/// Whether a step has one before it.
template <bool VALUE> struct Follows {
    static constexpr bool value = VALUE;
};

template <typename T, Role ROLE>
__device__ __forceinline__ void hopper_backward_wide(const Parameters &p,
                                                     const TmaDescriptors &descriptors) {
    constexpr int D = 256, BM = 64, BN = HOPPER_COLUMNS, STAGES = HOPPER_STAGES;
    using Block = BackwardBlock<T, D, BM, BN, ROLE>;
    constexpr bool BY_KEYS = Block::BY_KEYS, SECOND = Block::SECOND;
    constexpr int ROWS_BYTES = Block::ROWS_BYTES, COLUMNS_BYTES = Block::COLUMNS_BYTES;
    constexpr int WEIGHTS_BYTES = tile_bytes(BM, BN);
    /// Columns of a tile, and of a head, that are a warpgroup's.
    constexpr int OWN = BN / CONSUMERS, PART = D / CONSUMERS;
    extern __shared__ __align__(1024) unsigned char shared[];
    // x₁, x₂, then y₁ of every stage, y₂, then twice the gradients of scores, their probabilities, then what belongs to
    // the stages' columns, then the barriers.
    const uint32_t x1_shared = shared_address(shared), x2_shared = x1_shared + ROWS_BYTES;
    const auto y1_shared = [&](int stage) { return x2_shared + ROWS_BYTES + stage * COLUMNS_BYTES; };
    const uint32_t y2_shared = y1_shared(STAGES);
    const auto gradients_shared = [&](int step) {
        return y2_shared + COLUMNS_BYTES + step % 2 * WEIGHTS_BYTES;
    };
    const uint32_t weights_shared = y2_shared + COLUMNS_BYTES + 2 * WEIGHTS_BYTES;
    unsigned char *const columns_start =
        shared + 2 * ROWS_BYTES + (STAGES + 1) * COLUMNS_BYTES + 3 * WEIGHTS_BYTES;
    const auto of_columns = [&](int stage) { return columns_start + stage * Block::OF_COLUMNS_BYTES; };
    const uint32_t barriers = shared_address(of_columns(STAGES));
    const auto full = [&](int stage) { return barriers + stage * 8; };
    const auto empty = [&](int stage) { return barriers + (STAGES + stage) * 8; };
    const uint32_t full_second = barriers + 2 * STAGES * 8, empty_second = full_second + 8;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1 + WARP);
            barrier_init(empty(stage), 4 * CONSUMERS);
        }
        barrier_init(full_second, 1);
        barrier_init(empty_second, 4 * CONSUMERS);
        fence_shared_writes();
    }
    __syncthreads();
    const Block block(p, blockIdx.x, blockIdx.y);
    const int start_tile = block.seen_from(block.first_tile);
    int head = start_tile < block.end_tile ? block.first_head : block.end_head, tile = start_tile;
    int stage = 0, parity = 0;

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        const TmaDescriptors &d = descriptors;
        const int lane = threadIdx.x % WARP, batch = block.batch;
        for (int step = 0; threadIdx.x < WARP && head < block.end_head; step++) {
            const int of_tile = BY_KEYS ? head : block.kv_head, more = step == 0 ? ROWS_BYTES : 0;
            barrier_wait(empty(stage), parity ^ 1);
            if (lane == 0) {
                barrier_expect(full(stage), COLUMNS_BYTES + more);
                if (step == 0)
                    load_panels<BM, D>(x1_shared, BY_KEYS ? d.k : d.q, block.first_row, block.owner, batch,
                                       full(stage));
                load_panels<BN, D>(y1_shared(stage), BY_KEYS ? d.q : d.k, tile * BN, of_tile, batch,
                                   full(stage));
            }
            if constexpr (BY_KEYS)
                block.template load_sums<WARP>(head, tile, shared_address(of_columns(stage)), lane);
            barrier_arrive_copied(full(stage));
            barrier_wait(empty_second, step % 2 ^ 1);
            if (lane == 0) {
                barrier_expect(full_second, COLUMNS_BYTES + more);
                if (step == 0)
                    load_panels<BM, D>(x2_shared, BY_KEYS ? d.v : d.d_o, block.first_row, block.owner, batch,
                                       full_second);
                load_panels<BN, D>(y2_shared, BY_KEYS ? d.d_o : d.v, tile * BN, of_tile, batch, full_second);
            }
            next_stage<STAGES>(stage, parity);
            block.advance(head, tile, start_tile);
        }
        return;
    }

    take_registers<COMPUTE_REGISTERS>();
    const int thread = threadIdx.x % 128, lane = threadIdx.x % WARP, group = threadIdx.x / 128 - 1;
    const int warp_row = thread / WARP * 16;
    float row_sums[2], row_corrections[2];
    int row_lowest[2];
    block.row_values(row_sums, row_corrections, row_lowest, warp_row, lane);
    float first[1][PART / 8][4] = {}, second[1][SECOND ? PART / 8 : 1][4] = {};
    float s[1][OWN / 8][4], dp[1][OWN / 8][4], slopes[OWN / 8][4];
    // `out += weights·y` for this warpgroup's columns of y.
    const auto start_sum = [&](float (&out)[PART / 8][4], uint32_t weights, uint32_t y) {
        const uint64_t a = describe_tile(weights, 16);
        const uint64_t b = describe_tile(y + group * (PART / 64 * BN * ROW_BYTES), BN * ROW_BYTES);
        warpgroup_hold(out);
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < BN / 16; k++)
            warpgroup_multiply<T, PART, true>(out, moved_tile(a, k * 32),
                                              moved_tile(b, k * 16 * ROW_BYTES), true);
        warpgroup_commit();
    };
    const auto share = [&](uint32_t to, const float (&numbers)[1][OWN / 8][4]) {
        uint32_t packed[1][OWN / 16][4];
        pack_weights<T, OWN, 1>(packed, numbers);
#pragma unroll
        for (int n = 0; n < OWN / 16; n++)
            store_tiles(to + place<BM>(warp_row + lane % 16, group * (OWN / 8) + 2 * n + lane / 16),
                        packed[0][n]);
        fence_shared_writes();
    };
    const auto for_each_score = [&](bool whole, auto visit) {
        block.template for_each_score<OWN>(whole, tile * BN + group * OWN, group * OWN, of_columns(stage),
                                           warp_row, row_sums, row_corrections, row_lowest, lane, visit);
    };
    const auto probabilities = [&] {
        const bool whole = block.sees_whole(tile);
        if (whole && p.mode == AS_IS)
            for_each_score(whole, [&](int n, int i, bool seen, float sum, float) {
                probability<true>(p, s[0][n][i], seen, sum);
            });
        else
            for_each_score(whole, [&](int n, int i, bool seen, float sum, float) {
                slopes[n][i] = probability<false>(p, s[0][n][i], seen, sum);
            });
    };
    const auto gradients = [&] {
        for_each_score(true, [&](int n, int i, bool, float, float correction) {
            dp[0][n][i] = s[0][n][i] * (dp[0][n][i] - correction);
        });
        if (p.mode != CAPPED) return;
#pragma unroll
        for (int n = 0; n < OWN / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) dp[0][n][i] *= slopes[n][i];
        }
    };
    int before = 0, step = 0;
    const auto pass = [&](auto follows) {
        constexpr bool FOLLOWS = decltype(follows)::value;
        const uint32_t own_rows = group * (OWN * ROW_BYTES);
        barrier_wait(full(stage), parity);
        start_rows<T, D, BM, OWN, BN>(s[0], x1_shared, 0, y1_shared(stage) + own_rows);
        if constexpr (SECOND && FOLLOWS) start_sum(first[0], gradients_shared(step + 1), y1_shared(before));
        barrier_wait(full_second, step % 2);
        start_rows<T, D, BM, OWN, BN>(dp[0], x2_shared, 0, y2_shared + own_rows);
        if constexpr (SECOND) {
            warpgroup_wait<FOLLOWS ? 2 : 1>();
            warpgroup_hold(s[0]);
            probabilities();
            share(weights_shared, s);
            named_barrier<128 * CONSUMERS>(3);
            start_sum(second[0], weights_shared, y2_shared);
            warpgroup_wait<1>();
            warpgroup_hold(first[0]);
            warpgroup_hold(dp[0]);
            gradients();
        } else {
            if constexpr (FOLLOWS)
                start_sum(first[0], gradients_shared(step + 1), y1_shared(before));
            warpgroup_wait<FOLLOWS ? 1 : 0>();
            warpgroup_hold(s[0]);
            warpgroup_hold(dp[0]);
            probabilities();
            gradients();
        }
        // The sum that read this buffer, of two steps before, has ended.
        share(gradients_shared(step), dp);
        warpgroup_wait<0>();
        if constexpr (SECOND)
            warpgroup_hold(second[0]);
        else
            warpgroup_hold(first[0]);
        if (lane == 0) {
            barrier_arrive(empty_second);
            if constexpr (FOLLOWS) barrier_arrive(empty(before));
        }
        named_barrier<128 * CONSUMERS>(3);
        before = stage;
        next_stage<STAGES>(stage, parity);
        block.advance(head, tile, start_tile);
        step++;
    };
    if (head < block.end_head) {
        pass(Follows<false>());
        while (head < block.end_head) pass(Follows<true>());
        start_sum(first[0], gradients_shared(step + 1), y1_shared(before));
        warpgroup_wait<0>();
        warpgroup_hold(first[0]);
    }
    // Both warpgroups have read x₁ and x₂: their places serve for the results.
    named_barrier<128 * CONSUMERS>(3);
    const int own_columns = group * PART;
    unsigned char *const place_of_results = shared + group * tile_bytes(BM, PART);
    block.template store<PART>(place_of_results, first, second, warp_row, lane, own_columns);
}

#endif
