// The phases of route_kernel (cuda_moe/route.cuh), by all threads of its blocks.
#pragma once

#include "cuda/sync.cuh"
#include "cuda_moe/route.h"

namespace flux {

constexpr int kAddresses = 256;  // of weights, in the parameters of one launch
constexpr int kAhead = 4;        // choices of a lane that are loaded at once

struct RouteParams {
  FluxRouteArgs args;
  RouteMaps maps;
  int warps;                 // that RouteScratch is laid out for
  bool shared;               // scratch memory
  std::uint32_t reciprocal;  // choice / topk = choice * reciprocal >> shift
  int shift;
  int step;  // the first of a search among spans
  TileOrder order;
  CommTiling comm;
  int chunks[FLUX_MAX_WORLD];  // in the order of visits
  int peers[FLUX_MAX_WORLD];   // AllGather, parallel: in the order of pushes
  const void* weights[kAddresses];
};

__device__ __forceinline__ int lane_of() { return static_cast<int>(threadIdx.x) % 32; }
// Of all blocks.
__device__ __forceinline__ int threads_of() { return static_cast<int>(gridDim.x * blockDim.x); }
__device__ __forceinline__ int thread_of() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}
__device__ __forceinline__ int warp_of() { return thread_of() / 32; }
__device__ __forceinline__ int warps_of() { return threads_of() / 32; }

// each(i) for i < count, by all threads.
template <class Each>
__device__ __forceinline__ void by_thread(int count, Each each) {
  const int step = threads_of();
  for (int i = thread_of(); i < count; i += step) each(i);
}

// each(j) for j < kAhead, unrolled.
template <class Each>
__device__ __forceinline__ void ahead(Each each) {
#pragma unroll
  for (int j = 0; j < kAhead; ++j) each(j);
}

// Sum of the lanes up to this one.
__device__ __forceinline__ int sum_of_lanes(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane_of() >= step) value += below;
  }
  return value;
}

// put(i, sum of get(j) for j < i) for each i < count, by one warp. Returns the sum of all.
template <class Get, class Put>
__device__ __forceinline__ int sum_by_warp(int count, Get get, Put put) {
  int before = 0;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane_of();
    const int value = i < count ? get(i) : 0;
    const int sum = sum_of_lanes(value);
    if (i < count) put(i, before + sum - value);
    before += __shfl_sync(~0u, sum, 31);
  }
  return before;
}

// The same by all threads of the only block.
template <class Get, class Put>
__device__ __forceinline__ int sum_by_block(int count, Get get, Put put) {
  __shared__ int of_warps[kRouteWarps];
  int before = 0;
  for (int first = 0; first < count; first += static_cast<int>(blockDim.x)) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int value = i < count ? get(i) : 0;
    const int sum = sum_of_lanes(value);
    if (lane_of() == 31) of_warps[warp_of()] = sum;
    __syncthreads();
    const int of_lane = lane_of() < warps_of() ? of_warps[lane_of()] : 0;
    const int sums = sum_of_lanes(of_lane);
    const int below = __shfl_sync(~0u, sums - of_lane, warp_of());
    if (i < count) put(i, before + below + sum - value);
    before += __shfl_sync(~0u, sums, 31);
    __syncthreads();
  }
  return before;
}

// Bits that numbers below `count` have.
__device__ __forceinline__ int bits_of(int count) { return count > 1 ? 32 - __clz(count - 1) : 0; }

// The lanes of this warp with the same number, if it is not below 0. By ballots, which cost the same however
// many numbers there are, of several numbers at once.
__device__ __forceinline__ void lanes_alike(const int (&number)[kAhead], int bits,
                                            unsigned (&lanes)[kAhead]) {
  ahead([&](int j) { lanes[j] = __ballot_sync(~0u, number[j] >= 0); });
  for (int bit = 0; bit < bits; ++bit) {
    ahead([&](int j) {
      const bool set = (number[j] >> bit & 1) != 0;
      const unsigned ones = __ballot_sync(~0u, set);
      lanes[j] &= set ? ones : ~ones;
    });
  }
}

// What all threads know of the choices.
struct Verdict {
  int bad;    // the first choice of an expert that there is none of
  int tiles;  // of the GEMM
  int of_parts[FLUX_MAX_WORLD];
};
static_assert(sizeof(Verdict) == kVerdictWords * sizeof(int));

enum RoutePhase {
  kClear,
  kCount,
  kSumUp,
  kCut,
  kPlace,
  kFill,
  kSums,
  kOrder,
  kMerge,
  kRoutePhases
};

