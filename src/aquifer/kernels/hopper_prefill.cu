// Prefill attention on Hopper; `hopper_prefill.py` describes it.
//
// Compiled with these macros:
//   HEAD_DIM    elements of a head, a multiple of 8, at most 128
//   GROUP       query heads of a KV head
//   HEADS       heads of a block's rows; a divisor of GROUP
//   LEAST_KEYS  keys of a split, at least
//   IS_HALF     see `common.cuh`

#include "hopper.cuh"

#define ROWS 128                           // rows of a block, 64 for each consumer
#define TOKENS (ROWS / HEADS)              // tokens of a block
#define KEYS 128                           // tokens of a tile
#define STAGES 2                           // tiles of keys, and of values, in shared memory
#define ITEMS 4                            // items that are known ahead
#define DIM (HEAD_DIM > 64 ? 128 : 64)
#define PARTS (DIM / 64)
#define TILE_BYTES (KEYS * DIM * 2)
#define QUERY_BYTES (ROWS * DIM * 2)
#define CHUNKS (DIM / 8)                   // of 16 bytes, in a row
#define CONSUMER_WARPS 8
#define COPY_THREADS 64
#define COPY_ROWS (COPY_THREADS / CHUNKS)  // rows that are copied at once
#define STORE_ROWS (32 / CHUNKS)           // rows of the result that a warp writes at once
#define MOST_EXPONENT 8.f                  // of a weight: it is at most 2^8
#define NO_WINDOW (1 << 30)

// Makes what this thread wrote to shared memory visible to matrix products.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store4(u32 to, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// A tile's part from [slot, token, head, dim].
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int dim, int head, int token,
                                         int slot) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map), "r"(barrier), "r"(dim), "r"(head), "r"(token), "r"(slot) : "memory");
}

// Where 16 bytes of a row are in a tile: rows are swizzled, so that 8 of them are in different banks.
__device__ __forceinline__ u32 place(int row, int chunk, int num_rows) {
  return chunk / 8 * num_rows * ROW_BYTES + row * ROW_BYTES + ((chunk % 8) ^ (row % 8)) * 16;
}

// Matrix products of a warpgroup.

// scores[64, 128] (+)= query[64, 16] keys[128, 16]^T
__device__ __forceinline__ void multiply_keys(float* s, u32 query, u32 keys, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      ".reg .b64 query, keys;\n"
      "setp.ne.b32 adds, %66, 0;\n"
      "mov.b64 query, {%64, %67};\n"
      "mov.b64 keys, {%65, %67};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE
      " {" NUMBERS64 "}, query, keys, adds, 1, 1, 0, 0;\n"
      "}"
      : F64(s, 0)
      : "r"(query), "r"(keys), "r"(adds), "n"(HIGH_WORD));
}

// sums[64, DIM] += weights[64, 16] values[16, DIM]
__device__ __forceinline__ void multiply_values(float* o, const u32* p, u32 values) {
#if DIM == 128
  asm volatile(
      "{\n"
      ".reg .b64 values;\n"
      "mov.b64 values, {%68, %69};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE
      " {" NUMBERS64 "}, {%64,%65,%66,%67}, values, 1, 1, 1, 1;\n"
      "}"
      : F64(o, 0)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(values), "n"(HIGH_WORD));
#else
  asm volatile(
      "{\n"
      ".reg .b64 values;\n"
      "mov.b64 values, {%36, %37};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE
      " {" NUMBERS32 "}, {%32,%33,%34,%35}, values, 1, 1, 1, 1;\n"
      "}"
      : F32(o, 0)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(values), "n"(HIGH_WORD));
#endif
}

// What a block does next: the queries of some tokens, and some of their keys, for HEADS heads.
struct Item {
  int entry;        // of the list; -1 if there is nothing left
  int head_group;
  int slot;
  int kv_head;
  int first_row;    // of the block's first token
  int num_tokens;   // of the block
  int position;     // of the block's first token in its sequence
  int begin;        // first key
  int num_tiles;
  int has_tail;     // whether the last tile is longer than what may be read
  int limit;        // tokens that may be read
  int is_split;
};

