// Barriers in shared memory, and blocks that share theirs as a cluster, from Hopper on.
#pragma once

#include "async.cuh"

#if __CUDA_ARCH__ >= 900

/// A barrier in shared memory for phases of `count` arrivals.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// One arrival, of a thread that will have this many bytes brought.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

#define DEFINE_BARRIER_WAIT(name, order)                                                           \
    __device__ __forceinline__ void name(uint32_t barrier, int parity) {                           \
        uint32_t passed;                                                                           \
        do {                                                                                       \
            asm volatile("{\n.reg .pred p;\n"                                                      \
                         "mbarrier.try_wait.parity" order ".shared::cta.b64 p, [%1], %2;\n"        \
                         "selp.u32 %0, 1, 0, p;\n}\n"                                              \
                         : "=r"(passed)                                                            \
                         : "r"(barrier), "r"(parity)                                               \
                         : "memory");                                                              \
        } while (passed == 0);                                                                     \
    }

/// Waits until the phase of this parity is complete; the one before the first counts as parity 1.
DEFINE_BARRIER_WAIT(barrier_wait, "")
/// The same, where other blocks of the cluster told the barrier.
DEFINE_BARRIER_WAIT(barrier_wait_for_cluster, ".acquire.cluster")

#undef DEFINE_BARRIER_WAIT

/// Shows the barriers that this thread has made to the cluster, before it says that it has begun.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// This thread of the cluster has begun. Of what it wrote, others see only the barriers that it has fenced.
__device__ __forceinline__ void cluster_begin() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

/// Waits until all threads of the cluster have begun.
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ int cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// What `address` of this block's shared memory is in another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int block) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

/// Arrives at the barrier at the same place of block `block` of the cluster. What the thread read before
/// by products is read, so that it need not be fenced.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int block) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, block))
                 : "memory");
}

/// Waits until all warps of the cluster are here, each of whose threads calls it.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/// Writes into shared memory of a block of the cluster, to an address of `in_block`.
__device__ __forceinline__ void store_in_block(uint32_t to, float2 pair) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(pair.x), "f"(pair.y) : "memory");
}

/// Writes into shared memory of a block of the cluster, and tells a barrier of the same block of 4 bytes more.
/// Both are addresses of `in_block`.
__device__ __forceinline__ void store_and_tell(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
                 "f"(value), "r"(barrier)
                 : "memory");
}

#endif