struct Router {
  const RouteParams& p;
  TileOrder order;
  RouteScratch scratch;
  Verdict& verdict;

  __device__ void run(RoutePhase phase) const {
    const bool gathers = p.args.gathers != 0;
    switch (phase) {
      case kClear:
        return clear();
      case kCount:
        return count();
      case kSumUp:
        return sum_up();
      case kCut:
        return cut();
      case kPlace:
        return place();
      case kFill:
        fill();
        gathers ? list_gather() : note_last();
        if (p.args.parallel != 0) gathers ? list_pushes() : list_shares();
        return;
      case kSums:
        return count_sums();
      case kOrder:
        return list_sums();
      case kMerge:
        return list_products();
      case kRoutePhases:
        return;
    }
  }

  __device__ int choices() const { return p.args.m * p.args.topk; }
  __device__ int token_of(int choice) const {
    return static_cast<int>(std::uint64_t{p.reciprocal} * static_cast<unsigned>(choice) >> p.shift);
  }
  __device__ int part_of(int expert) const { return owner_of(p.args.total, p.args.ep, expert); }

  // The expert of a choice, as it was passed.
  __device__ std::int64_t passed(int choice) const {
    return p.args.expert_bytes == 8 ? static_cast<const std::int64_t*>(p.args.experts)[choice]
                                    : static_cast<const std::int32_t*>(p.args.experts)[choice];
  }

  // This rank's number of an expert; -1: it has none such.
  __device__ int number_here(std::int64_t expert) const {
    const std::uint64_t number = static_cast<std::uint64_t>(expert) - p.maps.first;
    return number < static_cast<std::uint64_t>(p.maps.experts) ? static_cast<int>(number) : -1;
  }

  __device__ int span_of(int token) const {
    return p.args.gathers != 0 ? signals_of_rows(p.comm, token, token + 1).begin
                               : token / p.args.tile_m;
  }

  // The choices of a warp, in order.
  __device__ Range run_of_warp() const {
    const int run = ceil_div(ceil_div(choices(), warps_of()), 32) * 32;
    const int begin = min_of(choices(), warp_of() * run);
    return {begin, min_of(choices(), begin + run)};
  }
  __device__ int* of_warp() const {
    return scratch.of_warps + warp_of() * odd_stride(p.maps.experts);
  }

  // Tiles of an expert with `all` rows that are computed when `rows` of them are there.
  __device__ int tiles_with(int rows, int all) const {
    const bool whole = p.args.gathers != 0 && rows < all;  // a tile comes with its last row
    return whole ? rows / p.args.tile_m : ceil_div(rows, p.args.tile_m);
  }

  // The place of the span of an expert's row, by visit.
  __device__ int place_of(int expert, int row) const {
    const int* const past = scratch.past + expert * p.maps.spans;
    int place = 0;
    for (int step = p.step; step > 0; step /= 2) {
      const int next = min_of(place + step, p.maps.spans);
      if (past[next - 1] <= row) place = next;
    }
    return place;
  }
  // Of an expert's rows, by visit, those before a place.
  __device__ int before_place(int expert, int place) const {
    return place == 0 ? 0 : scratch.past[expert * p.maps.spans + place - 1];
  }

  __device__ void clear() const {
    const RouteMaps& m = p.maps;
    by_thread(warps_of() * odd_stride(m.experts), [&](int i) { scratch.of_warps[i] = 0; });
    by_thread(m.experts * m.spans, [&](int i) { scratch.of_span[i] = 0; });
    by_thread(p.args.m, [&](int token) { m.span_of[token] = span_of(token); });
    const int addresses = p.args.weights != nullptr ? min_of(m.experts, kAddresses) : 0;
    by_thread(addresses, [&](int e) { m.weights[e] = p.weights[e]; });
    by_thread(p.args.ep, [&](int part) { verdict.of_parts[part] = 0; });
    if (thread_of() == 0) verdict.bad = choices();
    by_thread(m.spans, [&](int i) {
      scratch.span_at[i] = tile_row_of(i);
      if (p.args.gathers != 0) return;
      m.last[i] = -1;
      m.count[i] = 0;
    });
  }

  __device__ int tile_row_of(int place) const {
    if (p.args.gathers == 0) return tile_row_at(order, place);
    const int per_chunk = tiles_per_chunk(p.comm);
    return signal_index(p.comm, order.sequence[place / per_chunk], place % per_chunk);
  }

