// One step of AdamW over flat parameters, see mod.rs for the formulas.
#include "adamw.cuh"

CLIPPED_STEP(adamw, AdamW)

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_step(const __grid_constant__ Buffers buffers, float grad_scale,
               const __grid_constant__ AdamW rule) {
    update_all<4, false>(buffers, {true, grad_scale}, rule);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_step_any(const __grid_constant__ Buffers buffers, float grad_scale,
                   const __grid_constant__ AdamW rule) {
    update_all<1, false>(buffers, {true, grad_scale}, rule);
}
