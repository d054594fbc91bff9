// Copies: to another dtype, of any layout, and into a part of a tensor.
#include "common.metal.h"

template <typename From, typename To>
[[kernel]] void cast_to(device const From *x [[buffer(0)]], device To *out [[buffer(1)]],
                        constant ulong &count [[buffer(2)]], PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < count) out[i] = static_cast<To>(float(x[i]));
    }
}

/// `dimensions` sizes and strides, the last dimension first. A thread has an element of the result.
template <typename T>
[[kernel]] void copy_strided(device const T *x [[buffer(0)]], device T *out [[buffer(1)]],
                             constant uint *sizes [[buffer(2)]],
                             constant ulong *strides [[buffer(3)]],
                             constant uint &dimensions [[buffer(4)]],
                             constant uint &count [[buffer(5)]], PLACE) {
    const uint i = group.x * threads.x + own.x;
    if (i >= count) return;
    uint rest = i;
    ulong from = 0;
    for (uint d = 0; d < dimensions; d++) {
        from += rest % sizes[d] * strides[d];
        rest /= sizes[d];
    }
    out[i] = x[from];
}

/// Row `group.y` of a contiguous part, `width` elements, into rows that are `pitch` elements apart.
template <typename T>
[[kernel]] void copy_rows(device const T *part [[buffer(0)]], device T *whole [[buffer(1)]],
                          constant ulong &width [[buffer(2)]], constant ulong &pitch [[buffer(3)]],
                          PLACE) {
    const ulong start = ulong(group.x) * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const ulong i = start + k * threads.x;
        if (i < width) whole[group.y * pitch + i] = part[group.y * width + i];
    }
}

/// Row `group.y` of `(tokens, heads, head_dim)`, `width` elements, found by the strides of tokens and heads,
/// becomes that of its place among `room` rows, if it is one of them.
template <typename T>
[[kernel]] void write_rows(device const T *rows [[buffer(0)]],
                           device const uint *places [[buffer(1)]], device T *pool [[buffer(2)]],
                           constant ulong *strides [[buffer(3)]],
                           constant uint &head_dim [[buffer(4)]],
                           constant uint &width [[buffer(5)]], constant uint &room [[buffer(6)]],
                           PLACE) {
    const uint place = places[group.y];
    if (place >= room) return;
    const uint start = group.x * threads.x * AHEAD + own.x;
    for (uint k = 0; k < AHEAD; k++) {
        const uint i = start + k * threads.x;
        if (i < width)
            pool[ulong(place) * width + i] =
                rows[group.y * strides[0] + i / head_dim * strides[1] + i % head_dim];
    }
}

#define CAST(from, From, to, To)                                                                   \
    template [[host_name("cast_" #from "_" #to)]] [[kernel]] decltype(cast_to<From, To>)           \
        cast_to<From, To>;
CAST(f32, float, f16, half)
CAST(f32, float, bf16, bfloat)
CAST(f16, half, f32, float)
CAST(f16, half, bf16, bfloat)
CAST(bf16, bfloat, f32, float)
CAST(bf16, bfloat, f16, half)

/// By the size of an element in bytes.
#define FOR_EACH_SIZE(name)                                                                        \
    template [[host_name(#name "_1")]] [[kernel]] decltype(name<uchar>) name<uchar>;               \
    template [[host_name(#name "_2")]] [[kernel]] decltype(name<ushort>) name<ushort>;             \
    template [[host_name(#name "_4")]] [[kernel]] decltype(name<uint>) name<uint>;                 \
    template [[host_name(#name "_8")]] [[kernel]] decltype(name<ulong>) name<ulong>;
FOR_EACH_SIZE(copy_strided)
FOR_EACH_SIZE(copy_rows)
template [[host_name("write_rows_2")]] [[kernel]] decltype(write_rows<ushort>) write_rows<ushort>;
template [[host_name("write_rows_4")]] [[kernel]] decltype(write_rows<uint>) write_rows<uint>;
