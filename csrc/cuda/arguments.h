// From the arguments of a launch (abi.h) to what csrc/core computes with. Host code without CUDA, so
// that tests check on any machine what kernels are given.
#pragma once

#include "core/scatter.h"
#include "core/signal.h"
#include "core/tile_map.h"
#include "cuda/abi.h"

namespace flux {

// The order in which a kernel of this op visits units of tile_m x tile_n. A plain launch (world 0)
// visits them row by row in bands of `raster`.
inline TileOrder tile_order(const FluxGemmArgs& args, OpKind op, int tile_m, int tile_n) {
  const FluxOrder& o = args.order;
  const bool plain = o.world <= 1;
  TileOrder t{};
  t.op = op;
  t.m = args.m;
  t.n = args.n;
  t.tile_m = tile_m;
  t.tile_n = tile_n;
  t.raster = max_of(o.raster, 1);
  t.swizzle = plain ? Swizzle::kNone : static_cast<Swizzle>(o.swizzle);
  t.order = plain ? Order::kDirect : static_cast<Order>(o.order);
  t.direction = static_cast<Direction>(o.direction);
  t.mesh = plain ? Mesh{1, 1, 1} : Mesh{o.nodes, o.domains, o.lanes};
  t.rank = plain ? 0 : o.rank;
  t.sequence = plain ? nullptr : o.sequence;
  return t;
}

inline CommTiling comm_tiling(const FluxGemmArgs& args) {
  const int world = max_of(args.order.world, 1);
  const int chunk = chunk_rows(args.m, world);
  return CommTiling{args.m, world, max_of(1, min_of(args.order.comm_tile_rows, chunk))};
}

// Where the epilogue of GEMM + ReduceScatter sends tiles: the owners' memory as this rank sees it.
struct ScatterTargets {
  void* slots[FLUX_MAX_WORLD] = {};
  std::uint32_t* flags[FLUX_MAX_WORLD] = {};
  const std::uint32_t* entries = nullptr;
  std::int64_t ld = 0;
  int rank = 0;
  ScatterTiling tiling{};
  FluxSync sync{};
};

inline ScatterTargets scatter_targets(FluxGemmArgs const& args, int tile_m, int tile_n) {
  ScatterTargets to;
  const int world = max_of(args.order.world, 1);
  for (int owner = 0; owner < min_of(world, FLUX_MAX_WORLD); ++owner) {
    to.slots[owner] = args.slots[owner];
    to.flags[owner] = args.flags[owner];
  }
  to.entries = args.entries;
  to.ld = args.slot_ld;
  to.rank = args.order.rank;
  to.tiling = {args.m, args.n, world, tile_m, tile_n};
  to.sync = args.sync;
  return to;
}

}  // namespace flux
