// The forward pass for many queries on tensor cores: a block of warps takes a tile of queries of
// one head, 16·M queries a warp, and goes over the tiles of keys that any of them sees. The keys of
// the next tile are on their way while the values of this one are used, and the other way round.
#pragma once

#include "tiles.cuh"

/// The queries of a head from `first_query` on, for keys that are where `keys_at` says.
template <typename T, int D, int M, int WARPS, typename Keys>
__device__ __forceinline__ void forward_block(const Parameters &p, const Keys &keys_at, int batch,
                                              int head, int first_query) {
    constexpr int BM = 16 * M * WARPS, BN = SEGMENT, THREADS = WARP * WARPS;
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char *const q_tile = shared;
    const uint32_t q_shared = shared_address(q_tile);
    const uint32_t k_shared = q_shared + tile_bytes(BM, D);
    const uint32_t v_shared = k_shared + tile_bytes(BN, D);
    // The lowest key that each query sees.
    int *const lowest = reinterpret_cast<int *>(shared + tile_bytes(BM, D) + 2 * tile_bytes(BN, D));

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int kv_head = head / (p.heads / p.kv_heads);
    const int rows = min(BM, p.queries - first_query);
    const int first_position = p.keys - p.queries + first_query;

    const T *const q = head_start(static_cast<const T *>(p.q), p.q_strides, batch, head) +
                       first_query * p.q_strides[1];
    const auto k = keys_at.template keys<T>(p, batch, kv_head);
    const auto v = keys_at.template values<T>(p, batch, kv_head);

    const int2 range = lowest_keys<BM, THREADS>(p, batch, first_query, lowest);
    const int smallest = range.x, largest = range.y;
    const int first_tile = smallest / BN, end_tile = (first_position + rows - 1) / BN + 1;

    float out[M][D / 8][4] = {};
    RowSums sums[M][2];

    const auto load_keys = [&](int tile) {
        keys_at.template load<T, BN, D, THREADS>(k_shared, k, tile * BN, p.keys - tile * BN,
                                                 p.head_dim, threadIdx.x);
        copy_async_commit();
    };
    if (first_tile < end_tile) {
        load_tile<T, BM, D, THREADS>(q_shared, q, p.q_strides[1], rows, p.head_dim, threadIdx.x);
        load_keys(first_tile);
    }
    for (int tile = first_tile; tile < end_tile; tile++) {
        const int first_key = tile * BN;
        copy_async_wait<0>();
        keys_at.template land<T, BN, D, THREADS>(k_shared, k, threadIdx.x);
        // The keys are there, and every warp is done with the values of the tile before.
        __syncthreads();
        keys_at.template load<T, BN, D, THREADS>(v_shared, v, first_key, p.keys - first_key,
                                                 p.head_dim, threadIdx.x);
        copy_async_commit();

        float scores[M][BN / 8][4] = {};
        multiply_rows<T, D, BM, BN, M>(scores, q_shared, warp * 16 * M, k_shared, lane);

        // Not every query sees all of the tile.
        const bool hides = first_key < largest || first_key + BN - 1 > first_position;
        float after[M][2];
#pragma unroll
        for (int m = 0; m < M; m++) {
            shape_scores<BN>(p, scores[m]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (hides) {
                    const int row = (warp * M + m) * 16 + half * 8 + lane / 4;
                    hide_scores<BN>(scores[m], half, first_key, p.ragged ? lowest[row] : 0,
                                    first_position + row, lane);
                }
                const Joint joint = join(sums[m][half], soften_segment<BN>(scores[m], half, p.factor));
                // Most often by 1, as the largest score is found early.
                if (__any_sync(FULL, joint.before != 1.0f)) scale_row<D>(out[m], half, joint.before);
                after[m][half] = joint.after;
            }
        }
        uint32_t weights[M][BN / 16][4];
        pack_weights<T, BN, M>(weights, scores);

        copy_async_wait<0>();
        keys_at.template land<T, BN, D, THREADS>(v_shared, v, threadIdx.x);
        // The values are there, and every warp is done with the keys.
        __syncthreads();
        if (tile + 1 < end_tile) load_keys(tile + 1);
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            float part[M][2][4] = {};
            multiply_sixteen_columns<T, BN, M, 16 * ROW_BYTES, BN * ROW_BYTES>(part, weights, v_shared, c / 4, c % 4, lane);
#pragma unroll
            for (int m = 0; m < M; m++) add_columns(after[m], out[m][2 * c], out[m][2 * c + 1], part[m]);
        }
    }

    float inverse[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const RowEnd end = end_row<T>(p, head, sums[m][half]);
            inverse[m][half] = end.factor;
            const int row = (warp * M + m) * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < rows && p.log_sum_exp != nullptr)
                p.log_sum_exp[sum_row(p, batch, first_query + row, head)] = end.log_sum_exp;
        }
    }
    // A warp's queries are read by no other, so their place serves for the result.
    store_rows<T, D, BM, M>(
        q_tile, warp * 16 * M, out, inverse, p.head_dim, lane, [&](int row) -> T * {
            const int query = first_query + warp * 16 * M + row;
            if (query >= p.queries) return nullptr;
            return static_cast<T *>(p.o) + query_row(p, batch, query, head) * p.head_dim;
        });
}

template <typename T, int D, int M, int WARPS>
__device__ __forceinline__ void forward_tiles(const Parameters &p) {
    // The queries that see the most keys first.
    forward_block<T, D, M, WARPS>(p, KeysInARow(), blockIdx.x / p.heads, blockIdx.x % p.heads,
                                  (gridDim.y - 1 - blockIdx.y) * (16 * M * WARPS));
}
