// Runs dispatches, one after another, as they come on the standard input; the buffers go back on the
// standard output. A finding ends the process: its kind and message are on the standard error.
// The arguments are the function constants, as index:bytes in hexadecimal.
#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include "memory.h"

#if defined(MSL_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

namespace msl {

Thread* current;

struct Site {
  const char *name, *file;
  unsigned line;
  bool operator!=(const Site& other) const {
    return line != other.line || strcmp(name, other.name) || strcmp(file, other.file);
  }
};

enum class State { ready, at_simdgroup, at_threadgroup, done };

struct Fiber {
  Thread thread;
  State state;
  Site site;                       // where it waits
  unsigned flags;                  // the mem_flags of the barrier there
  unsigned char value[kLaneBytes]; // what it brings to the operation there
  uint32_t index, simdgroup, lane;
  unsigned char* stack = nullptr;
  void* saved = nullptr;  // the stack pointer
  void* sanitizer = nullptr;
};

struct Simdgroup {
  uint32_t active = 0;
  unsigned char values[32 * kLaneBytes];
  uint32_t epoch[2] = {0, 0};
};

struct Kernel {
  std::string name;
  void (*run)();
  unsigned most_threads;
  const char* constants;
};

static std::vector<Fiber> fibers;
static std::vector<Simdgroup> simdgroups;
static Fiber* self;
static const Kernel* kernel;
static uint32_t threadgroup_number, epoch[2];
static uint64_t seed;
static std::mt19937_64 random_bits;

static std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}
Entry::Entry(const char* name, void (*run)(), unsigned most_threads, const char* constants) {
  kernels().push_back({name, run, most_threads, constants});
}

void fail(const char* kind, const char* format, ...) {
  fprintf(stderr, "%s\n", kind);
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format, values);
  va_end(values);
  if (self) {
    const Size group = self->thread.threadgroup_position_in_grid;
    fprintf(stderr, " (thread %u of threadgroup %u, %u, %u)", self->index, group.x, group.y, group.z);
  }
  fprintf(stderr, "\n");
  fflush(stderr);
  _exit(3);
}

// ------------------------------------------------------------------------------------------------
// Fibers

#if defined(MSL_ASAN)
static const size_t kStack = 512 << 10;
static void* main_sanitizer;
static const void* main_stack;
static size_t main_stack_size;
#else
static const size_t kStack = 128 << 10;
#endif
static void* main_saved;

extern "C" void msl_switch(void** save, void* load);
asm(R"(
.text
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch,.-msl_switch
)");

static void leave(bool for_good) {
  Fiber* fiber = self;
#if defined(MSL_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber->sanitizer, main_stack,
                                 main_stack_size);
#endif
  msl_switch(&fiber->saved, main_saved);
#if defined(MSL_ASAN)
  __sanitizer_finish_switch_fiber(fiber->sanitizer, nullptr, nullptr);
#endif
  (void)for_good;
}

static void start_of_fiber() {
#if defined(MSL_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_size);
#endif
  kernel->run();
  self->state = State::done;
  leave(true);
  abort();
}

static void enter(Fiber& fiber) {
  self = &fiber;
  current = &fiber.thread;
  for (int memory = 0; memory < 2; memory++) {
    Access& access = now.access[memory];
    access.threadgroup = threadgroup_number;
    access.thread = uint16_t(fiber.index);
    access.epoch = epoch[memory];
    access.simdgroup_epoch = simdgroups[fiber.simdgroup].epoch[memory];
  }
  now.running = true;
#if defined(MSL_ASAN)
  __sanitizer_start_switch_fiber(&main_sanitizer, fiber.stack, kStack);
#endif
  msl_switch(&main_saved, fiber.saved);
#if defined(MSL_ASAN)
  __sanitizer_finish_switch_fiber(main_sanitizer, nullptr, nullptr);
#endif
  now.running = false;
  self = nullptr;
  current = nullptr;
}

