// Adds up the rows of each of some matrices `(groups, columns)` in a fixed order: what the blocks of a
// kernel have each summed on their own.
//
// A block has 32 columns. Slice s of 32 adds up groups s, s + 32, .. of every column; then the slices
// are added up in order. `blockIdx.y` counts the matrices.
#include "common.cuh"

constexpr int SLICES = 32;

extern "C" __global__ void __launch_bounds__(WARP *SLICES)
    sum_groups(const float *partial, int64_t groups, int64_t columns, float *out) {
    follow_previous();
    __shared__ float sums[SLICES][WARP];
    const int lane = threadIdx.x % WARP, slice = threadIdx.x / WARP;
    const int64_t column = int64_t(blockIdx.x) * WARP + lane;
    partial += blockIdx.y * groups * columns;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t group = slice; group < groups; group += SLICES)
            sum += partial[group * columns + column];
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice == 0 && column < columns) {
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SLICES; s++) total += sums[s][lane];
        out[blockIdx.y * columns + column] = total;
    }
}
