// Scalars, vectors and matrices of the Metal Shading Language, and what it tells about types.
#pragma once
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "runtime.h"

#define METAL_FUNC inline
#define MAXFLOAT 3.40282347e+38f
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.19209290e-7f
#define HALF_MAX half(65504.0f)
#define HALF_MIN half(6.103515625e-5f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace msl {
template <class T> struct is_half : std::is_same<T, half> {};
template <class T> struct is_bfloat : std::is_same<T, bfloat> {};
template <class T>
constexpr bool is_number = std::is_arithmetic<T>::value || is_half<T>::value || is_bfloat<T>::value;
// Metal's own functions know no bfloat.
template <class T> constexpr bool has_functions = is_number<T> && !is_bfloat<T>::value;
template <class T> constexpr bool is_real =
    std::is_floating_point<T>::value || is_half<T>::value || is_bfloat<T>::value;

template <class T> using if_number = typename std::enable_if<is_number<T>, T>::type;
template <class T> using if_functions = typename std::enable_if<has_functions<T>, T>::type;
template <class T>
using if_integer = typename std::enable_if<std::is_integral<T>::value, T>::type;

// The compiler has no conversion between half and bfloat.
template <class To, class From> constexpr To convert(From from, std::true_type) {
  return static_cast<To>(static_cast<float>(from));
}
template <class To, class From> constexpr To convert(From from, std::false_type) {
  return static_cast<To>(from);
}
template <class To, class From> constexpr To convert(From from) {
  return convert<To>(
      from, std::integral_constant<bool, (is_half<To>::value && is_bfloat<From>::value) ||
                                             (is_bfloat<To>::value && is_half<From>::value)>());
}
template <class To, class From> constexpr To cast(From&& from, std::true_type) {
  return convert<To>(typename std::decay<From>::type(from));
}
template <class To, class From> constexpr To cast(From&& from, std::false_type) {
  return static_cast<To>(static_cast<From&&>(from));
}
// static_cast, also between half and bfloat.
template <class To, class From> constexpr To cast(From&& from) {
  return cast<To>(
      static_cast<From&&>(from),
      std::integral_constant<bool, is_number<To> && is_number<typename std::decay<From>::type>>());
}
}  // namespace msl

namespace metal {
using std::conditional;
using std::declval;
using std::enable_if;
using std::false_type;
using std::integral_constant;
using std::is_integral;
using std::is_pointer;
using std::is_same;
using std::is_signed;
using std::is_unsigned;
using std::make_signed;
using std::make_unsigned;
using std::remove_const;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;
template <bool B, class T = void> using enable_if_t = typename std::enable_if<B, T>::type;
template <bool B, class T, class F> using conditional_t = typename std::conditional<B, T, F>::type;
template <class A, class B> constexpr bool is_same_v = std::is_same<A, B>::value;
template <class T> constexpr bool is_integral_v = std::is_integral<T>::value;
template <class T> constexpr bool is_signed_v = std::is_signed<T>::value;
template <class T> struct is_floating_point : std::integral_constant<bool, msl::is_real<T>> {};
template <class T> struct is_arithmetic : std::integral_constant<bool, msl::is_number<T>> {};
template <class T> constexpr bool is_floating_point_v = msl::is_real<T>;
template <class T> constexpr bool is_arithmetic_v = msl::is_number<T>;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <class T, uint16_t Max, uint16_t Min, uint16_t Epsilon, uint16_t Infinity, uint16_t Nan>
struct small_limits {
  static constexpr bool is_specialized = true;
  static constexpr T of(uint16_t bits) { return __builtin_bit_cast(T, bits); }
  static constexpr T max() { return of(Max); }
  static constexpr T lowest() { return of(Max | 0x8000); }
  static constexpr T min() { return of(Min); }
  static constexpr T epsilon() { return of(Epsilon); }
  static constexpr T infinity() { return of(Infinity); }
  static constexpr T quiet_NaN() { return of(Nan); }
};
template <>
struct numeric_limits<half> : small_limits<half, 0x7bff, 0x0400, 0x1400, 0x7c00, 0x7e00> {};
template <>
struct numeric_limits<bfloat> : small_limits<bfloat, 0x7f7f, 0x0080, 0x3c00, 0x7f80, 0x7fc0> {};

template <class T, int N> struct vec;
}  // namespace metal

