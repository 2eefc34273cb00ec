// Products of up to 16 tokens with a weight; `skinny_linear.py` describes it.
//
// Compiled with these macros:
//   UNITS     of 8 rows of the weight that a block multiplies by at once; of the gate's rows, if gated
//   CHUNKS    of 64 columns of a tile
//   ROW_WARPS warps that share the rows of a tile
//   SHARES    warps that share its columns
//   STAGES    tiles in shared memory
//   IS_GATED  whether the result is the gated activation of the product
//   IS_HALF   see `common.cuh`

#include "products.cuh"

#define TOKENS 16                                        // that there is room for, as many as a product has
#define WARP_UNITS (IS_GATED ? 2 : UNITS / ROW_WARPS)    // of a warp; if gated, one of the gate's and its other one
#define PAIRS ((WARP_UNITS + 1) / 2)                     // of units
#define CONSUMER_WARPS (ROW_WARPS * SHARES)
#define TILE_ROWS (UNITS * 8)
#define SLICES (CHUNKS * 4)                              // of 16 columns, of a tile
#define PART_BYTES (CHUNKS * TILE_ROWS * ROW_BYTES)      // of a tile of the weight, or half of one if gated
#define WEIGHT_BYTES (PART_BYTES * (1 + IS_GATED))
#define TILE_BYTES (WEIGHT_BYTES + CHUNKS * TOKENS * ROW_BYTES)
#define SUMS (WARP_UNITS * 4)                            // of a thread

// A tile of CHUNKS chunks; those of a chunk lie together.
__device__ __forceinline__ void copy_weight(u32 to, const TensorMap* map, u32 barrier, int row, int chunk, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(chunk), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap* map, u32 barrier, int chunk) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(0), "r"(0), "r"(chunk) : "memory");
}

