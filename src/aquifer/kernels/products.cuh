// What products with a weight have in common: `hopper_linear.cu` and `skinny_linear.cu`, which have
// STAGES tiles in shared memory.

#include "hopper.cuh"

// A place in shared memory that is used in turn, and the parity of the turn.
struct Turn {
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < STAGES) return;
    stage = 0;
    parity ^= 1;
  }
};

// Weights are read once in a step, so they should leave the L2 cache first.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ float widened(u16 narrow) {
  float x;
  asm("cvt.f32." TYPE " %0, %1;" : "=f"(x) : "h"(narrow));
  return x;
}

__device__ __forceinline__ float rounded(float x) {
  float y;
  asm("{\n.reg .b16 narrow;\ncvt.rn." TYPE ".f32 narrow, %1;\ncvt.f32." TYPE " %0, narrow;\n}" : "=f"(y) : "f"(x));
  return y;
}

// silu(gate) * up of rounded values, rounded as `silu_mul`, but for the last time.
__device__ __forceinline__ float silu_mul(float gate, float up) {
  return rounded(__fdividef(gate, 1.f + exp2_of(-1.44269504f * gate))) * up;
}
