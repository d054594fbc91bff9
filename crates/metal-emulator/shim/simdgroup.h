// Barriers, operations of a simdgroup, and its 8 x 8 matrices. A simdgroup has 32 lanes, fewer where
// the threadgroup ends. Reading a lane that isn't there, or that doesn't take part, is a finding.
#pragma once
#include "maths.h"

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::barrier(false, uint(flags), MSL_HERE);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::barrier(true, uint(flags), MSL_HERE);
}
}  // namespace metal

namespace msl {
inline uint lane() { return current->thread_index_in_simdgroup.x; }

template <class T> struct Pair {
  T at[2];
};

// The values that the active lanes brought, until this lane's next operation.
template <class T> struct Gathered {
  Exchange from;
  const char *name, *file;
  unsigned line;
  bool active(uint lane) const { return lane < 32 && (from.active >> lane & 1); }
  uint first() const { return uint(__builtin_ctz(from.active)); }
  T unchecked(uint lane) const {
    T value;
    std::memcpy((void*)&value, from.data + kLaneBytes * lane, sizeof value);
    return value;
  }
  T operator[](uint from_lane) const {
    if (!active(from_lane))
      fail("inactive-lane", "%s at %s:%u: lane %u reads lane %u, %s (active: %u lanes)", name, file,
           line, lane(), from_lane,
           from_lane < 32 ? "which isn't active" : "but a simdgroup has 32 lanes",
           uint(__builtin_popcount(from.active)));
    return unchecked(from_lane);
  }
};
template <class T> inline Gathered<T> gather(const T& value, const char* name, const char* file, unsigned line) {
  static_assert(sizeof(T) <= kLaneBytes && std::is_trivially_copyable<T>::value,
                "a simdgroup operation on this type");
  static_assert(!is_bfloat<T>::value, "Metal's simdgroup operations know no bfloat: use float");
  return {exchange(&value, sizeof(T), name, file, line), name, file, line};
}
// The sum over active lanes, or what else combine does, pairwise.
template <class T, class F> inline T reduce(const Gathered<T>& lanes, F combine) {
  T value[32];
  bool active[32];
  for (uint i = 0; i < 32; i++)
    if ((active[i] = lanes.active(i))) value[i] = lanes.unchecked(i);
  for (uint width = 16; width; width /= 2)
    for (uint i = 0; i < width; i++) {
      if (!active[i + width]) continue;
      value[i] = active[i] ? combine(value[i], value[i + width]) : value[i + width];
      active[i] = true;
    }
  return value[0];
}
}  // namespace msl

