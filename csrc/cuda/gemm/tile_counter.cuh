// The next tile of a dynamic tile scheduler (GemmConfig.tile_scheduler), from a counter in device memory.
// Blocks claim tiles one by one, in the order of the schedule, for as long as there are any. So a grid that
// does not get all of its multiprocessors at once loses no wave: blocks that start late find less to do, or
// nothing. A static scheduler has given them tiles of their own by then.
//
// No tile waits for another tile, only for rows and entries, which peers and copies bring: so it is of no
// consequence which block has a tile, and a block that has one needs no other block to start.
//
// Blocks beyond FluxGemmArgs.waiting leave the kernel rather than wait for long (claim_ready): the others wait
// for what is not there, and a kernel of another stream, which a peer may wait for in turn, gets their
// multiprocessors. As long as rows come in time, all multiprocessors multiply. Nobody comes back, so for a
// while they look again.
#pragma once

#include <cstdint>

#include "cuda/arguments.h"
#include "cuda/sync.cuh"

namespace flux {

// Below: tiles that are claimed, and claimers that found none. Above: those that have left.
using TileCounter = unsigned long long;
constexpr TileCounter kLeft = TileCounter{1} << 32;

// Each of `claimers` claims until it gets `tiles`, once. So the launch's last claim is known by its number,
// and sets the counter back: a captured launch is repeated as it is.
__device__ __forceinline__ void end_claims(TileCounter* counter, TileCounter before, int tiles,
                                           unsigned claimers) {
  const TileCounter claims = (before & (kLeft - 1)) + (before >> 32) + 1;
  if (claims == static_cast<TileCounter>(tiles) + claimers) atomicExch(counter, TileCounter{0});
}

// A tile, or `tiles` when there are no more.
__device__ __forceinline__ int claim_tile(TileCounter* counter, int tiles, unsigned claimers) {
  const TileCounter before = atomicAdd(counter, TileCounter{1});
  end_claims(counter, before, tiles, claimers);
  const auto tile = static_cast<std::uint32_t>(before);
  return tile < static_cast<std::uint32_t>(tiles) ? static_cast<int>(tile) : tiles;
}

constexpr std::uint64_t kPatienceNs = 500'000;

// The same for a block that must not wait for long: `tiles` also when no next tile becomes ready(tile).
template <class Ready>
__device__ __forceinline__ int claim_ready(TileCounter* counter, int tiles, unsigned claimers,
                                           Ready const& ready) {
  const std::uint64_t begin = nanoseconds();
  for (;;) {
    const TileCounter seen = atomicAdd(counter, TileCounter{0});
    const int tile = static_cast<int>(static_cast<std::uint32_t>(seen));
    if (tile >= tiles) return claim_tile(counter, tiles, claimers);
    if (ready(tile)) {
      if (atomicCAS(counter, seen, seen + 1) == seen) return tile;
    } else if (nanoseconds() - begin > kPatienceNs) {
      end_claims(counter, atomicAdd(counter, kLeft), tiles, claimers);
      return tiles;
    } else {
      __nanosleep(200);
    }
  }
}

// Whether rows wait for nothing any more: neither for their signals, nor for the entries of their owners.
__device__ __forceinline__ bool need_no_wait(Needs const& needs, Range rows) {
  const Range words = awaited(needs, rows);
  const std::uint32_t number = needs.count == nullptr ? needs.epoch : *needs.count;
  for (int i = words.begin; i < words.end; ++i) {
    if (!epoch_reached(load_acquire_sys(needs.words + i), number)) return false;
  }
  return true;
}

// What blocks, or clusters, of a GEMM claim.
struct TileClaims {
  TileCounter* counter = nullptr;
  Needs needs{};
  unsigned waiting = ~0u;  // claimers that may wait
};

// `per_sm`: claimers on a multiprocessor; `size`: multiprocessors of a claimer.
inline TileClaims tile_claims(OpKind op, const FluxGemmArgs& args, int per_sm, int size) {
  TileClaims claims{static_cast<TileCounter*>(args.workspace), needs_of(op, args)};
  if (args.waiting > 0) claims.waiting = max_of(args.waiting * max_of(per_sm, 1) / size, 1);
  return claims;
}

// The next tile of a claimer, of which `rows_of` says the rows.
template <class Rows>
__device__ __forceinline__ int claim_tile(TileClaims const& claims, int tiles, unsigned claimers,
                                          unsigned claimer, Rows const& rows_of) {
  if (claimer < claims.waiting) return claim_tile(claims.counter, tiles, claimers);
  return claim_ready(claims.counter, tiles, claimers,
                     [&](int tile) { return need_no_wait(claims.needs, rows_of(tile)); });
}

}  // namespace flux
