// The passes of Muon over flat parameters, see mod.rs for the formulas; its products are other operations.
#include "flat.cuh"

/// What is the same for all elements of one step, as in cpu.rs.
struct Muon {
    static constexpr int STATES = 2;
    float decay, momentum, one_minus_momentum, nesterov;

    __device__ __forceinline__ void step(float &p, float *state, float g, bool decays) const {
        float &m = state[0], &update = state[1];
        m += (g - m) * one_minus_momentum;
        update = nesterov != 0.0f ? g + (m - g) * momentum : m;
        if (decays) p *= decay;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    muon_step(const __grid_constant__ Buffers buffers, float grad_scale,
              const __grid_constant__ Muon rule) {
    update_all<4, true>(buffers, {true, grad_scale}, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    muon_step_any(const __grid_constant__ Buffers buffers, float grad_scale,
                  const __grid_constant__ Muon rule) {
    update_all<1, true>(buffers, {true, grad_scale}, rule);
}

/// `x ← x / max(‖x‖, ε)`, with the norm in parts.
extern "C" __global__ void __launch_bounds__(THREADS)
    muon_normalize(float *x, int64_t count, const double *partial, int parts, float epsilon) {
    const float norm = fmaxf(float(norm_of(partial, parts)), epsilon);
    const int64_t stride = int64_t(gridDim.x) * THREADS;
    for (int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x; i < count; i += stride)
        x[i] /= norm;
}
