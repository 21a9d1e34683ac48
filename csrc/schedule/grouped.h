// The work of one grouped GEMM on a GPU: which routed rows make a tile, and in which order tiles are
// computed (docs/kernels/protocol.md, "Mixtures of experts").
//
// A tile has rows of one expert. So that it depends on few communication tiles, the rows of an expert are
// taken in the order in which their tokens arrive (AllGather) or leave (ReduceScatter), and scattered
// when they are stored. W = 2, rank 1, tile_m = 2, the example of core/row_map.h:
//
//   expert 0   tile 0: routed row 0 (token 1)               waits for rank 0
//   expert 1   tile 1: routed rows 2, 3 (tokens 2, 3)       own tokens: computed first
//              tile 2: routed row 1 (token 0)               waits for rank 0
//
// With expert parallelism rows move only where one of their experts is: the kernel itself pushes them, and a
// sum has the partials of ranks with one of its token's experts alone.
//
// Kernels take these maps from device memory, where a kernel makes them (cuda_moe/route.h); these are what tests
// compare them with.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tile_order.h"
#include "schedule/routing.h"

namespace flux::host {

struct GroupedWork {
  int tile_m = 0;
  // In the order in which blocks claim it: a tile of the GEMM as tile * columns + column, or -1 - i:
  // AllGather: i = 0: all other rows are awaited; else push i - 1. ReduceScatter: tile i of the tokens'
  // sums, row by row.
  std::vector<int> items;
  std::vector<int> experts;  // by tile
  // By row of the tiles, tile_m of each: the routed row, -1 behind the last one; its token, that of the
  // tile's first row behind the last one.
  std::vector<int> rows;
  std::vector<int> tokens;
  std::vector<int> sources;  // ReduceScatter: as rows, that of the first row behind the last one
  std::vector<int> counts;   // ReduceScatter, by tile row of the tokens: their routed rows
  // AllGather, expert parallel: by push the rank, the signal that follows there, and where in `pushed` its
  // rows begin and end, which are tokens of this rank.
  std::vector<int> pushes;
  std::vector<int> pushed;
  std::vector<int>
      shares;  // ReduceScatter, expert parallel: by own row the bits of ranks with a partial
};
constexpr int kPushWords = 4;

// Rows of x are gathered: tiles in the order in which their last token arrives.
GroupedWork gather_work(const RowMap& map, const TileOrder& order, const CommTiling& comm,
                        int tile_m, int columns);

// Products of routed rows are summed for each token, in tiles of the order's size. `ahead` tiles of the
// GEMM, about as many as run at once, come between a sum and the last product that it awaits.
GroupedWork sum_work(const RowMap& map, const TileOrder& order, int ahead);

// Makes the kernel push the own rows to ranks with one of their experts, before its tiles: one push for each
// communication tile and rank, empty ones as well, since its signal is awaited. First to the ranks that take
// these rows first. The experts are split into `ep` parts.
void add_pushes(const Choices& choices, const TileOrder& order, const CommTiling& comm, int ep,
                GroupedWork* work);
// Notes whose partials are there for each of the own rows.
void add_shares(const Choices& choices, int world, int rank, int ep, GroupedWork* work);

}  // namespace flux::host
