// From the arguments of a launch (abi.h) to what csrc/core computes with. Host code without CUDA, so
// that tests check on any machine what kernels are given.
#pragma once

#include "core/all_reduce.h"
#include "core/relay.h"
#include "core/scatter.h"
#include "core/signal.h"
#include "core/tile_map.h"
#include "cuda/abi.h"

namespace flux {

// Bytes in front of what else a kernel's workspace holds: counters, which are zero whenever no kernel runs,
// so kernels of all kinds may take turns with a workspace.
constexpr std::uint64_t kCounterBytes = 128;

// The order in which a kernel of this op visits units of tile_m x tile_n. A plain launch (world 0)
// visits them row by row in bands of `raster`, or by ranges of columns.
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
  t.sequence = plain && o.column_ranges == 0 ? nullptr : o.sequence;
  t.column_ranges = o.column_ranges;
  t.slice_rows = slice_rows_of(t, o.comm_tile_rows);
  return t;
}

inline CommTiling comm_tiling(const FluxGemmArgs& args) {
  const int world = max_of(args.order.world, 1);
  const int chunk = chunk_rows(args.m, world);
  return CommTiling{args.m, world, max_of(1, min_of(args.order.comm_tile_rows, chunk))};
}

// Rows that a tile may read from FluxGemmArgs.own if it reads no others; none: from `a` alone.
inline Range own_rows(const FluxGemmArgs& args) {
  if (args.own == nullptr) return {0, 0};
  const int world = max_of(args.order.world, 1);
  return {row_begin(args.m, world, args.order.rank), row_end(args.m, world, args.order.rank)};
}

