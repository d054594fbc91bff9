#include "memory.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

#if defined(MSL_ASAN)
#include <sanitizer/asan_interface.h>
#endif

namespace msl {

Now now;

// Between two regions and before the first lies kGuard of forbidden memory.
static const size_t kArena = size_t(16) << 30, kGuard = size_t(1) << 20, kPage = 4096;
static unsigned char* arena;
static size_t used;
static std::vector<Region> regions;

static void forbid(unsigned char* start, size_t size) {
#if defined(MSL_ASAN)
  __asan_poison_memory_region(start, size);
#else
  (void)start, (void)size;
#endif
}

Region& allocate(const std::string& name, size_t size, bool is_threadgroup,
                 bool starts_uninitialised) {
  if (!arena) {
    void* memory = mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("misuse", "no address space for %zu bytes", kArena);
    arena = static_cast<unsigned char*>(memory);
  }
  if (regions.empty()) {
    regions.reserve(256);
    forbid(arena, kGuard);
    used = kGuard;
  }
  const size_t whole = (size + kPage - 1) / kPage * kPage;
  if (regions.size() == 256 || used + whole + kGuard > kArena)
    fail("misuse", "more than 256 regions or %zu bytes of memory", kArena);
  unsigned char* start = arena + used;
#if defined(MSL_ASAN)
  __asan_unpoison_memory_region(start, size);
#endif
  forbid(start + size, whole - size + kGuard);
  used += whole + kGuard;
  if (starts_uninitialised) memset(start, 0xff, size);
  regions.push_back(Region{name, start, size, is_threadgroup, starts_uninitialised, {}});
  return regions.back();
}

void release_all() {
  for (const Region& region : regions) forbid(region.start, region.size);
  regions.clear();
  used = 0;
}

void forget_threadgroup_memory() {
  for (Region& region : regions) {
    if (!region.is_threadgroup) continue;
    memset(region.start, 0xff, region.size);
    std::fill(region.bytes.begin(), region.bytes.end(), Region::Byte());
  }
}

size_t threadgroup_memory_size() {
  size_t sum = 0;
  for (const Region& region : regions)
    if (region.is_threadgroup) sum += (region.size + 15) / 16 * 16;
  return sum;
}

#if defined(MSL_ASAN) || defined(MSL_RACE)
static bool in_arena(const void* address) { return size_t((unsigned char*)address - arena) < used; }

// Ends with a finding if the address lies between the regions: which one it is next to.
static void out_of_bounds(const void* address, size_t size, bool write, uintptr_t code) {
  const unsigned char* p = static_cast<const unsigned char*>(address);
  const Region* nearest = nullptr;
  size_t distance = ~size_t(0);
  for (const Region& region : regions) {
    const unsigned char* end = region.start + region.size;
    const size_t away = size_t(p < region.start ? region.start - p : p >= end ? p - end : 0);
    if (away < distance) nearest = &region, distance = away;
  }
  if (!nearest) return;
  fail("out-of-bounds", "%s of %zu bytes at byte %td of %s, which has %zu bytes, at @%zx@",
       write ? "write" : "read", size, p - nearest->start, nearest->name.c_str(), nearest->size,
       size_t(code));
}

#endif

#if defined(MSL_RACE)
static Region* region_of(const void* address) {
  static size_t last;
  const unsigned char* p = static_cast<const unsigned char*>(address);
  const auto holds = [p](const Region& region) {
    return p >= region.start && p < region.start + region.size;
  };
  if (last < regions.size() && holds(regions[last])) return &regions[last];
  for (size_t i = 0; i < regions.size(); i++)
    if (holds(regions[i])) return &regions[last = i];
  return nullptr;
}

static bool unordered(const Access& before, const Access& after, bool threadgroup_memory) {
  if (!before.address || (before.atomic && after.atomic)) return false;
  if (before.threadgroup != after.threadgroup) return !threadgroup_memory;
  if (before.thread == after.thread || before.epoch != after.epoch) return false;
  return before.thread / 32 != after.thread / 32 ||
         before.simdgroup_epoch == after.simdgroup_epoch;
}

// By the same thread, between the same barriers.
static bool same_time(const Access& a, const Access& b) {
  return a.threadgroup == b.threadgroup && a.thread == b.thread && a.epoch == b.epoch &&
         a.simdgroup_epoch == b.simdgroup_epoch;
}

[[noreturn]] static void race(const Region& region, size_t at, const Access& before, bool wrote,
                              const Access& after, bool writes) {
  const bool same = before.threadgroup == after.threadgroup;
  fail("race", "byte %zu of %s: thread %u %s it at @%x@, and thread %u of %s threadgroup %s it at "
       "@%x@, with no barrier for %s memory between them",
       at, region.name.c_str(), unsigned(after.thread), writes ? "writes" : "reads", after.address,
       unsigned(before.thread), same ? "the same" : "another", wrote ? "wrote" : "read",
       before.address, region.is_threadgroup ? "threadgroup" : "device");
}

static void remember_read(Region::Byte& byte, const Access& access, bool threadgroup_memory) {
  Access &first = byte.read[0], &second = byte.read[1];
  if (!unordered(first, access, threadgroup_memory)) {
    // All that the second could tell is told by the first, unless they are unordered.
    if (first.thread != access.thread || first.epoch != access.epoch) second = Access();
    first = access;
  } else if (!second.address || second.epoch != access.epoch ||
             second.thread / 32 == first.thread / 32 || access.thread / 32 != first.thread / 32) {
    // Of two readers that the first knows nothing about, one of another simdgroup says more.
    second = access;
  }
}

enum class Kind { plain, atomic, checked_only };

static void touch(const void* address, size_t size, bool write, const void* code, Kind kind) {
  if (!now.running || !in_arena(address)) return;
  Region* region = region_of(address);
  const size_t at = region ? size_t((unsigned char*)address - region->start) : 0;
  if (!region || at + size > region->size)
    out_of_bounds(address, size, write, uintptr_t(code));
  if (!region) return;
  if (region->bytes.empty()) region->bytes.resize(region->size);
  const bool shared = region->is_threadgroup;
  Access access = now.access[shared];
  access.address = uint32_t(uintptr_t(code));
  access.atomic = kind == Kind::atomic;
  for (size_t i = at; i < at + size; i++) {
    Region::Byte& byte = region->bytes[i];
    if (!write && region->starts_uninitialised && !byte.write.address)
      fail("uninitialised", "read of byte %zu of %s, which nothing was written to "
           "yet (a missing write, or a missing barrier), at @%x@", i,
           region->name.c_str(), access.address);
    if (unordered(byte.write, access, shared)) race(*region, i, byte.write, true, access, write);
    if (kind == Kind::checked_only) continue;
    if (!write) {
      remember_read(byte, access, shared);
      continue;
    }
    for (const Access& read : byte.read)
      if (unordered(read, access, shared)) race(*region, i, read, false, access, true);
    // A plain write says more than an atomic one of the same thread behind it.
    const bool known = byte.write.address && !byte.write.atomic && same_time(byte.write, access);
    if (!access.atomic || !known) byte.write = access;
  }
}
#endif

void atomic_access(const void* address, size_t size, bool read, bool write) {
  const void* code = __builtin_return_address(0);
#if defined(MSL_RACE)
  if (read) touch(address, size, false, code, Kind::atomic);
  if (write) touch(address, size, true, code, Kind::atomic);
#elif defined(MSL_ASAN)
  (void)read;
  if (__asan_region_is_poisoned(const_cast<void*>(address), size))
    out_of_bounds(address, size, write, uintptr_t(code));
#else
  (void)address, (void)size, (void)read, (void)write, (void)code;
#endif
}

void check_read(const void* address, size_t size) {
#if defined(MSL_RACE)
  touch(address, size, false, __builtin_return_address(0), Kind::checked_only);
#else
  (void)address, (void)size;
#endif
}

}  // namespace msl

