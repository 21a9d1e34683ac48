// Sums inside the kernel that computes the partials (cuda/gemm/all_reduce.cuh). A piece of rows, a column of
// tiles wide, is one warp's.
//
// ReduceScatter: strips of tiles, in the order of the tiles (own_sum).
//
// AllReduce: pieces of the owner's rows that are summed, and pieces of the result that are copied out. M = 14,
// W = 4, tiles of 64 rows:
//
//   row             0  1  2  3| 4  5  6  7| 8  9 10 11|12 13
//   owner                0    |     1     |     2     |  3
//   summed together      0    |     1     |     2     |  3       kSumRows, of one owner
//   copied together                       0                      kCopiedRows, of any owners
//
// The word of a sum is that of its first row, so that M may change: it holds the number of the call.
#pragma once

#include "core/relay.h"
#include "core/scatter.h"
#include "core/tile_order.h"

namespace flux {

constexpr int kSumRows = 4;      // few, so that all warps of a device have something to sum
constexpr int kCopiedRows = 16;  // a lane of the warp for each word that is awaited

// Rows [begin, end) of [M, N], and a column of tiles.
struct Piece {
  int column;
  int begin;
  int end;
};

// Rows of a sum lie in one row of tiles, so its partials have one flag of each source.
FLUX_HD constexpr int rows_summed(const ScatterTiling& s) { return min_of(kSumRows, s.tile_m); }

FLUX_HD constexpr int sum_count(const ScatterTiling& s, int owner) {
  const int rows = rows_summed(s);
  const int begin = row_begin(s.m, s.world, owner), end = row_end(s.m, s.world, owner);
  return begin < end ? (ceil_div(end, rows) - begin / rows) * flag_columns(s) : 0;
}
FLUX_HD constexpr Piece sum_of_owner(const ScatterTiling& s, int owner, int index) {
  const int rows = rows_summed(s);
  const int begin = row_begin(s.m, s.world, owner), end = row_end(s.m, s.world, owner);
  const int first = (begin / rows + index / flag_columns(s)) * rows;
  return Piece{index % flag_columns(s), max_of(first, begin), min_of(first + rows, end)};
}

FLUX_HD constexpr int copy_count(const ScatterTiling& s) {
  return ceil_div(s.m, kCopiedRows) * flag_columns(s);
}
FLUX_HD constexpr Piece copied_piece(const ScatterTiling& s, int index) {
  const int first = index / flag_columns(s) * kCopiedRows;
  return Piece{index % flag_columns(s), first, min_of(first + kCopiedRows, s.m)};
}

// A tile of own rows is complete with its last partial, which is the own one where own rows are visited last:
// so strips are summed in the order in which a rank visits tiles, `raster` rows of them at a time.
FLUX_HD constexpr int own_sum_count(const ScatterTiling& s, int owner) {
  const Range tiles = tiles_of_owner(s, owner);
  return (tiles.end - tiles.begin) * flag_columns(s) * strips_per_tile(s.tile_m);
}
// Words with a bit for each of them.
FLUX_HD constexpr int taken_words(const ScatterTiling& s, int owner) {
  return ceil_div(own_sum_count(s, owner), 32);
}
// Without rows where all rows of the strip are another owner's.
FLUX_HD constexpr Piece own_sum(const ScatterTiling& s, int owner, int raster, int index) {
  const Range tiles = tiles_of_owner(s, owner);
  const int strips = strips_per_tile(s.tile_m);
  const TileCoord at =
      raster_slot(tiles.end - tiles.begin, flag_columns(s), raster, index / strips);
  const int tile = tiles.begin + at.m;
  const int first = tile * s.tile_m + index % strips * kStripRows;
  const int last = min_of(first + kStripRows, (tile + 1) * s.tile_m);
  return Piece{at.n, max_of(first, row_begin(s.m, s.world, owner)),
               min_of(last, row_end(s.m, s.world, owner))};
}

FLUX_HD constexpr bool begins_sum(const ScatterTiling& s, int row) {
  return row % rows_summed(s) == 0 || row == row_begin(s.m, s.world, owner_of(s.m, s.world, row));
}
FLUX_HD constexpr int sum_word(const ScatterTiling& s, int row, int column) {
  return row * flag_columns(s) + column;
}

}  // namespace flux
