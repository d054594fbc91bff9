// Functions of numbers. Those of real numbers are there for float and half, where half is computed
// in float and rounded once; fast:: and precise:: are for float and give the host's results.
#pragma once
#include "types.h"

namespace metal {
#define MSL_IN_NAMESPACE(space, name, parameters, arguments, vectors)                             \
  namespace space {                                                                               \
  MSL_INLINE float name parameters { return metal::name arguments; }                              \
  template <int N> MSL_INLINE vec<float, N> name vectors { return metal::name arguments; }        \
  }
#define MSL_FAST_AND_PRECISE(name, parameters, arguments, vectors)                                \
  MSL_IN_NAMESPACE(fast, name, parameters, arguments, vectors)                                    \
  MSL_IN_NAMESPACE(precise, name, parameters, arguments, vectors)
#define MSL_ONE(name, body)                                                                       \
  MSL_INLINE float name(float x) { return body; }                                                 \
  MSL_INLINE half name(half x) { return half(name(float(x))); }                                   \
  template <class T, int N> MSL_INLINE vec<T, N> name(vec<T, N> x) {                              \
    for (int i = 0; i < N; i++) x.at[i] = name(x.at[i]);                                          \
    return x;                                                                                     \
  }                                                                                               \
  MSL_FAST_AND_PRECISE(name, (float x), (x), (vec<float, N> x))
#define MSL_TWO(name, body)                                                                       \
  MSL_INLINE float name(float x, float y) { return body; }                                        \
  MSL_INLINE half name(half x, half y) { return half(name(float(x), float(y))); }                 \
  template <class T, int N> MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y) {                 \
    for (int i = 0; i < N; i++) x.at[i] = name(x.at[i], y.at[i]);                                 \
    return x;                                                                                     \
  }                                                                                               \
  MSL_FAST_AND_PRECISE(name, (float x, float y), (x, y), (vec<float, N> x, vec<float, N> y))
#define MSL_THREE(name, body)                                                                     \
  MSL_INLINE float name(float x, float y, float z) { return body; }                               \
  MSL_INLINE half name(half x, half y, half z) { return half(name(float(x), float(y), float(z))); } \
  template <class T, int N>                                                                       \
  MSL_INLINE vec<T, N> name(vec<T, N> x, vec<T, N> y, vec<T, N> z) {                              \
    for (int i = 0; i < N; i++) x.at[i] = name(x.at[i], y.at[i], z.at[i]);                        \
    return x;                                                                                     \
  }                                                                                               \
  MSL_FAST_AND_PRECISE(name, (float x, float y, float z), (x, y, z),                              \
                       (vec<float, N> x, vec<float, N> y, vec<float, N> z))