namespace metal {
#define MSL_REDUCTION(name, expression)                                        \
  template <class T> inline T name(T x, MSL_SITE) {                            \
    return msl::reduce(msl::gather(x, #name, MSL_HERE),                        \
                       [](T a, T b) { return T(expression); });                \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION

#define MSL_PREFIX(name, start, before, op)                                    \
  template <class T> inline T name(T x, MSL_SITE) {                            \
    const auto lanes = msl::gather(x, #name, MSL_HERE);                        \
    T result = T(start);                                                       \
    for (uint i = 0; i before msl::lane(); i++)                                \
      if (lanes.active(i)) result = T(result op lanes.unchecked(i));           \
    return result;                                                             \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, 0, <=, +)
MSL_PREFIX(simd_prefix_exclusive_sum, 0, <, +)
MSL_PREFIX(simd_prefix_inclusive_product, 1, <=, *)
MSL_PREFIX(simd_prefix_exclusive_product, 1, <, *)
#undef MSL_PREFIX

template <class T> inline T simd_shuffle(T x, ushort lane, MSL_SITE) {
  return msl::gather(x, "simd_shuffle", MSL_HERE)[lane];
}
template <class T> inline T simd_broadcast(T x, ushort lane, MSL_SITE) {
  return msl::gather(x, "simd_broadcast", MSL_HERE)[lane];
}
template <class T> inline T simd_broadcast_first(T x, MSL_SITE) {
  const auto lanes = msl::gather(x, "simd_broadcast_first", MSL_HERE);
  return lanes.unchecked(lanes.first());
}
template <class T> inline T simd_shuffle_xor(T x, ushort mask, MSL_SITE) {
  return msl::gather(x, "simd_shuffle_xor", MSL_HERE)[msl::lane() ^ mask];
}
// The lanes for which there is nothing to shift in keep what they have.
template <class T> inline T simd_shuffle_down(T x, ushort delta, MSL_SITE) {
  const auto lanes = msl::gather(x, "simd_shuffle_down", MSL_HERE);
  return msl::lane() + delta < 32 ? lanes[msl::lane() + delta] : x;
}
template <class T> inline T simd_shuffle_up(T x, ushort delta, MSL_SITE) {
  const auto lanes = msl::gather(x, "simd_shuffle_up", MSL_HERE);
  return msl::lane() >= delta ? lanes[msl::lane() - delta] : x;
}
template <class T> inline T simd_shuffle_rotate_down(T x, ushort delta, MSL_SITE) {
  return msl::gather(x, "simd_shuffle_rotate_down", MSL_HERE)[(msl::lane() + delta) % 32];
}
template <class T> inline T simd_shuffle_rotate_up(T x, ushort delta, MSL_SITE) {
  return msl::gather(x, "simd_shuffle_rotate_up", MSL_HERE)[(msl::lane() + 32 - delta % 32) % 32];
}
template <class T> inline T simd_shuffle_and_fill_down(T x, T filling, ushort delta, MSL_SITE) {
  const auto lanes =
      msl::gather(msl::Pair<T>{{x, filling}}, "simd_shuffle_and_fill_down", MSL_HERE);
  const uint from = msl::lane() + delta;
  return from < 32 ? lanes[from].at[0] : lanes[from - 32].at[1];
}
template <class T> inline T simd_shuffle_and_fill_up(T x, T filling, ushort delta, MSL_SITE) {
  const auto lanes = msl::gather(msl::Pair<T>{{x, filling}}, "simd_shuffle_and_fill_up", MSL_HERE);
  const uint to = msl::lane();
  return to >= delta ? lanes[to - delta].at[0] : lanes[to + 32 - delta].at[1];
}

class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t lanes, vote_t active = 0xffffffff) : lanes_(lanes), active_(active) {}
  explicit operator vote_t() const { return lanes_; }
  bool all() const { return lanes_ == active_; }
  bool any() const { return lanes_ != 0; }

 private:
  vote_t lanes_, active_;
};
inline simd_vote simd_ballot(bool x, MSL_SITE) {
  const auto lanes = msl::gather(x, "simd_ballot", MSL_HERE);
  ulong result = 0;
  for (uint i = 0; i < 32; i++)
    if (lanes.active(i) && lanes.unchecked(i)) result |= ulong(1) << i;
  return simd_vote(result, lanes.from.active);
}
inline simd_vote simd_active_threads_mask(MSL_SITE) {
  const auto lanes = msl::gather(true, "simd_active_threads_mask", MSL_HERE);
  return simd_vote(lanes.from.active, lanes.from.active);
}
inline bool simd_all(bool x, MSL_SITE) { return simd_ballot(x, MSL_HERE).all(); }
inline bool simd_any(bool x, MSL_SITE) { return simd_ballot(x, MSL_HERE).any(); }
inline bool simd_is_first(MSL_SITE) {
  return msl::gather(true, "simd_is_first", MSL_HERE).first() == msl::lane();
}
}  // namespace metal

namespace msl {
template <class T> struct is_matrix_element
    : std::integral_constant<bool, std::is_same<T, float>::value || is_half<T>::value ||
                                       is_bfloat<T>::value> {};
// Where the two elements of a lane are, as on Apple's GPUs.
inline uint row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
// Where element k of a lane is in memory.
inline ulong element(uint lane, uint k, ulong stride, ulong2 origin, bool transpose) {
  const ulong i = row(lane), j = column(lane) + k;
  return (origin.at[1] + (transpose ? j : i)) * stride + origin.at[0] + (transpose ? i : j);
}
template <class T>
inline Gathered<T> gather_all(const T& value, const char* name, const char* file, unsigned line) {
  const auto lanes = gather(value, name, file, line);
  if (lanes.from.active != 0xffffffff)
    fail("inactive-lane", "%s at %s:%u: the whole simdgroup must take part, but %u of 32 lanes are active",
         name, file, line, uint(__builtin_popcount(lanes.from.active)));
  return lanes;
}
}  // namespace msl

namespace metal {
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "a simdgroup_matrix is 8 x 8");
  static_assert(msl::is_matrix_element<T>::value, "a simdgroup_matrix of half, bfloat or float");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (uint k = 0; k < 2; k++)
      elements.at[k] = msl::row(msl::lane()) == msl::column(msl::lane()) + k ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C = R>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(x);
  return m;
}
template <class T, int N = 8>
inline simdgroup_matrix<T, N, N> make_diagonal_simdgroup_matrix(T x) {
  return simdgroup_matrix<T, N, N>(x);
}

// Metal doesn't say which lane touches which element in memory. A load is looked at as if it were
// another lane's than the store's too, so that a missing barrier between the two is seen.
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong stride = 8,
                               ulong2 origin = ulong2(0), bool transpose = false, MSL_SITE) {
  msl::gather_all(true, "simdgroup_load", MSL_HERE);
  for (uint k = 0; k < 2; k++) {
    const uint lane = msl::lane();
    msl::check_read(from + msl::element(lane ^ 16, k, stride, origin, transpose), sizeof(T));
    m.elements.at[k] = from[msl::element(lane, k, stride, origin, transpose)];
  }
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong stride = 8,
                                ulong2 origin = ulong2(0), bool transpose = false, MSL_SITE) {
  msl::gather_all(true, "simdgroup_store", MSL_HERE);
  for (uint k = 0; k < 2; k++)
    to[msl::element(msl::lane(), k, stride, origin, transpose)] = m.elements.at[k];
}

// d = a b + c, summed in float.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                          const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, MSL_SITE) {
  struct Both {
    vec<A, 2> a;
    vec<B, 2> b;
  };
  const auto lanes =
      msl::gather_all(Both{a.elements, b.elements}, "simdgroup_multiply_accumulate", MSL_HERE);
  float left[8][8], right[8][8];
  for (uint lane = 0; lane < 32; lane++) {
    const Both both = lanes.unchecked(lane);
    for (uint k = 0; k < 2; k++) {
      left[msl::row(lane)][msl::column(lane) + k] = float(both.a.at[k]);
      right[msl::row(lane)][msl::column(lane) + k] = float(both.b.at[k]);
    }
  }
  vec<D, 2> result;
  for (uint k = 0; k < 2; k++) {
    float sum = float(c.elements.at[k]);
    for (uint i = 0; i < 8; i++)
      sum += left[msl::row(msl::lane())][i] * right[i][msl::column(msl::lane()) + k];
    result.at[k] = D(sum);
  }
  d.elements = result;
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), MSL_HERE);
}
}  // namespace metal
