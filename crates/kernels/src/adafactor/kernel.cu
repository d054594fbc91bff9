// One step of Adafactor, see mod.rs for the formulas: the means of rows, those of columns together with the
// mean of the rows' means, sums of squares of update and parameter, and the update.
#include "common.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
/// Threads of a block of columns, side by side and one above the other.
constexpr int WIDTH = 32, HEIGHT = 32;

/// What is the same for all elements of one step, as in mod.rs.
struct Constants {
    float grad_scale, beta, one_minus_beta, epsilon, clip_threshold, learning_rate, scale_epsilon,
        weight_decay;

    __device__ __forceinline__ float mean(float before, float sum, int64_t count) const {
        return beta * before + one_minus_beta * (sum / float(count) + epsilon);
    }
};

/// As in cuda.rs.
struct Pointers {
    float *params, *grads, *row_means, *column_means;
    /// The mean of the rows' means.
    float *mean;
    /// A pair of sums from every block: of squares of the update and of the parameter.
    float *partial;
    int64_t rows, columns;

    __device__ __forceinline__ float update(int64_t i, float grad_scale, float mean) const {
        const float row = row_means[i / columns], column = column_means[i % columns];
        return grads[i] * grad_scale * rsqrtf(row / mean) * rsqrtf(column);
    }
};

/// A warp has a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_rows(const __grid_constant__ Pointers buffers,
                   const __grid_constant__ Constants constants) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t row = int64_t(blockIdx.x) * WARPS + warp;
    if (row >= buffers.rows) return;
    const float *grads = buffers.grads + row * buffers.columns;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t j = lane; j < buffers.columns; j += WARP) {
        const float g = grads[j] * constants.grad_scale;
        sum += g * g;
    }
    sum = warp_sum(sum);
    if (lane == 0)
        buffers.row_means[row] = constants.mean(buffers.row_means[row], sum, buffers.columns);
}

/// A block has `WIDTH` columns; one more has the mean of the rows' means.
extern "C" __global__ void __launch_bounds__(WIDTH *HEIGHT)
    adafactor_columns(const __grid_constant__ Pointers buffers,
                      const __grid_constant__ Constants constants) {
    __shared__ float scratch[WIDTH * HEIGHT];
    if (blockIdx.x + 1 == gridDim.x) {
        float sum = 0.0f;
        for (int64_t i = threadIdx.x; i < buffers.rows; i += WIDTH * HEIGHT)
            sum += buffers.row_means[i];
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) *buffers.mean = sum / float(buffers.rows);
        return;
    }
    const int x = threadIdx.x % WIDTH, y = threadIdx.x / WIDTH;
    const int64_t column = int64_t(blockIdx.x) * WIDTH + x;
    float sum = 0.0f;
    if (column < buffers.columns) {
#pragma unroll 4
        for (int64_t row = y; row < buffers.rows; row += HEIGHT) {
            const float g = buffers.grads[row * buffers.columns + column] * constants.grad_scale;
            sum += g * g;
        }
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (y == 0 && column < buffers.columns) {
        for (int other = 1; other < HEIGHT; other++) sum += scratch[other * WIDTH + x];
        buffers.column_means[column] =
            constants.mean(buffers.column_means[column], sum, buffers.rows);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_measure(const __grid_constant__ Pointers buffers,
                      const __grid_constant__ Constants constants) {
    __shared__ float scratch[32];
    const int64_t count = buffers.rows * buffers.columns, stride = int64_t(gridDim.x) * THREADS;
    const float mean = *buffers.mean;
    float updates = 0.0f, sizes = 0.0f;
#pragma unroll 4
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const float u = buffers.update(i, constants.grad_scale, mean), p = buffers.params[i];
        updates += u * u;
        sizes += p * p;
    }
    updates = block_sum(updates, scratch);
    sizes = block_sum(sizes, scratch);
    if (threadIdx.x == 0) {
        buffers.partial[2 * blockIdx.x] = updates;
        buffers.partial[2 * blockIdx.x + 1] = sizes;
    }
}

/// As many blocks as measured.
extern "C" __global__ void __launch_bounds__(THREADS)
    adafactor_update(const __grid_constant__ Pointers buffers,
                     const __grid_constant__ Constants constants) {
    __shared__ float scratch[32];
    const int64_t count = buffers.rows * buffers.columns, stride = int64_t(gridDim.x) * THREADS;
    float updates = 0.0f, sizes = 0.0f;
    for (int part = threadIdx.x; part < int(gridDim.x); part += THREADS) {
        updates += buffers.partial[2 * part];
        sizes += buffers.partial[2 * part + 1];
    }
    updates = sqrtf(block_sum(updates, scratch) / float(count));
    sizes = sqrtf(block_sum(sizes, scratch) / float(count));
    float rate = constants.learning_rate;
    if (constants.scale_epsilon >= 0.0f) rate *= fmaxf(constants.scale_epsilon, sizes);
    const float decay = 1.0f - rate * constants.weight_decay;
    const float factor = rate / fmaxf(1.0f, updates / constants.clip_threshold);
    const float mean = *buffers.mean;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride) {
        const float u = buffers.update(i, constants.grad_scale, mean);
        buffers.params[i] = buffers.params[i] * decay - factor * u;
        buffers.grads[i] = 0.0f;
    }
}