// sums[16 tokens, 8 rows] += a b^T
__device__ __forceinline__ void multiply(float* sums, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The kernel's arguments, except for tensor maps.
struct Arguments {
  const u16* bias;     // or null
  u16* out;
  u32 num_tokens;
  u32 num_out;         // columns of the result
  u32 num_chunks;      // of a row of the weight
};

// Addresses in shared memory: barriers of each stage, tiles, and sums of warps.
struct Shared {
  u32 there;           // both tiles of a stage can be read
  u32 read;            // they have been
  u32 tiles;
  float* sums;         // [SHARES - 1, ROW_WARPS, SUMS, 32]
};

// One thread: loads tiles of the weight as far ahead as there is room, also before the kernel waits.
__device__ __forceinline__ void load_weight(const Arguments& of, const Shared& at, const TensorMap* map) {
  const u64 policy = read_once();
  const u32 num_bytes = WEIGHT_BYTES + CHUNKS * of.num_tokens * ROW_BYTES;
  Turn turn;
  for (u32 row = blockIdx.x * TILE_ROWS; row < of.num_out; row += gridDim.x * TILE_ROWS) {
#pragma unroll 1
    for (u32 chunk = 0; chunk < of.num_chunks; chunk += CHUNKS, turn.advance()) {
      const u32 to = at.tiles + turn.stage * TILE_BYTES, there = at.there + turn.stage * 8;
      await_phase(at.read + turn.stage * 8, turn.parity ^ 1);
      arrive_and_expect(there, num_bytes);
      copy_weight(to, map, there, row, chunk, policy);
      if (IS_GATED) copy_weight(to + PART_BYTES, map, there, of.num_out + row, chunk, policy);
    }
  }
}

// One thread: loads tiles of the tokens. A barrier counts their bytes whether it expects them yet or
// not.
__device__ __forceinline__ void load_tokens(const Arguments& of, const Shared& at, const TensorMap* map) {
  Turn turn;
  for (u32 row = blockIdx.x * TILE_ROWS; row < of.num_out; row += gridDim.x * TILE_ROWS) {
#pragma unroll 1
    for (u32 chunk = 0; chunk < of.num_chunks; chunk += CHUNKS, turn.advance()) {
      await_phase(at.read + turn.stage * 8, turn.parity ^ 1);
      copy_tokens(at.tiles + turn.stage * TILE_BYTES + WEIGHT_BYTES, map, at.there + turn.stage * 8, chunk);
    }
  }
}

// A warp that multiplies some rows of a tile, in some of its columns.
struct Consumer {
  const Arguments& of;
  const Shared& at;
  const u32 lane, row_warp, share;
  Turn turn;
  float sums[WARP_UNITS][4];

  __device__ __forceinline__ Consumer(const Arguments& of, const Shared& at, u32 warp)
      : of(of), at(at), lane(threadIdx.x % 32), row_warp(warp % ROW_WARPS), share(warp / ROW_WARPS) {}

  __device__ __forceinline__ void run() {
    for (u32 row = blockIdx.x * TILE_ROWS; row < of.num_out; row += gridDim.x * TILE_ROWS) {
      add_products();
      if (SHARES > 1) add_shares();
      if (share == 0) store(row);
    }
  }

  __device__ __forceinline__ void add_products() {
#pragma unroll
    for (int u = 0; u < WARP_UNITS; u++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[u][i] = 0.f;
    // The row of a matrix that this lane has the address of: of the tokens, and of a pair of units. Half
    // of the lanes have another half of the columns.
    const u32 own_token = lane % 16, token_half = lane / 16, weight_half = lane / 8 % 2;
    auto own_row = [&](u32 pair) {
      const u32 unit = min(pair * 2 + lane / 16, WARP_UNITS - 1);  // the last one twice, if they are odd
      return IS_GATED ? row_warp * 8 + lane % 8 : (row_warp * WARP_UNITS + unit) * 8 + lane % 8;
    };
    const u32 own_part = IS_GATED ? lane / 16 * PART_BYTES : 0;
#pragma unroll 1
    for (u32 first = 0; first < of.num_chunks; first += CHUNKS, turn.advance()) {
      const u32 weight = at.tiles + turn.stage * TILE_BYTES, tokens = weight + WEIGHT_BYTES;
      await_phase(at.there + turn.stage * 8, turn.parity);
#pragma unroll
      for (u32 i = 0; i < SLICES / SHARES; i++) {
        const u32 slice = i * SHARES + share, chunk = slice / 4, column = slice % 4 * 2;
        u32 a[4], b[PAIRS][4];
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
          const u32 row = chunk * TILE_ROWS + own_row(pair);
          load_matrices(b[pair], weight + own_part + row * ROW_BYTES + ((column + weight_half ^ row % 8) << 4));
        }
        const u32 token = chunk * of.num_tokens + own_token;
        load_matrices(a, tokens + token * ROW_BYTES + ((column + token_half ^ token % 8) << 4));
#pragma unroll
        for (int u = 0; u < WARP_UNITS; u++) multiply(sums[u], a, b[u / 2][u % 2 * 2], b[u / 2][u % 2 * 2 + 1]);
      }
      __syncwarp();
      if (lane == 0) arrive(at.read + turn.stage * 8);
    }
  }

  // Gives the first of the warps that share columns the sums of all, added in order.
  __device__ __forceinline__ void add_shares() {
    float* own = at.sums + (((int)share - 1) * ROW_WARPS + (int)row_warp) * (SUMS * 32) + lane;
    float* all = &sums[0][0];
    if (share) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) own[i * 32] = all[i];
    }
    sync_threads<CONSUMER_WARPS * 32>(1);
    if (share == 0) {
#pragma unroll
      for (int s = 1; s < SHARES; s++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) all[i] += own[(s * ROW_WARPS * SUMS + i) * 32];
    }
    sync_threads<CONSUMER_WARPS * 32>(1);  // they have been read
  }

  // Sum i is of token i / 2 * 8 + lane / 4, and of row lane % 4 * 2 + i % 2 of a unit.
  __device__ __forceinline__ void store(u32 first_row) const {
#pragma unroll
    for (int u = 0; u < (IS_GATED ? 1 : WARP_UNITS); u++) {
      const u32 row = first_row + (IS_GATED ? row_warp : row_warp * WARP_UNITS + u) * 8 + lane % 4 * 2;
      if (row >= of.num_out) continue;
      float bias[2] = {0.f, 0.f}, up_bias[2] = {0.f, 0.f};
      if (of.bias) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          bias[r] = widened(of.bias[row + r]);
          if (IS_GATED) up_bias[r] = widened(of.bias[of.num_out + row + r]);
        }
      }
      auto result = [&](int i) {
        const float own = sums[u][i] + bias[i % 2];
        return IS_GATED ? silu_mul(rounded(own), rounded(sums[WARP_UNITS - 1][i] + up_bias[i % 2])) : own;
      };
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const u32 token = i / 2 * 8 + lane / 4;
        if (token < of.num_tokens) *(u32*)(of.out + (u64)token * of.num_out + row) = pack(result(i), result(i + 1));
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__((CONSUMER_WARPS + 2) * 32, 2)
skinny_linear(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap token_map,
              const u16* bias, u16* out, u64 num_tokens, u64 num_out, u64 num_chunks) {
  extern __shared__ char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const Arguments of = {bias, out, (u32)num_tokens, (u32)num_out, (u32)num_chunks};
  Shared at;
  at.there = shared_address(barriers);
  at.read = at.there + STAGES * 8;
  const u32 unaligned = shared_address(memory);
  at.tiles = (unaligned + 1023) / 1024 * 1024;
  at.sums = (float*)(memory + (at.tiles - unaligned) + STAGES * TILE_BYTES);
  // Uniform within a warp, which the compiler has to know.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool loads_weight = threadIdx.x == CONSUMER_WARPS * 32, loads_tokens = threadIdx.x == CONSUMER_WARPS * 32 + 32;
  if (loads_weight) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(at.there + stage * 8, 1);
      init_barrier(at.read + stage * 8, CONSUMER_WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  if (warp < CONSUMER_WARPS) {
    await_predecessor();
    Consumer(of, at, warp).run();
  } else if (loads_weight) {
    load_weight(of, at, &weight_map);
  } else if (loads_tokens) {
    await_predecessor();
    release_successor();
    load_tokens(of, at, &token_map);
  }
}
