// Products of up to 256 tokens with a weight, on Hopper; `hopper_linear.py` describes it.
//
// Compiled with these macros:
//   ROWS      rows of the weight that a block multiplies by at once, 64 or 128
//   TOKENS    tokens that there is room for, a multiple of 16 if there are 128 rows, and of 32 if 64
//   IS_GATED  whether the first half of a block's 128 rows are the gate's, the others those that they multiply
//   SPLITS    blocks that have a share of the columns each; a power of two
//   STAGES    tiles in shared memory
//   IS_HALF   see `common.cuh`

#include "products.cuh"

#define DEPTH 64                                         // columns of a tile
#define CONSUMER_WARPS 8
#define WEIGHT_THREAD (2 * GROUP_THREADS)                // loads the weight
#define TOKEN_THREAD (WEIGHT_THREAD + 32)                // loads the tokens
// A warpgroup has 64 rows, and all tokens or, where a block has no more rows, a half of them.
#define HAS_ALL_TOKENS (ROWS == 128)
#define GROUP_TOKENS (HAS_ALL_TOKENS ? TOKENS : TOKENS / 2)
#define SUMS (GROUP_TOKENS / 2)                          // of a thread
#define WEIGHT_BYTES (ROWS * ROW_BYTES)
#define TILE_BYTES (WEIGHT_BYTES + TOKENS * ROW_BYTES)   // with room for all tokens
#define OUT_ROWS (IS_GATED ? ROWS / 2 : ROWS)            // of the result, of a block
// Each of the blocks that share rows adds up the sums of some of a warpgroup's tokens: of so many, and the
// last of what is left.
#define SHARE_TOKENS ((GROUP_TOKENS + 16 * SPLITS - 1) / (16 * SPLITS) * 16)
#define SHARES ((GROUP_TOKENS + SHARE_TOKENS - 1) / SHARE_TOKENS)
#define SHARE_SUMS (SHARE_TOKENS / 2)
#define STORE_TOKENS (SHARE_TOKENS < 64 ? SHARE_TOKENS : 64)  // written at once
#define CHUNKS 8                                         // of 16 bytes, of 64 rows of the result
#define ALL_CONSUMERS 3                                  // a named barrier; those before it are of a warpgroup each

__device__ __forceinline__ void copy_weight(u32 to, const TensorMap* map, u32 barrier, int column, int row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap* map, u32 barrier, int column) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(column), "r"(0) : "memory");
}

#include "token_product.cuh"

// `silu_mul` of two results each, and of eight.
__device__ __forceinline__ u32 activated(u32 gate, u32 up) {
  return pack(silu_mul(widened(gate & 0xffff), widened(up & 0xffff)), silu_mul(widened(gate >> 16), widened(up >> 16)));
}

__device__ __forceinline__ uint4 activated(uint4 gate, uint4 up) {
  return {activated(gate.x, up.x), activated(gate.y, up.y), activated(gate.z, up.z), activated(gate.w, up.w)};
}

// Writes four matrices of 8 x 8, transposed: each lane has the address of a row of one.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

// The kernel's arguments, except for tensor maps.
struct Arguments {
  const u16* bias;     // or null
  u16* out;
  float* partials;     // of each item and warpgroup
  u32* counters;       // of each tile and warpgroup, of blocks that have written partial sums
  u32 num_tokens;
  u32 num_out;         // columns of the result
  u32 num_steps;       // tiles of a row of the weight
  u32 num_items;       // tiles of rows, for each split
};

// What a block does next: a tile of rows, and a share of the columns.
struct Item {
  u32 index;
  u32 tile, split;
  u32 begin, end;      // steps

  __device__ __forceinline__ Item(const Arguments& of, u32 index) : index(index) {
    tile = index / SPLITS;
    split = index % SPLITS;
    begin = split * of.num_steps / SPLITS;
    end = (split + 1) * of.num_steps / SPLITS;
  }
};

// Addresses in shared memory: barriers of each stage, tiles, and results of each warpgroup.
struct Shared {
  u32 there;           // both tiles of a stage can be read
  u32 read;            // they have been
  u32 tiles;
  u32 results;

  __device__ __forceinline__ u32 weight_tile(u32 stage) const { return tiles + stage * TILE_BYTES; }
  __device__ __forceinline__ u32 token_tile(u32 stage) const { return tiles + stage * TILE_BYTES + WEIGHT_BYTES; }
};

// One thread: loads tiles of the weight as far ahead as there is room, also before the kernel waits.
__device__ __forceinline__ void load_weight(const Arguments& of, const Shared& at, const TensorMap* map) {
  const u64 policy = read_once();
  const u32 num_bytes = WEIGHT_BYTES + of.num_tokens * ROW_BYTES;
  Turn turn;
  for (u32 index = blockIdx.x; index < of.num_items; index += gridDim.x) {
    const Item item(of, index);
    const int row = item.tile * OUT_ROWS, last_column = item.end * DEPTH;
#pragma unroll 1
    for (int column = item.begin * DEPTH; column < last_column; column += DEPTH, turn.advance()) {
      const u32 to = at.weight_tile(turn.stage), there = at.there + turn.stage * 8;
      await_phase(at.read + turn.stage * 8, turn.parity ^ 1);
      arrive_and_expect(there, num_bytes);
      copy_weight(to, map, there, column, row, policy);
      if (IS_GATED) copy_weight(to + WEIGHT_BYTES / 2, map, there, column, of.num_out + row, policy);
    }
  }
}

