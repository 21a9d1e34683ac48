// Where the maps of a grouped GEMM lie that a kernel makes on the device (cuda_moe/route.cuh), and what
// bounds their sizes. Host code without CUDA.
#pragma once

#include <algorithm>

#include "cuda/arguments.h"
#include "cuda_moe/groups.h"

namespace flux {

constexpr int kRouteWarps = 32;  // of a block, at most
// Routings of more choices are made by kRouteBlocks blocks, with a launch for each phase.
constexpr int kManyChoices = 8192, kRouteBlocks = 32, kRouteBlockWarps = 16;
// What all threads know of the choices: Verdict, and the number of tiles.
constexpr int kVerdictWords = 2 + FLUX_MAX_WORLD;

// Scratch memory that all warps go through again and again. `e`: of this rank's experts. Spans by number,
// but for those marked (visit).
struct RouteScratch {
  int* of_warps;    // [warps, odd_stride(e)]: rows; then those before them; then the next one
  int* of_expert;   // [e]: rows
  int* first_row;   // [e]
  int* first_tile;  // [e]
  int* span_at;     // [spans (visit)]: number
  int* past;        // [e, spans (visit)]: rows up to the span's last one
  int* of_span;     // [e, spans]: rows; then those before them
  int* group;       // [spans (visit), e]: tiles before those of this key and expert
};
constexpr std::int64_t kRouteSharedWords = 24 << 10;  // that it may have in shared memory

// Of rows that warps read column by column: in another bank each.
FLUX_HD constexpr int odd_stride(int count) { return count | 1; }

FLUX_HD constexpr std::int64_t scratch_words(std::int64_t e, std::int64_t spans, int warps) {
  return warps * (e | 1) + 3 * e + spans + 3 * e * spans;
}
FLUX_HD constexpr RouteScratch route_scratch(int* at, int e, int spans, int warps) {
  RouteScratch s{};
  s.of_warps = at;
  s.of_expert = s.of_warps + warps * odd_stride(e);
  s.first_row = s.of_expert + e;
  s.first_tile = s.first_row + e;
  s.span_at = s.first_tile + e;
  s.past = s.span_at + spans;
  s.of_span = s.past + e * spans;
  s.group = s.of_span + e * spans;
  return s;
}

// Maps and scratch memory of FluxRouteArgs. A *span* is a communication tile (AllGather) or a row of tiles
// of the tokens (ReduceScatter). It has a number, and a place in the order of visits.
struct RouteMaps {
  int first, experts;  // of this rank
  int spans, tiles, columns, pushes;
  std::int64_t items;
  // FluxGroups
  const void** weights;
  int *item, *expert, *row, *token, *source, *count, *position, *push, *pushed;
  std::uint32_t* share;
  int* totals;  // kRouteTotals
  int* routed;  // by routed row: its token; 0 behind the last one
  // Scratch
  int* verdict;       // of many blocks: Verdict
  int* scratch;       // RouteScratch, where it is not in shared memory
  int* span_of;       // [m]: by token
  int* of_tile;       // [tiles]: its last item, sums left out
  int* last;          // [spans (visit)]: the last item that the sum awaits; -1: none
  int* sorted_last;   // [spans]
  int* words_behind;  // the end
};
enum { kRouteItems = 0, kRouteRows = 1, kRouteRefused = 2, kRouteTotals = 4 };

inline CommTiling route_comm(const FluxRouteArgs& args) {
  const int world = max_of(args.order.world, 1);
  return {args.m, world, max_of(1, min_of(args.order.comm_tile_rows, chunk_rows(args.m, world)))};
}

inline bool makes_many(const FluxRouteArgs& args) {
  return std::int64_t{args.m} * args.topk > kManyChoices;
}

// `warps`: that share the choices.
inline RouteMaps route_maps(const FluxRouteArgs& args, int warps) {
  RouteMaps maps{};
  const CommTiling comm = route_comm(args);
  const int world = comm.world, rank = args.order.rank, part = rank / (world / args.ep);
  maps.first = row_begin(args.total, args.ep, part);
  maps.experts = row_end(args.total, args.ep, part) - maps.first;
  maps.columns = ceil_div(args.n, args.tile_n);  // none where a rank has no part of N
  maps.spans = args.gathers != 0 ? signal_count(comm) : ceil_div(args.m, args.tile_m);
  // An expert's last tile may have a single row.
  const std::int64_t rows = maps.experts > 0 ? args.max_rows : 0;
  const std::int64_t padded = rows + std::int64_t{maps.experts} * (args.tile_m - 1);
  maps.tiles = static_cast<int>(std::min(rows, padded / args.tile_m));
  const bool pushes = args.gathers != 0 && args.parallel != 0;
  const int own = row_count(args.m, world, rank);
  maps.pushes = pushes ? (world - 1) * ceil_div(own, comm.rows) : 0;
  const int sums = args.gathers != 0 ? 0 : maps.spans;
  maps.items = (std::int64_t{maps.tiles} + sums) * maps.columns + maps.pushes + args.gathers;

  int* next = args.room;
  const auto take = [&next](std::int64_t words) {
    int* const at = next;
    next = reinterpret_cast<int*>(reinterpret_cast<std::uintptr_t>(at) + words * sizeof(int));
    return at;
  };
  const std::int64_t e = maps.experts, spans = maps.spans,
                     slots = std::int64_t{maps.tiles} * args.tile_m;
  maps.weights = reinterpret_cast<const void**>(take(2 * e));
  maps.item = take(maps.items);
  maps.expert = take(maps.tiles);
  maps.row = take(slots);
  maps.token = take(slots);
  maps.source = args.gathers != 0 ? maps.token : take(slots);
  maps.count = take(sums);
  maps.position = take(std::int64_t{args.m} * args.topk);
  maps.push = take(std::int64_t{4} * maps.pushes);
  maps.pushed = take(std::int64_t{comm.rows} * maps.pushes);
  const bool shares = args.gathers == 0 && args.parallel != 0;
  maps.share = reinterpret_cast<std::uint32_t*>(take(shares ? own : 0));
  maps.totals = take(kRouteTotals);
  maps.routed = take(args.max_rows);
  maps.verdict = take(kVerdictWords);
  maps.scratch = take(scratch_words(e, spans, warps));
  maps.span_of = take(args.m);
  maps.of_tile = take(sums > 0 ? maps.tiles : 0);
  maps.last = take(sums);
  maps.sorted_last = take(sums);
  maps.words_behind = next;
  return maps;
}

inline RouteMaps route_maps(const FluxRouteArgs& args) {
  return route_maps(args, makes_many(args) ? kRouteBlocks * kRouteBlockWarps : kRouteWarps);
}

// What the kernels of the op take.
inline FluxGroups route_groups(const FluxRouteArgs& args) {
  const RouteMaps maps = route_maps(args);
  FluxGroups groups{};
  groups.items = maps.item;
  groups.experts = maps.expert;
  groups.sources = maps.source;
  groups.rows = maps.row;
  groups.weights = maps.weights;
  groups.item_count = static_cast<std::int32_t>(maps.items);
  groups.experts_count = maps.experts;
  groups.tokens = maps.token;
  groups.counts = maps.count;
  groups.positions = maps.position;
  groups.topk = args.topk;
  if (args.parallel != 0 && args.gathers != 0) {
    groups.pushes = maps.push;
    groups.pushed = maps.pushed;
  }
  if (args.parallel != 0 && args.gathers == 0) groups.shares = maps.share;
  groups.item_total = maps.totals + kRouteItems;
  return groups;
}

}  // namespace flux
