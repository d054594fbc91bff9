// The backward pass on Hopper in one go over the scores, for heads padded to 128 and scores that aren't
// capped: a block owns 128 keys of a head, goes over tiles of the queries that see them, gives dk and dv,
// and has its part of dq added to sums in global memory. Every tile of dq has a turn, which counts the
// blocks that added to it, and takes them from the first keys to the last: so the sums are the same
// whenever blocks run. The first block writes where the others add, and the last one makes dq of the sum.
//
// No block waits for one that hasn't started: blocks number themselves as they start, those of early keys
// first. All go over the queries from the last to the first, and over their heads of a group for each, so
// that a block finds the tile that it comes to left by the one before. Where keys are too few for all
// multiprocessors, blocks share the heads of a group, and what they give of dk and dv is added up after them.
#pragma once

#include "hopper.cuh"

#if defined(HOPPER)

/// Turns that are asked for or given on at once.
constexpr int TURNS = 2;

/// The threads of the first warpgroup that ask for turns and that have dq added; its first warp has tiles
/// brought.
constexpr int ASKING = WARP, ADDING = 2 * WARP;

__device__ __forceinline__ int load_acquire(const int *from) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(int *to, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/// Starts to write numbers in shared memory to global memory, or to add them to what is there.
__device__ __forceinline__ void start_sum(float *to, uint32_t from, int bytes, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(from), "r"(bytes)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                     "r"(bytes)
                     : "memory");
    store_commit();
}

/// Writes a warp's rows of dk and dv of some heads, for `backward_add_parts`.
template <typename Block, int N>
__device__ __forceinline__ void store_part(const Block &block, int split, const float (&dk)[1][N][4],
                                           const float (&dv)[1][N][4], int warp_row, int lane) {
    const Parameters &p = block.p;
    const int64_t all = static_cast<int64_t>(p.batch) * p.keys * p.kv_heads * p.head_dim;
    float *const of_keys = p.partial_keys + 2 * split * all;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int key = block.first_row + warp_row + half * 8 + lane / 4;
        if (key >= p.keys) continue;
        const int64_t row = (static_cast<int64_t>(block.batch) * p.keys + key) * p.kv_heads + block.kv_head;
        float *const to = of_keys + row * p.head_dim + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (n * 8 >= p.head_dim) break;
            *reinterpret_cast<float2 *>(to + n * 8) =
                make_float2(dk[0][n][half * 2] * p.scale, dk[0][n][half * 2 + 1] * p.scale);
            *reinterpret_cast<float2 *>(to + all + n * 8) =
                make_float2(dv[0][n][half * 2], dv[0][n][half * 2 + 1]);
        }
    }
}

