// One step of AdamW with moments of 8 bits, see mod.rs for the formulas. A block of threads has a block of
// elements at a time, a thread one of them.
#include "adamw.cuh"

constexpr int BLOCK = 256, LEVELS = 256;
static_assert(BLOCK == THREADS && LEVELS == THREADS, "a thread has one element, and one level to load");

/// The levels of signed codes and of unsigned ones, each in ascending order.
struct Levels {
    float of_sign[LEVELS], without[LEVELS];
};

/// The code of the level that is nearest to `share`, the lower of two.
__device__ __forceinline__ uint8_t nearest(float share, const float *levels) {
    int low = 0, high = LEVELS - 1;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const int middle = (low + high) / 2;
        if (share > levels[middle])
            low = middle;
        else
            high = middle;
    }
    return fabsf(share - levels[low]) <= fabsf(levels[high] - share) ? low : high;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw8bit_step(float *params, float *grads, uint8_t *m_codes, uint8_t *v_codes, float *m_scales,
                   float *v_scales, int64_t count, float grad_scale,
                   const __grid_constant__ AdamW rule, const __grid_constant__ Levels levels) {
    __shared__ float of_sign[LEVELS], without[LEVELS], scratch[32];
    of_sign[threadIdx.x] = levels.of_sign[threadIdx.x];
    without[threadIdx.x] = levels.without[threadIdx.x];
    __syncthreads();
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const int64_t i = block * BLOCK + threadIdx.x;
        const bool has = i < count;
        float moments[2] = {0.0f, 0.0f};
        if (has) {
            moments[0] = of_sign[m_codes[i]] * m_scales[block];
            moments[1] = without[v_codes[i]] * v_scales[block];
            float p = params[i];
            rule.step(p, moments, grads[i] * grad_scale, true);
            params[i] = p;
            grads[i] = 0.0f;
        }
        // Nobody reads the scales any more once all threads have come here.
        const float m_most = block_max(fabsf(moments[0]), scratch);
        const float v_most = block_max(fabsf(moments[1]), scratch);
        if (has) {
            m_codes[i] = nearest(m_most > 0.0f ? moments[0] / m_most : 0.0f, of_sign);
            v_codes[i] = nearest(v_most > 0.0f ? moments[1] / v_most : 0.0f, without);
        }
        if (threadIdx.x == 0) {
            m_scales[block] = m_most;
            v_scales[block] = v_most;
        }
    }
}
