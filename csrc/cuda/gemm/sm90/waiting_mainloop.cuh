// The mainloop of AllGather + GEMM: rows are awaited before they are loaded.
#pragma once

#include "core/signal.h"
#include "cuda/gather.cuh"
#include "cute/tensor.hpp"

namespace flux::sm90 {

// CUTLASS's mainloop, whose producer warp waits first. Only that warp does: consumers wait for its
// loads as ever.
//
// A block meets the same rows again in other columns, and even a signal that is there costs a round
// trip to L2 that the pipeline of loads cannot always hide. So the first 64 signals that were seen
// are remembered (signals never go back within a call).
template <class Base, int kTileM>
struct WaitingMainloop : Base {
  struct Waits {
    Needs needs{};  // own rows are elsewhere
    FluxSync sync{};
    FluxGather gather{};
    int rank = 0;
    std::int64_t other = 0;  // elements from `a` to where they are
  };
  struct Arguments : Base::Arguments {
    Waits waits;
  };
  struct Params : Base::Params {
    Waits waits;
    typename Base::Params other;  // of the own rows of x, or of the second buffer of gathered rows
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, args, workspace);
    params.waits = args.waits;
    params.other = params;
    if (args.waits.other != 0) {
      Arguments second = args;
      second.ptr_A += args.waits.other;
      params.other = Base::to_underlying_arguments(problem, second, workspace);
    }
    return params;
  }

  template <class Inputs, class BlockCoord, class KTileIterator>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, Inputs const& inputs,
                           BlockCoord const& block, KTileIterator k_tile, int k_tile_count,
                           int thread, std::uint32_t block_rank,
                           typename Base::TensorStorage& storage) {
    // One elected lane went through the base's loop of the tile before. Without this, the others could
    // poll for the next tile's rows meanwhile, and take issue slots from it.
    __syncwarp();
    waits_ = &params.waits;
    const bool own = are_own(waits_->needs, rows_of(*waits_, cute::get<0>(block)));
    if (!own) wait(params.waits, cute::get<0>(block));
    const bool odd = params.waits.gather.counts != nullptr && number(params.waits) % 2 != 0;
    Base::load(own || odd ? params.other : static_cast<typename Base::Params const&>(params),
               pipeline, state, inputs, block, k_tile, k_tile_count, thread, block_rank, storage);
  }

  // After the block's last load. A peer that gives up says so in the own status before it lets its
  // copies go (cuda_host/cuda_op.h, let_go), so signals that were raised in front of rows that never came were
  // acquired after it: report_failure() looks at the status behind all of them.
  CUTLASS_DEVICE void load_tail(typename Base::MainloopPipeline pipeline,
                                typename Base::PipelineState state) {
    Base::load_tail(pipeline, state);
    if (waits_ != nullptr && threadIdx.x % 32 == 0) report_failure(waits_->sync);
  }

 private:
  CUTLASS_DEVICE static Range rows_of(Waits const& w, int tile) {
    return {tile * kTileM, min_of((tile + 1) * kTileM, w.needs.tiling.m)};
  }

  // All lanes of the producer warp: a lane for each signal.
  CUTLASS_DEVICE void wait(Waits const& w, int tile) {
    const Range rows = rows_of(w, tile);
    if (w.needs.words == nullptr || rows.begin >= rows.end) return;
    const Range range = signals_of_rows(w.needs.tiling, rows.begin, rows.end);
    const std::uint64_t bits = mask(range);
    if (bits != 0 && (seen_ & bits) == bits) return;
    FluxSync sync = w.sync;
    sync.epoch = number(w);
    for (int index = range.begin + static_cast<int>(threadIdx.x % 32); index < range.end;
         index += 32) {
      await(w.needs.words, index, sync, FLUX_WAIT_GATHER, tile);
    }
    __syncwarp();
    // TMA reads through the async proxy what other agents wrote: see cuda/sync.cuh.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    seen_ |= bits;
  }

  // Of the call. Read again, since a register that keeps it would make stream-K spill.
  CUTLASS_DEVICE static std::uint32_t number(Waits const& w) {
    return w.gather.counts != nullptr ? gather_number(w.gather) : w.sync.epoch;
  }

  CUTLASS_DEVICE static std::uint64_t mask(Range range) {
    if (range.end > 64) return 0;
    const std::uint64_t all = ~std::uint64_t{0};
    return (range.end == 64 ? all : ~(all << range.end)) & (all << range.begin);
  }

  std::uint64_t seen_ = 0;
  Waits const* waits_ = nullptr;  // null: the block had no tile
};

}  // namespace flux::sm90
