// What only Hopper (sm_90a) has: products of whole warpgroups that read shared memory by
// themselves, and moving registers between warpgroups. `HOPPER` is defined where it is there to be
// used.
//
// A warpgroup, four warps, multiplies a 64 x 16 A by a 16 x N B into a 64 x N C of f32 (32 deep for e4m3). Warp `w`
// holds rows `16·w` to `16·w + 15` of C, and of A when that is in registers, as tensor.cuh
// describes for one warp and every eight columns. Products run on their own: `warpgroup_fence`
// comes before the first one, and between other uses of its registers and the next one;
// `warpgroup_commit` ends a group of them, `warpgroup_wait` waits for groups, and `warpgroup_hold`
// of the registers has to follow. What other threads wrote to shared memory has to be shown by
// `fence_shared_writes` before the barrier that says it is there.
#pragma once

#include "barrier.cuh"
#include "tensor.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER

/// An 8-bit float with 4 bits of exponent and 3 of mantissa, whose tiles have their lines along the depth.
struct e4m3;

/// Describes a tile of 2-byte elements in shared memory, in panels of 64 elements (128 bytes) a
/// line (or of 1-byte elements in lines of 128), whose chunk `c` of line `r` lies at place `c ^ r % 8`, from a multiple of 1024 bytes on.
/// When lines run across the depth, there are `panel` bytes from one panel to the next; when along
/// it, one panel is described and `panel` means nothing.
__device__ __forceinline__ uint64_t describe_tile(uint32_t address, uint32_t panel) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_LINES = 1024 >> 4;
    return SWIZZLE_128 | EIGHT_LINES << 32 | static_cast<uint64_t>((panel & 0x3ffff) >> 4) << 16 |
           (address & 0x3ffff) >> 4;
}

/// The tile that starts `bytes` further on in the same place.
__device__ __forceinline__ uint64_t moved_tile(uint64_t tile, uint32_t bytes) {
    return tile >> 32 << 32 | (static_cast<uint32_t>(tile) + (bytes >> 4));
}