namespace msl {
template <class T> struct components {
  static constexpr int count = 1;
};
template <class T, int N> struct components<metal::vec<T, N>> {
  static constexpr int count = N;
};
constexpr int sum() { return 0; }
template <class... R> constexpr int sum(int first, R... rest) { return first + sum(rest...); }

template <class T, int N> struct Storage;
template <class T, int N> struct PackedStorage;
#define MSL_STORAGE(name, count, places, alignment, ...)                       \
  template <class T> struct alignment name<T, count> {                         \
    union {                                                                    \
      T at[places];                                                            \
      struct {                                                                 \
        T __VA_ARGS__;                                                         \
      };                                                                       \
    };                                                                         \
  };
MSL_STORAGE(Storage, 2, 2, alignas(2 * sizeof(T)), x, y)
MSL_STORAGE(Storage, 3, 4, alignas(4 * sizeof(T)), x, y, z)
MSL_STORAGE(Storage, 4, 4, alignas(4 * sizeof(T)), x, y, z, w)
MSL_STORAGE(PackedStorage, 2, 2, , x, y)
MSL_STORAGE(PackedStorage, 3, 3, , x, y, z)
MSL_STORAGE(PackedStorage, 4, 4, , x, y, z, w)
#undef MSL_STORAGE

// `v.xz = ...`, which the translation writes as v.swizzled<0, 2>() = ...
template <class T, int N, int... I> struct Swizzled {
  metal::vec<T, N>& of;
  typedef metal::vec<T, sizeof...(I)> Value;
  MSL_INLINE Value value() const { return Value(of.at[I]...); }
  MSL_INLINE void operator=(Value from) {
    int k = 0;
    int each[] = {(of.at[I] = from.at[k++], 0)...};
    (void)each;
  }
  MSL_INLINE void operator+=(Value from) { *this = value() + from; }
  MSL_INLINE void operator-=(Value from) { *this = value() - from; }
  MSL_INLINE void operator*=(Value from) { *this = value() * from; }
  MSL_INLINE void operator/=(Value from) { *this = value() / from; }
};
}  // namespace msl

namespace metal {
template <class T, int N> struct vec : msl::Storage<T, N> {
  using msl::Storage<T, N>::at;
  vec() = default;
  template <class S, class = msl::if_number<S>>
  MSL_INLINE constexpr vec(S scalar) : msl::Storage<T, N>{} {
    for (int i = 0; i < N; i++) at[i] = msl::convert<T>(scalar);
  }
  template <class U> MSL_INLINE explicit vec(vec<U, N> from) {
    for (int i = 0; i < N; i++) at[i] = msl::convert<T>(from.at[i]);
  }
  template <class A, class B, class... R>
  MSL_INLINE constexpr vec(A a, B b, R... rest) : msl::Storage<T, N>{} {
    static_assert(msl::sum(msl::components<A>::count, msl::components<B>::count,
                           msl::components<R>::count...) == N,
                  "the components given are not as many as the vector has");
    int i = 0;
    int each[] = {(put(i, a), 0), (put(i, b), 0), (put(i, rest), 0)...};
    (void)each;
  }
  MSL_INLINE T& operator[](size_t i) { return at[checked(i)]; }
  MSL_INLINE const T& operator[](size_t i) const { return at[checked(i)]; }
  template <int... I> MSL_INLINE vec<T, sizeof...(I)> swizzle() const {
    return vec<T, sizeof...(I)>(at[I]...);
  }
  template <int... I> MSL_INLINE msl::Swizzled<T, N, I...> swizzled() { return {*this}; }

#define MSL_OPERATOR(op)                                                       \
  friend MSL_INLINE vec operator op(vec a, vec b) {                            \
    vec result;                                                                \
    for (int i = 0; i < N; i++) result.at[i] = T(a.at[i] op b.at[i]);          \
    return result;                                                             \
  }                                                                            \
  MSL_INLINE vec& operator op##=(vec b) { return *this = *this op b; }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
#define MSL_OPERATOR(op)                                                       \
  friend MSL_INLINE vec<bool, N> operator op(vec a, vec b) {                   \
    vec<bool, N> result;                                                       \
    for (int i = 0; i < N; i++) result.at[i] = a.at[i] op b.at[i];             \
    return result;                                                             \
  }
  MSL_OPERATOR(==) MSL_OPERATOR(!=) MSL_OPERATOR(<) MSL_OPERATOR(>) MSL_OPERATOR(<=)
  MSL_OPERATOR(>=) MSL_OPERATOR(&&) MSL_OPERATOR(||)
#undef MSL_OPERATOR
#define MSL_OPERATOR(op)                                                       \
  template <class U = T, class = msl::if_integer<U>>                           \
  friend MSL_INLINE vec operator op(vec a, vec b) {                            \
    vec result;                                                                \
    for (int i = 0; i < N; i++) result.at[i] = T(a.at[i] op b.at[i]);          \
    return result;                                                             \
  }                                                                            \
  template <class U = T, class = msl::if_integer<U>>                           \
  MSL_INLINE vec& operator op##=(vec b) {                                      \
    return *this = *this op b;                                                 \
  }
  MSL_OPERATOR(%) MSL_OPERATOR(&) MSL_OPERATOR(|) MSL_OPERATOR(^) MSL_OPERATOR(<<)
  MSL_OPERATOR(>>)
#undef MSL_OPERATOR
  friend MSL_INLINE vec operator-(vec a) {
    for (int i = 0; i < N; i++) a.at[i] = T(-a.at[i]);
    return a;
  }
  friend MSL_INLINE vec<bool, N> operator!(vec a) {
    vec<bool, N> result;
    for (int i = 0; i < N; i++) result.at[i] = !a.at[i];
    return result;
  }

