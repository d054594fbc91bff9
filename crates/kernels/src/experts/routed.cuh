// What all kernels of experts that the device has chosen share: what they are given, and what biases they add.
#pragma once

#include "common.cuh"

/// Rows of an expert in the order of experts; none where there is no such tile.
struct SortedItem {
    int expert, first, rows, unused;
};

/// What kernels of units, and those of outputs, are given, of which some need only a part.
#define UNIT_PARAMETERS(T, ...)                                                                    \
    (const T *x, const __VA_ARGS__ *table, const T *const *biases, const SortedItem *items,        \
     const unsigned *tokens, const unsigned *chosen, T *y, int depth, int columns, int active,     \
     int activation)
#define DOWN_PARAMETERS(T, ...)                                                                    \
    (const T *unit, const __VA_ARGS__ *table, const T *const *biases, const SortedItem *items,     \
     const unsigned *chosen, T *y, int depth, int columns)

/// What is added to a column of an expert's layer. `biases` has three addresses of each expert, or is null.
template <typename T>
__device__ __forceinline__ float bias_of(const T *const *biases, int64_t expert, int layer, int column) {
    if (biases == nullptr) return 0.0f;
    const T *const bias = biases[3 * expert + layer];
    return bias == nullptr ? 0.0f : to_float(bias[column]);
}