template <typename T>
__device__ __forceinline__ void hopper_backward_at_once(const Parameters &p,
                                                        const TmaDescriptors &descriptors) {
    constexpr int D = 128, BM = HOPPER_ROWS, BN = HOPPER_COLUMNS, STAGES = HOPPER_STAGES;
    using Block = BackwardBlock<T, D, BM, BN, KEYS>;
    constexpr int ROWS_BYTES = Block::ROWS_BYTES, COLUMNS_BYTES = Block::COLUMNS_BYTES;
    constexpr int DS_BYTES = tile_bytes(BM, BN), DQ_BYTES = BN * D * 4;
    /// Columns of dq that a warpgroup gives, and the float4 of a tile that are its own.
    constexpr int PART = D / CONSUMERS, PART_PACKS = BN * PART / 4;
    extern __shared__ __align__(1024) unsigned char shared[];
    // k, v, then for every stage q, do, then twice ds, then dq, then what belongs to the stages' queries,
    // then the barriers.
    const uint32_t k_shared = shared_address(shared), v_shared = k_shared + ROWS_BYTES;
    const auto q_shared = [&](int stage) {
        return k_shared + 2 * ROWS_BYTES + stage * 2 * COLUMNS_BYTES;
    };
    const auto do_shared = [&](int stage) { return q_shared(stage) + COLUMNS_BYTES; };
    const auto ds_shared = [&](int step) { return q_shared(STAGES) + step % 2 * DS_BYTES; };
    unsigned char *const dq_tile =
        shared + 2 * ROWS_BYTES + STAGES * 2 * COLUMNS_BYTES + 2 * DS_BYTES;
    const auto of_queries = [&](int stage) {
        return dq_tile + DQ_BYTES + stage * Block::OF_COLUMNS_BYTES;
    };
    const uint32_t barriers = shared_address(of_queries(STAGES));
    const auto full = [&](int stage) { return barriers + stage * 8; };
    const auto empty = [&](int stage) { return barriers + (STAGES + stage) * 8; };
    // Of a step: it is this block's turn; its part of dq is there; its turn is given on.
    const auto turn = [&](int step) { return barriers + (2 * STAGES + step % TURNS) * 8; };
    const auto there = [&](int step) { return barriers + (2 * STAGES + TURNS + step % TURNS) * 8; };
    const auto given = [&](int step) {
        return barriers + (2 * STAGES + 2 * TURNS + step % TURNS) * 8;
    };
    // The place of dq may be written. The steps that wait for it come before those that don't: the last
    // block of a tile is never after that of the tile before.
    const uint32_t free = barriers + (2 * STAGES + 3 * TURNS) * 8;
    int *const number =
        reinterpret_cast<int *>(of_queries(STAGES) + (2 * STAGES + 3 * TURNS + 1) * 8);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full(stage), 1 + WARP);
            barrier_init(empty(stage), 4 * CONSUMERS);
        }
        for (int slot = 0; slot < TURNS; slot++) {
            barrier_init(turn(slot), 1);
            barrier_init(there(slot), 4 * CONSUMERS);
            barrier_init(given(slot), 1);
        }
        barrier_init(free, 1);
        fence_shared_writes();
        *number = atomicAdd(p.turns, 1);
    }
    __syncthreads();
    const int across = p.batch * p.kv_heads * p.head_splits, split = *number % p.head_splits;
    Block block(p, *number % across / p.head_splits, *number / across);
    const int own = block.first_row / BM, heads = (block.end_head - block.first_head) / p.head_splits;
    block.first_head += split * heads;
    block.end_head = block.first_head + heads;

    // Of the blocks that meet a tile, the first and the last. A tile that sees nothing has one, for zeros.
    const auto last_of = [&](int tile) {
        return min(block.before + tile * BN + BN - 1, p.keys - 1) / BM;
    };
    const auto first_of = [&](int tile) {
        return p.ragged ? min(block.tile_lowest(tile).x / BM, last_of(tile)) : 0;
    };
    // The last tile up to `tile` that this block meets, or one before all.
    const auto met_from = [&](int tile) {
        while (tile >= block.first_tile && first_of(tile) > own) tile--;
        return tile;
    };
    // Of a step, the tile, and which of the block's heads.
    int tile = met_from(block.end_tile - 1), head = 0;
    const auto more = [&] { return head < heads && tile >= block.first_tile; };
    const auto advance = [&] {
        if (++head == heads) {
            head = 0;
            tile = met_from(tile - 1);
        }
    };
    const auto tile_place = [&] {
        return (static_cast<int64_t>(block.batch) * p.heads + block.first_head + head) * p.tiles +
               tile;
    };

    if (threadIdx.x < 128) {
        give_registers<COPY_REGISTERS>();
        if (threadIdx.x < WARP) {
            int stage = 0, parity = 0;
            for (bool start = true; more(); start = false, advance()) {
                barrier_wait(empty(stage), parity ^ 1);
                load_tiles_of(block, descriptors, start, block.first_head + head, tile, k_shared,
                              q_shared(stage), shared_address(of_queries(stage)), full(stage));
                next_stage<STAGES>(stage, parity);
            }
        } else if (threadIdx.x == ASKING) {
            for (int step = 0; more(); step++, advance()) {
                const int before = own - first_of(tile);
                if (before > 0) {
                    while (load_acquire(p.turns + 1 + tile_place()) != before) {}
                }
                // This barrier's turn before is over.
                barrier_wait(given(step), step / TURNS % 2 ^ 1);
                barrier_arrive(turn(step));
            }
        } else if (threadIdx.x == ADDING) {
            for (int step = 0; more(); step++, advance()) {
                barrier_wait(there(step), step / TURNS % 2);
                if (own < last_of(tile)) {
                    const int before = own - first_of(tile);
                    float *const sums =
                        reinterpret_cast<float *>(p.dq_sums + tile_place() * (CONSUMERS * PART_PACKS));
                    barrier_wait(turn(step), step / TURNS % 2);
                    start_sum(sums, shared_address(dq_tile), DQ_BYTES, before > 0);
                    store_wait_read<0>();
                    barrier_arrive(free);
                    store_wait<0>();
                    store_release(p.turns + 1 + tile_place(), before + 1);
                } else {
                    barrier_arrive(free);
                }
                barrier_arrive(given(step));
            }
        }
        return;
    }

    take_registers<COMPUTE_REGISTERS>();
    const int thread = threadIdx.x % 128, lane = threadIdx.x % WARP;
    const int half = threadIdx.x / 128 - 1, half_row = half * 64;
    const int warp_row = half_row + thread / WARP * 16;
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    float s[1][BN / 8][4], dp[1][BN / 8][4], dq[PART / 8][4];
    uint32_t of_s[1][BN / 16][4], of_dp[1][BN / 16][4];
    float2 of_pairs[BN / 8];
    const auto make_dq = [&](int step) {
        barrier_wait(turn(step), step / TURNS % 2);
        if (first_of(tile) < own) {
            const float4 *const sums =
                p.dq_sums + (tile_place() * CONSUMERS + half) * PART_PACKS + thread;
#pragma unroll
            for (int n = 0; n < PART / 8; n++) {
                // Others wrote it, so it must not come from this multiprocessor's cache.
                const float4 sum = __ldcg(sums + n * 128);
                dq[n][0] += sum.x;
                dq[n][1] += sum.y;
                dq[n][2] += sum.z;
                dq[n][3] += sum.w;
            }
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int query = tile * BN + thread / WARP * 16 + side * 8 + lane / 4;
            if (query >= p.queries) continue;
            const int column = half * PART + lane % 4 * 2;
            const int64_t row = query_row(p, block.batch, query, block.first_head + head);
            T *const to = static_cast<T *>(p.dq) + row * p.head_dim + column;
#pragma unroll
            for (int n = 0; n < PART / 8; n++) {
                if (column + n * 8 >= p.head_dim) continue;
                *reinterpret_cast<uint32_t *>(to + n * 8) =
                    pack_pair<T>(dq[n][side * 2] * p.scale, dq[n][side * 2 + 1] * p.scale);
            }
        }
    };
    const auto hand_dq_over = [&](int step) {
        float4 *const part = reinterpret_cast<float4 *>(dq_tile) + half * PART_PACKS + thread;
        barrier_wait(free, step % 2 ^ 1);
#pragma unroll
        for (int n = 0; n < PART / 8; n++)
            part[n * 128] = make_float4(dq[n][0], dq[n][1], dq[n][2], dq[n][3]);
        fence_shared_writes();
    };
    int stage = 0, parity = 0;
    for (int step = 0; more(); step++, advance()) {
        const unsigned char *const columns = of_queries(stage);
        barrier_wait(full(stage), parity);
        start_rows<T, D, BM, BN>(s[0], k_shared, half_row, q_shared(stage));
        start_rows<T, D, BM, BN>(dp[0], v_shared, half_row, do_shared(stage));
        // Probabilities are made beside the product that gives dp, and gradients of scores beside the
        // sum of dv. What they take of shared memory is on its way before.
        block.of_pairs(of_pairs, columns, 0, lane);
        warpgroup_wait<1>();
        warpgroup_hold(s[0]);
        block.probabilities(s[0], of_pairs, tile, columns, warp_row, lane);
        pack_weights<T, BN, 1>(of_s, s);
        start_columns<T, D, BN>(dv[0], of_s[0], do_shared(stage));
        block.of_pairs(of_pairs, columns, 1, lane);
        warpgroup_wait<1>();
        warpgroup_hold(dp[0]);
        // The sum of dv still reads `of_s`, as this does: there is no room for a copy, and nothing writes
        // it before the sum is done.
        block.score_gradients(dp[0], of_s[0], of_pairs);
        pack_weights<T, BN, 1>(of_dp, dp);
        const uint32_t ds = ds_shared(step);
#pragma unroll
        for (int n = 0; n < BN / 16; n++)
            store_tiles(ds + place<BM>(warp_row + lane % 16, 2 * n + lane / 16), of_dp[0][n]);
        fence_shared_writes();
        named_barrier<128 * CONSUMERS>(3);
        // dq = dsᵀ·k over the block's keys, before dk, beside which it is handed over.
        const uint64_t ds_tile = describe_tile(ds, 0);
        const uint64_t k_tile = describe_tile(k_shared + half * (BM * ROW_BYTES), 0);
        warpgroup_hold(dq);
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < BM / 16; k++)
            warpgroup_multiply<T, PART, true, true>(dq, moved_tile(ds_tile, k * 16 * ROW_BYTES),
                                                    moved_tile(k_tile, k * 16 * ROW_BYTES), k != 0);
        warpgroup_commit();
        start_columns<T, D, BN>(dk[0], of_dp[0], q_shared(stage));
        warpgroup_wait<1>();
        warpgroup_hold(dq);
        if (own < last_of(tile))
            hand_dq_over(step);
        else
            make_dq(step);
        __syncwarp();
        if (lane == 0) barrier_arrive(there(step));
        warpgroup_wait<0>();
        warpgroup_hold(dk[0]);
        warpgroup_hold(dv[0]);
        if (lane == 0) barrier_arrive(empty(stage));
        next_stage<STAGES>(stage, parity);
    }
    if (p.head_splits > 1) return store_part(block, split, dk, dv, warp_row, lane);
    // Both warpgroups have read k and v: their places serve for the results.
    named_barrier<128 * CONSUMERS>(3);
    block.store(shared, dk, dv, warp_row, lane);
}

/// Adds up the parts of dk and dv, in the order of their heads.
template <typename T> __device__ __forceinline__ void backward_add_parts(const Parameters &p) {
    follow_previous();
    const int64_t packs = static_cast<int64_t>(p.batch) * p.keys * p.kv_heads * p.head_dim / 4;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= 2 * packs) return;
    const float4 *const parts = reinterpret_cast<const float4 *>(p.partial_keys) + i;
    float4 sum = parts[0];
    for (int split = 1; split < p.head_splits; split++) {
        const float4 part = parts[split * 2 * packs];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    T *const to = i < packs ? static_cast<T *>(p.dk) + 4 * i : static_cast<T *>(p.dv) + 4 * (i - packs);
    *reinterpret_cast<uint2 *>(to) = make_uint2(pack_pair<T>(sum.x, sum.y), pack_pair<T>(sum.z, sum.w));
}

#endif
