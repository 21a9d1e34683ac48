// The tile order in the form that kernels carry as a parameter: the runs of tile rows (or columns), computed once
// on the host, so that a thread block finds its tile with a few additions instead of walking the
// communication order (tile_order.h), which costs microseconds on one GPU thread.
#pragma once

#include "core/tile_order.h"

namespace flux {

// Ranks whose chunks a map can hold; kernel parameters are limited to 4 KiB.
constexpr int kMaxRuns = 64;

struct TileMap {
  int rows = 0;  // tiles along M
  int columns = 0;
  int raster = 1;
  int runs = 0;
  bool by_columns = false;   // runs are of tile columns
  int first[kMaxRuns] = {};  // tile row with which the run begins
  int past[kMaxRuns] = {};   // row slots up to the end of the run
};

// Rows of a slice (TileOrder): those of a communication tile, or of several if a map would have too many runs.
// A kernel finds them by what it is told; the host by the same.
FLUX_HD constexpr int slice_rows_of(const TileOrder& t, int comm_tile_rows) {
  const int node = t.mesh.domains * t.mesh.lanes, remote = world_of(t.mesh) - node;
  const int chunk = chunk_rows(t.m, world_of(t.mesh));
  const bool sums = t.op == OpKind::kGemmRS || t.op == OpKind::kGemmAR;
  if (!sums || t.order != Order::kHierarchical || t.swizzle != Swizzle::kRankShift) return 0;
  if (remote == 0 || comm_tile_rows < 1 || comm_tile_rows >= chunk) return 0;
  const int tiles = ceil_div(chunk, comm_tile_rows);
  const int slices = min_of(tiles, (kMaxRuns - node) / remote);
  return slices < 2 ? 0 : comm_tile_rows * ceil_div(tiles, slices);
}

// Empty runs (chunks without rows, or with none of their own) are left out; neighbours that follow
// each other in M become one. M = 8 tiles, 4 ranks, rank 1, AllGather direct pull:
//   runs 2    first 2 0    past 6 8
// A map without runs stands for a world, or column ranges, above kMaxRuns.
FLUX_HD constexpr TileMap tile_map(const TileOrder& t) {
  TileMap map{};
  map.rows = tiles_m(t);
  map.columns = tiles_n(t);
  map.raster = t.raster;
  map.by_columns = t.column_ranges > 0;
  const int runs = map.by_columns ? t.column_ranges : runs_of(t);
  if (runs > kMaxRuns) return map;
  int past = 0;
  for (int p = 0; p < runs; ++p) {
    const TileRun run = map.by_columns ? column_run_at(t, p) : turn_at(t, p);
    if (run.count == 0) continue;
    const int last = map.runs - 1;
    const int begin = last > 0 ? map.past[last - 1] : 0;
    const bool joins = last >= 0 && map.first[last] + map.past[last] - begin == run.first;
    if (!joins) map.first[map.runs++] = run.first;
    map.past[map.runs - 1] = past += run.count;
  }
  return map;
}

// The slot-th tile; equal to tile_at of the order that the map was made from.
FLUX_HD constexpr TileCoord tile_at(const TileMap& map, int slot) {
  const int swept = map.by_columns ? map.columns : map.rows;
  const int across = map.by_columns ? map.rows : map.columns;
  const TileCoord at = raster_slot(swept, across, map.raster, slot);
  int run = 0;
  int begin = 0;
  while (run + 1 < map.runs && at.m >= map.past[run]) begin = map.past[run++];
  const int tile = map.first[run] + at.m - begin;
  return map.by_columns ? TileCoord{at.n, tile} : TileCoord{tile, at.n};
}

}  // namespace flux
