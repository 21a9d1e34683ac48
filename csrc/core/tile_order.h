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
// ReduceScatter over several nodes: ranks of a node add up their partials of another node's rows before
// one of them sends the sum. Were owners visited one by one, in another order by each rank, every sum
// would be complete at the end alone. So the owners of a node take turns, a slice of their rows at a
// time. 2 nodes x 2 ranks, 4 tiles an owner, slices of 2, rank 0 (owners 3 and 2, then 1, 0):
//
//   12 13 | 8 9 | 14 15 | 10 11 | 4 5 6 7 | 0 1 2 3
//
// A tile that straddles chunks is visited with exactly one of them: for AllGather the one that
// arrives last (it must wait for all that it reads), for ReduceScatter the one that is visited
// first (its rows leave as early as they can).
#pragma once

#include <cstdint>

#include "core/comm_order.h"
#include "core/ownership.h"
#include "core/signal.h"

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
  // With column ranges: begin and end of each of them.
  const int* sequence = nullptr;
  int column_ranges = 0;  // that tiles are visited by, in place of chunks of rows; 0: none
  int slice_rows = 0;  // of an owner on another node before the next owner's turn; 0: all its rows
};

struct TileCoord {
  int m;  // index of the tile, not of the row
  int n;
};

FLUX_HD constexpr int tiles_m(const TileOrder& t) { return ceil_div(t.m, t.tile_m); }
FLUX_HD constexpr int tiles_n(const TileOrder& t) { return ceil_div(max_of(t.n, 1), t.tile_n); }
FLUX_HD constexpr std::int64_t tile_count(const TileOrder& t) {
  return std::int64_t{tiles_m(t)} * tiles_n(t);
}

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

// Tile rows that are visited with one chunk: `count` of them from `first` on. Only the first and the
// last tile row of a chunk can belong to another chunk's position.
struct TileRun {
  int first;
  int count;
};

// Tile rows visited with the chunk at position p of the sequence.
//   M = 8 tiles, 4 ranks, rank 1, AllGather direct pull:  p 0 1 2 3  ->  first 2 4 6 0, count 2
FLUX_HD constexpr TileRun tile_run_at(const TileOrder& t, int p) {
  const int world = world_of(t.mesh);
  const int chunk = chunk_at(t, p);
  const int begin = row_begin(t.m, world, chunk);
  const int end = row_end(t.m, world, chunk);
  if (begin == end) return TileRun{0, 0};
  int first = begin / t.tile_m;
  int last = (end - 1) / t.tile_m;
  if (position_of_tile(t, first) != p) ++first;
  if (last >= first && position_of_tile(t, last) != p) --last;
  return TileRun{first, max_of(last - first + 1, 0)};
}

// Slices of an owner's rows on another node, and the owners of whom there are slices: those of other nodes,
// which are the first positions, one node after the other.
FLUX_HD constexpr int slices_of(const TileOrder& t) {
  return t.slice_rows > 0 ? ceil_div(chunk_rows(t.m, world_of(t.mesh)), t.slice_rows) : 1;
}
FLUX_HD constexpr int sliced_owners(const TileOrder& t) {
  return t.slice_rows > 0 ? world_of(t.mesh) - t.mesh.domains * t.mesh.lanes : 0;
}
FLUX_HD constexpr int runs_of(const TileOrder& t) {
  return world_of(t.mesh) + sliced_owners(t) * (slices_of(t) - 1);
}

// A tile is in the slice that has its first row; one that an earlier chunk begins, in the first.
FLUX_HD constexpr int slice_of_tile(const TileOrder& t, int chunk, int tile) {
  return max_of(tile * t.tile_m - row_begin(t.m, world_of(t.mesh), chunk), 0) / t.slice_rows;
}