  // Leaves in `position` how many choices before one, of those of the warp, are of its expert. Finds experts
  // that there are none of, and counts the rows of parts if one may have too many.
  __device__ void count() const {
    const RouteMaps& m = p.maps;
    const Range run = run_of_warp();
    const int bits = bits_of(m.experts);
    for (int first = run.begin; first < run.end; first += 32 * kAhead) {
      std::int64_t expert[kAhead];
      int number[kAhead], span[kAhead];
      unsigned lanes[kAhead];
      ahead([&](int j) {
        const int choice = first + 32 * j + lane_of();
        expert[j] = choice < run.end ? passed(choice) : -1;
        span[j] = choice < run.end ? m.span_of[token_of(choice)] : 0;
      });
      ahead([&](int j) { number[j] = number_here(expert[j]); });
      lanes_alike(number, bits, lanes);
      ahead([&](int j) {
        const int e = number[j], choice = first + 32 * j + lane_of();
        const int leader = e < 0 ? 0 : __ffs(static_cast<int>(lanes[j])) - 1;
        int before = 0;
        if (e >= 0 && leader == lane_of()) {
          before = of_warp()[e];
          of_warp()[e] = before + __popc(lanes[j]);
        }
        before = __shfl_sync(~0u, before, leader);
        __syncwarp();  // another lane may lead next
        if (p.args.max_rows < choices()) count_parts(expert[j]);
        if (choice >= run.end) return;
        m.position[choice] = before + __popc(lanes[j] & ((1u << lane_of()) - 1));
        if (e >= 0) atomicAdd(scratch.of_span + e * m.spans + span[j], 1);
        if (expert[j] >= p.args.total) atomicMin(&verdict.bad, choice);
      });
    }
  }

  // By a warp.
  __device__ void count_parts(std::int64_t expert) const {
    const bool exists = expert >= 0 && expert < p.args.total;
    const int part = exists ? part_of(static_cast<int>(expert)) : -1;
    const unsigned lanes = __match_any_sync(~0u, part);
    const bool leads = __ffs(static_cast<int>(lanes)) - 1 == lane_of();
    if (exists && leads) atomicAdd(verdict.of_parts + part, __popc(lanes));
  }

  // Whether there is a result; the same on all ranks. `tells`: whether to report that there is none.
  __device__ bool check(bool tells) const {
    if (verdict.bad < choices()) {
      const std::int64_t expert = passed(verdict.bad), most = 0x7fffffff;
      if (tells) {
        refuse(FLUX_BAD_EXPERT, verdict.bad / p.args.topk,
               static_cast<int>(expert < most ? expert : most), 0);
      }
      return false;
    }
    for (int part = 0; part < p.args.ep; ++part) {
      const int rows = verdict.of_parts[part];
      if (rows <= p.args.max_rows) continue;
      if (tells) refuse(FLUX_MANY_ROWS, p.args.max_rows, part, rows);
      return false;
    }
    return true;
  }

  // Without a status the host reads the totals.
  __device__ void refuse(int code, int tile, int signal, int observed) const {
    by_thread(kRouteTotals, [&](int i) { p.maps.totals[i] = i == kRouteRefused ? 1 : 0; });
    if (thread_of() != 0 || p.args.sync.status == nullptr) return;
    record_failure(p.args.sync, code, tile, signal, static_cast<std::uint32_t>(observed));
  }

  // By warp and expert.
  __device__ void sum_up() const {
    const RouteMaps& m = p.maps;
    const int stride = odd_stride(m.experts);
    for (int e = warp_of(); e < m.experts; e += warps_of()) {
      const int all = sum_by_warp(
          warps_of(), [&](int warp) { return scratch.of_warps[warp * stride + e]; },
          [&](int warp, int before) { scratch.of_warps[warp * stride + e] = before; });
      if (lane_of() == 0) scratch.of_expert[e] = all;
      int* const begin = scratch.of_span + e * m.spans;
      sum_by_warp(
          m.spans, [&](int span) { return begin[span]; },
          [&](int span, int before) { begin[span] = before; });
      __syncwarp();
      const auto rows_at = [&](int place) {
        const int span = scratch.span_at[place];
        return (span + 1 < m.spans ? begin[span + 1] : all) - begin[span];
      };
      sum_by_warp(m.spans, rows_at, [&](int place, int before) {
        const int past = before + rows_at(place);
        scratch.past[e * m.spans + place] = past;
        scratch.group[place * m.experts + e] = tiles_with(past, all) - tiles_with(before, all);
      });
    }
  }

