// Atomics. The threads are fibers of one thread of the host, so a plain access is atomic; the race
// check is told which accesses are meant to be.
#pragma once
#include "types.h"

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
  T value;
};
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
}  // namespace metal

namespace msl {
// The compiler's checks of accesses are left out here, as the race check sees atomic_access.
#define MSL_UNCHECKED __attribute__((no_sanitize_thread, noinline))
template <class T> MSL_UNCHECKED T load(const metal::atomic<T>* p) { return p->value; }
template <class T> MSL_UNCHECKED void store(metal::atomic<T>* p, T value) { p->value = value; }
#undef MSL_UNCHECKED
template <class T> MSL_INLINE void atomic_access(const metal::atomic<T>* p, bool read, bool write) {
  atomic_access(p, sizeof(T), read, write);
}
}  // namespace msl

namespace metal {
template <class T> MSL_INLINE T atomic_load_explicit(const atomic<T>* p, memory_order) {
  msl::atomic_access(p, true, false);
  return msl::load(p);
}
template <class T, class S> MSL_INLINE void atomic_store_explicit(atomic<T>* p, S x, memory_order) {
  msl::atomic_access(p, false, true);
  msl::store(p, T(x));
}
template <class T, class S>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(atomic<T>* p, T* expected, S desired,
                                                      memory_order, memory_order) {
  msl::atomic_access(p, true, true);
  const T old = msl::load(p);
  if (old == *expected) {
    msl::store(p, T(desired));
    return true;
  }
  *expected = old;
  return false;
}
#define MSL_ATOMIC(name, expression)                                           \
  template <class T, class S> MSL_INLINE T name(atomic<T>* p, S x, memory_order) { \
    msl::atomic_access(p, true, true);                                         \
    const T a = msl::load(p), b = T(x);                                        \
    msl::store(p, T(expression));                                              \
    return a;                                                                  \
  }
MSL_ATOMIC(atomic_exchange_explicit, b)
MSL_ATOMIC(atomic_fetch_add_explicit, a + b)
MSL_ATOMIC(atomic_fetch_sub_explicit, a - b)
MSL_ATOMIC(atomic_fetch_min_explicit, b < a ? b : a)
MSL_ATOMIC(atomic_fetch_max_explicit, a < b ? b : a)
MSL_ATOMIC(atomic_fetch_or_explicit, a | b)
MSL_ATOMIC(atomic_fetch_and_explicit, a& b)
MSL_ATOMIC(atomic_fetch_xor_explicit, a ^ b)
#undef MSL_ATOMIC
}  // namespace metal
