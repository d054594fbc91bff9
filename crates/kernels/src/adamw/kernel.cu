// The passes over flat parameters, see mod.rs for the formulas.
//
// The norm is added up in f64: every block adds squares in a fixed order, and whoever needs the norm adds
// up the blocks in a fixed order as well. So the step can follow without the host: every one of its
// blocks works out the factor by itself.
#include "vector.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
/// Vectors of a thread in a step, and in other passes.
constexpr int STEP_AHEAD = 2, AHEAD = 2;

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

/// The sum of squares of the block's share, of all elements from `blockIdx.x` on in steps of the grid.
template <typename T, int VECTOR>
__device__ __forceinline__ void sum_squares(const T *grads, int64_t count, double *partial) {
    const int64_t vectors = count / VECTOR;
    const int64_t step = int64_t(gridDim.x) * THREADS;
    const int64_t thread = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t vector = thread; vector < vectors; vector += step) {
        const Vector<T, VECTOR> values = load_vector<VECTOR>(grads + vector * VECTOR);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            const double g = double(to_float(values.at[i]));
            sum += g * g;
        }
    }
    const int64_t i = vectors * VECTOR + thread;
    if (VECTOR > 1 && i < count) {
        const double g = double(to_float(grads[i]));
        sum += g * g;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__device__ __forceinline__ void squares(const T *grads, int64_t count, double *partial) {
    sum_squares<T, Pack<T>::N>(grads, count, partial);
}

template <typename T>
__device__ __forceinline__ void squares_any(const T *grads, int64_t count, double *partial) {
    sum_squares<T, 1>(grads, count, partial);
}

FOR_EACH_DTYPE(squares, THREADS, (const T *grads, int64_t count, double *partial),
               (grads, count, partial))
FOR_EACH_DTYPE(squares_any, THREADS, (const T *grads, int64_t count, double *partial),
               (grads, count, partial))

/// The norm from what the blocks have added up.
__device__ __forceinline__ double norm_of(const double *partial, int parts) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < parts; i += THREADS) sum += partial[i];
    return sqrt(block_sum(sum));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_norm(const double *partial, int parts, double *out) {
    const double result = norm_of(partial, parts);
    if (threadIdx.x == 0) *out = result;
}

/// What is the same for all elements of one step.
struct Update {
    float decay, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, correction;
    int64_t decayed;
};

template <int VECTOR>
__device__ __forceinline__ void step_elements(Vector<float, VECTOR> &p, Vector<float, VECTOR> &m,
                                              Vector<float, VECTOR> &v,
                                              const Vector<float, VECTOR> &grad, int64_t first,
                                              float grad_scale, const Update &update) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        const float g = grad.at[i] * grad_scale;
        m.at[i] += (g - m.at[i]) * update.one_minus_beta1;
        v.at[i] = v.at[i] * update.beta2 + update.one_minus_beta2 * g * g;
        const float denominator = sqrtf(v.at[i]) / update.correction + update.epsilon;
        const float decay = first + i < update.decayed ? update.decay : 1.0f;
        p.at[i] = p.at[i] * decay - update.step_size * (m.at[i] / denominator);
    }
}

