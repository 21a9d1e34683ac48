// ReduceScatter by an epilogue: which owners a GEMM tile belongs to, and the flags that tell an
// owner that a tile of a source is there.
//
// One flag per source and GEMM tile, written by its source alone (a plain store, so that no atomic
// operation ever crosses a link). It holds the epoch of the call, as signals do (signal.h). A tile
// that straddles owners raises one flag at each. M = 8 rows, W = 2, tile_m = 3, two tile columns:
//
//   tile row      0 (rows 0-2)    1 (rows 3-5)    2 (rows 6-7)
//   owners        0               0 1             1
//   flags of source s at owner 0:   (0,0) (0,1) (1,0) (1,1)    from s * 4 on   [flag rows = 2]
//                       at owner 1:   (1,0) (1,1) (2,0) (2,1)
#pragma once

#include "core/signal.h"

namespace flux {

struct ScatterTiling {
  int m;
  int n;
  int world;
  int tile_m;
  int tile_n;
};

// Owners [begin, end) of the rows of tile row `tile`; none when the tile lies beyond M.
FLUX_HD constexpr Range owners_of_rows(int m, int world, int begin, int end) {
  const int last = min_of(end, m) - 1;
  if (begin > last) return Range{0, 0};
  return Range{owner_of(m, world, begin), owner_of(m, world, last) + 1};
}
FLUX_HD constexpr Range owners_of_tile(const ScatterTiling& s, int tile) {
  return owners_of_rows(s.m, s.world, tile * s.tile_m, (tile + 1) * s.tile_m);
}

// Tile rows [begin, end) that hold rows of `owner`.
FLUX_HD constexpr Range tiles_of_owner(const ScatterTiling& s, int owner) {
  const int begin = row_begin(s.m, s.world, owner);
  const int end = row_end(s.m, s.world, owner);
  if (begin == end) return Range{0, 0};
  return Range{begin / s.tile_m, ceil_div(end, s.tile_m)};
}

// Most tile rows that any chunk can touch: L rows touch at most ceil((L - 1) / T) + 1 tiles of T.
//   chunk 4, tile 3 -> 2    chunk 4, tile 4 -> 2    chunk 1, tile 128 -> 1    chunk 8, tile 2 -> 5
FLUX_HD constexpr int flag_rows(const ScatterTiling& s) {
  return ceil_div(chunk_rows(s.m, s.world) - 1, s.tile_m) + 1;
}
FLUX_HD constexpr int flag_columns(const ScatterTiling& s) { return ceil_div(s.n, s.tile_n); }
FLUX_HD constexpr std::int64_t flag_count(const ScatterTiling& s) {
  return std::int64_t{s.world} * flag_rows(s) * flag_columns(s);
}

// Flag, in the pad of `owner`, of the tile (tile_row, tile_column) computed by `source`.
FLUX_HD constexpr int flag_index(const ScatterTiling& s, int source, int owner, int tile_row,
                                 int tile_column) {
  const int local = tile_row - tiles_of_owner(s, owner).begin;
  return (source * flag_rows(s) + local) * flag_columns(s) + tile_column;
}

// A bulk store moves a box of rows that may begin before the first row of an owner, and end behind its
// last one. What lies beyond the end of a tensor map is left out, but a store must not begin before the
// map's first row (CUDA programming guide, on tensor copies from shared to global memory). So the
// map of an owner begins `kGuardRows` in front of its slot: rows of the box that belong to the owner
// before it land there, where nothing is ever read. M = 8, W = 2, rows 3-5 of a tile, guard 3:
//
//   map of owner 0    guard guard guard | 0 1 2 3           box at map row 6: rows 3, and 4, 5 left out
//   map of owner 1    guard guard guard | 4 5 6 7           box at map row 2: row 3 into the guard, 4, 5
constexpr int kGuardRows = 128;  // no epilogue stores a higher box

// Rows of the map of `owner`. An owner without rows has a map of the guard and one row: maps are not empty.
FLUX_HD constexpr int map_rows(const ScatterTiling& s, int owner) {
  return kGuardRows + max_of(row_count(s.m, s.world, owner), 1);
}
// Where a row of [M, N] is in the map of `owner`; not negative for the first row of a box that is at most
// kGuardRows high and has a row of the owner.
FLUX_HD constexpr int map_row(const ScatterTiling& s, int owner, int row) {
  return row - row_begin(s.m, s.world, owner) + kGuardRows;
}

}  // namespace flux
