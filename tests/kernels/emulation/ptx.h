// PTX instructions of our kernels, each a function: `emulated_kernel.py` turns asm statements into calls.
//
// A function has the instruction's name without the type of 16 bits; several instructions of one
// statement are joined by two underscores. First come its results, then its operands.

#pragma once

#include <array>
#include <tuple>
#include <utility>

#include "emulation.h"

namespace ptx {

using namespace emulated;

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

inline void ex2_approx_ftz_f32(float& y, float x) { y = __builtin_exp2f(x); }
inline void cvt_rnx2_f32(uint32_t& pair, float high, float low) { pair = narrowed(low) | (uint32_t)narrowed(high) << 16; }

inline void cp_async_cg_shared_global(uint32_t to, const void* from, uint32_t num_bytes) {
  char* target = (char*)in_shared<uint4>(to);
  auto copy = [=] {
    memset(target, 0, 16);
    memcpy(target, from, num_bytes);
  };
  if (is_late)
    current->copies.add(copy);
  else
    copy();
}
inline void cp_async_commit_group() { current->copies.end_group(); }
inline void cp_async_wait_group(int num_left) { current->copies.finish(num_left); }
inline void cp_async_wait_all() {
  current->copies.end_group();
  current->copies.finish(0);
}

inline void barrier_cluster_arrive_release_aligned() {
  Cluster& cluster = *current->block->cluster;
  current->cluster_phase = cluster.barrier.phase;
  cluster.barrier.arrive(cluster.num_running);
}
inline void barrier_cluster_wait_acquire_aligned() {
  wait_until([] { return current->block->cluster->barrier.phase != current->cluster_phase; });
}

// An address in a block's shared memory, with the block's rank above it.
inline void mapa_shared__cluster_u32(uint32_t& there, uint32_t here, uint32_t rank) { there = here | rank << 24; }
inline void ld_shared__cluster_f32(float& value, uint32_t from) {
  Block& block = *current->block->cluster->blocks.at(from >> 24);
  memcpy(&value, in_shared(block, from & 0xffffff, 4), 4);
}

// Four matrices of 8 x 8, of which each lane has the address of a row, and gets two elements of another.
inline void load_matrices(uint32_t* m, uint32_t from, bool is_transposed) {
  among_lanes(from, [&](auto address_of) {
    const int g = current->lane() / 4, t = current->lane() % 4;
    for (int i = 0; i < 4; i++) {
      auto at = [&](int row, int column) { return in_shared<uint16_t>(address_of(i * 8 + row), 8)[column]; };
      m[i] = is_transposed ? at(t * 2, g) | at(t * 2 + 1, g) << 16 : at(g, t * 2) | at(g, t * 2 + 1) << 16;
    }
    return 0;
  });
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  uint32_t m[4];
  load_matrices(m, from, false);
  a = m[0], b = m[1], c = m[2], d = m[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t from) {
  uint32_t m[4];
  load_matrices(m, from, true);
  a = m[0], b = m[1], c = m[2], d = m[3];
}

inline void mma_sync_aligned_m16n8k16_row_col_f32_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                      uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Factors { uint32_t a[4], b[2]; };
  among_lanes(Factors{{a0, a1, a2, a3}, {b0, b1}}, [&](auto of_lane) {
    const int g = current->lane() / 4, t = current->lane() % 4;
    float* const sums[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 16; k++) {
        const Factors left = of_lane(g * 4 + k % 8 / 2), right = of_lane((t * 2 + i % 2) * 4 + k % 8 / 2);
        *sums[i] += element(left.a[i / 2 + k / 8 * 2], k % 2) * element(right.b[k / 8], k % 2);
      }
    return 0;
  });
}

// Hopper's.

inline void setmaxnreg_dec_sync_aligned_u32() {}
inline void setmaxnreg_inc_sync_aligned_u32() {}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared__cta() {}
inline void createpolicy_fractional_L2__evict_first_b64(unsigned long long& policy) { policy = 0; }
inline void cvt_f32(float& wide, uint16_t narrow) { wide = widened(narrow); }
inline void cvt_rn_f32__cvt_f32(float& y, float x) { y = widened(narrowed(x)); }
inline void st_shared_b32(uint32_t to, uint32_t value) { *in_shared<uint32_t>(to) = value; }
inline void ld_shared_v4_b32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t from) {
  const uint4 v = *in_shared<uint4>(from);
  x = v.x, y = v.y, z = v.z, w = v.w;
}

