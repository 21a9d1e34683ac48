// The next tile of a dynamic tile scheduler (GemmConfig.tile_scheduler), from a counter in device memory.
// Blocks claim tiles one by one, in the order of the schedule, for as long as there are any. So a grid that
// does not get all of its multiprocessors at once loses no wave: blocks that start late find less to do, or
// nothing. A static scheduler has given them tiles of their own by then.
//
// No tile waits for another tile, only for rows and entries, which peers and copies bring: so it is of no
// consequence which block has a tile, and a block that has one needs no other block to start.
#pragma once

#include <cstdint>

namespace flux {

// A tile, or `tiles` when there are no more. Each of `claimers` claims until it gets that, once: so the
// launch's last claim can be told by its number, and sets the counter back. A captured launch is repeated
// as it is.
__device__ __forceinline__ int claim_tile(std::uint32_t* counter, int tiles, unsigned claimers) {
  const std::uint32_t tile = atomicAdd(counter, 1u);
  if (tile + 1 == static_cast<std::uint32_t>(tiles) + claimers) atomicExch(counter, 0u);
  return tile < static_cast<std::uint32_t>(tiles) ? static_cast<int>(tile) : tiles;
}

}  // namespace flux
