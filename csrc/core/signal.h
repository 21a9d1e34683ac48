// Communication tiles, the signals that announce them, and the epochs that make signals reusable.
//
// A communication tile is a run of at most `rows` rows inside one rank's chunk; its size is chosen
// independently of the GEMM tile (Flux paper, 4.3 "Communication tile size"). M = 16, W = 4, rows =
// 2:
//
//   row      0 1 | 2 3 || 4 5 | 6 7 || 8 9 | 10 11 || 12 13 | 14 15
//   chunk        0     ||     1     ||      2      ||       3
//   tile     0   | 1   || 0   | 1   || 0   | 1     || 0     | 1
//   signal   0   | 1   || 2   | 3   || 4   | 5     || 6     | 7          = chunk * 2 + tile
#pragma once

#include <cstdint>

#include "core/ownership.h"

namespace flux {

struct CommTiling {
  int m;
  int world;
  int rows;  // rows of a communication tile, in [1, chunk_rows]
};

struct Range {
  int begin;
  int end;
};

// Signals per chunk; the same for every chunk so that an index needs no prefix sum.
//   M = 16, W = 4:  rows = 4 -> 1    rows = 3 -> 2    rows = 2 -> 2    rows = 1 -> 4
FLUX_HD constexpr int tiles_per_chunk(const CommTiling& c) {
  return ceil_div(chunk_rows(c.m, c.world), c.rows);
}

FLUX_HD constexpr int signal_count(const CommTiling& c) { return c.world * tiles_per_chunk(c); }

// Signal of (chunk, tile). M = 16, W = 4, rows = 2:  (0,0) -> 0, (1,0) -> 2, (3,1) -> 7.
FLUX_HD constexpr int signal_index(const CommTiling& c, int chunk, int tile) {
  return chunk * tiles_per_chunk(c) + tile;
}

// Rows that (chunk, tile) carries; empty for the tail tiles of short chunks.
//   M = 7, W = 4, rows = 1:  (3, 0) -> [6, 7)    (3, 1) -> [7, 7) empty, its signal is never raised
FLUX_HD constexpr Range comm_tile_rows(const CommTiling& c, int chunk, int tile) {
  const int end_of_chunk = row_end(c.m, c.world, chunk);
  const int begin = min_of(end_of_chunk, row_begin(c.m, c.world, chunk) + tile * c.rows);
  return Range{begin, begin + min_of(c.rows, end_of_chunk - begin)};
}

// Tile of a row inside its chunk. M = 16, W = 4, rows = 3:  row 4 5 6 7 -> 0 0 0 1.
FLUX_HD constexpr int comm_tile_of(const CommTiling& c, int row) {
  return (row - row_begin(c.m, c.world, owner_of(c.m, c.world, row))) / c.rows;
}

// Signals that guard rows [begin, end), begin < end, all chunks that the rows straddle included.
//   M = 16, W = 4, rows = 2:
//   rows [0, 4)  -> signals [0, 2)            inside chunk 0
//   rows [3, 9)  -> signals [1, 5)            straddles chunks 0, 1, 2: waits for all three
FLUX_HD constexpr Range signals_of_rows(const CommTiling& c, int begin, int end) {
  const int last = end - 1;
  return Range{signal_index(c, owner_of(c.m, c.world, begin), comm_tile_of(c, begin)),
               signal_index(c, owner_of(c.m, c.world, last), comm_tile_of(c, last)) + 1};
}

// Signals hold the epoch (number of the call) that raised them, so a call never has to clear them:
// whatever an earlier call left behind compares as "not yet". The signed difference keeps that true
// when the 32-bit epoch wraps around, as long as two ranks are within 2^31 calls of each other and
// no signal is left older than that (cpu/engine.cpp renews those that are seldom raised).
//   epoch_reached(observed 4, expected 5) = false    (5, 5) = true    (0, 0xffffffff) = true
FLUX_HD constexpr bool epoch_reached(std::uint32_t observed, std::uint32_t expected) {
  return static_cast<std::int32_t>(observed - expected) >= 0;
}

}  // namespace flux
