// Decode attention of few rows by clusters of blocks; `cluster_attention.py` describes it.
//
// Compiled with these macros:
//   DIM      elements of a head, 64 or 128
//   GROUP    query heads of a KV head, at most 8
//   RANKS    blocks of a cluster
//   WARPS    warps of a block
//   STAGES   tiles that a warp has in shared memory
//   IS_HALF  see `common.cuh`

#include "common.cuh"

#define TILE 16                        // tokens of a tile
#define ROUND (RANKS * WARPS)          // tiles that a cluster reads at once
#define FEWEST (2 * ROUND)             // tiles of a share, at least
#define MERGE_TILES (3 * ROUND)        // about as long as merging a row that is split
#define LANES (DIM / 8)                // lanes that copy a row of a tile, 16 bytes each
#define ROWS (32 / LANES)              // rows that a warp copies at once
#define ROW_BYTES (DIM * 2 + 16)       // padded, so that 8 rows are in different banks
#define TILE_BYTES (TILE * ROW_BYTES)
#define OUTPUTS (GROUP * DIM)
#define SLICE (OUTPUTS / RANKS)        // outputs that a block merges

__device__ __forceinline__ void load_transposed(u32* m, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

// c += a b, of which the lower 8 of 16 rows are zero.
__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a2, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(0u), "r"(a2), "r"(0u), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float load_of_rank(const void* pointer, u32 rank) {
  u32 address;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(~0u, value); }

// A partial result's maximum and sum: powers of two, as scores are scaled by log2(e).
struct Weight {
  float most, total;
};

// The work of a cluster: lane r has the tiles [begin, end) of row r. Equal in all of its warps.
struct Work {
  int begin, end;
  int first, count;  // the clusters that have tiles of the row
};

// Divide the rows' tiles among the clusters of a head: whole rows in turn, or where that leaves
// much more to one than to others, equal shares of all tiles, row after row.
__device__ __forceinline__ Work divide(int tiles, int cluster, int num_clusters) {
  int lane = threadIdx.x % 32;
  int rounded = (tiles + ROUND - 1) / ROUND * ROUND;
  int load = 0;
  // What each cluster would have of whole rows; lane c sums up for cluster c.
  for (int r = 0; r < 32; r++) {
    int of_row = __shfl_sync(~0u, rounded, r);
    if (r % num_clusters == lane) load += of_row;
  }
  int total = warp_sum(tiles);
  int share = (total + num_clusters - 1) / num_clusters;
  share = max((share + ROUND - 1) / ROUND * ROUND, FEWEST);
  Work work;
  if (warp_max(load) <= share + MERGE_TILES) {
    bool is_own = lane % num_clusters == cluster;
    work.begin = 0;
    work.end = is_own ? tiles : 0;
    work.first = cluster;
    work.count = 1;
    return work;
  }
  int before = tiles;  // tiles of this row and those before it
  for (int step = 1; step < 32; step *= 2) {
    int other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  before -= tiles;
  work.begin = max(cluster * share - before, 0);
  work.end = min((cluster + 1) * share - before, tiles);
  work.first = before / share;
  work.count = tiles > 0 ? (before + tiles - 1) / share - work.first + 1 : 1;
  return work;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
cluster_attention(const u16* query, const char* keys, const char* values, const void* slots, const void* lengths,
                  u16* out, float* partials, u32* counters, float scale, u64 batch, u64 index_bytes, u64 query_row,
                  u64 query_head, u64 slot_bytes, u64 token_bytes, u64 head_bytes, u64 out_row, u64 out_head) {
  extern __shared__ __align__(128) char memory[];
  __shared__ Weight warp_weights[WARPS][GROUP];
  __shared__ Weight block_weights[GROUP];
  __shared__ u32 num_before;
  float* block_sums = (float*)memory;                  // [OUTPUTS]
  float* warp_sums = block_sums + OUTPUTS;             // [WARPS][OUTPUTS]
  char* tiles_memory = (char*)(warp_sums + WARPS * OUTPUTS);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 rank = blockIdx.x % RANKS, head = blockIdx.y;
  const int cluster = blockIdx.x / RANKS, num_clusters = gridDim.x / RANKS;

  // Lengths and slots were written before the predecessor was launched, and are read through the
  // L2 cache. So is KV, except that of each row's own token.
  const bool is_row = lane < batch;
  auto index_of = [&](const void* indices) -> int {
    if (!is_row) return 0;
    return index_bytes == 8 ? (int)__ldcg((const long long*)indices + lane) : __ldcg((const int*)indices + lane);
  };
  const int length = index_of(lengths);
  const int slot = index_of(slots);
  const Work work = divide((length + TILE - 1) / TILE, cluster, num_clusters);
  const u32 used = __ballot_sync(~0u, work.begin < work.end);  // rows that this cluster has tiles of
  // The first cluster waits in any case: a kernel must not be complete before its predecessor is.
  if (!used && cluster) return;

  const char* lane_keys = keys + head * head_bytes + lane % LANES * 16;
  const char* lane_values = values + head * head_bytes + lane % LANES * 16;
  const u32 own_memory = shared_address(tiles_memory) + warp * STAGES * 2 * TILE_BYTES;

  // Where the next tile of this warp is: in turn with the other warps of the cluster, row by row.
  u32 rows_left = used;
  int tile = 0, end = 0;
  int row_length = 0;
  u64 row_offset = 0;
  auto find_tile = [&]() {  // false if there is none
    while (tile >= end) {
      if (!rows_left) return false;
      int row = __ffs(rows_left) - 1;
      rows_left &= rows_left - 1;
      tile = __shfl_sync(~0u, work.begin, row) + (int)rank * WARPS + warp;
      end = __shfl_sync(~0u, work.end, row);
      row_length = __shfl_sync(~0u, length, row);
      row_offset = (u64)__shfl_sync(~0u, slot, row) * slot_bytes;
    }
    return true;
  };
  bool has_waited = false;
  int num_fetched = 0;
  auto fetch = [&]() {
    if (find_tile()) {
      if (!has_waited && (tile + 1) * TILE >= row_length) {  // it has the row's own token
        await_predecessor();
        has_waited = true;
      }
      u32 to = own_memory + num_fetched % STAGES * 2 * TILE_BYTES + lane / LANES * ROW_BYTES + lane % LANES * 16;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const char* from = (part ? lane_values : lane_keys) + row_offset;
#pragma unroll
        for (int i = 0; i < TILE; i += ROWS) {
          int token = tile * TILE + lane / LANES + i;
          bool is_there = token < row_length;
          copy16(to + part * TILE_BYTES + i * ROW_BYTES, from + (is_there ? token : 0) * token_bytes, is_there ? 16 : 0);
        }
      }
      tile += ROUND;
      num_fetched++;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fetch();
  if (!has_waited) await_predecessor();
  has_waited = true;

  const int of_group = lane / 4;  // the query head of this lane's scores
  const u32 in_keys = ((lane & 7) + (lane & 16) / 2) * ROW_BYTES + (lane & 8) * 2;
  const u32 in_values = TILE_BYTES + (lane & 15) * ROW_BYTES + (lane & 16);
  int num_read = 0;
  bool has_arrived = false;  // at the barrier that lets the other block's sums be overwritten

  for (u32 rows = used; rows; rows &= rows - 1) {
    const int row = __ffs(rows) - 1;
    const int begin = __shfl_sync(~0u, work.begin, row) + (int)rank * WARPS + warp;
    const int stop = __shfl_sync(~0u, work.end, row);
    const int num_tokens = __shfl_sync(~0u, length, row);
    u32 q[DIM / 16][2];
    const u32* of_query = (const u32*)(query + row * query_row + (head * GROUP + of_group) * query_head);
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      q[k][0] = of_group < GROUP ? of_query[k * 8 + lane % 4] : 0u;
      q[k][1] = of_group < GROUP ? of_query[k * 8 + 4 + lane % 4] : 0u;
    }
    float most = NEG_INF, total = 0.f;
    float sums[DIM / 8][4];
#pragma unroll
    for (int j = 0; j < DIM / 8; j++) sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0.f;

    for (int at = begin; at < stop; at += ROUND) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
      __syncwarp();
      const u32 from = own_memory + num_read % STAGES * 2 * TILE_BYTES;
      num_read++;
      float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};  // scores of 8 tokens each
#pragma unroll
      for (int k = 0; k < DIM / 16; k++) {
        u32 m[4];
        load_matrices(m, from + in_keys + k * 32);
        multiply(low, q[k][0], q[k][1], m[0], m[1]);
        multiply(high, q[k][0], q[k][1], m[2], m[3]);
      }
      const int token = at * TILE + lane % 4 * 2;
      float scores[4] = {low[0], low[1], high[0], high[1]};
#pragma unroll
      for (int j = 0; j < 4; j++)
        scores[j] = token + j % 2 + j / 2 * 8 < num_tokens ? scores[j] * scale : NEG_INF;
      float now = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
      now = fmaxf(most, now);  // finite, as each tile has a token
      const float kept = exp2_of(most - now);
      most = now;
#pragma unroll
      for (int j = 0; j < 4; j++) scores[j] = exp2_of(scores[j] - now);
      total = total * kept + (scores[0] + scores[1]) + (scores[2] + scores[3]);
      const u32 p0 = pack(scores[0], scores[1]), p1 = pack(scores[2], scores[3]);
#pragma unroll
      for (int j = 0; j < DIM / 8; j++) {
        sums[j][0] *= kept;
        sums[j][1] *= kept;
      }
#pragma unroll
      for (int j = 0; j < DIM / 16; j++) {
        u32 m[4];
        load_transposed(m, from + in_values + j * 32);
        multiply(sums[2 * j], p0, p1, m[0], m[1]);
        multiply(sums[2 * j + 1], p0, p1, m[2], m[3]);
      }
      __syncwarp();
      fetch();
    }

    // Not before: what the next kernel keeps in registers and shared memory would be in the way.
    if (!(rows & (rows - 1))) release_successor();

    // The warps of this block.
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (of_group < GROUP) {
      if (lane % 4 == 0) warp_weights[warp][of_group] = {most, total};
      float* of_warp = warp_sums + warp * OUTPUTS + of_group * DIM + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < DIM / 8; j++) *(float2*)(of_warp + j * 8) = make_float2(sums[j][0], sums[j][1]);
    }
    __syncthreads();
    if (has_arrived) await_cluster();
    for (int o = threadIdx.x; o < OUTPUTS; o += WARPS * 32) {
      Weight weight = {NEG_INF, 0.f};
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) weight.most = fmaxf(weight.most, warp_weights[w][o / DIM].most);
      const float base = weight.most == NEG_INF ? 0.f : weight.most;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float factor = exp2_of(warp_weights[w][o / DIM].most - base);
        weight.total += factor * warp_weights[w][o / DIM].total;
        sum += factor * warp_sums[w * OUTPUTS + o];
      }
      block_sums[o] = sum;
      if (o % DIM == 0) block_weights[o / DIM] = weight;
    }
    arrive_at_cluster();
    await_cluster();

    // The blocks of this cluster: each merges a slice of the outputs.
    const int first = __shfl_sync(~0u, work.first, row), count = __shfl_sync(~0u, work.count, row);
    const int num_slots = 2 * num_clusters;  // of partial results, for each head
    float* of_head = partials + (u64)head * num_slots * (OUTPUTS + 2 * GROUP);
    // A cluster has at most one row that began before it and one that goes on after it.
    auto slot_of = [&](int c) { return of_head + (2 * c + (c == first)) * (OUTPUTS + 2 * GROUP); };
    for (int i = threadIdx.x; i < SLICE; i += WARPS * 32) {
      const int o = rank * SLICE + i, g = o / DIM;
      float mosts[RANKS], totals[RANKS], parts[RANKS];
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        mosts[r] = load_of_rank(&block_weights[g].most, r);
        totals[r] = load_of_rank(&block_weights[g].total, r);
        parts[r] = load_of_rank(&block_sums[o], r);
      }
      float all = mosts[0], total = 0.f, sum = 0.f;