// The kernel's arguments, except for tensor maps.
struct Arguments {
  const u16* query;
  const char* keys;
  const char* values;
  const i64* programs;
  const i64* slots;
  const i64* starts;
  const i64* offsets;
  u16* out;
  float* partials;
  float* lse;
  float scale;
  u32 num_entries, num_groups, band;
  int window;
  u64 query_row, query_head;                  // distances in elements
  u64 slot_bytes, token_bytes, head_bytes;    // of keys, and of values
  u64 out_row, out_head;
};

// Addresses in shared memory. A barrier `..._there` says that something can be read, and one
// `..._read` that it has been.
struct Shared {
  const Item* items;
  u32 queries, outputs, key_tiles, value_tiles;
  u32 keys_there, values_there, keys_read, values_read;  // one for each stage
  u32 queries_there, queries_read;
  u32 item_there, item_read;                             // one for each of ITEMS
};

#define NUM_BARRIERS (4 * STAGES + 2 + 2 * ITEMS)

__device__ __forceinline__ Shared divide_memory(char* memory, const Item* items, const u64* barriers) {
  Shared at;
  at.items = items;
  at.queries = (shared_address(memory) + 1023) / 1024 * 1024;
  at.outputs = at.queries + QUERY_BYTES;
  at.key_tiles = at.outputs + QUERY_BYTES;
  at.value_tiles = at.key_tiles + STAGES * TILE_BYTES;
  at.keys_there = shared_address(barriers);
  at.values_there = at.keys_there + STAGES * 8;
  at.keys_read = at.values_there + STAGES * 8;
  at.values_read = at.keys_read + STAGES * 8;
  at.queries_there = at.values_read + STAGES * 8;
  at.queries_read = at.queries_there + 8;
  at.item_there = at.queries_read + 8;
  at.item_read = at.item_there + ITEMS * 8;
  return at;
}

__device__ __forceinline__ void init_barriers(const Shared& at) {
  for (int stage = 0; stage < STAGES; stage++) {
    init_barrier(at.keys_there + stage * 8, 1);
    init_barrier(at.values_there + stage * 8, 1);
    init_barrier(at.keys_read + stage * 8, CONSUMER_WARPS);
    init_barrier(at.values_read + stage * 8, CONSUMER_WARPS);
  }
  init_barrier(at.queries_there, 1);
  init_barrier(at.queries_read, CONSUMER_WARPS);
  for (int n = 0; n < ITEMS; n++) {
    init_barrier(at.item_there + n * 8, 1);
    init_barrier(at.item_read + n * 8, CONSUMER_WARPS + 3);  // and the warps that load
  }
  fence_barriers();
}

// Tiles are counted over all items of a block. A barrier's phase is odd every other time.
__device__ __forceinline__ u32 stage_of(u32 tile) { return tile % STAGES; }
__device__ __forceinline__ u32 phase_of(u32 tile) { return tile / STAGES % 2; }

__device__ __forceinline__ const Item* await_item(const Shared& at, u32 n) {
  await_phase(at.item_there + n % ITEMS * 8, n / ITEMS % 2);
  return at.items + n % ITEMS;
}

