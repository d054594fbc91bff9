// What the runtime gives to a translated kernel. The threads of a threadgroup are fibers of one
// thread of the host: each runs until it reaches a barrier or a simdgroup operation.
#pragma once
#include <cstddef>
#include <cstdint>

#define MSL_INLINE inline __attribute__((always_inline))
// The place of the call, for messages.
#define MSL_SITE const char *file_ = __builtin_FILE(), unsigned line_ = __builtin_LINE()
#define MSL_HERE file_, line_

namespace msl {

struct Size {
  uint32_t x, y, z;
};

// The built-in arguments of a kernel, under the names of their attributes.
struct Thread {
  Size thread_position_in_grid, thread_position_in_threadgroup, thread_index_in_threadgroup,
      thread_index_in_simdgroup, thread_index_in_quadgroup, threadgroup_position_in_grid,
      simdgroup_index_in_threadgroup, quadgroup_index_in_threadgroup, threads_per_grid,
      threads_per_threadgroup, threads_per_simdgroup, threadgroups_per_grid,
      simdgroups_per_threadgroup, quadgroups_per_threadgroup, dispatch_threads_per_threadgroup,
      dispatch_simdgroups_per_threadgroup, thread_execution_width, grid_size, grid_origin;
};
extern Thread* current;

enum class ArgumentKind { buffer, threadgroup, builtin };
struct Argument {
  ArgumentKind kind;
  unsigned index;
  bool (*bound)();  // false: a function constant says that there is no such argument
  Size Thread::*field;
};
inline Argument buffer(unsigned index, bool (*bound)() = nullptr) {
  return {ArgumentKind::buffer, index, bound, nullptr};
}
inline Argument threadgroup(unsigned index, bool (*bound)() = nullptr) {
  return {ArgumentKind::threadgroup, index, bound, nullptr};
}
inline Argument builtin(Size Thread::*field) {
  return {ArgumentKind::builtin, 0, nullptr, field};
}

// Ends the dispatch with a finding: its kind, a line break, and the message.
[[noreturn]] void fail(const char* kind, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
void* argument(const Argument& argument, size_t size, size_t align);
void* threadgroup_variable(const void* key, const char* name, size_t size, size_t align);
void barrier(bool simdgroup, unsigned flags, const char* file, unsigned line);

// What the lanes of a simdgroup brought to an operation, 64 bytes each; bit i of active: lane i did.
constexpr unsigned kLaneBytes = 64;
struct Exchange {
  const unsigned char* data;
  uint32_t active;
};
Exchange exchange(const void* value, size_t size, const char* name, const char* file, unsigned line);
// Looks at a read as the race check does, without remembering it.
void check_read(const void* address, size_t size);
void atomic_access(const void* address, size_t size, bool read, bool write);

bool function_constant(unsigned index, const char* name, void* value, size_t size, bool required);
template <class T> T function_constant(unsigned index, const char* name, bool required) {
  T value{};
  function_constant(index, name, &value, sizeof value, required);
  return value;
}
bool function_constant_given(unsigned index);

template <class Holder> struct Key {
  static char key;
};
template <class Holder> char Key<Holder>::key;
template <class Holder> Holder& threadgroup_variable(const char* name) {
  return *static_cast<Holder*>(
      threadgroup_variable(&Key<Holder>::key, name, sizeof(Holder), alignof(Holder)));
}

struct Entry {
  // `constants`: the indices of those that it depends on, with a space before and after each.
  Entry(const char* name, void (*run)(), unsigned most_threads, const char* constants);
};

}  // namespace msl
