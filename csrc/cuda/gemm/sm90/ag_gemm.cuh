// AllGather + GEMM in one kernel (Flux paper, 3.1 and Algorithm 2): the producer warp waits for the
// signals of the rows that a tile reads before it loads them, and tiles come in the order in which
// rows arrive.
#pragma once

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/sync.cuh"

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
    const std::uint32_t* signals = nullptr;
    CommTiling tiling{};
    FluxSync sync{};
  };
  struct Arguments : Base::Arguments {
    Waits waits;
  };
  struct Params : Base::Params {
    Waits waits;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, args, workspace);
    params.waits = args.waits;
    return params;
  }

  template <class Inputs, class BlockCoord, class KTileIterator>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, Inputs const& inputs,
                           BlockCoord const& block, KTileIterator k_tile, int k_tile_count,
                           int thread, std::uint32_t block_rank,
                           typename Base::TensorStorage& storage) {
    wait(params.waits, cute::get<0>(block));
    Base::load(params, pipeline, state, inputs, block, k_tile, k_tile_count, thread, block_rank,
               storage);
  }

 private:
  // All lanes of the producer warp: a lane for each signal.
  CUTLASS_DEVICE void wait(Waits const& w, int tile) {
    const int begin = tile * kTileM;
    if (w.signals == nullptr || begin >= w.tiling.m) return;
    const Range range = signals_of_rows(w.tiling, begin, min_of(begin + kTileM, w.tiling.m));
    const std::uint64_t bits = mask(range);
    if (bits != 0 && (seen_ & bits) == bits) return;
    for (int index = range.begin + static_cast<int>(threadIdx.x % 32); index < range.end;
         index += 32) {
      await(w.signals, index, w.sync, FLUX_WAIT_GATHER, tile);
    }
    __syncwarp();
    // TMA reads through the async proxy what other agents wrote: see cuda/sync.cuh.
    asm volatile("fence.proxy.async.global;" ::: "memory");
    seen_ |= bits;
  }

  CUTLASS_DEVICE static std::uint64_t mask(Range range) {
    if (range.end > 64) return 0;
    const std::uint64_t all = ~std::uint64_t{0};
    return (range.end == 64 ? all : ~(all << range.end)) & (all << range.begin);
  }

  std::uint64_t seen_ = 0;
};

template <class C>
struct AGGemm {
  using Visitor = visit::Activated<C>;
  using Epilogue = sm90::Epilogue<C, typename Visitor::Node, typename C::Output>;
  using Mainloop = WaitingMainloop<sm90::Mainloop<C, Epilogue>, C::kTileM>;
  using Kernel =
      sm90::Kernel<C, Mainloop, Epilogue,
                   std::conditional_t<Types<C>::kStreamK, OrderedStreamK, OrderedPersistent>>;
  using Launch = Launcher<C, Kernel>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;

  static typename Launch::Arguments arguments(FluxGemmArgs const& args) {
    auto out = Launch::arguments(args);
    out.mainloop.waits = {args.signals, comm_tiling(args), args.sync};
    out.epilogue.thread = Visitor::arguments(args);
    out.epilogue.ptr_D = static_cast<typename C::Output*>(args.d);
    cute::get<0>(out.epilogue.dD) = args.ldd;
    out.scheduler = scheduler_arguments<typename Launch::Scheduler>(
        tile_map(
            tile_order(args, OpKind::kAGGemm, C::kTileM * C::kClusterM, C::kTileN * C::kClusterN)),
        args.sync);
    return out;
  }
  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    return Launch::workspace(arguments(*args));
  }
  static int prepare(int device) { return Launch::prepare(device); }
  static int launch(FluxGemmArgs const* args, void* stream) {
    if (args->order.world > kMaxRuns) return FLUX_REFUSED;
    return Launch::run(*args, arguments(*args), stream);
  }
};

}  // namespace flux::sm90