// One thread: loads tiles of the tokens. A barrier counts their bytes whether it expects them yet or
// not.
__device__ __forceinline__ void load_tokens(const Arguments& of, const Shared& at, const TensorMap* map) {
  Turn turn;
  for (u32 index = blockIdx.x; index < of.num_items; index += gridDim.x) {
    const Item item(of, index);
    const int last_column = item.end * DEPTH;
#pragma unroll 1
    for (int column = item.begin * DEPTH; column < last_column; column += DEPTH, turn.advance()) {
      await_phase(at.read + turn.stage * 8, turn.parity ^ 1);
      copy_tokens(at.token_tile(turn.stage), map, at.there + turn.stage * 8, column);
    }
  }
}

// A warpgroup: multiplies, adds up what blocks have of the same rows, and writes results.
struct Consumer {
  const Arguments& of;
  const Shared& at;
  const u32 group, warp, lane, thread;  // of two; of the group; of the warp; of the group
  Turn turn;
  float sums[SUMS];

  __device__ __forceinline__ Consumer(const Arguments& of, const Shared& at, u32 group, u32 warp)
      : of(of), at(at), group(group), warp(warp), lane(threadIdx.x % 32), thread(threadIdx.x % GROUP_THREADS) {}

  __device__ __forceinline__ void sync() const { sync_threads<GROUP_THREADS>(1 + group); }

  __device__ __forceinline__ void run() {
    for (u32 index = blockIdx.x; index < of.num_items; index += gridDim.x) {
      const Item item(of, index);
      add_products(item.end - item.begin);
      if (SPLITS > 1) {
        exchange(item);
        if (item.split >= SHARES) continue;
      }
      const u32 first_token = HAS_ALL_TOKENS ? 0 : group * GROUP_TOKENS;
      const u32 begin = item.split * SHARE_TOKENS, end = min(begin + SHARE_TOKENS, GROUP_TOKENS);
      store(item.tile, first_token + begin, min(first_token + end, of.num_tokens));
    }
  }

  __device__ __forceinline__ void add_products(u32 num_steps) {
    const u32 weight_matrix = matrix(at.weight_tile(0) + (HAS_ALL_TOKENS ? group * 64 * ROW_BYTES : 0), 16);
    const u32 token_matrix = matrix(at.token_tile(0) + (HAS_ALL_TOKENS ? 0 : group * GROUP_TOKENS * ROW_BYTES), 16);
    u32 read = 0;  // the barrier of the last tile
#pragma unroll 1
    for (u32 i = 0; i < num_steps; i++, turn.advance()) {
      const u32 tile = turn.stage * (TILE_BYTES >> 4);
      await_phase(at.there + turn.stage * 8, turn.parity);
      hold(sums);
      begin_products();
#pragma unroll
      for (int k = 0; k < DEPTH / 16; k++)
        multiply(sums, weight_matrix + tile + (k * 32 >> 4), token_matrix + tile + (k * 32 >> 4), i | k);
      commit_products();
      if (i) {
        await_products<1>();
        if (lane == 0) arrive(read);
      }
      read = at.read + turn.stage * 8;
    }
    await_products<0>();
    hold(sums);
    if (lane == 0) arrive(read);
  }

  // Where a thread's sums of an item are: [warpgroups, sums / 4, threads, 4].
  __device__ __forceinline__ float4* partials_of(u32 index) const {
    return (float4*)of.partials + ((u64)index * 2 + group) * (SUMS / 4 * GROUP_THREADS) + thread;
  }

  // Blocks that share rows wait for each other. They are neighbours, so all but the last few run at
  // once, and those follow when others end. Sums are added in the order of the splits.
  __device__ __forceinline__ void exchange(const Item& item) {
    float4* own = partials_of(item.index);
#pragma unroll
    for (int j = 0; j < SUMS; j += 4)
      __stcg(own + j / 4 * GROUP_THREADS, make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]));
    sync();
    if (thread == 0) {
      // The counter is a multiple of SPLITS before and after a kernel.
      u32* counter = of.counters + item.tile * 2 + group;
      u32 count;
      asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(count) : "l"(counter) : "memory");
      const u32 round = count / SPLITS;
      if (item.split < SHARES) {
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
        while (count / SPLITS == round);
      }
    }
    if (item.split >= SHARES) return;
    sync();
    const u32 begin = item.split * SHARE_SUMS;
    auto is_there = [&](int j) { return SUMS % SHARE_SUMS == 0 || begin + j < SUMS; };
    const float4* first = partials_of(item.index - item.split) + begin / 4 * GROUP_THREADS;
#pragma unroll
    for (int j = 0; j < SHARE_SUMS; j++) sums[j] = 0.f;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
      const float4* other = first + split * (2 * SUMS / 4 * GROUP_THREADS);
