// One step of stochastic gradient descent over flat parameters, see mod.rs for the formulas.
#include "flat.cuh"

/// What is the same for all elements of one step, as in cpu.rs.
struct Constants {
    float learning_rate, weight_decay, momentum, share, nesterov;
};

/// Without momentum.
struct Plain : Constants {
    static constexpr int STATES = 0;

    __device__ __forceinline__ void step(float &p, float *, float g, bool decays) const {
        if (decays) g += weight_decay * p;
        p -= learning_rate * g;
    }
};

struct Momentum : Constants {
    static constexpr int STATES = 1;

    __device__ __forceinline__ void step(float &p, float *state, float g, bool decays) const {
        float &v = state[0];
        if (decays) g += weight_decay * p;
        v = momentum * v + share * g;
        p -= learning_rate * (nesterov != 0.0f ? g + momentum * v : v);
    }
};

CLIPPED_STEP(sgd_plain, Plain)
CLIPPED_STEP(sgd, Momentum)
