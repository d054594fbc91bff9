// All of it, and how an entry point is called with what is bound to its parameters.
#pragma once
#include "atomics.h"
#include "simdgroup.h"

#define is_function_constant_defined(name) msl_given_##name

namespace msl {
template <class P> struct alignment : std::alignment_of<P> {};
template <> struct alignment<void> : std::integral_constant<size_t, 1> {};
template <> struct alignment<const void> : std::integral_constant<size_t, 1> {};

template <class P> struct Parameter {
  template <class T> static void fill(T& to, Size from) { to = T(from.x); }
  template <class T> static void fill(metal::vec<T, 2>& to, Size from) {
    to = metal::vec<T, 2>(from.x, from.y);
  }
  template <class T> static void fill(metal::vec<T, 3>& to, Size from) {
    to = metal::vec<T, 3>(from.x, from.y, from.z);
  }
  static P get(const Argument& from) {
    typename std::remove_cv<P>::type value;
    fill(value, current->*from.field);
    return value;
  }
};
template <class P> struct Parameter<P*> {
  static P* get(const Argument& from) {
    return static_cast<P*>(argument(from, 0, alignment<P>::value));
  }
};
template <class P> struct Parameter<P&> {
  static P& get(const Argument& from) {
    return *static_cast<P*>(argument(from, sizeof(P), alignof(P)));
  }
};
template <class... P, size_t... I>
inline void call(void (*kernel)(P...), const Argument* arguments, std::index_sequence<I...>) {
  kernel(Parameter<P>::get(arguments[I])...);
}
template <size_t N, class... P> inline void call(void (*kernel)(P...), const Argument (&arguments)[N]) {
  static_assert(N == sizeof...(P), "the translation saw another number of parameters");
  call(kernel, arguments, std::make_index_sequence<N>());
}
}  // namespace msl

#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
// MSL_KERNEL(name for the host, (function), most threads of a threadgroup, function constants,
// arguments...)
#define MSL_KERNEL(name, function, most_threads, constants, ...)                                 \
  static void MSL_JOIN(msl_run_, __LINE__)() {                                                   \
    static const msl::Argument arguments[] = {__VA_ARGS__};                                      \
    msl::call(&function, arguments);                                                             \
  }                                                                                              \
  static msl::Entry MSL_JOIN(msl_entry_, __LINE__)(name, &MSL_JOIN(msl_run_, __LINE__),          \
                                                   most_threads, constants);
