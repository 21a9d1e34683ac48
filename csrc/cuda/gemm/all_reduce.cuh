// Sums in the kernel that computes the partials (docs/kernels/protocol.md), in rank order and fp32, so that
// results repeat bit for bit.
//
// AllReduce. When the tiles of a block are done, its warps take pieces one by one: first sums of own rows,
// which go to all ranks; then pieces of the result.
//
//   tiles   partial -> owner, flag      sums   await flags, add, -> all, word      copies   await words, -> result
//
// Behind an NVLink switch one store puts a sum to all ranks, and one load may add up what lies at all of them
// (Knobs.reduce = in_flight, in no order): then a partial stays with its source, and its flag goes to the owner.
//
// No rank waits forever: tiles wait for nothing, sums for tiles, and copies, which are claimed behind all
// sums, for sums. And no warp waits before all blocks of its launch have begun: one that finds no more
// tiles earlier leaves its place to a block that waits for room. The last block to begin finds all begun.
//
// ReduceScatter: sums alone, of strips of own rows. Warps of a block that neither load nor multiply look after
// strips while the others do, and sum those whose partials have all come, so that the sums of all but the last
// tiles cost the multiplication nothing (sum_beside). They take no strip that they would have to wait for, and
// leave when the block has no more tiles: so they keep neither a tile nor a block waiting. Then the warps that
// multiplied sum what nobody has. A bit for each strip says whose it is: the warp that sets it sums.
//
// Memory ordering. A lane for each source acquires a flag, and a barrier of the warp passes that on to the
// lanes that read. Their stores to peers, another barrier, and the lanes that release the words follow. What
// the switch reads or stores has other addresses than everybody else's: fence.proxy.alias stands between.
#pragma once

#include <cuda_runtime.h>

#include "cuda/gather.cuh"
#include "cuda/gemm/reduce.cuh"

namespace flux {

// Every 2^30 calls, words that no recent call has raised: docs/kernels/protocol.md.
constexpr std::uint32_t kRenewWords = 1u << 30;

// Of the current call. The count changes when all warps of the launch are done.
__device__ __forceinline__ std::uint32_t sum_number(const FluxAllReduce& to) {
  return *reinterpret_cast<const volatile std::uint32_t*>(to.counts + FLUX_SUM_CALLS) + 1;
}

// With the number that flags of the call hold.
__device__ __forceinline__ FluxSync sum_sync(const SumTargets& s) {
  FluxSync sync = s.sync;
  if (s.to.scatters == 0) {
    sync.epoch = sum_number(s.to);
  } else {
    sync.launch = static_cast<std::uint32_t>(s.rank);  // as those of a reduction that follows
  }
  return sync;
}

// Behind a wait that failed nothing is sent: peers may still read what was there.
__device__ __forceinline__ bool has_failed(const FluxSync& sync) {
  return *reinterpret_cast<const volatile std::uint64_t*>(sync.status + FLUX_STATUS_CODE) != 0;
}

// A thread of each block calls it. The asm keeps the address from occupying two registers until the end.
__device__ __forceinline__ void begin_sums(const FluxAllReduce& to) {
  asm volatile("red.global.add.u32 [%0], 1;" ::"l"(to.counts + FLUX_SUM_BLOCKS) : "memory");
}

template <class Element, int Width>
__device__ __forceinline__ cutlass::Array<float, Width> sum_of_partials(const SumTargets& s,
                                                                        std::int64_t offset) {
  if constexpr (Width * sizeof(Element) == sizeof(uint4)) {
    if (s.to.switch_in != nullptr) return sum_by_switch<Element, Width>(s.to.switch_in, offset);
  }
  return sum_of_slots<Element, Width>(
      s.tiling.world, [&s](int source) { return s.to.partials[source]; }, offset);
}

// One warp. Without all partials the own result is NaN, and peers get nothing.
template <class Element, int Width>
__device__ __forceinline__ void sum_rows(const SumTargets& s, Piece piece, bool complete) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const int first = piece.column * s.tiling.tile_n;
  const int vectors = min_of(s.tiling.tile_n, s.tiling.n - first) / Width;
  const int above = row_begin(s.tiling.m, s.tiling.world, s.rank);
  const int world = s.tiling.world;
  for (int at = threadIdx.x % 32; at < (piece.end - piece.begin) * vectors; at += 32) {
    const int row = piece.begin + at / vectors;
    const int column = first + at % vectors * Width;
    cutlass::Array<float, Width> sum;
    sum.fill(nanf(""));
    if (complete) sum = sum_of_partials<Element, Width>(s, (row - above) * s.ld + column);
    const Vector result = result_of<Element, Width>(sum, s.to.scale, s.bias, column);
    const bool stays = s.to.scatters != 0;
    const std::int64_t place = std::int64_t{stays ? row - above : row} * s.tiling.n + column;
    bool alone = !complete || stays;  // the own result has it, and nobody else
    if constexpr (sizeof(Vector) == sizeof(uint4)) {
      if (!alone && s.to.switch_out != nullptr) {
        store_everywhere(static_cast<Element*>(s.to.switch_out) + place,
                         *reinterpret_cast<const uint4*>(&result));
        alone = true;
      }
    }
    for (int step = 0; step < (alone ? 1 : world); ++step) {
      const int rank = s.rank + step < world ? s.rank + step : s.rank + step - world;
      auto* out = static_cast<Element*>(s.to.outs[rank]) + place;
      *reinterpret_cast<Vector*>(out) = result;
    }
  }
}