// What the block does in its n-th turn.
__device__ __forceinline__ Item find_item(const Arguments& of, u32 n) {
  Item item;
  item.entry = -1;
  // Items are sorted by length: in turn forth and back, each block gets as much.
  const u32 index = n * gridDim.x + (n % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  if (index >= of.num_entries * of.num_groups) return item;
  // A band of entries is taken for one group of heads after another, and then comes the next band.
  const u32 band_begin = index / (of.band * of.num_groups) * of.band;
  const u32 in_band = index - band_begin * of.num_groups, band = min(of.band, of.num_entries - band_begin);
  const u32 entry = band_begin + in_band % band;
  const i64* own = of.programs + entry * 4;
  const int span = (int)own[0], first_token = (int)own[1], split = (int)own[2], num_splits = (int)own[3];
  if (span < 0) return item;  // and so are all later ones; a band is of one entry then
  const int start = (int)of.starts[span], first_row = (int)of.offsets[span];
  const int count = (int)of.offsets[span + 1] - first_row;
  item.entry = entry;
  item.head_group = in_band / band;
  item.kv_head = item.head_group * HEADS / GROUP;
  item.slot = (int)of.slots[span];
  item.first_row = first_row + first_token;
  item.num_tokens = min(TOKENS, count - first_token);
  item.position = start + first_token;
  item.limit = start + count;
  item.is_split = num_splits > 1;
  // Keys [begin, end) are seen by some query; a split has some of them.
  const int end = item.position + item.num_tokens;
  int begin = max(item.position + 1 - of.window, 0);
  int split_keys = end - begin;
  if (num_splits > 1) {
    split_keys = (split_keys + num_splits - 1) / num_splits;
    split_keys = max((split_keys + KEYS - 1) / KEYS * KEYS, LEAST_KEYS);
  }
  begin += split * split_keys;
  item.begin = begin;
  item.num_tiles = max((min(begin + split_keys, end) - begin + KEYS - 1) / KEYS, 0);
  item.has_tail = item.num_tiles && begin + item.num_tiles * KEYS > item.limit;
  return item;
}

// One thread: finds items ahead of those who work on them.
__device__ __forceinline__ void find_items(const Arguments& of, const Shared& at, Item* items) {
  for (u32 n = 0;; n++) {
    const Item item = find_item(of, n);
    await_phase(at.item_read + n % ITEMS * 8, n / ITEMS % 2 ^ 1);
    items[n % ITEMS] = item;
    arrive(at.item_there + n % ITEMS * 8);
    if (item.entry < 0) return;
  }
}

// One thread: loads whole tiles, from the last of an item to the first.
__device__ __forceinline__ void load_tiles(const Shared& at, const TensorMap* key_map, const TensorMap* value_map) {
  u32 tile = 0;
  for (u32 n = 0;; n++) {
    const Item* item = await_item(at, n);
    if (item->entry < 0) return;
    const int num_tiles = item->num_tiles, slot = item->slot, kv_head = item->kv_head, has_tail = item->has_tail;
    const int last_key = item->begin + (num_tiles - 1) * KEYS;
    arrive(at.item_read + n % ITEMS * 8);
    auto load = [&](int i, const TensorMap* map, u32 tiles, u32 there, u32 read) {
      const u32 stage = stage_of(tile + i), to = tiles + stage * TILE_BYTES;
      // Also where others load the tile: a phase can only be told from the one before it.
      await_phase(read + stage * 8, phase_of(tile + i) ^ 1);
      if (has_tail && i == 0) return;
      arrive_and_expect(there + stage * 8, TILE_BYTES);
#pragma unroll
      for (int part = 0; part < PARTS; part++)
        copy_box(to + part * KEYS * ROW_BYTES, map, there + stage * 8, part * 64, kv_head, last_key - i * KEYS, slot);
    };
    // In the order in which they are needed.
    for (int i = 0; i <= num_tiles; i++) {
      if (i < num_tiles) load(i, key_map, at.key_tiles, at.keys_there, at.keys_read);
      if (i > 0) load(i - 1, value_map, at.value_tiles, at.values_there, at.values_read);
    }
    tile += num_tiles;
  }
}

// COPY_THREADS threads: load queries, and tiles that end behind a sequence's last token: there,
// memory may be missing, and what it has may not be finite.
__device__ __forceinline__ void load_rows(const Arguments& of, const Shared& at, int thread) {
  const int lane = thread % 32, chunk = thread % CHUNKS, own_row = thread / CHUNKS;
  const bool has_chunk = chunk * 8 < HEAD_DIM;  // the others are zero
  const u32 query_place = at.queries + place(own_row, chunk, ROWS);
  const u64 step = COPY_ROWS / HEADS * of.query_row + COPY_ROWS % HEADS * of.query_head;
  const u64 wrap = of.query_row - HEADS * of.query_head;
  u32 tile = 0;
  for (u32 n = 0;; n++) {
    const Item item = *await_item(at, n);
    __syncwarp();
    if (lane == 0) arrive(at.item_read + n % ITEMS * 8);
    if (item.entry < 0) return;
    const u32 stage = stage_of(tile), phase = phase_of(tile);

    auto copy_queries = [&]() {
      await_phase(at.queries_read, n % 2 ^ 1);
      int token = own_row / HEADS, head = own_row % HEADS;
      const u16* from = of.query + (u64)(item.first_row + token) * of.query_row +
                        (u64)(item.head_group * HEADS + head) * of.query_head + chunk * 8;
#pragma unroll 4
      for (int i = 0; i < ROWS / COPY_ROWS; i++) {
        const bool is_there = has_chunk && token < item.num_tokens;
        const u32 to = query_place + i * COPY_ROWS * ROW_BYTES ^ i * COPY_ROWS % 8 * 16;
        copy16(to, is_there ? from : of.query, is_there ? 16 : 0);
        from += step;
        token += COPY_ROWS / HEADS;
        head += COPY_ROWS % HEADS;
        if (COPY_ROWS % HEADS && head >= HEADS) {
          head -= HEADS;
          token++;
          from += wrap;
        }
      }
    };
    auto copy_tail = [&](const char* base, u32 tiles, u32 read) {
      await_phase(read + stage * 8, phase ^ 1);
      const int first = item.begin + (item.num_tiles - 1) * KEYS;
      const int num_rows = item.limit - first - own_row;  // from this thread's first one on
      const char* of_head = base + (u64)item.slot * of.slot_bytes + item.kv_head * of.head_bytes;
      const char* first_row = of_head + (u64)first * of.token_bytes;
      const char* from = first_row + own_row * of.token_bytes + chunk * 16;
      const u32 tile_place = tiles + stage * TILE_BYTES + place(own_row, chunk, KEYS);
#pragma unroll 4
      for (int i = 0; i < KEYS / COPY_ROWS; i++) {
        const bool is_there = has_chunk && i * COPY_ROWS < num_rows;
        const u32 to = tile_place + i * COPY_ROWS * ROW_BYTES ^ i * COPY_ROWS % 8 * 16;
        copy16(to, is_there ? from : first_row, is_there ? 16 : 0);
        from += COPY_ROWS * of.token_bytes;
      }
    };
    auto finish = [&]() {  // true for the thread that tells the consumers
      asm volatile("cp.async.wait_all;" ::: "memory");
      fence_shared();
      __syncwarp();
      sync_threads<COPY_THREADS>(1);
      return thread == 0;
    };

    copy_queries();
    if (item.has_tail) copy_tail(of.keys, at.key_tiles, at.keys_read);
    if (finish()) {
      arrive(at.queries_there);
      if (item.has_tail) arrive(at.keys_there + stage * 8);
    }
    if (item.has_tail) {
      copy_tail(of.values, at.value_tiles, at.values_read);
      if (finish()) arrive(at.values_there + stage * 8);
    }
    tile += item.num_tiles;
  }
}

// Online softmax over the scores of two rows of a thread, `row` and `row + 8` of its warp's.
struct Softmax {
  float top[2], total[2];  // about the maximum, and the sum of weights relative to it
  float decay[2];          // what earlier sums are to be multiplied by
  bool decays;             // whether a row of the warp has another factor than 1

  // Scores become weights, not rounded yet. Each row of 4 threads has 32 scores in each of them.
  __device__ __forceinline__ void add(float (&scores)[KEYS / 2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = scores[2 * r];
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // Only if it is much larger: sums are then rarely multiplied, and weights stay finite.
      const float new_top = most * scale > top[r] + MOST_EXPONENT ? most * scale : top[r];
      const float zero = new_top == NEG_INF ? 0.f : new_top;  // no key is seen yet
      decay[r] = exp2_of(top[r] - zero);
      top[r] = new_top;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < KEYS / 4; j++) {
        float& score = scores[j / 2 * 4 + 2 * r + j % 2];
        score = exp2_of(fmaf(score, scale, -zero));
        sum += score;
      }
      total[r] = total[r] * decay[r] + sum;
    }
    decays = __any_sync(~0u, decay[0] != 1.f || decay[1] != 1.f);
  }
};

