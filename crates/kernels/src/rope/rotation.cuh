// A rotated pair of elements, see mod.rs for the formulas.
#pragma once

#include "common.cuh"

/// With its roundings spelled out, so that it has the same bits wherever it is made.
__device__ __forceinline__ float2 rotated_pair(float x1, float x2, float cosine, float sine) {
    return make_float2(__fmaf_rn(x1, cosine, -__fmul_rn(x2, sine)),
                       __fmaf_rn(x2, cosine, __fmul_rn(x1, sine)));
}