#pragma unroll
      for (int r = 1; r < RANKS; r++) all = fmaxf(all, mosts[r]);  // finite: there is a tile
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        const float factor = exp2_of(mosts[r] - all);
        total += factor * totals[r];
        sum += factor * parts[r];
      }
      if (count == 1) {
        out[row * out_row + (head * GROUP + g) * out_head + o % DIM] = (u16)pack(sum / total, 0.f);
      } else {
        float* to = slot_of(cluster);
        to[o] = sum;
        ((Weight*)(to + OUTPUTS))[g] = {all, total};  // the same from each thread of the head
      }
    }
    arrive_at_cluster();
    has_arrived = true;
    if (count == 1) continue;

    // The clusters of this row: the last one to get here merges, each block its slice.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      u32* counter = counters + (row * gridDim.y + head) * RANKS + rank;
      num_before = atomicAdd(counter, 1);
      if (num_before == count - 1) *counter = 0;
    }
    __syncthreads();
    if (num_before != count - 1) continue;
    __threadfence();
    for (int i = threadIdx.x; i < SLICE; i += WARPS * 32) {
      const int o = rank * SLICE + i, g = o / DIM;
      float all = NEG_INF, total = 0.f, sum = 0.f;
      for (int c = first; c < first + count; c += 8) {
        Weight weights[8];
        float parts[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float* from = slot_of(min(c + j, first + count - 1));
          const float2 weight = __ldcg((const float2*)(from + OUTPUTS) + g);
          weights[j] = {c + j < first + count ? weight.x : NEG_INF, weight.y};
          parts[j] = __ldcg(from + o);
        }
        float now = all;
#pragma unroll
        for (int j = 0; j < 8; j++) now = fmaxf(now, weights[j].most);
        const float kept = exp2_of(all - now);
        total *= kept;
        sum *= kept;
        all = now;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float factor = exp2_of(weights[j].most - all);
          total += factor * weights[j].total;
          sum += factor * parts[j];
        }
      }
      out[row * out_row + (head * GROUP + g) * out_head + o % DIM] = (u16)pack(sum / total, 0.f);
    }
  }
  if (has_arrived) await_cluster();

  // Rows of padding.
  const u32 empty = __ballot_sync(~0u, is_row && length == 0);
  if (cluster == 0 && rank == 0) {
    for (u32 rows = empty; rows; rows &= rows - 1)
      for (int o = threadIdx.x; o < OUTPUTS; o += WARPS * 32)
        out[(__ffs(rows) - 1) * out_row + (head * GROUP + o / DIM) * out_head + o % DIM] = 0;
  }
}
