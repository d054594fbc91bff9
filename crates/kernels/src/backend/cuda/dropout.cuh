// The dropout mask: a hash of the seed and the element's index, the same bits as on the CPU.
#pragma once

#include "common.cuh"

/// The `index`-th number of the SplitMix64 generator (Steele, Lea and Flood 2014).
__device__ __forceinline__ uint64_t splitmix(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/// Whether the element is dropped. The threshold is the probability times 2³².
__device__ __forceinline__ bool dropped(uint64_t seed, uint64_t index, uint32_t threshold) {
    return static_cast<uint32_t>(splitmix(seed, index) >> 32) < threshold;
}