inline void atom_add_release_gpu_global_u32(uint32_t& before, uint32_t* counter) { before = atomicAdd(counter, 1); }
inline void ld_acquire_gpu_global_u32(uint32_t& value, const uint32_t* from) {
  yield();  // it is read again and again
  value = *from;
}

inline void bar_sync(int id, int num_threads) { meet(current->block->named[id], num_threads); }
inline void bar_arrive(int id, int num_threads) { current->block->named[id].arrive(num_threads); }

// A barrier in shared memory, which counts bytes too. They may come before they are expected.
struct MemoryBarrier {
  uint16_t wanted : 15, phase : 1;
  int16_t left;
  int32_t num_bytes;

  void complete() {
    if (left || num_bytes) return;
    phase ^= 1;
    left = wanted;
  }
};
static_assert(sizeof(MemoryBarrier) == 8);
inline MemoryBarrier& barrier_at(uint32_t address) { return *(MemoryBarrier*)in_shared<uint64_t>(address); }

inline void mbarrier_init_shared__cta_b64(uint32_t barrier, uint32_t count) {
  barrier_at(barrier) = {(uint16_t)count, 0, (int16_t)count, 0};
}
inline void mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t barrier, uint32_t num_bytes) {
  MemoryBarrier& at = barrier_at(barrier);
  if (at.left-- <= 0) fail("more arrive at a barrier than it waits for");
  at.num_bytes += num_bytes;
  at.complete();
}
inline void mbarrier_arrive_shared__cta_b64(uint32_t barrier) { mbarrier_arrive_expect_tx_shared__cta_b64(barrier, 0); }
// Makes the copies that have been begun and are counted by a barrier.
inline void finish_copies(uint32_t barrier) {
  auto& copies = current->block->copies;
  for (size_t i = 0; i < copies.size();) {
    if (copies[i].first != barrier) {
      i++;
      continue;
    }
    const Work copy = std::move(copies[i].second);
    copies.erase(copies.begin() + i);
    copy();
  }
}
inline void mbarrier_try_wait_parity_shared__cta_b64__bra__bra(uint32_t barrier, uint32_t parity) {
  wait_until([&] {
    finish_copies(barrier);
    return barrier_at(barrier).phase != parity;
  });
}

// Rows of 128 bytes are swizzled: 16 bytes of them lie elsewhere, by the row's address.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// What `emulated_kernel.py` has in place of the driver's map. Dimensions from the last to the first.
struct Map {
  const char* address;
  uint64_t rank, shape[5], stride_bytes[4], tile[5];
};

template <int RANK>
void copy_tile(uint32_t to, const Map& map, uint32_t barrier, const int* begin) {
  uint64_t num_rows = 1;
  for (int d = 1; d < RANK; d++) num_rows *= map.tile[d];
  for (uint64_t row = 0; row < num_rows; row++) {
    const char* from = map.address;
    bool is_there = true;
    uint64_t rest = row;
    for (int d = 1; d < RANK; d++) {
      const int64_t index = begin[d] + (int64_t)(rest % map.tile[d]);
      rest /= map.tile[d];
      is_there &= 0 <= index && index < (int64_t)map.shape[d];
      from += index * map.stride_bytes[d - 1];
    }
    for (int i = 0; i < 64; i++) {
      const int64_t index = begin[0] + i;
      uint16_t value = 0;
      if (is_there && 0 <= index && index < (int64_t)map.shape[0]) memcpy(&value, from + index * 2, 2);
      *in_shared<uint16_t>(swizzled(to + row * 128 + i * 2)) = value;
    }
  }
  MemoryBarrier& at = barrier_at(barrier);
  at.num_bytes -= num_rows * 128;
  at.complete();
}

template <int RANK>
void begin_copy(uint32_t to, const void* of, uint32_t barrier, const std::array<int, RANK>& begin) {
  Map map;
  memcpy(&map, of, sizeof map);
  if (map.rank != RANK || map.tile[0] != 64 || to % 1024) fail("a copy of a tile that does not fit its map");
  auto copy = [=] { copy_tile<RANK>(to, map, barrier, begin.data()); };
  if (is_late)
    current->block->copies.emplace_back(barrier, copy);
  else
    copy();
}
inline void cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t to, const void* map,
                                                                                        uint32_t barrier, int x, int y) {
  begin_copy<2>(to, map, barrier, {x, y});
}
inline void cp_async_bulk_tensor_2d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, uint64_t) {
  begin_copy<2>(to, map, barrier, {x, y});
}
inline void cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t to, const void* map,
                                                                                        uint32_t barrier, int x, int y, int z) {
  begin_copy<3>(to, map, barrier, {x, y, z});
}
inline void cp_async_bulk_tensor_3d_shared__cluster_global_mbarrier__complete_tx__bytes_L2__cache_hint(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, uint64_t) {
  begin_copy<3>(to, map, barrier, {x, y, z});
}
inline void cp_async_bulk_tensor_4d_shared__cluster_global_mbarrier__complete_tx__bytes(
    uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, int w) {
  begin_copy<4>(to, map, barrier, {x, y, z, w});
}