/// One step with the gradients times `grad_scale`; unless `step` is false, which leaves all but the
/// gradients alone. With `CLEAR` these are zero afterwards.
template <int VECTOR, bool CLEAR>
__device__ __forceinline__ void update_all(float *params, float *grads, float *m, float *v,
                                           int64_t count, float grad_scale, bool step,
                                           const Update &update) {
    Vector<float, VECTOR> zeros;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) zeros.at[i] = 0.0f;
    const int64_t vectors = count / VECTOR;
    const int64_t stride = int64_t(gridDim.x) * (STEP_AHEAD * THREADS);
    for (int64_t first = int64_t(blockIdx.x) * (STEP_AHEAD * THREADS) + threadIdx.x;
         first < vectors; first += stride) {
        Vector<float, VECTOR> p[STEP_AHEAD], g[STEP_AHEAD], m_old[STEP_AHEAD], v_old[STEP_AHEAD];
#pragma unroll
        for (int k = 0; k < STEP_AHEAD; k++) {
            const int64_t vector = first + k * THREADS;
            if (step && vector < vectors) {
                g[k] = load_vector<VECTOR>(grads + vector * VECTOR);
                p[k] = load_vector<VECTOR>(params + vector * VECTOR);
                m_old[k] = load_vector<VECTOR>(m + vector * VECTOR);
                v_old[k] = load_vector<VECTOR>(v + vector * VECTOR);
            }
        }
#pragma unroll
        for (int k = 0; k < STEP_AHEAD; k++) {
            const int64_t vector = first + k * THREADS;
            if (vector < vectors) {
                if (step) {
                    step_elements(p[k], m_old[k], v_old[k], g[k], vector * VECTOR, grad_scale,
                                  update);
                    store_vector(params + vector * VECTOR, p[k]);
                    store_vector(m + vector * VECTOR, m_old[k]);
                    store_vector(v + vector * VECTOR, v_old[k]);
                }
                if constexpr (CLEAR) store_vector(grads + vector * VECTOR, zeros);
            }
        }
    }
    // What is left over.
    const int64_t i = vectors * VECTOR + threadIdx.x;
    if (VECTOR > 1 && blockIdx.x == 0 && i < count) {
        if (step) {
            Vector<float, 1> p{{params[i]}}, m_old{{m[i]}}, v_old{{v[i]}}, g{{grads[i]}};
            step_elements(p, m_old, v_old, g, i, grad_scale, update);
            params[i] = p.at[0];
            m[i] = m_old.at[0];
            v[i] = v_old.at[0];
        }
        if constexpr (CLEAR) grads[i] = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_step(float *params, float *grads, float *m, float *v, int64_t count, float grad_scale,
         const __grid_constant__ Update update) {
    update_all<4, false>(params, grads, m, v, count, grad_scale, true, update);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_step_any(float *params, float *grads, float *m, float *v, int64_t count, float grad_scale,
             const __grid_constant__ Update update) {
    update_all<1, false>(params, grads, m, v, count, grad_scale, true, update);
}

/// `max_norm` is infinite for none. Makes no step when the norm isn't finite, as f32.
template <int VECTOR>
__device__ __forceinline__ void clip(float *params, float *grads, float *m, float *v, int64_t count,
                                     const double *partial, int parts, double max_norm,
                                     const Update &update, float *norm_out) {
    const double norm = norm_of(partial, parts);
    if (blockIdx.x == 0 && threadIdx.x == 0) *norm_out = float(norm);
    // Keeps the norm's reciprocal finite.
    constexpr double CLIP_EPSILON = 1e-6;
    const float grad_scale = float(fmin(max_norm / (norm + CLIP_EPSILON), 1.0));
    update_all<VECTOR, true>(params, grads, m, v, count, grad_scale, isfinite(float(norm)), update);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_clipped_step(float *params, float *grads, float *m, float *v, int64_t count,
                 const double *partial, int parts, double max_norm,
                 const __grid_constant__ Update update, float *norm_out) {
    clip<4>(params, grads, m, v, count, partial, parts, max_norm, update, norm_out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_clipped_step_any(float *params, float *grads, float *m, float *v, int64_t count,
                     const double *partial, int parts, double max_norm,
                     const __grid_constant__ Update update, float *norm_out) {
    clip<1>(params, grads, m, v, count, partial, parts, max_norm, update, norm_out);
}

/// `destination += factor·source`, by vectors of 4 or, where they don't fit, by elements.
template <typename T, int VECTOR>
__device__ __forceinline__ void add_to(float *destination, const T *source, float factor,
                                       int64_t count) {
    const int64_t vectors = count / VECTOR;
    const int64_t first = int64_t(blockIdx.x) * (AHEAD * THREADS) + threadIdx.x;
    Vector<float, VECTOR> sum[AHEAD];
    Vector<T, VECTOR> more[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
            sum[k] = load_vector<VECTOR>(destination + vector * VECTOR);
            more[k] = load_vector<VECTOR>(source + vector * VECTOR);
        }
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        const int64_t vector = first + k * THREADS;
        if (vector < vectors) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[k].at[i] += factor * to_float(more[k].at[i]);
            store_vector(destination + vector * VECTOR, sum[k]);
        }
    }
    const int64_t i = vectors * VECTOR + threadIdx.x;
    if (VECTOR > 1 && blockIdx.x == 0 && i < count)
        destination[i] += factor * to_float(source[i]);
}

template <typename T>
__device__ __forceinline__ void accumulate(float *destination, const T *source, float factor,
                                           int64_t count) {
    follow_previous();
    add_to<T, 4>(destination, source, factor, count);
}

template <typename T>
__device__ __forceinline__ void accumulate_any(float *destination, const T *source, float factor,
                                               int64_t count) {
    follow_previous();
    add_to<T, 1>(destination, source, factor, count);
}

FOR_EACH_DTYPE(accumulate, THREADS,
               (float *destination, const T *source, float factor, int64_t count),
               (destination, source, factor, count))
FOR_EACH_DTYPE(accumulate_any, THREADS,
               (float *destination, const T *source, float factor, int64_t count),
               (destination, source, factor, count))
