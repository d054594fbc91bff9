// Attention on CUDA. bf16 and f16 with head dimensions up to 256 that are multiples of 8 go to
// tensor cores, padded with zeros to 64, 96, 128 or 256; everything else to plain kernels.

#include "few_queries.cuh"
#include "forward.cuh"
#include "hopper_backward.cuh"
#include "hopper_backward_wide.cuh"
#include "plain.cuh"

#define FORWARD(element, d)                                                                        \
    extern "C" __global__ void __launch_bounds__(128)                                              \
        attention_forward_##element##_##d(const __grid_constant__ Parameters p) {                  \
        follow_previous();                                                                         \
        forward_tiles<element, d, (d) <= 128 ? 2 : 1, 4>(p);                                       \
    }
FOR_EACH_TILE_KERNEL(FORWARD)

#define BACKWARD_QUERIES(element, d)                                                               \
    extern "C" __global__ void __launch_bounds__(backward_rows(d) * 2, 1)                          \
        attention_backward_queries_##element##_##d(const __grid_constant__ Parameters p) {         \
        follow_previous();                                                                         \
        backward_tiles<element, d, QUERIES>(p);                                                    \
    }
FOR_EACH_TILE_KERNEL(BACKWARD_QUERIES)

// With 256 columns, dk and dv together are more than the registers hold: `z` says which.
#define BACKWARD_KEYS(element, d)                                                                  \
    extern "C" __global__ void __launch_bounds__(backward_rows(d) * 2, 1)                          \
        attention_backward_keys_##element##_##d(const __grid_constant__ Parameters p) {            \
        follow_previous();                                                                         \
        if constexpr ((d) <= 128) {                                                                \
            backward_tiles<element, d, KEYS>(p);                                                   \
        } else if (blockIdx.z == 0) {                                                              \
            backward_tiles<element, d, KEYS_FIRST>(p);                                             \
        } else {                                                                                   \
            backward_tiles<element, d, KEYS_SECOND>(p);                                            \
        }                                                                                          \
    }
FOR_EACH_TILE_KERNEL(BACKWARD_KEYS)

FOR_EACH_DTYPE(backward_rows_sums, 256, (const __grid_constant__ Parameters p), (p))
FOR_EACH_DTYPE(attention_backward_sinks, 256, (const __grid_constant__ Parameters p), (p))

extern "C" __global__ void __launch_bounds__(256)
    attention_backward_tile_ranges(const __grid_constant__ Parameters p, int size) {
    follow_previous();
    backward_tile_ranges(p, size);
}

#define FEW(element, d)                                                                            \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS)                                \
        attention_few_##element##_##d(const __grid_constant__ Parameters p) {                      \
        few_tiles<element, d>(p);                                                               \
    }
FOR_EACH_TILE_KERNEL(FEW)

FOR_EACH_DTYPE(plain_few, 128, (const __grid_constant__ Parameters p), (p))
FOR_EACH_DTYPE(combine_parts, 128, (const __grid_constant__ Parameters p), (p))

#define PLAIN(element, columns)                                                                    \
    extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 1)                                 \
        plain_forward_##columns##_##element(const __grid_constant__ Parameters p) {                \
        follow_previous();                                                                         \
        plain_forward<element, columns>(p);                                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 1)                                 \
        plain_backward_queries_##columns##_##element(const __grid_constant__ Parameters p) {       \
        follow_previous();                                                                         \
        plain_backward<element, columns, QUERIES>(p);                                              \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(PLAIN_THREADS, 1)                                 \
        plain_backward_keys_##columns##_##element(const __grid_constant__ Parameters p) {          \
        follow_previous();                                                                         \
        plain_backward<element, columns, KEYS>(p);                                                 \
    }
using f32 = float;
PLAIN(f32, 64)
PLAIN(f32, 128)
PLAIN(bf16, 64)
PLAIN(bf16, 128)
PLAIN(f16, 64)
PLAIN(f16, 128)

#if defined(HOPPER)
#define HOPPER_KERNEL(name)                                                                        \
    extern "C" __global__ void __launch_bounds__(HOPPER_THREADS, 1)                                \
        attention_hopper_##name(const __grid_constant__ Parameters p,                              \
                                const __grid_constant__ TmaDescriptors descriptors)

#define HOPPER_FORWARD(element, d)                                                                 \
    HOPPER_KERNEL(forward_##element##_##d) {                                                       \
        follow_previous();                                                                         \
        hopper_forward<element, d>(p, descriptors);                                                \
    }
HOPPER_FORWARD(bf16, 64)
HOPPER_FORWARD(bf16, 128)
HOPPER_FORWARD(bf16, 256)
HOPPER_FORWARD(f16, 64)
HOPPER_FORWARD(f16, 128)
HOPPER_FORWARD(f16, 256)

#define HOPPER_BACKWARD(element, d)                                                                \
    HOPPER_KERNEL(backward_queries_##element##_##d) {                                              \
        follow_previous();                                                                         \
        hopper_backward<element, d, QUERIES>(p, descriptors);                                      \
    }                                                                                              \
    HOPPER_KERNEL(backward_keys_##element##_##d) {                                                 \
        follow_previous();                                                                         \
        hopper_backward<element, d, KEYS>(p, descriptors);                                         \
    }
HOPPER_BACKWARD(bf16, 64)
HOPPER_BACKWARD(bf16, 128)
HOPPER_BACKWARD(f16, 64)
HOPPER_BACKWARD(f16, 128)

#define HOPPER_BACKWARD_WIDE(element)                                                              \
    HOPPER_KERNEL(backward_queries_##element##_256) {                                              \
        follow_previous();                                                                         \
        hopper_backward_wide<element, QUERIES>(p, descriptors);                                    \
    }                                                                                              \
    HOPPER_KERNEL(backward_keys_##element##_256) {                                                 \
        follow_previous();                                                                         \
        hopper_backward_wide<element, KEYS>(p, descriptors);                                       \
    }
HOPPER_BACKWARD_WIDE(bf16)
HOPPER_BACKWARD_WIDE(f16)

#define HOPPER_BACKWARD_AT_ONCE(element)                                                           \
    HOPPER_KERNEL(backward_at_once_##element) {                                                    \
        follow_previous();                                                                         \
        hopper_backward_at_once<element>(p, descriptors);                                          \
    }
HOPPER_BACKWARD_AT_ONCE(bf16)
HOPPER_BACKWARD_AT_ONCE(f16)

#define BACKWARD_ADD_PARTS(element)                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                              \
        attention_backward_add_parts_##element(const __grid_constant__ Parameters p) {             \
        backward_add_parts<element>(p);                                                            \
    }
BACKWARD_ADD_PARTS(bf16)
BACKWARD_ADD_PARTS(f16)
#endif