// A warpgroup: attends from 64 rows to the item's keys. While one of two computes weights, the
// other one's products run.
__device__ __forceinline__ void attend(const Arguments& of, const Shared& at, int consumer, int warp) {
  const int lane = threadIdx.x % 32;
  const int turn = 2 + consumer, next_turn = 3 - consumer;
  if (consumer == 1) pass_threads<2 * GROUP_THREADS>(next_turn);
  auto release = [&](u32 barrier) {
    if (lane == 0) arrive(barrier);
  };

  const int first_row = consumer * 64 + warp * 16;  // of this warp
  const int row = first_row + lane / 4;             // this thread's rows are this one and the 8th after it
  const int store_row = first_row + lane / CHUNKS;
  const u32 output_place = at.outputs + row * ROW_BYTES + lane / 4 * 16 + lane % 4 * 4;
  const u32 store_place = at.outputs + place(store_row, lane % CHUNKS, ROWS);
  const u32 query_matrix = matrix(at.queries + consumer * 64 * ROW_BYTES, 16);
  const u32 first_keys = matrix(at.key_tiles, 16), first_values = matrix(at.value_tiles, KEYS * ROW_BYTES);
  const u64 out_step = STORE_ROWS / HEADS * of.out_row + STORE_ROWS % HEADS * of.out_head;
  const u64 out_wrap = of.out_row - HEADS * of.out_head;
  u32 tile = 0;
  for (u32 n = 0;; n++) {
    const Item item = *await_item(at, n);
    __syncwarp();
    release(at.item_read + n % ITEMS * 8);
    if (item.entry < 0) return;
    const int num_tiles = item.num_tiles;
    const int positions[2] = {item.position + row / HEADS, item.position + (row + 8) / HEADS};
    Softmax softmax = {{NEG_INF, NEG_INF}, {0.f, 0.f}, {1.f, 1.f}, false};
    float scores[KEYS / 2], sums[DIM / 2];
    u32 weights[KEYS / 4];
#pragma unroll
    for (int j = 0; j < DIM / 2; j++) sums[j] = 0.f;

    auto await_tile = [&](int i, u32 there) { await_phase(there + stage_of(tile + i) * 8, phase_of(tile + i)); };
    auto start_scores = [&](int i) {
      const u32 key_matrix = first_keys + stage_of(tile + i) * (TILE_BYTES >> 4);
      hold(scores);
      begin_products();
#pragma unroll
      for (int k = 0; k < (HEAD_DIM + 15) / 16; k++)
        multiply_keys(scores, query_matrix + (k / 4 * ROWS * ROW_BYTES + k % 4 * 32 >> 4),
                      key_matrix + (k / 4 * KEYS * ROW_BYTES + k % 4 * 32 >> 4), k != 0);
      commit_products();
    };
    auto start_sums = [&](int i) {
      const u32 value_matrix = first_values + stage_of(tile + i) * (TILE_BYTES >> 4);
      hold(sums);
      begin_products();
#pragma unroll
      for (int k = 0; k < KEYS / 16; k++)
        multiply_values(sums, weights + 4 * k, value_matrix + (k * 16 * ROW_BYTES >> 4));
      commit_products();
    };
    auto weigh = [&](int i) {
      const int first = item.begin + (num_tiles - 1 - i) * KEYS;
      // Score j is of key `first + lane % 4 * 2 + j / 4 * 8 + j % 2`, and of row j / 2 % 2.
      if (first + KEYS > item.position + 1) {
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++)
          if (j / 4 * 8 + j % 2 > positions[j / 2 % 2] - first - lane % 4 * 2) scores[j] = NEG_INF;
      }
      if (first < item.position + item.num_tokens - of.window) {
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++)
          if (j / 4 * 8 + j % 2 <= positions[j / 2 % 2] - of.window - first - lane % 4 * 2) scores[j] = NEG_INF;
      }
      softmax.add(scores, of.scale);
    };
    auto round_weights = [&]() {
#pragma unroll
      for (int j = 0; j < KEYS / 4; j++) weights[j] = pack(scores[2 * j], scores[2 * j + 1]);
    };
    auto decay_sums = [&]() {
      if (!softmax.decays) return;
#pragma unroll
      for (int j = 0; j < DIM / 2; j++) sums[j] *= softmax.decay[j / 2 % 2];
    };

    await_phase(at.queries_there, n % 2);
    if (num_tiles) {
      await_tile(0, at.keys_there);
      start_scores(0);
      await_products<0>();
      hold(scores);
      release(at.keys_read + stage_of(tile) * 8);
      if (num_tiles == 1) release(at.queries_read);
      weigh(0);
      round_weights();
#pragma unroll 1
      for (int i = 1; i < num_tiles; i++) {
        await_tile(i, at.keys_there);
        sync_threads<2 * GROUP_THREADS>(turn);
        start_scores(i);
        decay_sums();
        await_tile(i - 1, at.values_there);
        start_sums(i - 1);
        pass_threads<2 * GROUP_THREADS>(next_turn);
        await_products<1>();
        hold(scores);
        release(at.keys_read + stage_of(tile + i) * 8);
        if (i == num_tiles - 1) release(at.queries_read);
        weigh(i);
        await_products<0>();
        hold(sums);
        release(at.values_read + stage_of(tile + i - 1) * 8);
        round_weights();
      }
      decay_sums();
      await_tile(num_tiles - 1, at.values_there);
      start_sums(num_tiles - 1);
      await_products<0>();
      hold(sums);
      release(at.values_read + stage_of(tile + num_tiles - 1) * 8);
      tile += num_tiles;
    } else {
      release(at.queries_read);
    }

    float total[2], inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] = softmax.total[r];
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      inverse[r] = total[r] > 0.f ? 1.f / total[r] : 0.f;
    }
    if (item.is_split) {
      const u64 first = ((u64)item.entry * of.num_groups + item.head_group) * ROWS;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u64 at_row = first + row + 8 * r;
        if (lane % 4 == 0) of.lse[at_row] = total[r] > 0.f ? softmax.top[r] + __log2f(total[r]) : NEG_INF;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
          *(float2*)(of.partials + at_row * HEAD_DIM + lane % 4 * 2 + 8 * j) =
              make_float2(sums[4 * j + 2 * r] * inverse[r], sums[4 * j + 2 * r + 1] * inverse[r]);
      }
      continue;
    }
    // Through shared memory, so that a thread writes 16 bytes of a row.
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int j = 0; j < DIM / 8; j++)
        store4((output_place ^ j % 8 * 16) + j / 8 * ROWS * ROW_BYTES + r * 8 * ROW_BYTES,
               pack(sums[4 * j + 2 * r] * inverse[r], sums[4 * j + 2 * r + 1] * inverse[r]));
    }
    __syncwarp();
    int token = store_row / HEADS, head = store_row % HEADS;
    u16* to = of.out + (u64)(item.first_row + token) * of.out_row +
              (u64)(item.head_group * HEADS + head) * of.out_head + lane % CHUNKS * 8;
