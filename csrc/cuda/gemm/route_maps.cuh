// The phases of route_kernel (cuda/gemm/route.cuh), by all threads of its block.
#pragma once

#include "cuda/route.h"
#include "cuda/sync.cuh"

namespace flux {

constexpr int kAddresses = 256;  // of weights, in the parameters of one launch

struct RouteParams {
  FluxRouteArgs args;
  RouteMaps maps;
  TileOrder order;
  CommTiling comm;
  int chunks[FLUX_MAX_WORLD];  // in the order of visits
  int peers[FLUX_MAX_WORLD];   // AllGather, parallel: in the order of pushes
  const void* weights[kAddresses];
};

__device__ __forceinline__ int lane_of() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int warp_of() { return static_cast<int>(threadIdx.x) / 32; }
__device__ __forceinline__ int warps_of() { return static_cast<int>(blockDim.x) / 32; }

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

// The same by all threads of the block.
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
    int at = before + sum - value;
    for (int warp = 0; warp < warps_of(); ++warp) {
      if (warp < warp_of()) at += of_warps[warp];
      before += of_warps[warp];
    }
    if (i < count) put(i, at);
    __syncthreads();
  }
  return before;
}

struct Router {
  const RouteParams& p;
  TileOrder order;

  __device__ int choices() const { return p.args.m * p.args.topk; }
  __device__ int part_of(int expert) const { return owner_of(p.args.total, p.args.ep, expert); }

  // The expert of a choice, as it was passed.
  __device__ std::int64_t passed(int choice) const {
    return p.args.expert_bytes == 8 ? static_cast<const std::int64_t*>(p.args.experts)[choice]
                                    : static_cast<const std::int32_t*>(p.args.experts)[choice];
  }

  // This rank's number of the expert of a choice; -1: none here.
  __device__ int expert_here(int choice) const {
    const std::int64_t expert = choice < choices() ? passed(choice) - p.maps.first : -1;
    return expert >= 0 && expert < p.maps.experts ? static_cast<int>(expert) : -1;
  }

  __device__ int span_of(int token) const {
    return p.args.gathers != 0 ? signals_of_rows(p.comm, token, token + 1).begin
                               : token / p.args.tile_m;
  }

  // Calls each(choice, expert, lanes of this warp with the same expert) for choices that this rank has,
  // those of a warp in order.
  template <class Each>
  __device__ void each_choice(Each each) const {
    const int run = ceil_div(ceil_div(choices(), warps_of()), 32) * 32;
    const int begin = warp_of() * run, end = min_of(choices(), begin + run);
    for (int first = begin; first < end; first += 32) {
      const int choice = first + lane_of();
      const int expert = expert_here(choice);
      each(choice, expert, __match_any_sync(~0u, expert));
      __syncwarp();  // another lane may lead next
    }
  }

  // Whether lane is the first of some.
  __device__ static bool leads(unsigned lanes) {
    return __ffs(static_cast<int>(lanes)) - 1 == lane_of();
  }

  // Tiles of an expert that are computed with the first `place` spans, or before.
  __device__ int tiles_with(int expert, int place) const {
    const RouteMaps& m = p.maps;
    if (place == 0) return 0;
    const int rows = m.past[expert * m.spans + place - 1], all = m.of_expert[expert];
    const bool whole = p.args.gathers != 0 && rows < all;  // a tile comes with its last row
    return whole ? rows / p.args.tile_m : ceil_div(rows, p.args.tile_m);
  }

