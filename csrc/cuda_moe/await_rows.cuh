// AllGather + grouped GEMM in one kernel: a tile waits for the communication tiles that its tokens lie in. With
// expert parallelism the kernel itself pushes the own rows, each to the ranks with one of its experts. Pushes
// are claimed before tiles: when a tile waits for a peer, the own pushes are with blocks that run, and those
// wait for entries alone. A row's scale goes with it.
//
// Memory ordering. A thread acquires the signal of a row, and the barrier behind the waits passes that on to
// those which copy the row with cp.async, in the generic proxy. Behind a push the threads meet, and one
// releases the signal, for the stores of all: no other thread waits for the link.
#pragma once

#include "cuda_moe/grouped.cuh"
#include "cutlass/array.h"

namespace flux {

template <class C>
struct AwaitRows {
  static constexpr bool kGathers = true;
  static std::uint64_t words(FluxGemmArgs const&) { return 0; }

  // Rows behind the last one have the token of the first.
  template <class Team>
  __device__ __forceinline__ static void before(GroupedParams const& p, int tile, Team team) {
    if (p.signals == nullptr) return;
    const int* tokens = p.groups.sources + tile * C::kTileM;
    for (int row = team.thread(); row < C::kTileM; row += team.threads()) {
      const int signal = signal_of(p, tokens[row]);
      if (row > 0 && signal_of(p, tokens[row - 1]) == signal) continue;
      await(p.signals, signal, told_by_one(p.sync, team.thread()), FLUX_WAIT_GATHER, tile);
    }
    team.sync();
  }

  template <class Team>
  __device__ __forceinline__ static void after(GroupedParams const&, int, int, Team) {}

  // A call ends when all rows have come, also those that no expert of this rank has: peers write them
  // into memory that the rank may give back then.
  template <class Team>
  __device__ __forceinline__ static void item(GroupedParams const& p, int number, Team team) {
    if (number > 0) return push(p, p.groups.pushes + (number - 1) * 4, team);
    if (p.signals == nullptr) return;
    const int per_chunk = tiles_per_chunk(p.tiling);
    for (int i = team.thread(); i < signal_count(p.tiling); i += team.threads()) {
      const Range rows = comm_tile_rows(p.tiling, i / per_chunk, i % per_chunk);
      if (rows.begin == rows.end) continue;  // of a short chunk: never raised
      await(p.signals, i, told_by_one(p.sync, team.thread()), FLUX_WAIT_GATHER, 0);
    }
  }

 private:
  // Four words: the peer, its signal, and where the rows begin and end in the list.
  template <class Team>
  __device__ __forceinline__ static void push(GroupedParams const& p, const int* words, Team team) {
    using Vector = cutlass::AlignedArray<typename C::Element, C::kAlignment>;
    constexpr int kUnderWay = 4;  // loads of a thread
    const int peer = words[0], signal = words[1], first = words[2];
    const FluxSync sync = entry_sync(p.sync);
    const bool reached =
        await(p.targets.entries, peer, told_by_one(sync, team.thread()), FLUX_WAIT_ENTRY, signal);
    const int vectors = p.k / C::kAlignment;
    const int count = reached ? (words[3] - first) * vectors : 0;
    const int own = row_begin(p.tiling.m, p.tiling.world, p.targets.rank);
    [[maybe_unused]] const std::uint64_t began = stamp();
    auto const* from = static_cast<Vector const*>(p.own);
    auto* to = static_cast<Vector*>(p.targets.slots[peer]);
    for (int at = team.thread(); at < count; at += team.threads() * kUnderWay) {
      Vector loaded[kUnderWay];
      std::int64_t places[kUnderWay];
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) {
        const int vector = at + i * team.threads();
        if (vector >= count) break;
        const int row = p.groups.pushed[first + vector / vectors];
        const std::int64_t column = vector % vectors;
        places[i] = std::int64_t{row} * vectors + column;
        loaded[i] = from[std::int64_t{row - own} * vectors + column];
      }
#pragma unroll
      for (int i = 0; i < kUnderWay; ++i) {
        if (at + i * team.threads() >= count) break;
        to[places[i]] = loaded[i];
      }
    }
    if constexpr (C::kScaling == Scaling::kRow) {
      auto* scales = reinterpret_cast<float*>(reinterpret_cast<char*>(to) + p.targets.ld);
      for (int i = first + team.thread(); reached && i < words[3]; i += team.threads()) {
        const int row = p.groups.pushed[i];
        scales[row] = p.scale_a[row];
      }
    }
    if (!team.all(reached)) return;
    if (team.thread() != 0) return;
    store_release_sys(p.targets.flags[peer] + signal, p.sync.epoch);
    tell(p.sync, began, {FLUX_TRACE_SEND, words[3] - first, peer, signal});
  }

  __device__ __forceinline__ static int signal_of(GroupedParams const& p, int token) {
    return signals_of_rows(p.tiling, token, token + 1).begin;
  }
};

}  // namespace flux