#pragma unroll
      for (int j = 0; j < SHARE_SUMS; j += 4) {
        if (!is_there(j)) continue;
        const float4 v = __ldcg(other + j / 4 * GROUP_THREADS);
        sums[j] += v.x;
        sums[j + 1] += v.y;
        sums[j + 2] += v.z;
        sums[j + 3] += v.w;
      }
    }
  }

  // Sum j of a thread is of token j / 4 * 8 + lane % 4 * 2 + j % 2, and of row j / 2 % 2 * 8 + lane / 4 of
  // the warp's 16. Rows of a token are written together, so they go through shared memory; with a gate
  // both warpgroups write what the first has of the gate and the second of the rows that it multiplies.
  __device__ __forceinline__ void store(u32 tile, u32 first_token, u32 end_token) {
    const u32 own_results = at.results + group * STORE_TOKENS * ROW_BYTES;
    // The token and the rows of a matrix's row that this lane has the address of.
    const u32 own_token = lane / 16 * 8 + lane % 8, own_chunk = warp * 2 + lane / 8 % 2;
    const u32 own_place = own_results + own_token * ROW_BYTES + (own_chunk ^ own_token % 8) * 16;
    const u32 row = tile * OUT_ROWS + (HAS_ALL_TOKENS && !IS_GATED ? group * 64 : 0);  // the first, of the result
    float bias[2] = {0.f, 0.f};
    if (of.bias) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 own_row = row + warp * 16 + lane / 4 + 8 * r;
        if (own_row < of.num_out) bias[r] = widened(of.bias[own_row + (IS_GATED ? group * of.num_out : 0)]);
      }
    }
    auto result = [&](int j) { return sums[j] + bias[j / 2 % 2]; };
#pragma unroll
    for (int first = 0; first < SHARE_TOKENS; first += STORE_TOKENS) {
      if (first_token + first >= end_token) break;
      constexpr int WRITERS = (IS_GATED ? 2 : 1) * GROUP_THREADS;
      const int count = min(STORE_TOKENS, SHARE_TOKENS - first);
      sync_writers();  // what was there has been read
#pragma unroll
      for (int j = first / 2; j < (first + count) / 2; j += 8) {
        const u32 matrices[4] = {pack(result(j), result(j + 1)), pack(result(j + 2), result(j + 3)),
                                 pack(result(j + 4), result(j + 5)), pack(result(j + 6), result(j + 7))};
        store_transposed(own_place + (j * 2 - first) * ROW_BYTES, matrices);
      }
      sync_writers();
      const u32 results = IS_GATED ? at.results : own_results;
#pragma unroll
      for (int i = 0; i * WRITERS < count * CHUNKS; i++) {
        const u32 place = i * WRITERS + (IS_GATED ? group * GROUP_THREADS : 0) + thread;
        const u32 token = place / CHUNKS, chunk = place % CHUNKS;
        if (token >= count) break;
        const u32 out_token = first_token + first + token, out_row = row + chunk * 8;
        const u32 from = results + token * ROW_BYTES + (chunk ^ token % 8) * 16;
        uint4 v = load16(from);
        if (IS_GATED) v = activated(v, load16(from + STORE_TOKENS * ROW_BYTES));
        if (out_token < end_token && out_row < of.num_out)
          *(uint4*)(of.out + (u64)out_token * of.num_out + out_row) = v;
      }
    }
  }

  // Waits for those that write the same results.
  __device__ __forceinline__ void sync_writers() const {
    if (IS_GATED)
      sync_threads<2 * GROUP_THREADS>(ALL_CONSUMERS);
    else
      sync();
  }
};

extern "C" __global__ void __launch_bounds__(3 * GROUP_THREADS, 1)
hopper_linear(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap token_map,
              const u16* bias, u16* out, float* partials, u32* counters, u64 num_tokens, u64 num_out, u64 num_steps,
              u64 num_items) {
  extern __shared__ char memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const Arguments of = {bias, out, partials, counters, (u32)num_tokens, (u32)num_out, (u32)num_steps, (u32)num_items};
  Shared at;
  at.there = shared_address(barriers);
  at.read = at.there + STAGES * 8;
  at.tiles = (shared_address(memory) + 1023) / 1024 * 1024;
  at.results = at.tiles + STAGES * TILE_BYTES;
  if (threadIdx.x == WEIGHT_THREAD) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(at.there + stage * 8, 1);
      init_barrier(at.read + stage * 8, CONSUMER_WARPS);
    }
    fence_barriers();
  }
  __syncthreads();
  // Uniform within a warp, which the compiler has to know.
  const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp >= CONSUMER_WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == WEIGHT_THREAD) load_weight(of, at, &weight_map);
    if (threadIdx.x == TOKEN_THREAD) {
      await_predecessor();
      if (!IS_GATED) release_successor();
      load_tokens(of, at, &token_map);
      if (IS_GATED) release_successor();  // its weight is large, and the next product would take its place
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    await_predecessor();
    Consumer(of, at, warp / 4, warp % 4).run();
  }
}
