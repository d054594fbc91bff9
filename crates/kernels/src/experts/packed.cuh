// Products of single rows with matrices in fewer bits that a table describes, where fragments.cuh isn't for them. The numbers are
// those of numbers.cuh, but that the scale of eight neighbours is multiplied by their sum.
#pragma once

#include "../quantized/numbers.cuh"

/// Of some matrices what all threads of a block read.
template <int MATRICES> struct Shared {
    Packed at[MATRICES];

    __device__ __forceinline__ void copy(const Packed *from) {
        static_assert(sizeof(Packed) % 4 == 0, "whole words");
        for (int i = threadIdx.x; i < int(MATRICES * sizeof(Packed) / 4); i += blockDim.x)
            reinterpret_cast<uint32_t *>(at)[i] = reinterpret_cast<const uint32_t *>(from)[i];
    }
};

/// Codes of a lane that follow each other, which share a scale if groups are as long. Eight are taken at a time.
constexpr int LANE_CODES = 32;

/// The products of the block's row, which is in shared memory, with the warp's `COLUMNS` rows of `MATRICES` matrices from
/// `column` on, which may lie beyond the end. Rows and groups are whole eights.
template <int BITS, int KIND, int MATRICES, int COLUMNS, typename T>
__device__ __forceinline__ void packed_dots(const T *row, const Packed (&weights)[MATRICES], int inner, int outer,
                                            int column, float (&sums)[MATRICES][COLUMNS]) {
    constexpr int N = Pack<T>::N;
    ScaleAndOffset scales[MATRICES][COLUMNS];
    const bool in_whole_lanes = inner % LANE_CODES == 0;
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[m][c] = 0.0f;
    }
    for (int start = (threadIdx.x % WARP) * LANE_CODES; start < inner; start += WARP * LANE_CODES) {
        const int end = min(start + LANE_CODES, inner);
#pragma unroll 1
        for (int i = start; i < end; i += 8) {
            float x[8], total = 0.0f;
#pragma unroll
            for (int part = 0; part < 8; part += N) {
                const Pack<T> pack = load_pack(row + i + part);
#pragma unroll
                for (int n = 0; n < N; n++) x[part + n] = to_float(pack.at[n]);
            }
#pragma unroll
            for (int n = 0; n < 8; n++) total += x[n];
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                const Packed &q = weights[m];
                const float zero = zero_of(q);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const uint32_t eight = uint32_t(min(column + c, outer - 1)) * (inner / 8u) + i / 8u;
                    const uint64_t codes = eight_codes<BITS>(q, eight);
                    if (i == start || !in_whole_lanes || q.group % LANE_CODES != 0) {
                        const uint32_t group = q.shift >= 0 ? eight >> (q.shift - 3) : eight / (q.group / 8u);
                        scales[m][c] = scale_of(q, group, int64_t(eight) * 8);
                    }
                    float sum = 0.0f;
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        const uint32_t code = codes >> (n * BITS) & ((1u << BITS) - 1);
                        sum = fmaf(level_of<KIND>(code, zero, q.levels), x[n], sum);
                    }
                    const ScaleAndOffset scale = scales[m][c];
                    sums[m][c] = fmaf(scale.scale, sum, fmaf(scale.offset, total, sums[m][c]));
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sums[m][c] = warp_sum(sums[m][c]);
    }
}
