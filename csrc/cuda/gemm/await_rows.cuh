// AllGather + grouped GEMM in one kernel: a tile waits for the communication tiles that its tokens lie in.
//
// Memory ordering. A thread acquires the signal of a row, and the barrier behind the waits passes that on to
// those which copy the row with cp.async, in the generic proxy.
#pragma once

#include "cuda/gemm/grouped.cuh"

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
  __device__ __forceinline__ static void item(GroupedParams const& p, int, Team team) {
    if (p.signals == nullptr) return;
    const int per_chunk = tiles_per_chunk(p.tiling);
    for (int i = team.thread(); i < signal_count(p.tiling); i += team.threads()) {
      const Range rows = comm_tile_rows(p.tiling, i / per_chunk, i % per_chunk);
      if (rows.begin == rows.end) continue;  // of a short chunk: never raised
      await(p.signals, i, told_by_one(p.sync, team.thread()), FLUX_WAIT_GATHER, 0);
    }
  }

 private:
  __device__ __forceinline__ static int signal_of(GroupedParams const& p, int token) {
    return signals_of_rows(p.tiling, token, token + 1).begin;
  }
};

}  // namespace flux