static void prepare(Fiber& fiber) {
  if (!fiber.stack) {
    void* memory = mmap(nullptr, kStack + 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("misuse", "no memory for the stack of a thread");
    mprotect(memory, 4096, PROT_NONE);
    fiber.stack = static_cast<unsigned char*>(memory) + 4096;
  }
  // What msl_switch takes from the stack: six registers, and where to go on. Above them is a place
  // for a return address, so that the stack is aligned as after a call.
  void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 8;
  memset(top, 0, 8 * sizeof *top);
  top[6] = reinterpret_cast<void*>(&start_of_fiber);
  fiber.saved = top;
  fiber.state = State::ready;
}

// ------------------------------------------------------------------------------------------------
// Arguments

struct Buffer {
  Region* region;
  size_t offset;
};
static std::map<unsigned, Buffer> buffers;
static std::map<unsigned, Region*> threadgroup_arguments;
static std::map<const void*, Region*> variables;
static std::map<std::string, Region*> absent;

void* argument(const Argument& argument, size_t size, size_t align) {
  const bool is_buffer = argument.kind == ArgumentKind::buffer;
  char name[64];
  snprintf(name, sizeof name, "%s(%u)", is_buffer ? "buffer" : "threadgroup", argument.index);
  if (argument.bound && !argument.bound()) {
    Region*& region = absent[name];
    if (!region)
      region = &allocate(std::string(name) + ", left out by a function constant", 0, false, false);
    return region->start;
  }
  if (!is_buffer) {
    const auto found = threadgroup_arguments.find(argument.index);
    if (found == threadgroup_arguments.end()) fail("misuse", "%s has no length set", name);
    return found->second->start;
  }
  const auto found = buffers.find(argument.index);
  if (found == buffers.end()) fail("misuse", "%s is not bound", name);
  const Buffer& buffer = found->second;
  const size_t length = buffer.region->size - buffer.offset;
  if (length < size)
    fail("misuse", "%s: %zu bytes are bound, the kernel's type has %zu", name, length, size);
  if (buffer.offset % align)
    fail("misuse", "%s: the offset %zu is not a multiple of %zu, which the kernel's type needs", name,
         buffer.offset, align);
  return buffer.region->start + buffer.offset;
}

static const size_t kMostThreadgroupMemory = 32768;
static void check_threadgroup_memory() {
  const size_t size = threadgroup_memory_size();
  if (size > kMostThreadgroupMemory)
    fail("misuse", "%zu bytes of threadgroup memory, of which there are %zu", size,
         kMostThreadgroupMemory);
}

void* threadgroup_variable(const void* key, const char* name, size_t size, size_t) {
  Region*& region = variables[key];
  if (!region) {
    region = &allocate(std::string("threadgroup variable `") + name + "`", size, true, true);
    check_threadgroup_memory();
  }
  return region->start;
}

static char** constant_arguments;
static bool find_constant(unsigned index, std::vector<unsigned char>& bytes) {
  for (char** each = constant_arguments; each && *each; each++) {
    char* rest;
    if (strtoul(*each, &rest, 10) != index || *rest != ':') continue;
    unsigned byte;
    for (rest++; sscanf(rest, "%2x", &byte) == 1; rest += 2) bytes.push_back((unsigned char)byte);
    return true;
  }
  return false;
}
// Constants are read before main, which the arguments of the program aren't known to yet.
__attribute__((constructor(101))) static void keep_arguments(int, char** arguments, char**) {
  constant_arguments = arguments + 1;
}
// Those that are not set, by their indices.
static std::map<unsigned, std::string>& missing_constants() {
  static std::map<unsigned, std::string> missing;
  return missing;
}
bool function_constant(unsigned index, const char* name, void* value, size_t size, bool required) {
  std::vector<unsigned char> bytes;
  if (!find_constant(index, bytes)) {
    if (required) missing_constants()[index] = name;
    return false;
  }
  if (bytes.size() != size)
    fail("misuse", "function constant %u (`%s`): %zu bytes are given, its type has %zu", index, name,
         bytes.size(), size);
  memcpy(value, bytes.data(), size);
  return true;
}
bool function_constant_given(unsigned index) {
  std::vector<unsigned char> bytes;
  return find_constant(index, bytes);
}

// ------------------------------------------------------------------------------------------------
// Threads in turn

void barrier(bool simdgroup, unsigned flags, const char* file, unsigned line) {
  self->state = simdgroup ? State::at_simdgroup : State::at_threadgroup;
  self->site = {simdgroup ? "simdgroup_barrier" : "threadgroup_barrier", file, line};
  self->flags = flags;
  leave(false);
}

Exchange exchange(const void* value, size_t size, const char* name, const char* file, unsigned line) {
  memcpy(self->value, value, size);
  self->state = State::at_simdgroup;
  self->site = {name, file, line};
  self->flags = 0;
  leave(false);
  const Simdgroup& simdgroup = simdgroups[self->simdgroup];
  return {simdgroup.values, simdgroup.active};
}

// Every lane of the simdgroup waits or has ended, and some wait for an operation of the simdgroup.
static void release_simdgroup(size_t number) {
  Simdgroup& simdgroup = simdgroups[number];
  const Fiber* first = nullptr;
  simdgroup.active = 0;
  const size_t end = std::min(fibers.size(), number * 32 + 32);
  for (size_t i = number * 32; i < end; i++) {
    Fiber& fiber = fibers[i];
    if (fiber.state != State::at_simdgroup) continue;
    if (!first) first = &fiber;
    if (fiber.site != first->site) {
      self = &fiber;
      fail("divergence", "simdgroup %zu: lane %u is at %s (%s:%u), lane %u at %s (%s:%u)", number,
           first->lane, first->site.name, first->site.file, first->site.line, fiber.lane,
           fiber.site.name, fiber.site.file, fiber.site.line);
    }
    simdgroup.active |= 1u << fiber.lane;
    memcpy(simdgroup.values + kLaneBytes * fiber.lane, fiber.value, kLaneBytes);
    fiber.state = State::ready;
  }
  for (int memory = 0; memory < 2; memory++)
    if (orders(first->flags, memory)) simdgroup.epoch[memory]++;
}

// Takes a simdgroup on to its next stop. False if every lane waits for the threadgroup or has ended.
static bool advance(size_t number) {
  std::vector<uint32_t> ready;
  bool waits = false;
  const size_t end = std::min(fibers.size(), number * 32 + 32);
  for (size_t i = number * 32; i < end; i++) {
    if (fibers[i].state == State::ready) ready.push_back(uint32_t(i));
    waits |= fibers[i].state == State::at_simdgroup;
  }
  if (ready.empty()) {
    if (waits) release_simdgroup(number);
    return waits;
  }
  if (seed == 1) std::reverse(ready.begin(), ready.end());
  if (seed > 1) std::shuffle(ready.begin(), ready.end(), random_bits);
  for (const uint32_t i : ready) enter(fibers[i]);
  return true;
}

// Every thread waits for the threadgroup, or has ended.
static bool release_threadgroup() {
  const Fiber *waiting = nullptr, *ended = nullptr;
  for (Fiber& fiber : fibers) {
    if (fiber.state == State::done) {
      ended = &fiber;
      continue;
    }
    if (waiting && fiber.site != waiting->site) {
      self = &fiber;
      fail("divergence", "thread %u waits at the barrier %s:%u, thread %u at %s:%u", waiting->index,
           waiting->site.file, waiting->site.line, fiber.index, fiber.site.file, fiber.site.line);
    }
    waiting = &fiber;
  }
  if (!waiting) return false;
  if (ended)
    fail("divergence", "thread %u has returned while thread %u waits at the barrier %s:%u",
         ended->index, waiting->index, waiting->site.file, waiting->site.line);
  for (int memory = 0; memory < 2; memory++)
    if (orders(waiting->flags, memory)) epoch[memory]++;
  for (Fiber& fiber : fibers) fiber.state = State::ready;
  return true;
}

static void run_threadgroup() {
  for (Fiber& fiber : fibers) prepare(fiber);
  do {
    // Between barriers the simdgroups are independent: one runs far ahead of the others, or they mix.
    std::vector<size_t> order(simdgroups.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = seed == 1 ? order.size() - 1 - i : i;
    if (seed > 1) std::shuffle(order.begin(), order.end(), random_bits);
    const bool ahead = seed < 2 || random_bits() % 2;
    while (!order.empty()) {
      const size_t i = ahead ? 0 : random_bits() % order.size();
      if (!advance(order[i])) order.erase(order.begin() + long(i));
    }
  } while (release_threadgroup());
}

static Size place(Size size, uint32_t index) {
  return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

// The threads of a threadgroup at `group`, of the size `size`, which at the grid's end is smaller
// than `full`.
static void set_up_threadgroup(Size group, Size groups, Size size, Size full, Size grid) {
  const uint32_t count = size.x * size.y * size.z, full_count = full.x * full.y * full.z;
  while (fibers.size() > count) {
    munmap(fibers.back().stack - 4096, kStack + 4096);
    fibers.pop_back();
  }
  fibers.resize(count);
  const uint32_t simdgroup_count = (count + 31) / 32;
  simdgroups.assign(simdgroup_count, Simdgroup());
  for (uint32_t i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    fiber.index = i;
    fiber.simdgroup = i / 32;
    fiber.lane = i % 32;
    const Size at = place(size, i);
    Thread& thread = fiber.thread;
    thread.thread_position_in_grid = {group.x * full.x + at.x, group.y * full.y + at.y,
                                      group.z * full.z + at.z};
    thread.thread_position_in_threadgroup = at;
    thread.thread_index_in_threadgroup = {i, 0, 0};
    thread.thread_index_in_simdgroup = {i % 32, 0, 0};
    thread.thread_index_in_quadgroup = {i % 4, 0, 0};
    thread.threadgroup_position_in_grid = group;
    thread.simdgroup_index_in_threadgroup = {i / 32, 0, 0};
    thread.quadgroup_index_in_threadgroup = {i / 4, 0, 0};
    thread.threads_per_grid = thread.grid_size = grid;
    thread.grid_origin = {0, 0, 0};
    thread.threads_per_threadgroup = size;
    thread.dispatch_threads_per_threadgroup = full;
    thread.threads_per_simdgroup = thread.thread_execution_width = {32, 0, 0};
    thread.threadgroups_per_grid = groups;
    thread.simdgroups_per_threadgroup = {simdgroup_count, 0, 0};
    thread.quadgroups_per_threadgroup = {(count + 3) / 4, 0, 0};
    thread.dispatch_simdgroups_per_threadgroup = {(full_count + 31) / 32, 0, 0};
  }
}

static void run_grid(bool by_threads, Size size, Size full) {
  const size_t threads = size_t(full.x) * full.y * full.z;
  const size_t most = kernel->most_threads ? kernel->most_threads : 1024;
  if (threads == 0 || threads > most)
    fail("misuse", "%zu threads in a threadgroup, where 1 to %zu can be", threads, most);
  const Size grid = by_threads ? size : Size{size.x * full.x, size.y * full.y, size.z * full.z};
  const Size groups = {(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y,
                       (grid.z + full.z - 1) / full.z};
  std::vector<uint32_t> order(size_t(groups.x) * groups.y * groups.z);
  for (size_t i = 0; i < order.size(); i++)
    order[i] = uint32_t(seed == 1 ? order.size() - 1 - i : i);
  if (seed > 1) std::shuffle(order.begin(), order.end(), random_bits);
  threadgroup_number = 0;
  for (const uint32_t number : order) {
    const Size group = place(groups, number);
    const Size part = {std::min(full.x, grid.x - group.x * full.x),
                       std::min(full.y, grid.y - group.y * full.y),
                       std::min(full.z, grid.z - group.z * full.z)};
    set_up_threadgroup(group, groups, part, full, grid);
    threadgroup_number++;
    forget_threadgroup_memory();
    run_threadgroup();
  }
}

// ------------------------------------------------------------------------------------------------
// Dispatches

static void read_bytes(void* to, size_t size) {
  if (size && fread(to, 1, size, stdin) != size) _exit(0);  // the test has ended
}
template <class T> static T read() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

static void dispatch() {
  std::string name(read<uint64_t>(), 0);
  read_bytes(&name[0], name.size());
  seed = read<uint64_t>();
  const bool by_threads = read<uint64_t>();
  const Size size = read<Size>(), full = read<Size>();

  self = nullptr;
  kernel = nullptr;
  random_bits.seed(seed);
  buffers.clear();
  threadgroup_arguments.clear();
  variables.clear();
  absent.clear();
  release_all();

  for (uint64_t count = read<uint64_t>(); count--;) {
    const uint64_t index = read<uint64_t>(), offset = read<uint64_t>(), length = read<uint64_t>();
    const bool uninitialised = read<uint64_t>();
    const std::string called = "buffer(" + std::to_string(index) + ")";
    Region& region = allocate(called, length, false, uninitialised);
    if (!uninitialised) read_bytes(region.start, length);
    if (offset > length)
      fail("misuse", "%s: the offset %zu is behind its %zu bytes", called.c_str(), offset, length);
    buffers[unsigned(index)] = {&region, offset};
  }
  for (uint64_t count = read<uint64_t>(); count--;) {
    const uint64_t index = read<uint64_t>(), length = read<uint64_t>();
    const std::string called = "threadgroup(" + std::to_string(index) + ")";
    if (length % 16)
      fail("misuse", "%s: the length %zu is not a multiple of 16", called.c_str(), length);
    threadgroup_arguments[unsigned(index)] = &allocate(called, length, true, true);
  }
  check_threadgroup_memory();
  for (const Kernel& each : kernels())
    if (each.name == name) kernel = &each;
  if (!kernel) fail("misuse", "there is no such kernel");
  for (const auto& missing : missing_constants())
    if (strstr(kernel->constants, (" " + std::to_string(missing.first) + " ").c_str()))
      fail("misuse", "function constant %u (`%s`) is not set", missing.first, missing.second.c_str());

  run_grid(by_threads, size, full);

  for (const auto& each : buffers) {
    const Region& region = *each.second.region;
    if (fwrite(region.start, 1, region.size, stdout) != region.size) _exit(0);
  }
  putc(0, stdout);  // the end, also of nothing
  fflush(stdout);
}

static void on_signal(int signal, siginfo_t* information, void* context) {
  const size_t code = size_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]) + 1;
  if (signal == SIGPROF) fail("hang", "the kernel ran for a minute; it was at @%zx@", code);
  fail("crash", "signal %d at @%zx@: a wild or misaligned access, or a division by zero; address %p",
       signal, code, information->si_addr);
}

static void watch() {
  static char stack[65536];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPROF}) sigaction(signal, &action, nullptr);
}

static void limit_time() {
  const itimerval minute = {{0, 0}, {60, 0}};
  setitimer(ITIMER_PROF, &minute, nullptr);
}

}  // namespace msl

int main() {
  msl::watch();
  for (;;) {
    // Waits for the next dispatch without using time.
    const int first = getc(stdin);
    if (first == EOF) _exit(0);
    ungetc(first, stdin);
    msl::limit_time();
    msl::dispatch();
  }
}

// Conversions that the compiler calls for and older libraries lack.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(rounded >> 16));
}
extern "C" __attribute__((weak)) __bf16 __truncdfbf2(double x) { return __truncsfbf2(float(x)); }
