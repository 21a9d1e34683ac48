// ReduceScatter between nodes: the strips in which the sum of a node travels, and the words that
// announce them.
//
// A rank on each node adds up its node's partials of an owner's rows and sends the sum. It does so by
// strips: runs of rows inside one row of GEMM tiles, all columns wide, so that a strip is one contiguous
// message of rows that are finished together. M = 64, W = 2, tile_m = 24; owner 1 has rows 32 to 63:
//
//   tile row     1 (rows 24-47)     2 (rows 48-71)
//   strip        24-39    40-47     48-63    64-71
//   own rows     32-39    40-47     48-63    none
//   word         0        1         2        3: never raised
#pragma once

#include "core/scatter.h"

namespace flux {

// Rows of a strip. At N = 8192 in 16 bits, 256 KiB: large enough for any link, small enough that the
// last strip of a tile adds little to the end.
constexpr int kStripRows = 16;

struct Strip {
  int tile_row;
  int begin;  // rows of the matrix
  int end;    // none of the owner's if begin >= end
};

FLUX_HD constexpr int strips_per_tile(int tile_m) { return ceil_div(tile_m, kStripRows); }

// Words for one owner's rows, the same for all owners.
FLUX_HD constexpr int strip_count(const ScatterTiling& s) {
  return flag_rows(s) * strips_per_tile(s.tile_m);
}

// Strips of the owner's tile rows. Those outside its rows are empty.
FLUX_HD constexpr int strips_of_owner(const ScatterTiling& s, int owner) {
  const Range tiles = tiles_of_owner(s, owner);
  return (tiles.end - tiles.begin) * strips_per_tile(s.tile_m);
}

// The strip that the owner's word `index` announces. Clipped to the tile and to the owner's rows.
FLUX_HD constexpr Strip strip_of_owner(const ScatterTiling& s, int owner, int index) {
  const int per_tile = strips_per_tile(s.tile_m);
  const int tile_row = tiles_of_owner(s, owner).begin + index / per_tile;
  const int first = tile_row * s.tile_m + index % per_tile * kStripRows;
  return Strip{
      tile_row, max_of(first, row_begin(s.m, s.world, owner)),
      min_of(min_of(first + kStripRows, (tile_row + 1) * s.tile_m), row_end(s.m, s.world, owner))};
}

}  // namespace flux