__device__ __forceinline__ void tell_of_piece(const FluxSync& sync, std::uint64_t began,
                                              Piece piece, int kind = FLUX_TRACE_SUM) {
  tell_of_warp(sync, began, {kind, piece.begin, piece.column, piece.end - piece.begin});
}

template <class Element>
__device__ __forceinline__ void sum_own(const SumTargets& s, const FluxSync& sync, Piece piece) {
  const ScatterTiling& t = s.tiling;
  const int lane = threadIdx.x % 32;
  bool came = true;
  if (lane < t.world) {
    const int tile_row = piece.begin / t.tile_m;
    const int flag = flag_index(t, lane, s.rank, tile_row, piece.column);
    came = await(s.to.words, flag, sync, FLUX_WAIT_PARTIAL, tile_row);
  }
  const bool complete = __all_sync(~0u, came);
  __syncwarp();
  if (s.to.switch_in != nullptr) fence_alias();
  const std::uint64_t began = stamp();
  if (s.wide) {
    sum_rows<Element, 16 / sizeof(Element)>(s, piece, complete);
  } else {
    sum_rows<Element, 1>(s, piece, complete);
  }
  if (s.to.switch_out != nullptr) fence_alias();
  __syncwarp();
  if (complete && lane < t.world && lane != s.rank) {
    store_release_sys(s.to.sums[lane] + sum_word(t, piece.begin, piece.column), sync.epoch);
  }
  tell_of_piece(sync, began, piece);
}

template <class Element, int Width>
__device__ __forceinline__ void copy_rows(const SumTargets& s, Piece piece, bool complete) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const ScatterTiling& t = s.tiling;
  const int first = piece.column * t.tile_n;
  const int vectors = min_of(t.tile_n, t.n - first) / Width;
  const int own = row_begin(t.m, t.world, s.rank), own_end = row_end(t.m, t.world, s.rank);
  Vector missing;
  missing.fill(Element(nanf("")));
  for (int at = threadIdx.x % 32; at < (piece.end - piece.begin) * vectors; at += 32) {
    const int row = piece.begin + at / vectors;
    if (row >= own && row < own_end) continue;
    const std::int64_t place = std::int64_t{row} * t.n + first + at % vectors * Width;
    const auto* from = static_cast<const Element*>(s.to.put) + place;
    *reinterpret_cast<Vector*>(static_cast<Element*>(s.to.outs[s.rank]) + place) =
        complete ? load_past_l1<Vector>(from) : missing;
  }
}

