// Several neighbouring elements that are loaded from and stored to global memory at once: 2, 4, 8 or 16
// bytes, at an address that is a multiple of that.
#pragma once

#include "common.cuh"

template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T at[N]; };

template <int BYTES> struct Bits;
template <> struct Bits<2> { using Type = unsigned short; };
template <> struct Bits<4> { using Type = unsigned; };
template <> struct Bits<8> { using Type = uint2; };
template <> struct Bits<16> { using Type = uint4; };

template <int N, typename T> __device__ __forceinline__ Vector<T, N> load_vector(const T *address) {
    using Type = typename Bits<sizeof(T) * N>::Type;
    const Type bits = *reinterpret_cast<const Type *>(address);
    return *reinterpret_cast<const Vector<T, N> *>(&bits);
}

template <typename T, int N>
__device__ __forceinline__ void store_vector(T *address, const Vector<T, N> &vector) {
    using Type = typename Bits<sizeof(T) * N>::Type;
    const Type bits = *reinterpret_cast<const Type *>(&vector);
    if constexpr (sizeof(Type) == 16) {
        // The compiler splits some plain stores into single elements.
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x),
                     "r"(bits.y), "r"(bits.z), "r"(bits.w)
                     : "memory");
    } else {
        *reinterpret_cast<Type *>(address) = bits;
    }
}