// Tile rows of the i-th turn: of a chunk, or of a slice. In the picture above: first 12 8 14 10 4 0.
FLUX_HD constexpr TileRun turn_at(const TileOrder& t, int i) {
  const int slices = slices_of(t), sliced = sliced_owners(t) * slices;
  if (i >= sliced) return tile_run_at(t, i - sliced + sliced_owners(t));
  const int lanes = t.mesh.domains * t.mesh.lanes;
  const int slice = i / lanes % slices;
  const int position = i / (lanes * slices) * lanes + i % lanes;
  const TileRun run = tile_run_at(t, position);
  const int chunk = chunk_at(t, position);
  int first = run.first, past = run.first + run.count;
  while (first < past && slice_of_tile(t, chunk, first) < slice) ++first;
  while (first < past && slice_of_tile(t, chunk, past - 1) > slice) --past;
  return TileRun{first, past - first};
}

// The slot-th tile row in visiting order; a permutation of [0, tiles_m). Walks the turns in order
// and counts the tile rows of each, so this costs O(W * tiles straddled), not O(tiles_m).
//   M = 8 tiles, 4 ranks, rank 1, AllGather direct pull:  slot 0 1 2 3 ... -> 2 3 4 5 6 7 0 1
FLUX_HD constexpr int tile_row_at(const TileOrder& t, int slot) {
  int left = slot;
  for (int i = 0; i < runs_of(t); ++i) {
    const TileRun run = turn_at(t, i);
    if (left < run.count) return run.first + left;
    left -= run.count;
  }
  return -1;
}

// Tile columns that are visited with range p of the columns, as the columns of an all-to-all leave by
// destination: those that no earlier range has. Ranges are disjoint, so only the first and the last column
// may be another one's. n = 10, tile_n = 3, ranges [4, 7) [7, 10) [0, 4):  p 0 1 2  ->  first 1 3 0, count 2 1 1
FLUX_HD constexpr Range column_range(const TileOrder& t, int p) {
  return Range{t.sequence[2 * p], t.sequence[2 * p + 1]};
}
FLUX_HD constexpr bool is_visited_before(const TileOrder& t, int p, int column) {
  for (int q = 0; q < p; ++q) {
    const Range r = column_range(t, q);
    if (r.begin < r.end && r.begin / t.tile_n <= column && column <= (r.end - 1) / t.tile_n) {
      return true;
    }
  }
  return false;
}
FLUX_HD constexpr TileRun column_run_at(const TileOrder& t, int p) {
  const Range r = column_range(t, p);
  if (r.begin >= r.end) return TileRun{0, 0};
  int first = r.begin / t.tile_n;
  int last = (r.end - 1) / t.tile_n;
  if (is_visited_before(t, p, first)) ++first;
  if (last >= first && is_visited_before(t, p, last)) --last;
  return TileRun{first, max_of(last - first + 1, 0)};
}
FLUX_HD constexpr int tile_column_at(const TileOrder& t, int slot) {
  int left = slot;
  for (int p = 0; p < t.column_ranges; ++p) {
    const TileRun run = column_run_at(t, p);
    if (left < run.count) return run.first + left;
    left -= run.count;
  }
  return -1;
}

// Bands of `raster` tile rows are swept column by column, so that the band's rows of A and each
// column of B stay in cache: the row slot and the column of the slot-th tile.
FLUX_HD constexpr TileCoord raster_slot(int rows, int columns, int raster, int slot) {
  const int height_of_all = min_of(raster, rows);
  const int band = slot / (height_of_all * columns);
  const int in_band = slot - band * height_of_all * columns;
  const int height = min_of(height_of_all, rows - band * height_of_all);
  const int column = in_band / height;
  return TileCoord{band * height_of_all + in_band - column * height, column};
}

// The slot-th tile. raster = 2, 2 tile columns, rank 1 above:
//   slot     0     1     2     3     4     5   ...
//   (m, n)   (2,0) (3,0) (2,1) (3,1) (4,0) (5,0)
FLUX_HD constexpr TileCoord tile_at(const TileOrder& t, int slot) {
  if (t.column_ranges > 0) {  // bands of tile columns, swept row by row
    const TileCoord at = raster_slot(tiles_n(t), tiles_m(t), t.raster, slot);
    return TileCoord{at.n, tile_column_at(t, at.m)};
  }
  const TileCoord at = raster_slot(tiles_m(t), tiles_n(t), t.raster, slot);
  return TileCoord{tile_row_at(t, at.m), at.n};
}

}  // namespace flux
