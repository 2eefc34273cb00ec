// What all kernels in CUDA C++ have in common (`_cuda.py`).
//
// IS_HALF is 1 for float16, 0 for bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;

#define NEG_INF (-__int_as_float(0x7f800000))

#if IS_HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ void await_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void await_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return (u32)__cvta_generic_to_shared(pointer);
}

// 16 bytes from global to shared memory, through the L2 cache alone; zeros if `size` is 0.
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 size) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

// Four matrices of 8 x 8: each lane has the address of a row of one, and gets two elements of each.
__device__ __forceinline__ void load_matrices(u32* m, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