// A lane for each row that a sum begins with.
template <class Element>
__device__ __forceinline__ void copy_others(const SumTargets& s, const FluxSync& sync,
                                            Piece piece) {
  const ScatterTiling& t = s.tiling;
  const int row = piece.begin + static_cast<int>(threadIdx.x % 32);
  bool came = true;
  if (row < piece.end && begins_sum(t, row)) {
    const int owner = owner_of(t.m, t.world, row);
    const std::uint32_t* word = s.to.sums[s.rank] + sum_word(t, row, piece.column);
    came = owner == s.rank || await_word(word, owner, sync, FLUX_WAIT_RESULT, row / t.tile_m);
  }
  const bool complete = __all_sync(~0u, came);
  __syncwarp();
  const std::uint64_t began = stamp();
  if (s.wide) {
    copy_rows<Element, 16 / sizeof(Element)>(s, piece, complete);
  } else {
    copy_rows<Element, 1>(s, piece, complete);
  }
  tell_of_piece(sync, began, piece, FLUX_TRACE_COPY);
}

// The same for a warp of few registers: all lanes in one row, one vector of each.
template <class Element, int Width>
__device__ __forceinline__ void sum_row_by_row(const SumTargets& s, Piece strip) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const int first = strip.column * s.tiling.tile_n + static_cast<int>(threadIdx.x % 32) * Width;
  const int end = min_of((strip.column + 1) * s.tiling.tile_n, s.tiling.n);
  const int above = row_begin(s.tiling.m, s.tiling.world, s.rank);
  for (int row = strip.begin - above; row < strip.end - above; ++row) {
    for (int column = first; column < end; column += 32 * Width) {
      const auto sum = sum_of_slots<Element, Width>(
          s.tiling.world, [&s](int source) { return s.to.partials[source]; }, row * s.ld + column);
      const Vector result = result_of<Element, Width>(sum, s.to.scale, s.bias, column);
      auto* out = static_cast<Element*>(s.to.outs[s.rank]) + std::int64_t{row} * s.tiling.n;
      *reinterpret_cast<Vector*>(out + column) = result;
    }
  }
}

// Whether the warp has the strip from now on.
__device__ __forceinline__ bool take_strip(const SumTargets& s, int index) {
  std::uint32_t before = 0;
  if (threadIdx.x % 32 == 0) before = atomicOr(s.taken + index / 32, 1u << index % 32);
  return (__shfl_sync(~0u, before, 0) >> index % 32 & 1u) == 0;
}

// The flag of source `lane` for the strip.
__device__ __forceinline__ int strip_flag(const SumTargets& s, Piece strip) {
  const int lane = min_of(static_cast<int>(threadIdx.x % 32), s.tiling.world - 1);
  return flag_index(s.tiling, lane, s.rank, strip.begin / s.tiling.tile_m, strip.column);
}

// What nobody has summed when the block has no more tiles.
template <class Element>
__device__ __forceinline__ void sum_the_rest(const SumTargets& s, const FluxSync& sync) {
  const int strips = own_sum_count(s.tiling, s.rank);
  for (;;) {
    const int index = static_cast<int>(claim_of_warp(s.to.counts + FLUX_SUM_CLAIMED));
    if (index >= strips) return;
    const Piece strip = own_sum(s.tiling, s.rank, s.raster, index);
    if (strip.begin >= strip.end) continue;
    const int tile_row = strip.begin / s.tiling.tile_m;
    const bool came = await(s.to.words, strip_flag(s, strip), sync, FLUX_WAIT_PARTIAL, tile_row);
    const bool complete = __all_sync(~0u, came);
    __syncwarp();
    if (!take_strip(s, index)) continue;
    const std::uint64_t began = stamp();
    sum_rows<Element, 16 / sizeof(Element)>(s, strip, complete);
    tell_of_piece(sync, began, strip);
  }
}

