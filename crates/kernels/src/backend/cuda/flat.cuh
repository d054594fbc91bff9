// A step of an optimiser over flat parameters, in one pass: the gradients are clipped on the way and zero
// afterwards.
//
// The norm is added up in f64: every block adds squares in a fixed order, and whoever needs the norm adds
// up the blocks in a fixed order as well. So the step can follow without the host: every one of its
// blocks works out the factor by itself.
#pragma once

#include "vector.cuh"

/// As in `flat/cuda.rs`.
constexpr int THREADS = 256, WARPS = THREADS / WARP;
/// Vectors of a thread in a step.
constexpr int STEP_AHEAD = 2;

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
}

/// The sum over the block in every thread.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double scratch[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < WARPS ? scratch[lane] : 0.0);
}

/// The norm from what the blocks have added up.
__device__ __forceinline__ double norm_of(const double *partial, int parts) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < parts; i += THREADS) sum += partial[i];
    return sqrt(block_sum(sum));
}

/// The buffers of a step, as in `flat/cuda.rs`.
struct Buffers {
    float *params, *grads;
    /// What the optimiser keeps of each element, as far as there is something.
    float *states[2];
    int64_t count;
    /// Weight decay applies to so many elements.
    int64_t decayed;
};

/// The norm, in parts, and what gradients are clipped to, as in `flat/cuda.rs`.
struct Clip {
    const double *partial;
    /// Infinite for none.
    double max_norm;
    /// Where the norm is left.
    float *norm;
    int parts;
};

/// Whether there is a step at all, and what it multiplies gradients by.
struct Clipped {
    bool step;
    float grad_scale;
};

/// No step is made when the norm isn't finite, as f32. All threads of the block call it, and the first
/// block leaves the norm.
__device__ __forceinline__ Clipped clipped(const Clip &clip) {
    const double norm = norm_of(clip.partial, clip.parts);
    if (blockIdx.x == 0 && threadIdx.x == 0) *clip.norm = float(norm);
    // Keeps the norm's reciprocal finite.
    constexpr double CLIP_EPSILON = 1e-6;
    return {bool(isfinite(float(norm))), float(fmin(clip.max_norm / (norm + CLIP_EPSILON), 1.0))};
}

/// The buffers' elements from `at` on.
template <int STATES, int VECTOR> struct Elements {
    Vector<float, VECTOR> params, grads, states[STATES > 0 ? STATES : 1];

    __device__ __forceinline__ void load(const Buffers &buffers, int64_t at) {
        grads = load_vector<VECTOR>(buffers.grads + at);
        params = load_vector<VECTOR>(buffers.params + at);
#pragma unroll
        for (int s = 0; s < STATES; s++)
            states[s] = load_vector<VECTOR>(buffers.states[s] + at);
    }

    template <typename Rule>
    __device__ __forceinline__ void step(const Buffers &buffers, int64_t at, float grad_scale,
                                         const Rule &rule) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float state[STATES > 0 ? STATES : 1];
#pragma unroll
            for (int s = 0; s < STATES; s++) state[s] = states[s].at[i];
            rule.step(params.at[i], state, grads.at[i] * grad_scale, at + i < buffers.decayed);
#pragma unroll
            for (int s = 0; s < STATES; s++) states[s].at[i] = state[s];
        }
        store_vector(buffers.params + at, params);
#pragma unroll
        for (int s = 0; s < STATES; s++) store_vector(buffers.states[s] + at, states[s]);
    }
};

/// One step with the gradients times `grad_scale`; unless `step` is false, which leaves all but the
/// gradients alone. With `CLEAR` these are zero afterwards. `Rule::step` makes the step of one element.
template <int VECTOR, bool CLEAR, typename Rule>
__device__ __forceinline__ void update_all(const Buffers &buffers, Clipped clipped,
                                           const Rule &rule) {
    Vector<float, VECTOR> zeros;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) zeros.at[i] = 0.0f;
    const int64_t vectors = buffers.count / VECTOR;
    const int64_t stride = int64_t(gridDim.x) * (STEP_AHEAD * THREADS);
    for (int64_t first = int64_t(blockIdx.x) * (STEP_AHEAD * THREADS) + threadIdx.x;
         first < vectors; first += stride) {
        Elements<Rule::STATES, VECTOR> elements[STEP_AHEAD];
#pragma unroll
        for (int k = 0; k < STEP_AHEAD; k++) {
            const int64_t vector = first + k * THREADS;
            if (clipped.step && vector < vectors) elements[k].load(buffers, vector * VECTOR);
        }
#pragma unroll
        for (int k = 0; k < STEP_AHEAD; k++) {
            const int64_t vector = first + k * THREADS;
            if (vector < vectors) {
                if (clipped.step)
                    elements[k].step(buffers, vector * VECTOR, clipped.grad_scale, rule);
                if constexpr (CLEAR) store_vector(buffers.grads + vector * VECTOR, zeros);
            }
        }
    }
    // What is left over.
    const int64_t i = vectors * VECTOR + threadIdx.x;
    if (VECTOR > 1 && blockIdx.x == 0 && i < buffers.count) {
        if (clipped.step) {
            Elements<Rule::STATES, 1> element;
            element.load(buffers, i);
            element.step(buffers, i, clipped.grad_scale, rule);
        }
        if constexpr (CLEAR) buffers.grads[i] = 0.0f;
    }
}

/// The kernels of a clipped step by `Rule`, by vectors of 4 or, where they don't fit, by elements.
#define CLIPPED_STEP(name, Rule)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        name##_clipped_step(const __grid_constant__ Buffers buffers,                               \
                            const __grid_constant__ Clip clip, const __grid_constant__ Rule rule) {\
        update_all<4, true>(buffers, clipped(clip), rule);                                         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_clipped_step_any(                 \
        const __grid_constant__ Buffers buffers, const __grid_constant__ Clip clip,                \
        const __grid_constant__ Rule rule) {                                                       \
        update_all<1, true>(buffers, clipped(clip), rule);                                         \
    }
