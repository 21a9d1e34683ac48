// Tile order: which output tile the i-th GEMM tile slot computes ("tile coordinate swizzling", Flux
// paper, 3.1 and 4.1).
//
// AllGather: a tile may start when the rows it reads are there, so tiles are visited in the order
// in which chunks arrive. ReduceScatter: a tile's rows leave when it is done, so tiles are visited
// by owner, shifted by rank, and no two ranks write to one owner at the same time. M = 8 tiles, 4
// ranks:
//
//                 AllGather, direct pull          ReduceScatter, rank_shift
//   rank 0        0 1 | 2 3 | 4 5 | 6 7           2 3 | 4 5 | 6 7 | 0 1
//   rank 1        2 3 | 4 5 | 6 7 | 0 1           4 5 | 6 7 | 0 1 | 2 3
//   rank 2        4 5 | 6 7 | 0 1 | 2 3           6 7 | 0 1 | 2 3 | 4 5
//   rank 3        6 7 | 0 1 | 2 3 | 4 5           0 1 | 2 3 | 4 5 | 6 7
//
// A tile that straddles chunks is visited with exactly one of them: for AllGather the one that
// arrives last (it must wait for all that it reads), for ReduceScatter the one that is visited
// first (its rows leave as early as they can).
#pragma once

#include "core/comm_order.h"
#include "core/ownership.h"

namespace flux {

// All that the map (rank, slot) -> tile depends on.
struct TileOrder {
  OpKind op;
  int m;
  int n;       // columns of the local GEMM; a rank without any still visits its rows
  int tile_m;  // rows of a GEMM tile
  int tile_n;  // columns of a GEMM tile
  int raster;  // rows of tiles that are swept together, column by column; 1 = row by row
  Swizzle swizzle;
  Order order;
  Direction direction;
  Mesh mesh;
  int rank;
  // W chunks in visiting order, for hosts that form no mesh; null means the maps of comm_order.h.
  const int* sequence = nullptr;
};

struct TileCoord {
  int m;  // index of the tile, not of the row
  int n;
};

FLUX_HD constexpr int tiles_m(const TileOrder& t) { return ceil_div(t.m, t.tile_m); }
FLUX_HD constexpr int tiles_n(const TileOrder& t) { return ceil_div(max_of(t.n, 1), t.tile_n); }
FLUX_HD constexpr int tile_count(const TileOrder& t) { return tiles_m(t) * tiles_n(t); }

// Chunk at position p of this rank's sequence; a permutation of [0, W). See comm_order.h for
// pictures.
FLUX_HD constexpr int chunk_at(const TileOrder& t, int position) {
  if (t.sequence != nullptr) return t.sequence[position];
  return t.op == OpKind::kAGGemm
             ? ag_chunk_at(t.swizzle, t.order, t.mesh, t.direction, t.rank, position)
             : rs_owner_at(t.swizzle, t.order, t.mesh, t.rank, position);
}

// Inverse of chunk_at.  AllGather, direct pull, rank 1 of 4:  chunk 0 1 2 3 -> 3 0 1 2.
FLUX_HD constexpr int position_of_chunk(const TileOrder& t, int chunk) {
  const int world = world_of(t.mesh);
  for (int p = 0; p < world; ++p) {
    if (chunk_at(t, p) == chunk) return p;
  }
  return world;
}

// Position with which tile row `tile` is visited: the last (AllGather) or first (ReduceScatter) of
// the chunks it covers. M = 8 rows, W = 4, tile_m = 3, rank 0 of a direct pull AllGather:
//   tile      0 (rows 0-2)    1 (rows 3-5)    2 (rows 6-7)
//   chunks    0 1             1 2             3
//   position  1               2               3
FLUX_HD constexpr int position_of_tile(const TileOrder& t, int tile) {
  const int world = world_of(t.mesh);
  const int first = owner_of(t.m, world, tile * t.tile_m);
  const int last = owner_of(t.m, world, min_of(t.m, (tile + 1) * t.tile_m) - 1);
  int best = position_of_chunk(t, first);
  for (int chunk = first + 1; chunk <= last; ++chunk) {
    const int p = position_of_chunk(t, chunk);
    best = t.op == OpKind::kAGGemm ? max_of(best, p) : min_of(best, p);
  }
  return best;
}

// The slot-th tile row in visiting order; a permutation of [0, tiles_m). Walks the chunks in order
// and counts the tile rows visited with each: only the first and the last tile row of a chunk can
// belong to another chunk's position, so this costs O(W * tiles straddled), not O(tiles_m).
//   M = 8 tiles, 4 ranks, rank 1, AllGather direct pull:  slot 0 1 2 3 ... -> 2 3 4 5 6 7 0 1
FLUX_HD constexpr int tile_row_at(const TileOrder& t, int slot) {
  const int world = world_of(t.mesh);
  int left = slot;
  for (int p = 0; p < world; ++p) {
    const int chunk = chunk_at(t, p);
    const int begin = row_begin(t.m, world, chunk);
    const int end = row_end(t.m, world, chunk);
    if (begin == end) continue;
    int first = begin / t.tile_m;
    int last = (end - 1) / t.tile_m;
    if (position_of_tile(t, first) != p) ++first;
    if (last >= first && position_of_tile(t, last) != p) --last;
    const int here = last - first + 1;
    if (left < here) return first + left;
    left -= max_of(here, 0);
  }
  return -1;
}

// The slot-th tile. Bands of `raster` tile rows are swept column by column, so that the band's rows
// of A and each column of B stay in cache. raster = 2, 2 tile columns, rank 1 above:
//   slot     0     1     2     3     4     5   ...
//   (m, n)   (2,0) (3,0) (2,1) (3,1) (4,0) (5,0)
FLUX_HD constexpr TileCoord tile_at(const TileOrder& t, int slot) {
  const int columns = tiles_n(t);
  const int raster = min_of(t.raster, tiles_m(t));
  const int band = slot / (raster * columns);
  const int in_band = slot - band * raster * columns;
  const int height = min_of(raster, tiles_m(t) - band * raster);
  return TileCoord{tile_row_at(t, band * raster + in_band % height), in_band / height};
}

}  // namespace flux
