// Device and threadgroup memory: where it lies, its bounds, and who touched each byte of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime.h"

namespace msl {

// An access, as the race check remembers it. The epochs count the barriers that ordered the memory:
// those of the threadgroup, and those of the thread's simdgroup.
struct Access {
  uint32_t threadgroup = 0, epoch = 0, simdgroup_epoch = 0;
  uint32_t address = 0;  // of the code, zero where there was no access; programs lie below 4 GiB
  uint16_t thread = 0;
  bool atomic = false;
};

struct Region {
  std::string name;
  unsigned char* start;
  size_t size;
  bool is_threadgroup, starts_uninitialised;
  struct Byte {
    Access write, read[2];
  };
  std::vector<Byte> bytes;  // empty until the first access
};

// Zeroed nowhere: threadgroup memory and outputs are filled with 0xff, which is NaN.
Region& allocate(const std::string& name, size_t size, bool is_threadgroup,
                 bool starts_uninitialised);
void release_all();
// Threadgroup memory has no value when a threadgroup begins.
void forget_threadgroup_memory();
size_t threadgroup_memory_size();

// The thread that runs now, as memory needs to know it; thread is none between threads.
struct Now {
  Access access[2];  // to device and to threadgroup memory; [].address is left open
  bool running = false;
};
extern Now now;

// What a barrier with these mem_flags orders.
inline bool orders(unsigned flags, bool threadgroup_memory) {
  return flags & (threadgroup_memory ? 2 : 1);
}

}  // namespace msl