// By a warp of few registers, until `ended` of the block's warps, `multiplying` in all, have no more tiles.
template <class Element>
__device__ __forceinline__ void sum_beside(const SumTargets& s, const volatile unsigned& ended,
                                           unsigned multiplying) {
  const FluxSync sync = sum_sync(s);
  const int strips = own_sum_count(s.tiling, s.rank);
  for (;;) {
    const int index = static_cast<int>(claim_of_warp(s.to.counts + FLUX_SUM_BESIDE));
    if (index >= strips) return;
    const Piece strip = own_sum(s.tiling, s.rank, s.raster, index);
    if (strip.begin >= strip.end) continue;
    const std::uint32_t* flag = s.to.words + strip_flag(s, strip);
    while (!__all_sync(~0u, epoch_reached(load_acquire_sys(flag), sync.epoch))) {
      if (__any_sync(~0u, ended == multiplying)) return;
      __nanosleep(500);
    }
    __syncwarp();
    if (!take_strip(s, index)) continue;
    const std::uint64_t began = stamp();
    sum_row_by_row<Element, 8 / sizeof(Element)>(s, strip);
    tell_of_piece(sync, began, strip);
  }
}

template <class Element>
__device__ __forceinline__ void take_pieces(const SumTargets& s, const FluxSync& sync) {
  const int sums = sum_count(s.tiling, s.rank);
  const int all = sums + copy_count(s.tiling);
  for (;;) {
    const int piece = static_cast<int>(claim_of_warp(s.to.counts + FLUX_SUM_CLAIMED));
    if (piece >= all) return;
    if (piece < sums) {
      sum_own<Element>(s, sync, sum_of_owner(s.tiling, s.rank, piece));
    } else {
      copy_others<Element>(s, sync, copied_piece(s.tiling, piece - sums));
    }
  }
}

// Sets words that no recent call has raised to the number, since words are compared by signed difference.
// Peers may raise them for the next call meanwhile.
__device__ inline void renew_words(const FluxAllReduce& to, std::uint32_t number) {
  for (unsigned i = threadIdx.x % 32; i < to.word_count; i += 32) {
    const std::uint32_t seen = load_acquire_sys(to.words + i);
    if (!epoch_reached(seen, number)) atomicCAS_system(to.words + i, seen, number);
  }
}

__device__ __forceinline__ unsigned blocks_of_launch() { return gridDim.x * gridDim.y * gridDim.z; }
__device__ __forceinline__ bool all_have_begun(const FluxAllReduce& to) {
  const volatile std::uint32_t* begun = to.counts + FLUX_SUM_BLOCKS;
  return __any_sync(~0u, *begun == blocks_of_launch());
}

// Ends the call. `warps` warps of each block call it when the block has no more tiles, or none of theirs.
template <class Element>
__device__ __forceinline__ void end_all_reduce(const SumTargets& s, unsigned warps) {
  auto* counts = reinterpret_cast<volatile std::uint32_t*>(s.to.counts);
  const FluxSync sync = sum_sync(s);
  if (all_have_begun(s.to)) take_pieces<Element>(s, sync);
  if (threadIdx.x % 32 == 0) report_failure(sync);
  if (!counts_to(s.to.counts + FLUX_SUM_WARPS, blocks_of_launch() * warps)) return;
  if (sync.epoch % kRenewWords == 0) renew_words(s.to, sync.epoch);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    counts[FLUX_SUM_BLOCKS] = counts[FLUX_SUM_CLAIMED] = counts[FLUX_SUM_WARPS] = 0;
    counts[FLUX_SUM_CALLS] = sync.epoch;
  }
}

// A warp of a ReduceScatter's kernel has nothing more to do. The last of `warps` of each block sets the
// workspace back.
__device__ __forceinline__ void leave_sums(const SumTargets& s, unsigned warps) {
  if (!counts_to(s.to.counts + FLUX_SUM_WARPS, blocks_of_launch() * warps)) return;
  const int words = taken_words(s.tiling, s.rank);
  for (int i = threadIdx.x % 32; i < words; i += 32) s.taken[i] = 0;
  if (threadIdx.x % 32 < FLUX_SUM_WORDS) s.to.counts[threadIdx.x % 32] = 0;
}

}  // namespace flux
