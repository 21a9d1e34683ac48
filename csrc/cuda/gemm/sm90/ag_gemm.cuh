// AllGather + GEMM in one kernel (Flux paper, 3.1 and Algorithm 2): the producer warp waits for the
// signals of the rows that a tile reads before it loads them, and tiles come in the order in which
// rows arrive.
#pragma once

#include "cuda/gemm/sm90/gemm.cuh"
#include "cuda/gemm/sm90/waiting_mainloop.cuh"

namespace flux::sm90 {

// The kernel, which pushes the own rows first where no copies bring them.
template <class C, class Base>
struct GatheringKernel : Base {
  CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* memory) {
    auto const& waits = params.mainloop.waits;
    if (waits.gather.counts != nullptr) {
      begin_gather<typename C::Element>(waits.gather, waits.needs.words, waits.sync,
                                        waits.needs.tiling.world, waits.rank);
    }
    Base::operator()(params, memory);
  }
};

template <class C>
struct AGGemmParts {
  using Visitor = visit::Activated<C>;
  using Epilogue = sm90::Epilogue<C, typename Visitor::Node>;
  using Mainloop = WaitingMainloop<sm90::Mainloop<C, Epilogue>, C::kTileM>;
  using Kernel =
      GatheringKernel<C, sm90::Kernel<C, Mainloop, Epilogue, typename Types<C>::TileScheduler>>;

  static bool accepts(FluxGemmArgs const& args) {
    return max_of(args.order.world, args.order.column_ranges) <= kMaxRuns;
  }
  static void complete(typename Kernel::Arguments& out, FluxGemmArgs const& args) {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(typename C::Element));
    out.mainloop.waits = {needs_of(OpKind::kAGGemm, args), args.sync, args.gather, args.order.rank,
                          other_rows(args, kBytes) / kBytes};
    out.epilogue.thread = Visitor::arguments(args);
    out.epilogue.ptr_D = static_cast<typename C::Output*>(args.d);
    cute::get<0>(out.epilogue.dD) = args.ldd;
    out.scheduler = scheduler_arguments<C, typename Kernel::TileScheduler>(OpKind::kAGGemm, args);
  }
  static void set_sync(typename Kernel::Params& params, FluxSync const& sync) {
    params.mainloop.waits.sync = sync;
    Kernel::TileScheduler::set_sync(params.scheduler, sync);
    if constexpr (kTraced) params.mainloop.sync = params.epilogue.sync = sync;
  }
};
template <class C>
struct AGGemm : Launcher<C, AGGemmParts<C>> {};

}  // namespace flux::sm90