#pragma unroll
    for (int i = 0; i < 16 / STORE_ROWS; i++) {
      const uint4 values = load16(store_place + i * STORE_ROWS * ROW_BYTES ^ i * STORE_ROWS % 8 * 16);
      if (token < item.num_tokens && lane % CHUNKS * 8 < HEAD_DIM) *(uint4*)to = values;
      to += out_step;
      token += STORE_ROWS / HEADS;
      head += STORE_ROWS % HEADS;
      if (STORE_ROWS % HEADS && head >= HEADS) {
        head -= HEADS;
        token++;
        to += out_wrap;
      }
    }
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(3 * GROUP_THREADS, 1)
hopper_prefill(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
               const u16* query, const char* keys, const char* values, const i64* programs, const i64* slots,
               const i64* starts, const i64* offsets, u16* out, float* partials, float* lse, float scale,
               u64 num_entries, u64 num_groups, u64 band, u64 window, u64 query_row, u64 query_head, u64 slot_bytes,
               u64 token_bytes, u64 head_bytes, u64 out_row, u64 out_head) {
  extern __shared__ char memory[];
  __shared__ Item items[ITEMS];
  __shared__ __align__(8) u64 barriers[NUM_BARRIERS];
  const Shared at = divide_memory(memory, items, barriers);
  const Arguments of = {query, keys, values, programs, slots, starts, offsets, out, partials, lse, scale,
                        (u32)num_entries, (u32)num_groups, (u32)band, window ? (int)window : NO_WINDOW,
                        query_row, query_head, slot_bytes, token_bytes, head_bytes, out_row, out_head};
  if (threadIdx.x == 0) init_barriers(at);
  __syncthreads();
  await_predecessor();

  // Uniform within a warp, which the compiler has to know.
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 0) {
      if (threadIdx.x == 0) load_tiles(at, &key_map, &value_map);
    } else if (warp == 3) {
      if (threadIdx.x == 96) find_items(of, at, items);
    } else {
      load_rows(of, at, threadIdx.x - 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    attend(of, at, warpgroup - 1, warp % 4);
  }
}