  // Whether there is a result; the same on all ranks.
  __device__ bool check() const {
    __shared__ int of_parts[FLUX_MAX_WORLD], bad;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int part = thread; part < p.args.ep; part += threads) of_parts[part] = 0;
    if (thread == 0) bad = choices();
    __syncthreads();
    for (int first = 0; first < choices(); first += threads) {
      const int choice = first + thread;
      const std::int64_t expert = choice < choices() ? passed(choice) : -1;
      const bool exists = expert < p.args.total;
      if (!exists) atomicMin(&bad, choice);
      const int part = expert >= 0 && exists ? part_of(static_cast<int>(expert)) : -1;
      const unsigned lanes = __match_any_sync(~0u, part);
      if (part >= 0 && leads(lanes)) atomicAdd(of_parts + part, __popc(lanes));
    }
    __syncthreads();
    if (bad < choices()) {
      const std::int64_t expert = passed(bad), most = 0x7fffffff;
      if (thread == 0) {
        record_failure(p.args.sync, FLUX_BAD_EXPERT, bad / p.args.topk,
                       static_cast<int>(expert < most ? expert : most), 0);
      }
      return false;
    }
    for (int part = 0; part < p.args.ep; ++part) {
      if (of_parts[part] <= p.args.max_rows) continue;
      if (thread == 0) {
        record_failure(p.args.sync, FLUX_MANY_ROWS, p.args.max_rows, part,
                       static_cast<std::uint32_t>(of_parts[part]));
      }
      return false;
    }
    return true;
  }

  __device__ void clear() const {
    const RouteMaps& m = p.maps;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread; i < warps_of() * m.experts; i += threads) m.of_warps[i] = 0;
    for (int i = thread; i < m.experts * m.spans; i += threads) m.of_span[i] = 0;
    for (int i = thread; i < m.spans; i += threads) {
      int span = tile_row_of(i);
      m.visit[span] = i;
      m.span_at[i] = span;
      if (p.args.gathers == 0) {
        m.last[i] = -1;
        m.count[i] = 0;
      }
    }
  }

  __device__ int tile_row_of(int place) const {
    if (p.args.gathers == 0) return tile_row_at(order, place);
    const int per_chunk = tiles_per_chunk(p.comm);
    return signal_index(p.comm, order.sequence[place / per_chunk], place % per_chunk);
  }

  __device__ void count() const {
    const RouteMaps& m = p.maps;
    each_choice([&](int choice, int expert, unsigned lanes) {
      const int at = expert < 0 ? -1 : expert * m.spans + span_of(choice / p.args.topk);
      const unsigned beside = __match_any_sync(~0u, at);
      if (expert < 0) return;
      if (leads(lanes)) m.of_warps[warp_of() * m.experts + expert] += __popc(lanes);
      if (leads(beside)) atomicAdd(m.of_span + at, __popc(beside));
    });
  }

  // By warp and expert.
  __device__ void sum_up() const {
    const RouteMaps& m = p.maps;
    for (int e = warp_of(); e < m.experts; e += warps_of()) {
      const int rows = sum_by_warp(
          warps_of(), [&](int warp) { return m.of_warps[warp * m.experts + e]; },
          [&](int warp, int before) { m.of_warps[warp * m.experts + e] = before; });
      if (lane_of() == 0) m.of_expert[e] = rows;
      const int first = e * m.spans;
      sum_by_warp(
          m.spans, [&](int span) { return m.of_span[first + span]; },
          [&](int span, int before) { m.shift[first + span] = -before; });
      __syncwarp();
      sum_by_warp(
          m.spans, [&](int place) { return m.of_span[first + m.span_at[place]]; },
          [&](int place, int before) {
            const int span = m.span_at[place];
            m.past[first + place] = before + m.of_span[first + span];
            m.shift[first + span] += before;
          });
    }
    __syncthreads();
    sum_by_block(
        m.experts, [&](int e) { return m.of_expert[e]; },
        [&](int e, int before) { m.first_row[e] = before; });
  }

  // Returns how many tiles there are.
  __device__ int cut() const {
    const RouteMaps& m = p.maps;
    return sum_by_block(
        m.experts, [&](int e) { return ceil_div(m.of_expert[e], p.args.tile_m); },
        [&](int e, int before) { m.first_tile[e] = before; });
  }

  __device__ void place() const {
    const RouteMaps& m = p.maps;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    each_choice([&](int choice, int expert, unsigned lanes) {
      int* const next = m.of_warps + warp_of() * m.experts + expert;
      const int in_expert = expert < 0 ? 0 : *next + __popc(lanes & ((1u << lane_of()) - 1));
      __syncwarp();
      if (expert >= 0 && leads(lanes)) *next += __popc(lanes);
      __syncwarp();
      if (choice < choices())
        m.position[choice] = expert < 0 ? -1 : m.first_row[expert] + in_expert;
      if (expert < 0) return;
      const int token = choice / p.args.topk, row = m.first_row[expert] + in_expert;
      const int at = m.first_tile[expert] * p.args.tile_m + in_expert +
                     m.shift[expert * m.spans + span_of(token)];
      m.routed[row] = token;
      m.row[at] = row;
      m.token[at] = token;
      if (p.args.gathers == 0) m.source[at] = row;
    });
    const int rows = m.experts > 0 ? m.first_row[m.experts - 1] + m.of_expert[m.experts - 1] : 0;
    for (int row = rows + thread; row < p.args.max_rows; row += threads) m.routed[row] = 0;
    if (thread == 0) m.totals[kRouteRows] = rows;
  }

  // The experts of tiles, and the rows behind the last one of an expert.
  __device__ void fill() const {
    const RouteMaps& m = p.maps;
    for (int e = warp_of(); e < m.experts; e += warps_of()) {
      const int rows = m.of_expert[e], tiles = ceil_div(rows, p.args.tile_m);
      for (int tile = lane_of(); tile < tiles; tile += 32) m.expert[m.first_tile[e] + tile] = e;
      const int last = (m.first_tile[e] + tiles - 1) * p.args.tile_m;
      const int behind = m.first_tile[e] * p.args.tile_m + rows;
      for (int at = behind + lane_of(); at < last + p.args.tile_m && rows > 0; at += 32) {
        m.row[at] = -1;
        m.token[at] = m.token[last];
        if (p.args.gathers == 0) m.source[at] = m.source[last];
      }
    }
  }

  // Tiles by (key, expert): group[key, expert] are before those.
  __device__ void group() const {
    const RouteMaps& m = p.maps;
    sum_by_block(
        m.spans * m.experts,
        [&](int i) {
          const int place = i / m.experts, e = i % m.experts;
          return tiles_with(e, place + 1) - tiles_with(e, place);
        },
        [&](int i, int before) { m.group[i] = before; });
  }

  // put(item's number, tile, column) for all tiles of the GEMM; done(tile, number of its last item).
  template <class Put, class Done>
  __device__ void each_product(int tiles, Put put, Done done) const {
    const RouteMaps& m = p.maps;
    for (int tile = static_cast<int>(threadIdx.x); tile < tiles;
         tile += static_cast<int>(blockDim.x)) {
      const int e = m.expert[tile], number = tile - m.first_tile[e];
      const int rows = min_of(p.args.tile_m, m.of_expert[e] - number * p.args.tile_m);
      const int of_key = p.args.gathers != 0 ? rows - 1 : 0;
      const int place = m.visit[span_of(m.token[tile * p.args.tile_m + of_key])];
      const int before = tiles_with(e, place), beside = tiles_with(e, place + 1) - before;
      const int first = m.group[place * m.experts + e] * m.columns + number - before;
      for (int column = 0; column < m.columns; ++column) {
        put(first + column * beside, tile, column);
      }
      done(tile, first + (m.columns - 1) * beside);
    }
  }

  __device__ void list_gather(int tiles) const {
    const RouteMaps& m = p.maps;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int i = thread; i < m.pushes; i += threads) m.item[i] = -2 - i;
    each_product(
        tiles,
        [&](int at, int tile, int column) { m.item[m.pushes + at] = tile * m.columns + column; },
        [](int, int) {});
    const int all = m.pushes + tiles * m.columns;
    if (thread != 0) return;
    m.item[all] = -1;
    m.totals[kRouteItems] = all + 1;
  }

  // A sum comes `ahead` items behind the last product that it awaits.
  __device__ void list_sums(int tiles) const {
    const RouteMaps& m = p.maps;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    each_product(tiles, [](int, int, int) {}, [&](int tile, int last) { m.of_tile[tile] = last; });
    __syncthreads();
    for (int i = thread; i < m.experts * m.spans; i += threads) {
      const int e = i / m.spans, place = i % m.spans, span = m.span_at[place];
      const int rows = m.of_span[e * m.spans + span];
      if (rows == 0) continue;
      atomicAdd(m.count + span, rows);
      const int tile = m.first_tile[e] + (m.past[i] - 1) / p.args.tile_m;
      atomicMax(m.last + place, m.of_tile[tile]);
    }
    __syncthreads();
    const int products = tiles * m.columns;
    for (int i = thread; i < m.spans; i += threads) {
      const int last = m.last[i];
      int before = 0;
      for (int j = 0; j < m.spans; ++j) {
        before += m.last[j] < last || (m.last[j] == last && j < i) ? 1 : 0;
      }
      m.sorted_last[before] = last;
      const int at = min_of(products, last + p.args.ahead + 1) + before * m.columns;
      for (int column = 0; column < m.columns; ++column) {
        m.item[at + column] = -1 - (m.span_at[i] * m.columns + column);
      }
    }
    __syncthreads();
    each_product(
        tiles,
        [&](int at, int tile, int column) {
          m.item[at + sums_before(at) * m.columns] = tile * m.columns + column;
        },
        [](int, int) {});
    if (thread == 0) m.totals[kRouteItems] = products + m.spans * m.columns;
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
    for (int row = own.begin + static_cast<int>(threadIdx.x); row < own.end;
         row += static_cast<int>(blockDim.x)) {
      std::uint32_t bits = 0;
      const std::uint32_t parts = parts_of(row);
      for (int part = 0; part < p.args.ep; ++part) {
        if ((parts >> part & 1u) != 0) bits |= ranks << (part * per_part);
      }
      p.maps.share[row - own.begin] = bits;
    }
  }
};

}  // namespace flux
