// Kernels in CUDA C++ on the CPU, for tests: threads, and what the language has beyond C++.
//
// Each thread is a coroutine. They take turns where they wait for each other: in a warp, a block or a
// cluster. What a GPU does meanwhile, copies and matrix products, is done at once, or as late as it may
// be: when a thread waits for it. A wait that is missing is found in one of these two ways. Addresses,
// indices, layouts of registers and barriers are as on a GPU, and an address outside of a block's shared
// memory is an error, as are threads that wait for ever.

#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { uint32_t x, y, z; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulated {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 << 10, MOST_SHARED_BYTES = 227 << 10;
constexpr int MOST_IDLE_ROUNDS = 3;

// Where a number of threads wait for each other.
struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;

  void arrive(int wanted) {
    arrived++;
    end_phase(wanted);
  }

  // One that has not arrived is wanted no more.
  void leave(int wanted) {
    if (arrived) end_phase(wanted);
  }

  void end_phase(int wanted) {
    if (arrived < wanted) return;
    arrived = 0;
    phase++;
  }
};

struct Warp {
  Barrier barrier;
  int num_running = 0;
  alignas(16) char given[WARP][64];  // what each lane gives to the others
};

struct Cluster {
  Barrier barrier;
  int num_running = 0;
  std::vector<struct Block*> blocks;
};

using Work = std::function<void()>;

// What a thread has begun, in groups.
struct Begun {
  std::vector<std::vector<Work>> groups{1};  // the last one is not complete

  void add(Work work) { groups.back().push_back(std::move(work)); }
  void end_group() { groups.emplace_back(); }

  // Do all groups but so many of the last.
  void finish(size_t num_left) {
    while (groups.size() > num_left + 1) {
      const std::vector<Work> first = std::move(groups.front());
      groups.erase(groups.begin());
      for (const Work& work : first) work();
    }
  }
};

struct Block {
  dim3 index;
  uint32_t rank;  // in its cluster
  Cluster* cluster;
  Barrier barrier;
  Barrier named[16];
  int num_running = 0;
  std::vector<Warp> warps;
  std::vector<std::pair<int, size_t>> places;  // of variables in shared memory, by their lines
  size_t num_static = 0, num_dynamic = 0;
  std::vector<char> memory;  // dynamic, then static
  std::vector<std::pair<uint32_t, Work>> copies;  // of tiles, that have been begun, by their barriers
};

struct Thread {
  ucontext_t context;
  Block* block;
  uint32_t index;
  uint64_t cluster_phase = 0;  // at its last arrival
  Begun copies, products;
  bool is_done = false;

  Warp& warp() const { return block->warps[index / WARP]; }
  uint32_t lane() const { return index % WARP; }
};

inline Thread* current;
inline ucontext_t scheduler;
inline dim3 grid;
inline uint64_t num_events;  // of threads that have gone on after a wait, or ended
inline void (*body)();       // of a thread
inline const char* failure;  // why the kernel has failed, or null
inline bool is_late;         // whether work is done as late as it may be

inline void yield() { swapcontext(&current->context, &scheduler); }

// Ends the kernel.
[[noreturn]] inline void fail(const char* why) {
  failure = why;
  yield();
  __builtin_unreachable();
}

template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
  num_events++;
}

inline void meet(Barrier& barrier, int wanted) {
  const uint64_t phase = barrier.phase;
  barrier.arrive(wanted);
  wait_until([&] { return barrier.phase != phase; });
}

inline void meet_warp() { meet(current->warp().barrier, current->warp().num_running); }

// The result of a function of what all lanes of the warp give.
template <class Given, class Function>
auto among_lanes(const Given& own, Function function) {
  static_assert(sizeof(Given) <= sizeof(Warp::given[0]) && std::is_trivially_copyable_v<Given>);
  Warp& warp = current->warp();
  memcpy(warp.given[current->lane()], &own, sizeof own);
  meet_warp();
  auto result = function([&](uint32_t lane) {
    Given of_lane;
    memcpy(&of_lane, warp.given[lane % WARP], sizeof of_lane);
    return of_lane;
  });
  meet_warp();
  return result;
}

inline void run_thread() {
  body();
  Thread& thread = *current;
  thread.copies.end_group();
  thread.copies.finish(0);
  thread.is_done = true;
  num_events++;
  // Others do not wait for it any more.
  auto leave = [](auto& group) { group.barrier.leave(--group.num_running); };
  leave(thread.warp());
  leave(*thread.block);
  leave(*thread.block->cluster);
  yield();
}

// Runs some blocks beside each other, to their end or a failure.
inline void run_blocks(std::vector<Block>& blocks, int num_threads) {
  std::vector<Thread> threads(blocks.size() * num_threads);
  const size_t stacks_bytes = threads.size() * STACK_BYTES;
  char* stacks = (char*)mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    failure = "there is no memory for the threads' stacks";
    return;
  }
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& thread = threads[i];
    thread.block = &blocks[i / num_threads];
    thread.index = i % num_threads;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    thread.context.uc_stack.ss_size = STACK_BYTES;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  size_t num_running = threads.size();
  for (int num_idle = 0; num_running && !failure;) {
    const uint64_t before = num_events;
    for (Thread& thread : threads) {
      if (thread.is_done || failure) continue;
      current = &thread;
      swapcontext(&scheduler, &thread.context);
      num_running -= thread.is_done;
    }
    num_idle = num_events == before ? num_idle + 1 : 0;
    if (num_idle == MOST_IDLE_ROUNDS) failure = "all threads wait for each other";
  }
  munmap(stacks, stacks_bytes);
}

