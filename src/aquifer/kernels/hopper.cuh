// What kernels for Hopper alone have in common: copies by hardware (TMA), barriers in shared
// memory, and matrix products of a warpgroup (WGMMA).

#include "common.cuh"

struct __align__(64) TensorMap {
  u64 opaque[16];
};

#define ROW_BYTES 128      // of a tile: 64 elements, swizzled
#define GROUP_THREADS 128  // of a warpgroup

// Barriers in shared memory.

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes barriers that this thread has set up visible to copies, and to other blocks of the cluster.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void await_phase(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

// Named barriers, of some threads of the block.

template <int THREADS>
__device__ __forceinline__ void sync_threads(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void pass_threads(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// 16 bytes from shared memory.
__device__ __forceinline__ uint4 load16(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}

// Matrix products of a warpgroup.

#define F4(r, i) "+f"(r[i]), "+f"(r[i + 1]), "+f"(r[i + 2]), "+f"(r[i + 3])
#define F8(r, i) F4(r, i), F4(r, i + 4)
#define F16(r, i) F8(r, i), F8(r, i + 8)
#define F32(r, i) F16(r, i), F16(r, i + 16)
#define F64(r, i) F32(r, i), F32(r, i + 32)
#define NUMBERS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NUMBERS16 NUMBERS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NUMBERS24 NUMBERS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NUMBERS32 NUMBERS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NUMBERS40 NUMBERS32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define NUMBERS48 NUMBERS40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define NUMBERS56 NUMBERS48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NUMBERS64 NUMBERS56 ",%56,%57,%58,%59,%60,%61,%62,%63"
// The low word of the descriptor of a matrix in shared memory, in units of 16 bytes: rows of 128
// bytes, swizzled, in groups of 8. `lead` is the distance of 64 columns from the next ones, in
// bytes, where rows are of the product's inner dimension.
__device__ __forceinline__ u32 matrix(u32 address, u32 lead) {
  return (address >> 4 & 0x3fff) | (lead >> 4) << 16;
}

#define HIGH_WORD (8 * ROW_BYTES >> 4 | 1 << 30)

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving registers that a product in flight reads or writes.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(registers[i])::"memory");
}