MSL_ONE(exp, __builtin_expf(x))
MSL_ONE(exp2, __builtin_exp2f(x))
MSL_ONE(exp10, __builtin_powf(10.0f, x))
MSL_ONE(log, __builtin_logf(x))
MSL_ONE(log2, __builtin_log2f(x))
MSL_ONE(log10, __builtin_log10f(x))
MSL_ONE(sqrt, __builtin_sqrtf(x))
MSL_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_ONE(sin, __builtin_sinf(x))
MSL_ONE(cos, __builtin_cosf(x))
MSL_ONE(tan, __builtin_tanf(x))
MSL_ONE(sinpi, float(__builtin_sin(3.14159265358979323846 * x)))
MSL_ONE(cospi, float(__builtin_cos(3.14159265358979323846 * x)))
MSL_ONE(sinh, __builtin_sinhf(x))
MSL_ONE(cosh, __builtin_coshf(x))
MSL_ONE(tanh, __builtin_tanhf(x))
MSL_ONE(asin, __builtin_asinf(x))
MSL_ONE(acos, __builtin_acosf(x))
MSL_ONE(atan, __builtin_atanf(x))
MSL_ONE(asinh, __builtin_asinhf(x))
MSL_ONE(acosh, __builtin_acoshf(x))
MSL_ONE(atanh, __builtin_atanhf(x))
MSL_ONE(floor, __builtin_floorf(x))
MSL_ONE(ceil, __builtin_ceilf(x))
MSL_ONE(trunc, __builtin_truncf(x))
MSL_ONE(round, __builtin_roundf(x))
MSL_ONE(rint, __builtin_rintf(x))
MSL_ONE(fract, x - __builtin_floorf(x))
MSL_ONE(fabs, __builtin_fabsf(x))
MSL_ONE(saturate, x > 0.0f ? (x > 1.0f ? 1.0f : x) : 0.0f)
MSL_ONE(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
MSL_TWO(pow, __builtin_powf(x, y))
MSL_TWO(powr, __builtin_powf(x, y))
MSL_TWO(atan2, __builtin_atan2f(x, y))
MSL_TWO(fmod, __builtin_fmodf(x, y))
MSL_TWO(copysign, __builtin_copysignf(x, y))
MSL_TWO(fmin, __builtin_fminf(x, y))
MSL_TWO(fmax, __builtin_fmaxf(x, y))
MSL_TWO(step, y < x ? 0.0f : 1.0f)
MSL_TWO(divide, x / y)
MSL_THREE(fma, __builtin_fmaf(x, y, z))
MSL_THREE(mix, x + (y - x) * z)
#undef MSL_ONE
#undef MSL_TWO
#undef MSL_THREE
#undef MSL_IN_NAMESPACE
#undef MSL_FAST_AND_PRECISE

MSL_INLINE float sincos(float x, float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
template <class T> MSL_INLINE bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T> MSL_INLINE bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T> MSL_INLINE bool isfinite(T x) { return __builtin_isfinite(float(x)); }

// Where one of two is NaN, the result is the other.
template <class T> MSL_INLINE msl::if_functions<T> min(T a, T b) {
  return b < a ? b : a != a ? b : a;
}
template <class T> MSL_INLINE msl::if_functions<T> max(T a, T b) {
  return a < b ? b : a != a ? b : a;
}
template <class T> MSL_INLINE msl::if_functions<T> min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T> MSL_INLINE msl::if_functions<T> max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> MSL_INLINE msl::if_functions<T> clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T> MSL_INLINE msl::if_functions<T> abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> MSL_INLINE msl::if_number<T> select(T a, T b, bool c) { return c ? b : a; }

#define MSL_COMPONENTS(name)                                                   \
  template <class T, int N> MSL_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; i++) a.at[i] = name(a.at[i], b.at[i]);              \
    return a;                                                                  \
  }
MSL_COMPONENTS(min) MSL_COMPONENTS(max)
#undef MSL_COMPONENTS
template <class T, int N>
MSL_INLINE vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N> MSL_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return clamp(x, vec<T, N>(low), vec<T, N>(high));
}
template <class T, int N> MSL_INLINE vec<T, N> abs(vec<T, N> x) {
  for (int i = 0; i < N; i++) x.at[i] = abs(x.at[i]);
  return x;
}
template <class T, int N>
MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  for (int i = 0; i < N; i++)
    if (c.at[i]) a.at[i] = b.at[i];
  return a;
}
template <class T, int N> MSL_INLINE T length_squared(vec<T, N> x) { return dot(x, x); }
template <class T, int N> MSL_INLINE T length(vec<T, N> x) { return sqrt(dot(x, x)); }
template <int N> MSL_INLINE bool any(vec<bool, N> x) {
  for (int i = 0; i < N; i++)
    if (x.at[i]) return true;
  return false;
}
template <int N> MSL_INLINE bool all(vec<bool, N> x) {
  for (int i = 0; i < N; i++)
    if (!x.at[i]) return false;
  return true;
}
namespace fast {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace fast
namespace precise {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace precise

MSL_INLINE uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
MSL_INLINE uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
MSL_INLINE uint popcount(uint x) { return uint(__builtin_popcount(x)); }
MSL_INLINE ulong popcount(ulong x) { return ulong(__builtin_popcountl(x)); }
MSL_INLINE uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
MSL_INLINE int mulhi(int a, int b) { return int((long(a) * b) >> 32); }
template <class T> MSL_INLINE msl::if_integer<T> rotate(T x, T n) {
  typedef typename std::make_unsigned<T>::type U;
  const uint bits = sizeof(T) * 8, by = uint(n) & (bits - 1);
  return by ? T(U(U(x) << by) | U(U(x) >> (bits - by))) : x;
}
template <class T> MSL_INLINE msl::if_integer<T> extract_bits(T x, uint offset, uint count) {
  typedef typename std::make_unsigned<T>::type U;
  const uint bits = sizeof(T) * 8;
  return count == 0 ? T(0) : T(T(U(x) << (bits - count - offset)) >> (bits - count));
}
}  // namespace metal
