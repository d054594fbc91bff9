// Copies from global into shared memory that go on while their thread does something else.
#pragma once

#include <stdint.h>

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Starts to copy 16 aligned bytes into shared memory; zeros when not `valid`, then nothing is
/// read.
__device__ __forceinline__ void copy_async(uint32_t target, const void *source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/// Like `copy_async`, of 4 bytes.
__device__ __forceinline__ void copy_async_word(uint32_t target, const void *source, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

/// Ends a group of this thread's copies.
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits for all but the latest `PENDING` groups of this thread's copies.
template <int PENDING> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
