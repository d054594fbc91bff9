// One step of Lion over flat parameters, see mod.rs for the formulas.
#include "flat.cuh"

/// What is the same for all elements of one step, as in cpu.rs.
struct Lion {
    static constexpr int STATES = 1;
    float learning_rate, decay, beta1, one_minus_beta1, beta2, one_minus_beta2;

    __device__ __forceinline__ void step(float &p, float *state, float g, bool decays) const {
        float &m = state[0];
        const float c = beta1 * m + one_minus_beta1 * g;
        m = beta2 * m + one_minus_beta2 * g;
        const float sign = float(c > 0.0f) - float(c < 0.0f);
        p = p * (decays ? decay : 1.0f) - learning_rate * sign;
    }
};

CLIPPED_STEP(lion, Lion)