  // Where experts begin, and the experts of tiles. By one block.
  __device__ void cut() const {
    sum_by_block(
        p.maps.experts, [&](int e) { return scratch.of_expert[e]; },
        [&](int e, int before) { scratch.first_row[e] = before; });
    const int tiles = sum_by_block(
        p.maps.experts, [&](int e) { return ceil_div(scratch.of_expert[e], p.args.tile_m); },
        [&](int e, int before) {
          scratch.first_tile[e] = before;
          const int own = ceil_div(scratch.of_expert[e], p.args.tile_m);
          for (int i = 0; i < own; ++i) p.maps.expert[before + i] = e;
        });
    // Of (span, expert): those before them.
    sum_by_block(
        p.maps.spans * p.maps.experts, [&](int i) { return scratch.group[i]; },
        [&](int i, int before) { scratch.group[i] = before; });
    if (threadIdx.x == 0) verdict.tiles = tiles;
  }

  __device__ void place() const {
    const RouteMaps& m = p.maps;
    const Range run = run_of_warp();
    for (int first = run.begin; first < run.end; first += 32 * kAhead) {
      int e[kAhead], before[kAhead];
      ahead([&](int j) {
        const int choice = first + 32 * j + lane_of();
        e[j] = choice < run.end ? number_here(passed(choice)) : -1;
        before[j] = choice < run.end ? m.position[choice] : 0;
      });
      ahead([&](int j) {
        const int choice = first + 32 * j + lane_of();
        const int row = e[j] < 0 ? -1 : scratch.first_row[e[j]] + of_warp()[e[j]] + before[j];
        if (choice < run.end) m.position[choice] = row;
        if (row >= 0) m.routed[row] = token_of(choice);
      });
    }
    const int last = m.experts - 1;
    const int rows = m.experts > 0 ? scratch.first_row[last] + scratch.of_expert[last] : 0;
    by_thread(p.args.max_rows - rows, [&](int i) { m.routed[rows + i] = 0; });
    by_thread(kRouteTotals, [&](int i) { m.totals[i] = i == kRouteRows ? rows : 0; });
  }

  // The rows of tiles, by visit, by warp and tile. Those behind the last one of an expert have a place, too.
  __device__ void fill() const {
    const RouteMaps& m = p.maps;
    const int tiles = verdict.tiles;
    for (int tile = warp_of(); tile < tiles; tile += warps_of()) {
      const int e = m.expert[tile], rows = scratch.of_expert[e];
      const int first = (tile - scratch.first_tile[e]) * p.args.tile_m;
      for (int i = lane_of(); i < p.args.tile_m; i += 32) {
        const bool routed = first + i < rows;
        const int in_expert = routed ? first + i : first;
        const int place = place_of(e, in_expert);
        const int before = before_place(e, place);
        const int row = scratch.first_row[e] + in_expert - before +
                        scratch.of_span[e * m.spans + scratch.span_at[place]];
        const int at = tile * p.args.tile_m + i;
        m.row[at] = routed ? row : -1;
        m.token[at] = m.routed[row];
        if (p.args.gathers == 0) m.source[at] = row;
      }
    }
  }

  // visit(number of the item, tile, column), for all items of the GEMM: a tile's columns in order.
  template <class Visit>
  __device__ void each_product(Visit visit) const {
    const RouteMaps& m = p.maps;
    by_thread(verdict.tiles, [&](int tile) {
      const int e = m.expert[tile], number = tile - scratch.first_tile[e];
      const int first_row = number * p.args.tile_m, all = scratch.of_expert[e];
      const int last_row = min_of(first_row + p.args.tile_m, all) - 1;
      const int place = place_of(e, p.args.gathers != 0 ? last_row : first_row);
      const int before = tiles_with(before_place(e, place), all);
      const int beside = tiles_with(before_place(e, place + 1), all) - before;
      const int first = scratch.group[place * m.experts + e] * m.columns + number - before;
      for (int column = 0; column < m.columns; ++column) {
        visit(first + column * beside, tile, column);
      }
    });
  }

  __device__ void list_gather() const {
    const RouteMaps& m = p.maps;
    by_thread(m.pushes, [&](int i) { m.item[i] = -2 - i; });
    each_product(
        [&](int at, int tile, int column) { m.item[m.pushes + at] = tile * m.columns + column; });
    const int all = m.pushes + verdict.tiles * m.columns;
    if (thread_of() != 0) return;
    m.item[all] = -1;
    m.totals[kRouteItems] = all + 1;
  }

