// Boxes of a tensor that Hopper's tensor memory accelerator (TMA) moves by itself between global and shared
// memory, where their lines of 128 bytes lie as `describe_tile` in warpgroup.cuh has it. What of a box
// lies beyond the tensor is zeros when it is read, and isn't written.
#pragma once

#include "warpgroup.cuh"

/// Where a tensor lies and which boxes of it are moved, as the driver tells the hardware; as in tma.rs.
struct alignas(128) TmaDescriptor {
    uint64_t words[16];
};

#if defined(HOPPER)

/// Brings the box of a matrix from column x of row y on.
__device__ __forceinline__ void load_box(uint32_t to, const TmaDescriptor &descriptor, int x, int y,
                                         uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&descriptor), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

/// Brings it to the same place of all `BLOCKS` blocks of the cluster, and tells the barriers of all.
template <int BLOCKS>
__device__ __forceinline__ void load_box_for_all(uint32_t to, const TmaDescriptor &descriptor, int x, int y,
                                                 uint32_t barrier) {
    constexpr uint16_t ALL = (1 << BLOCKS) - 1;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&descriptor), "r"(x), "r"(y), "r"(barrier), "h"(ALL)
                 : "memory");
}

/// Brings the box of a tensor of four dimensions from there on.
__device__ __forceinline__ void load_box(uint32_t to, const TmaDescriptor &descriptor, int x, int y,
                                         int z, int w, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(&descriptor), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
                 : "memory");
}

/// Brings neighbouring bytes, a multiple of 16 at such addresses.
__device__ __forceinline__ void load_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_box(const TmaDescriptor &descriptor, int x, int y, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                     &descriptor),
                 "r"(x), "r"(y), "r"(from)
                 : "memory");
}

/// Ends a group of what this thread has stored or added.
__device__ __forceinline__ void store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until all but the latest `PENDING` groups are read, so that their place may be written.
template <int PENDING> __device__ __forceinline__ void store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/// Waits until all but the latest `PENDING` groups are in global memory.
template <int PENDING> __device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
