// AllGather + grouped GEMM in one kernel, for sm_80 and newer: a tile waits for the communication tiles
// that its tokens lie in.
//
// Memory ordering. A thread acquires the signal of a row, and the barrier behind the waits passes that on to
// those which copy the row with cp.async, in the generic proxy.
#pragma once

#include "cuda/gemm/sm80/grouped.cuh"

namespace flux::sm80 {

template <class C>
struct AwaitRows {
  static constexpr bool kGathers = true;
  template <class>
  static std::uint64_t words(FluxGemmArgs const&) {
    return 0;
  }

  // Rows behind the last one have the token of the first.
  CUTLASS_DEVICE static void before(GroupedParams const& p, int tile) {
    if (p.signals == nullptr) return;
    const int* tokens = p.groups.sources + tile * C::kTileM;
    for (int row = threadIdx.x; row < C::kTileM; row += blockDim.x) {
      const int signal = signal_of(p, tokens[row]);
      if (row > 0 && signal_of(p, tokens[row - 1]) == signal) continue;
      await(p.signals, signal, told_by_one(p.sync), FLUX_WAIT_GATHER, tile);
    }
    __syncthreads();
  }

  CUTLASS_DEVICE static void after(GroupedParams const&, int, int) {}

  // A call ends when all rows have come, also those that no expert of this rank has: peers write them
  // into memory that the rank may give back then.
  CUTLASS_DEVICE static void item(GroupedParams const& p, int) {
    if (p.signals == nullptr) return;
    const int per_chunk = tiles_per_chunk(p.tiling);
    for (int i = threadIdx.x; i < signal_count(p.tiling); i += blockDim.x) {
      const Range rows = comm_tile_rows(p.tiling, i / per_chunk, i % per_chunk);
      if (rows.begin == rows.end) continue;  // of a short chunk: never raised
      await(p.signals, i, told_by_one(p.sync), FLUX_WAIT_GATHER, 0);
    }
  }

 private:
  CUTLASS_DEVICE static int signal_of(GroupedParams const& p, int token) {
    return signals_of_rows(p.tiling, token, token + 1).begin;
  }
};

template <class C>
struct AGGroupedGemm : GroupedLauncher<C, AwaitRows<C>> {};

}  // namespace flux::sm80