// Bytes from `a` to where all rows would begin, so that the own ones are in FluxGemmArgs.own: or to the
// second buffer of rows that kernels push. 0: there is one matrix.
inline std::int64_t other_rows(const FluxGemmArgs& args, std::int64_t element_bytes) {
  if (args.gather.counts != nullptr) return args.gather.odd;
  if (args.own == nullptr) return 0;
  return static_cast<const char*>(args.own) - static_cast<const char*>(args.a) -
         own_rows(args).begin * args.lda * element_bytes;
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

// What tiles wait for: signals of their rows (AllGather), or entries of the rows' owners (ReduceScatter).
struct Needs {
  const std::uint32_t* words = nullptr;  // null: nothing
  CommTiling tiling{};  // a word for each communication tile; of owners, for each chunk
  Range own{};          // rows that need nothing
  bool entries = false;
  std::uint32_t epoch = 0;
  const std::uint32_t* count = nullptr;  // where the epoch of entries is, in a captured call

  void set_sync(const FluxSync& sync) {
    epoch = sync.epoch;
    count = entries ? sync.count : nullptr;
  }
};

FLUX_HD constexpr bool are_own(const Needs& needs, Range rows) {
  return rows.begin >= needs.own.begin && rows.end <= needs.own.end;
}
// The words that rows wait for.
FLUX_HD constexpr Range awaited(const Needs& needs, Range rows) {
  if (needs.words == nullptr || are_own(needs, rows)) return {0, 0};
  return signals_of_rows(needs.tiling, rows.begin, rows.end);
}

inline Needs needs_of(OpKind op, const FluxGemmArgs& args) {
  Needs needs;
  needs.tiling = comm_tiling(args);
  needs.entries = op != OpKind::kAGGemm;
  if (needs.entries) {
    needs.words = args.entries;
    needs.tiling.rows = chunk_rows(args.m, needs.tiling.world);
  } else {
    needs.words = args.signals;
    needs.own = own_rows(args);
  }
  needs.set_sync(args.sync);
  return needs;
}

// How a kernel sums by itself (FluxAllReduce).
struct SumTargets {
  FluxAllReduce to{};
  std::uint32_t* taken = nullptr;  // ReduceScatter: a bit for each strip that a warp sums
  int raster = 1;                  // the same: rows of tiles that are visited together
  const void* bias = nullptr;
  std::int64_t ld = 0;  // of partials
  bool wide = false;    // rows can be read and written 16 bytes at a time
  int rank = 0;
  ScatterTiling tiling{};
  FluxSync sync{};
};

// In a kernel's workspace, of a ReduceScatter that it ends: FLUX_SUM_WORDS words, and behind kCounterBytes
// bits of strips. All are zero whenever no kernel runs.
constexpr std::uint64_t kSumCountsOffset = 64;
inline std::uint64_t taken_bytes(FluxGemmArgs const& args, int tile_m, int tile_n) {
  if (args.all_reduce.scatters == 0) return 0;
  const ScatterTiling s{args.m, args.n, max_of(args.order.world, 1), tile_m, tile_n};
  const int words = max_of(taken_words(s, args.order.rank), 1);  // a workspace also without rows
  return static_cast<std::uint64_t>(ceil_div(words, 32)) * 128;
}

// `cluster_rows`: rows of tiles in one of FluxOrder.raster.
inline SumTargets sum_targets(FluxGemmArgs const& args, int tile_m, int tile_n, int element_bytes,
                              int cluster_rows = 1) {
  SumTargets s;
  const FluxAllReduce& to = args.all_reduce;
  const int world = max_of(args.order.world, 1);
  s.to = to;
  if (to.scatters != 0) {
    auto* words = static_cast<char*>(args.workspace);
    s.to.counts = reinterpret_cast<std::uint32_t*>(words + kSumCountsOffset);
    s.taken = reinterpret_cast<std::uint32_t*>(words + kCounterBytes);
    s.raster = max_of(args.order.raster, 1) * cluster_rows;
  }
  s.bias = args.bias;
  s.ld = args.slot_ld;
  s.rank = args.order.rank;
  s.tiling = {args.m, args.n, world, tile_m, tile_n};
  s.sync = args.sync;
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(to.put) |
                       static_cast<std::uint64_t>(args.n | tile_n | s.ld) * element_bytes;
  for (int rank = 0; rank < min_of(world, FLUX_MAX_WORLD); ++rank) {
    bits |= reinterpret_cast<std::uintptr_t>(to.partials[rank]) |
            reinterpret_cast<std::uintptr_t>(to.outs[rank]);
  }
  s.wide = bits % 16 == 0;
  return s;
}

// Strips of tiles that the reduction sums one by one, each with the threads of one block.
inline int reduce_units(const FluxReduceArgs& args) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const Range tiles = tiles_of_owner(s, args.rank);
  return (tiles.end - tiles.begin) * flag_columns(s) * ceil_div(args.tile_m, kStripRows);
}

// Blocks of the reduction, of kReduceTeams units at a time. A device places blocks breadth-first, so n
// blocks may be on n multiprocessors, none of which has room for a block of a GEMM then. While they wait
// for peers, two thirds of the multiprocessors stay free for kernels of other streams, which a peer may
// be waiting for in turn. 44 blocks of 1024 threads keep the memory of 132 multiprocessors busy.
inline int reduce_blocks(const FluxReduceArgs& args) {
  const int most = args.most_blocks > 0 ? args.most_blocks : max_of(args.sm_count / 3, 1);
  return min_of(reduce_units(args), most);
}

// Whether ranks share the device of `device_sms` multiprocessors. A rank alone on it uses all of them
// but for a margin (Knobs.sm_margin).
inline bool shares_device(int sm_count, int device_sms) { return 2 * sm_count <= device_sms; }

// Blocks of a GEMM that hands out tiles by block number and may use `sm_count` of `device_sms`
// multiprocessors, each with room for `blocks_per_sm`. If ranks share the device, there are no more
// blocks than its share of them, since each may be on another one.
inline int shared_blocks(int tiles, int sm_count, int device_sms, int blocks_per_sm) {
  const bool shared = shares_device(sm_count, device_sms);
  return min_of(tiles, shared ? sm_count : sm_count * max_of(blocks_per_sm, 1));
}

}  // namespace flux