__device__ __forceinline__ void warpgroup_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits for all but the latest `PENDING` groups.
template <int PENDING> __device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/// Keeps the compiler from moving other uses of registers across a product that runs on its own.
template <int N> __device__ __forceinline__ void warpgroup_hold(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

/// `c = a·b`, or `c += a·b` with `add`, for A and B in shared memory with lines across the depth, where
/// `B_ACROSS` and `A_ACROSS` say so, or else along it.
template <typename T, int N, bool B_ACROSS = false, bool A_ACROSS = false>
__device__ __forceinline__ void warpgroup_multiply(float (&c)[N / 8][4], uint64_t a, uint64_t b,
                                                   bool add);
/// `c += a·b` for A in registers and B with lines across the depth in shared memory.
template <typename T, int N>
__device__ __forceinline__ void warpgroup_multiply_add(float (&c)[N / 8][4], const uint32_t (&a)[4],
                                                       uint64_t b);

#define ACCUMULATOR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ACCUMULATORS_8(n)                                                                          \
    ACCUMULATOR(n), ACCUMULATOR(n + 1), ACCUMULATOR(n + 2), ACCUMULATOR(n + 3),                    \
        ACCUMULATOR(n + 4), ACCUMULATOR(n + 5), ACCUMULATOR(n + 6), ACCUMULATOR(n + 7)
#define REGISTERS_32                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REGISTERS_64                                                                               \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_128                                                                              \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define REGISTERS_192                                                                              \
    REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "  \
                  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, "    \
                  "%94, %95"
#define REGISTERS_224                                                                              \
    REGISTERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, "   \
                  "%109, %110, %111"
#define REGISTERS_256                                                                              \
    REGISTERS_224 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "     \
                  "%124, %125, %126, %127"

#define DEFINE_WARPGROUP_MULTIPLY_64(element, name)                                                \
    template <>                                                                                    \
    __device__ __forceinline__ void warpgroup_multiply<element, 64>(                               \
        float (&c)[64 / 8][4], uint64_t a, uint64_t b, bool add) {                                 \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "setp.ne.b32 p, %34, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" REGISTERS_64 \
                     "}, %32, %33, p, 1, 1, 0, 0;\n}\n"                                            \
                     : ACCUMULATORS_8(0)                                                           \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                \
    }                                                                                              \
    template <>                                                                                    \
    __device__ __forceinline__ void warpgroup_multiply<element, 64, true, true>(                   \
        float (&c)[64 / 8][4], uint64_t a, uint64_t b, bool add) {                                 \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "setp.ne.b32 p, %34, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" REGISTERS_64 \
                     "}, %32, %33, p, 1, 1, 1, 1;\n}\n"                                            \
                     : ACCUMULATORS_8(0)                                                           \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                \
    }                                                                                              \
    template <>                                                                                    \
    __device__ __forceinline__ void warpgroup_multiply_add<element, 64>(                           \
        float (&c)[64 / 8][4], const uint32_t (&a)[4], uint64_t b) {                               \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "setp.ne.b32 p, %37, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {" REGISTERS_64 \
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                              \
                     : ACCUMULATORS_8(0)                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                \
    }
DEFINE_WARPGROUP_MULTIPLY_64(bf16, "bf16")
DEFINE_WARPGROUP_MULTIPLY_64(f16, "f16")

#define DEFINE_WARPGROUP_MULTIPLY_ADD_128(element, name)                                           \
    template <>                                                                                    \
    __device__ __forceinline__ void warpgroup_multiply_add<element, 128>(                          \
        float (&c)[128 / 8][4], const uint32_t (&a)[4], uint64_t b) {                              \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "setp.ne.b32 p, %69, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name                  \
                     " {" REGISTERS_128 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"           \
                     : ACCUMULATORS_8(0), ACCUMULATORS_8(8)                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                \
    }
DEFINE_WARPGROUP_MULTIPLY_ADD_128(bf16, "bf16")
DEFINE_WARPGROUP_MULTIPLY_ADD_128(f16, "f16")

#define ACCUMULATORS_32 ACCUMULATOR(0), ACCUMULATOR(1), ACCUMULATOR(2), ACCUMULATOR(3)
#define ACCUMULATORS_128 ACCUMULATORS_8(0), ACCUMULATORS_8(8)
#define ACCUMULATORS_192 ACCUMULATORS_128, ACCUMULATORS_8(16)
#define ACCUMULATORS_224                                                                           \
    ACCUMULATORS_192, ACCUMULATOR(24), ACCUMULATOR(25), ACCUMULATOR(26), ACCUMULATOR(27)
#define ACCUMULATORS_256 ACCUMULATORS_192, ACCUMULATORS_8(24)

/// Of `n` columns, whose accumulators are the operands before those of A and B, and `flag` comes after these.
#define DEFINE_WARPGROUP_MULTIPLY(n, element, name, across, transposed, a_at, b_at, flag)          \
    template <>                                                                                    \
    __device__ __forceinline__ void warpgroup_multiply<element, n, across>(                        \
        float (&c)[n / 8][4], uint64_t a, uint64_t b, bool add) {                                  \
        asm volatile("{\n.reg .pred p;\n"                                                          \
                     "setp.ne.b32 p, %" flag ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name               \
                     " {" REGISTERS_##n "}, %" a_at ", %" b_at ", p, 1, 1, 0, " transposed ";\n}\n" \
                     : ACCUMULATORS_##n                                                            \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                \
    }
#define DEFINE_WARPGROUP_MULTIPLIES(element, name)                                                 \
    DEFINE_WARPGROUP_MULTIPLY(32, element, name, false, "0", "16", "17", "18")                     \
    DEFINE_WARPGROUP_MULTIPLY(128, element, name, false, "0", "64", "65", "66")                    \
    DEFINE_WARPGROUP_MULTIPLY(128, element, name, true, "1", "64", "65", "66")                     \
    DEFINE_WARPGROUP_MULTIPLY(192, element, name, false, "0", "96", "97", "98")                    \
    DEFINE_WARPGROUP_MULTIPLY(192, element, name, true, "1", "96", "97", "98")                     \
    DEFINE_WARPGROUP_MULTIPLY(224, element, name, false, "0", "112", "113", "114")                 \
    DEFINE_WARPGROUP_MULTIPLY(256, element, name, false, "0", "128", "129", "130")                 \
    DEFINE_WARPGROUP_MULTIPLY(256, element, name, true, "1", "128", "129", "130")
DEFINE_WARPGROUP_MULTIPLIES(bf16, "bf16")
DEFINE_WARPGROUP_MULTIPLIES(f16, "f16")

template <>
__device__ __forceinline__ void warpgroup_multiply<e4m3, 256>(float (&c)[256 / 8][4], uint64_t a,
                                                              uint64_t b, bool add) {
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" REGISTERS_256
                 "}, %128, %129, p, 1, 1;\n}\n"
                 : ACCUMULATORS_8(0), ACCUMULATORS_8(8), ACCUMULATORS_8(16), ACCUMULATORS_8(24)
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

/// The inverse of `load_tiles`.
__device__ __forceinline__ void store_tiles(uint32_t address, const uint32_t (&tiles)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(tiles[0]), "r"(tiles[1]), "r"(tiles[2]), "r"(tiles[3])
                 : "memory");
}

/// Gives registers of this warpgroup back, down to `COUNT` a thread, for others to take.
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/// Shows this thread's writes to shared memory to products.
__device__ __forceinline__ void fence_shared_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// The next of stages that are used over and over, and the parity of its barriers' phases.
template <int STAGES> __device__ __forceinline__ void next_stage(int &stage, int &parity) {
    if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
    }
}

/// A barrier for `COUNT` threads of a block, `name` from 1 to 15.
template <int COUNT> __device__ __forceinline__ void named_barrier(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(COUNT) : "memory");
}

#endif