  __device__ void note_last() const {
    const RouteMaps& m = p.maps;
    each_product([&](int at, int tile, int column) {
      if (column == m.columns - 1) m.of_tile[tile] = at;
    });
  }

  // The rows of sums, and the last product that each awaits.
  __device__ void count_sums() const {
    const RouteMaps& m = p.maps;
    by_thread(m.experts * m.spans, [&](int i) {
      const int e = i / m.spans, place = i % m.spans;
      const int past = scratch.past[i], rows = past - before_place(e, place);
      if (rows == 0) return;
      atomicAdd(m.count + scratch.span_at[place], rows);
      const int tile = scratch.first_tile[e] + (past - 1) / p.args.tile_m;
      atomicMax(m.last + place, m.of_tile[tile]);
    });
  }

  // A sum comes `ahead` items behind the last product that it awaits.
  __device__ void list_sums() const {
    const RouteMaps& m = p.maps;
    const int products = verdict.tiles * m.columns;
    by_thread(m.spans, [&](int i) {
      const int last = m.last[i];
      int before = 0;
      for (int j = 0; j < m.spans; ++j) {
        before += m.last[j] < last || (m.last[j] == last && j < i) ? 1 : 0;
      }
      m.sorted_last[before] = last;
      const int at = min_of(products, last + p.args.ahead + 1) + before * m.columns;
      for (int column = 0; column < m.columns; ++column) {
        m.item[at + column] = -1 - (scratch.span_at[i] * m.columns + column);
      }
    });
    if (thread_of() == 0) m.totals[kRouteItems] = products + m.spans * m.columns;
  }

  // Between the sums.
  __device__ void list_products() const {
    const RouteMaps& m = p.maps;
    each_product([&](int at, int tile, int column) {
      m.item[at + sums_before(at) * m.columns] = tile * m.columns + column;
    });
  }

  // Sums that are claimed before a product.
  __device__ int sums_before(int product) const {
    Range left{0, p.maps.spans};
    while (left.begin < left.end) {
      const int middle = (left.begin + left.end) / 2;
      if (p.maps.sorted_last[middle] + p.args.ahead < product) {
        left.begin = middle + 1;
      } else {
        left.end = middle;
      }
    }
    return left.begin;
  }

  // Bits of the parts that have an expert of a token.
  __device__ std::uint32_t parts_of(int token) const {
    std::uint32_t parts = 0;
    for (int i = 0; i < p.args.topk; ++i) {
      const std::int64_t expert = passed(token * p.args.topk + i);
      if (expert >= 0) parts |= 1u << part_of(static_cast<int>(expert));
    }
    return parts;
  }

  // By warp: a push of the own rows of a communication tile. Each has room for all of them.
  __device__ void list_pushes() const {
    const RouteMaps& m = p.maps;
    const int own = order.rank, of_peer = m.pushes / max_of(p.comm.world - 1, 1);
    const int per_part = p.comm.world / p.args.ep;
    for (int i = warp_of(); i < m.pushes; i += warps_of()) {
      const int peer = p.peers[i / of_peer], tile = i % of_peer;
      const Range rows = comm_tile_rows(p.comm, own, tile);
      const int begin = i * p.comm.rows;
      int end = begin;
      for (int first = rows.begin; first < rows.end; first += 32) {
        const int row = first + lane_of();
        const bool taken = row < rows.end && (parts_of(row) >> (peer / per_part) & 1u) != 0;
        const unsigned lanes = __ballot_sync(~0u, taken);
        if (taken) m.pushed[end + __popc(lanes & ((1u << lane_of()) - 1))] = row;
        end += __popc(lanes);
      }
      if (lane_of() != 0) continue;
      int* const push = m.push + 4 * i;
      push[0] = peer;
      push[1] = signal_index(p.comm, own, tile);
      push[2] = begin;
      push[3] = end;
    }
  }

  // By own row the bits of ranks.
  __device__ void list_shares() const {
    const int world = p.comm.world, per_part = world / p.args.ep;
    const Range own{row_begin(p.args.m, world, order.rank), row_end(p.args.m, world, order.rank)};
    const auto ranks = static_cast<std::uint32_t>((std::uint64_t{1} << per_part) - 1);
    by_thread(own.end - own.begin, [&](int i) {
      std::uint32_t bits = 0;
      const std::uint32_t parts = parts_of(own.begin + i);
      for (int part = 0; part < p.args.ep; ++part) {
        if ((parts >> part & 1u) != 0) bits |= ranks << (part * per_part);
      }
      p.maps.share[i] = bits;
    });
  }
};

}  // namespace flux
