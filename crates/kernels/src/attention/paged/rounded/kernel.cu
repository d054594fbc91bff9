// Rows rounded to 8 bits and written to their places in pools, as mod.rs has it.
#include "rounded.cuh"

/// `Rounding` in cuda.rs has the same fields in the same order.
struct Rounding {
    /// (tokens, heads, head_dim), found by the strides of tokens and heads.
    const void *rows[2];
    /// (room, heads, head_dim) and (room, heads, groups)
    uint8_t *codes[2], *scales[2];
    int64_t token_strides[2], head_strides[2];
    /// (tokens)
    const uint32_t *places;
    int64_t tokens, room;
    int heads, head_dim;
};

/// A warp rounds a group; `blockIdx.y` says of which rows.
template <typename T> __device__ __forceinline__ void round_rows(const Rounding &given) {
    follow_previous();
    const int lane = threadIdx.x % WARP, which = blockIdx.y;
    const int groups = (given.head_dim + ROUNDED_GROUP - 1) / ROUNDED_GROUP;
    const int64_t count = given.tokens * given.heads * groups;
    const int64_t step = int64_t(gridDim.x) * (blockDim.x / WARP);
    for (int64_t i = int64_t(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP; i < count;
         i += step) {
        const int group = i % groups, head = i / groups % given.heads;
        const int64_t token = i / groups / given.heads, place = given.places[token];
        if (place >= given.room) continue;
        const int column = group * ROUNDED_GROUP + lane;
        const bool inside = column < given.head_dim;
        const T *const row = static_cast<const T *>(given.rows[which]) +
                             token * given.token_strides[which] + head * given.head_strides[which];
        const float x = inside ? to_float(row[column]) : 0.0f;
        // As integers, NaN is beyond infinity, and that beyond all numbers.
        const uint32_t largest = __reduce_max_sync(FULL, __float_as_uint(x) & 0x7fffffffu);
        const uint32_t scale = max(largest >> 23, LEAST_SCALE);
        // 64 / scale
        const float factor = __uint_as_float((260 - scale) << 23);
        const int64_t to = place * given.heads + head;
        if (inside) {
            const int code = __float2int_rn(fminf(fmaxf(x * factor, -127.0f), 127.0f));
            given.codes[which][to * given.head_dim + column] = static_cast<uint8_t>(code);
        }
        if (lane == 0) given.scales[which][to * groups + group] = scale;
    }
}

FOR_EACH_DTYPE(round_rows, 256, (const __grid_constant__ Rounding given), (given))
