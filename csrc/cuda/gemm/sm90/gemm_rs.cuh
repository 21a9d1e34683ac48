// GEMM + ReduceScatter in one kernel (Flux paper, 3.1 and Algorithm 1): tiles are visited by owner,
// shifted by rank, and each goes straight into its owner's memory (scatter_store.cuh). The reduction
// that follows is in cuda/gemm/reduce.cuh.
#pragma once

#include "cuda/gemm/reduce.cuh"
#include "cuda/gemm/sm90/scatter_store.cuh"

namespace flux::sm90 {

template <class C>
struct GemmRS {
  using Output = typename C::Output;
  using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
      typename Types<C>::Tile, cutlass::epilogue::collective::EpilogueTileAuto, void, Output,
      typename Types<C>::EpilogueSchedule>;
  using Stride = cute::Stride<std::int64_t, cute::_1, cute::_0>;
  using Aux = cutlass::epilogue::collective::detail::AuxStoreDescriptor<Descriptor, Stride, Output>;
  using CopyOp = std::conditional_t<C::kReduce == Reduce::kInFlight, cute::SM90_TMA_REDUCE_ADD,
                                    cute::SM90_TMA_STORE>;
  using Store = ScatterStore<cutlass::epilogue::fusion::Sm90AuxStore<
                                 Aux::Stages, typename Aux::EpilogueTile, Output, visit::kRound,
                                 Stride, typename Aux::SmemLayoutAtom, typename Aux::CopyOpR2S>,
                             CopyOp>;
  using Visitor = cutlass::epilogue::fusion::Sm90EVT<Store, typename visit::Scaled<C>::Node>;
  using Epilogue = sm90::Epilogue<C, Visitor, void>;
  using Kernel =
      sm90::Kernel<C, sm90::Mainloop<C, Epilogue>, Epilogue,
                   std::conditional_t<Types<C>::kStreamK, OrderedStreamK, OrderedPersistent>>;
  using Launch = Launcher<C, Kernel>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = &reduce_partials<Output>;

  static typename Launch::Arguments arguments(FluxGemmArgs const& args) {
    auto out = Launch::arguments(args);
    out.epilogue.thread = {visit::Scaled<C>::arguments(args),
                           {scatter_targets(args, kTileM, kTileN)}};
    out.scheduler = scheduler_arguments<typename Launch::Scheduler>(
        tile_map(
            tile_order(args, OpKind::kGemmRS, C::kTileM * C::kClusterM, C::kTileN * C::kClusterN)),
        args.sync);
    return out;
  }
  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    return Launch::workspace(arguments(*args));
  }
  static int prepare(int device) {
    const int status = Launch::prepare(device);
    return status != 0 ? status : prepare_reduce<Output>();
  }
  static int launch(FluxGemmArgs const* args, void* stream) {
    if (args->order.world > FLUX_MAX_WORLD) return FLUX_REFUSED;
    return Launch::run(*args, arguments(*args), stream);
  }
};

}  // namespace flux::sm90