// Runs all blocks, cluster by cluster, or all beside each other; returns why it failed, or null.
inline const char* run_grid(void (*kernel)(), dim3 of, int num_threads, int cluster_blocks, size_t num_dynamic, bool together,
                            bool late) {
  body = kernel;
  grid = of;
  failure = nullptr;
  is_late = late;
  const size_t num_blocks = (size_t)of.x * of.y * of.z, at_once = together ? num_blocks : cluster_blocks;
  for (size_t first = 0; first < num_blocks && !failure; first += at_once) {
    std::vector<Block> blocks(at_once);
    std::vector<Cluster> clusters(at_once / cluster_blocks);
    for (size_t i = 0; i < at_once; i++) {
      Block& block = blocks[i];
      const uint32_t number = first + i;
      block.index = {number % of.x, number / of.x % of.y, number / of.x / of.y};
      block.rank = i % cluster_blocks;
      block.cluster = &clusters[i / cluster_blocks];
      block.cluster->blocks.push_back(&block);
      block.cluster->num_running += num_threads;
      block.num_running = num_threads;
      block.warps.resize(num_threads / WARP);
      for (Warp& warp : block.warps) warp.num_running = WARP;
      block.num_dynamic = num_dynamic;
      // What is read before it is written is NaN.
      block.memory.assign(MOST_SHARED_BYTES, (char)0xff);
    }
    run_blocks(blocks, num_threads);
  }
  return failure;
}

// A variable in the block's shared memory, named by its line in the source.
template <class T>
T& shared_variable(int line) {
  Block& block = *current->block;
  for (const auto& [of_line, place] : block.places)
    if (of_line == line) return *(T*)(block.memory.data() + place);
  const size_t place = (block.num_dynamic + block.num_static + 127) / 128 * 128, end = place + sizeof(T);
  if (end > MOST_SHARED_BYTES) fail("too much shared memory");
  block.num_static = end - block.num_dynamic;
  block.places.emplace_back(line, place);
  return *(T*)(block.memory.data() + place);
}

inline char* dynamic_shared() { return current->block->memory.data(); }

inline char* in_shared(Block& block, uint32_t address, size_t num_bytes) {
  if (address + num_bytes > block.num_dynamic + block.num_static) fail("an address outside of shared memory");
  return block.memory.data() + address;
}

template <class T>
T* in_shared(uint32_t address, size_t count = 1) {
  if (address % sizeof(T)) fail("an address in shared memory that is not aligned");
  return (T*)in_shared(*current->block, address, count * sizeof(T));
}

// Numbers of 16 bits: bfloat16, or float16.

inline float widened(uint16_t narrow) {
#if IS_HALF
  _Float16 half;
  memcpy(&half, &narrow, 2);
  return half;
#else
  const uint32_t bits = (uint32_t)narrow << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
#endif
}

inline uint16_t narrowed(float wide) {
  uint16_t narrow;
#if IS_HALF
  const _Float16 half = wide;
  memcpy(&narrow, &half, 2);
#else
  uint32_t bits;
  memcpy(&bits, &wide, 4);
  if (wide != wide) return 0x7fff;
  narrow = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
  return narrow;
}

inline float element(uint32_t pair, int which) { return widened(which ? pair >> 16 : pair & 0xffff); }

}  // namespace emulated

#define threadIdx (dim3{emulated::current->index, 0, 0})
#define blockIdx (emulated::current->block->index)
#define gridDim (emulated::grid)

// Functions of CUDA.

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline void __syncthreads() { emulated::meet(emulated::current->block->barrier, emulated::current->block->num_running); }
inline void __syncwarp(uint32_t = ~0u) { emulated::meet_warp(); }
inline void __threadfence() {}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline float __int_as_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline uint32_t __cvta_generic_to_shared(const void* pointer) { return (const char*)pointer - emulated::dynamic_shared(); }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> void __stcg(T* to, T value) { *to = value; }
template <class T, class Added> T atomicAdd(T* to, Added value) { const T before = *to; *to += value; return before; }

template <class T> T __shfl_sync(uint32_t, T value, int from) {
  return emulated::among_lanes(value, [&](auto of_lane) { return of_lane(from); });
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return __shfl_sync(mask, value, emulated::current->lane() ^ other);
}
template <class T> T __shfl_up_sync(uint32_t mask, T value, uint32_t distance) {
  const uint32_t lane = emulated::current->lane();
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}
inline uint32_t __ballot_sync(uint32_t, bool is_true) {
  return emulated::among_lanes(is_true, [](auto of_lane) {
    uint32_t bits = 0;
    for (int lane = 0; lane < emulated::WARP; lane++) bits |= (uint32_t)of_lane(lane) << lane;
    return bits;
  });
}
inline bool __any_sync(uint32_t mask, bool is_true) { return __ballot_sync(mask, is_true); }
inline int __reduce_add_sync(uint32_t, int value) {
  return emulated::among_lanes(value, [](auto of_lane) {
    int sum = 0;
    for (int lane = 0; lane < emulated::WARP; lane++) sum += of_lane(lane);
    return sum;
  });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return emulated::among_lanes(value, [](auto of_lane) {
    int most = of_lane(0);
    for (int lane = 1; lane < emulated::WARP; lane++) most = max(most, of_lane(lane));
    return most;
  });
}