 private:
  MSL_INLINE static size_t checked(size_t i) {
    if (i >= size_t(N)) msl::fail("out-of-bounds", "component %zu of a vector of %d", i, N);
    return i;
  }
  template <class S> MSL_INLINE constexpr void put(int& i, S scalar) {
    at[i++] = msl::convert<T>(scalar);
  }
  template <class U, int M> MSL_INLINE constexpr void put(int& i, vec<U, M> from) {
    for (int j = 0; j < M; j++) at[i++] = msl::convert<T>(from.at[j]);
  }
};

template <class T, int N> MSL_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(a.at[0] * b.at[0]);
  for (int i = 1; i < N; i++) sum = T(sum + a.at[i] * b.at[i]);
  return sum;
}

template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  template <class... V> matrix(vec<T, R> first, V... rest) : columns{first, rest...} {
    static_assert(sizeof...(V) + 1 == C, "a matrix takes as many vectors as it has columns");
  }
  explicit matrix(T diagonal) {
    for (int i = 0; i < C; i++) {
      columns[i] = vec<T, R>(T(0));
      if (i < R) columns[i].at[i] = diagonal;
    }
  }
  vec<T, R>& operator[](size_t i) { return columns[i]; }
  const vec<T, R>& operator[](size_t i) const { return columns[i]; }
};
template <class T, int C, int R> inline vec<T, R> operator*(matrix<T, C, R> m, vec<T, C> x) {
  vec<T, R> result = m.columns[0] * x.at[0];
  for (int i = 1; i < C; i++) result += m.columns[i] * x.at[i];
  return result;
}
template <class T, int C, int R> inline vec<T, C> operator*(vec<T, R> x, matrix<T, C, R> m) {
  vec<T, C> result;
  for (int i = 0; i < C; i++) result.at[i] = dot(x, m.columns[i]);
  return result;
}

// packed_float4 and its kin: the alignment is that of a component.
template <class T, int N> struct packed_vec : msl::PackedStorage<T, N> {
  using msl::PackedStorage<T, N>::at;
  packed_vec() = default;
  MSL_INLINE packed_vec(vec<T, N> from) {
    for (int i = 0; i < N; i++) at[i] = from.at[i];
  }
  template <class... V> MSL_INLINE packed_vec(T a, T b, V... rest) : packed_vec(vec<T, N>(a, b, rest...)) {}
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> result;
    for (int i = 0; i < N; i++) result.at[i] = at[i];
    return result;
  }
  MSL_INLINE T& operator[](size_t i) { return at[i]; }
  MSL_INLINE const T& operator[](size_t i) const { return at[i]; }
};
}  // namespace metal

#define MSL_VECTORS(T)                                                         \
  typedef metal::vec<T, 2> T##2;                                               \
  typedef metal::vec<T, 3> T##3;                                               \
  typedef metal::vec<T, 4> T##4;                                               \
  typedef metal::packed_vec<T, 2> packed_##T##2;                               \
  typedef metal::packed_vec<T, 3> packed_##T##3;                               \
  typedef metal::packed_vec<T, 4> packed_##T##4;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(char) MSL_VECTORS(uchar)
MSL_VECTORS(short) MSL_VECTORS(ushort) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS
typedef metal::vec<bool, 2> bool2;
typedef metal::vec<bool, 3> bool3;
typedef metal::vec<bool, 4> bool4;
#define MSL_MATRICES(T)                                                        \
  typedef metal::matrix<T, 2, 2> T##2x2;                                       \
  typedef metal::matrix<T, 2, 4> T##2x4;                                       \
  typedef metal::matrix<T, 3, 3> T##3x3;                                       \
  typedef metal::matrix<T, 4, 4> T##4x4;
MSL_MATRICES(float) MSL_MATRICES(half)
#undef MSL_MATRICES

template <class To, class From> MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
