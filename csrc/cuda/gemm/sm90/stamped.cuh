// CUTLASS's collectives with time stamps: a tile's begins with its first multiplication and ends with its
// epilogue. Trace builds only (cuda/trace.cuh);
// in others these are the collectives themselves.
#pragma once

#include "cuda/sync.cuh"
#include "cute/tensor.hpp"

namespace flux::sm90 {

#ifdef FLUX_TRACE

template <class Base>
struct StampedMainloop : Base {
  struct Arguments : Base::Arguments {
    FluxSync sync{};
  };
  struct Params : Base::Params {
    FluxSync sync;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    Params params;
    static_cast<typename Base::Params&>(params) =
        Base::to_underlying_arguments(problem, args, workspace);
    params.sync = args.sync;
    return params;
  }

  // Ping-pong's warp groups come here when it is their turn.
  template <class Accumulators>
  CUTLASS_DEVICE void mma(typename Base::MainloopPipeline pipeline,
                          typename Base::PipelineState state, Accumulators& accumulators,
                          int k_tile_count, int thread, typename Base::TensorStorage& storage,
                          Params const& params) {
    begin_tile(params.sync);
    Base::mma(pipeline, state, accumulators, k_tile_count, thread, storage, params);
  }
};

template <class Base, bool kPingpong>
struct StampedEpilogue : Base {
  struct Arguments : Base::Arguments {
    FluxSync sync{};
  };
  struct Params : Base::Params {
    FluxSync sync;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args,
                                        void* workspace) {
    return {Base::to_underlying_arguments(problem, args, workspace), args.sync};
  }

  CUTLASS_DEVICE StampedEpilogue(Params const& params, typename Base::TensorStorage& storage)
      : Base(params, storage), sync_(&params.sync) {}

  template <class LoadPipeline, class LoadState, class StorePipeline, class StoreState,
            class Problem, class TileShape, class TileCoord, class... Rest>
  CUTLASS_DEVICE auto store(LoadPipeline load, LoadState load_state, StorePipeline store,
                            StoreState store_state, Problem problem, TileShape shape,
                            TileCoord tile, Rest&&... rest) {
    auto states = Base::store(load, load_state, store, store_state, problem, shape, tile,
                              static_cast<Rest&&>(rest)...);
    end_tile<kPingpong>(*sync_,
                        {FLUX_TRACE_TILE, int(cute::get<0>(tile)), int(cute::get<1>(tile)), 0});
    return states;
  }

 private:
  FluxSync const* sync_;
};

#else

template <class Base>
using StampedMainloop = Base;
template <class Base, bool kPingpong>
using StampedEpilogue = Base;

#endif

}  // namespace flux::sm90