// The opposite of `load_matrices`, transposed.
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  struct Row { uint32_t to, m[4]; };
  among_lanes(Row{to, {m0, m1, m2, m3}}, [&](auto of_lane) {
    const int matrix = current->lane() / 8, row = current->lane() % 8;
    uint16_t* stored = in_shared<uint16_t>(to, 8);
    for (int column = 0; column < 8; column++) stored[column] = of_lane(column * 4 + row / 2).m[matrix] >> row % 2 * 16;
    return 0;
  });
}

// Matrix products of a warpgroup: sums[64, N] (+)= left[64, 16] right[16, N]. A descriptor has an address,
// the distance of 64 elements of a row from the next, and that of 8 rows from the next, in units of 16 bytes.

inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { current->products.end_group(); }
inline void wgmma_wait_group_sync_aligned(int num_left) { current->products.finish(num_left); }

struct Matrix {
  uint32_t address, lead, stride;

  Matrix(uint32_t low, uint32_t high) : address((low & 0x3fff) << 4), lead((low >> 16 & 0x3fff) << 4), stride((high & 0x3fff) << 4) {
    if (high >> 30 != 1) fail("a matrix that is not swizzled in rows of 128 bytes");
  }
  float at(int row, int column) const {
    const uint32_t of_row = address + row / 8 * stride + row % 8 * 128;
    return widened(*in_shared<uint16_t>(swizzled(of_row + column / 64 * lead + column % 64 * 2)));
  }
};

// The sums of a thread: rows of its warp's 16, by element.
inline int row_of(int i) { return current->index % 128 / WARP * 16 + current->lane() / 4 + i / 2 % 2 * 8; }
inline int column_of(int i) { return i / 4 * 8 + current->lane() % 4 * 2 + i % 2; }

// Where the first COUNT operands of a product are, its sums.
template <size_t COUNT, class Operands>
std::array<float*, COUNT> places_of(Operands& operands) {
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<float*, COUNT>{&const_cast<float&>((const float&)std::get<I>(operands))...};
  }(std::make_index_sequence<COUNT>());
}

template <class Product>
void begin_product(Product product) {
  if (is_late)
    current->products.add(product);
  else
    product();
}

// Both factors in shared memory, by rows of the product's inner dimension.
template <int N, class... Operand>
void wgmma_of_memory(Operand&&... operand) {
  auto all = std::forward_as_tuple(operand...);
  const uint32_t high = std::get<N / 2 + 3>(all);
  const Matrix left(std::get<N / 2>(all), high), right(std::get<N / 2 + 1>(all), high);
  begin_product([=, sums = places_of<N / 2>(all), adds = (bool)std::get<N / 2 + 2>(all)] {
    for (int i = 0; i < N / 2; i++) {
      float sum = adds ? *sums[i] : 0.f;
      for (int k = 0; k < 16; k++) sum += left.at(row_of(i), k) * right.at(column_of(i), k);
      *sums[i] = sum;
    }
  });
}

// The left factor in registers, and the other by its columns.
template <int N, class... Operand>
void wgmma_of_registers(Operand&&... operand) {
  auto all = std::forward_as_tuple(operand...);
  struct Left { uint32_t pairs[4]; };
  const Left own = {{std::get<N / 2>(all), std::get<N / 2 + 1>(all), std::get<N / 2 + 2>(all), std::get<N / 2 + 3>(all)}};
  const Matrix right(std::get<N / 2 + 4>(all), std::get<N / 2 + 5>(all));
  begin_product([=, sums = places_of<N / 2>(all)] {
    among_lanes(own, [&](auto of_lane) {
      for (int i = 0; i < N / 2; i++)
        for (int k = 0; k < 16; k++) {
          const Left of_row = of_lane(current->lane() / 4 * 4 + k % 8 / 2);
          *sums[i] += element(of_row.pairs[i / 2 % 2 + k / 8 * 2], k % 2) * right.at(k, column_of(i));
        }
      return 0;
    });
  });
}

}  // namespace ptx