#if defined(MSL_ASAN)
// AddressSanitizer calls this before it prints its own report, which names no buffer.
extern "C" void __asan_on_error() {
  void* address = __asan_get_report_address();
  const size_t code = size_t(__asan_get_report_pc());
  const bool write = __asan_get_report_access_type();
  const size_t size = __asan_get_report_access_size();
  if (msl::in_arena(address)) msl::out_of_bounds(address, size, write, code);
  msl::fail("out-of-bounds", "%s of %zu bytes (%s) at @%zx@", write ? "write" : "read", size,
            __asan_get_report_description(), code);
}
#endif

#if defined(MSL_RACE)
// The kernel is compiled with ThreadSanitizer's calls at every access, and they end up here.
#define MSL_READ(p, n) msl::touch(p, n, false, __builtin_return_address(0), msl::Kind::plain)
#define MSL_WRITE(p, n) msl::touch(p, n, true, __builtin_return_address(0), msl::Kind::plain)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define MSL_ACCESSES(n)                                                        \
  void __tsan_read##n(void* p) { MSL_READ(p, n); }                             \
  void __tsan_write##n(void* p) { MSL_WRITE(p, n); }                           \
  void __tsan_read_write##n(void* p) { MSL_READ(p, n), MSL_WRITE(p, n); }      \
  void __tsan_unaligned_read##n(void* p) { MSL_READ(p, n); }                   \
  void __tsan_unaligned_write##n(void* p) { MSL_WRITE(p, n); }                 \
  void __tsan_unaligned_read_write##n(void* p) { MSL_READ(p, n), MSL_WRITE(p, n); }
MSL_ACCESSES(1) MSL_ACCESSES(2) MSL_ACCESSES(4) MSL_ACCESSES(8) MSL_ACCESSES(16)
void __tsan_read_range(void* p, unsigned long n) { MSL_READ(p, n); }
void __tsan_write_range(void* p, unsigned long n) { MSL_WRITE(p, n); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  MSL_READ(from, n), MSL_WRITE(to, n);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, unsigned long n) {
  MSL_READ(from, n), MSL_WRITE(to, n);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  MSL_WRITE(to, n);
  return memset(to, value, n);
}
}
#endif
