// GEMM + ReduceScatter in one kernel (Flux paper, 3.1 and Algorithm 1): tiles are visited by owner,
// shifted by rank, and each goes straight into its owner's memory (scatter_store.cuh). The reduction
// that follows is in cuda/gemm/reduce.cuh, and that beside the multiplication in cuda/gemm/all_reduce.cuh.
#pragma once

#include <algorithm>

#include "cuda/gemm/reduce.cuh"
#include "cuda/gemm/sm90/scatter_store.cuh"
#include "cuda/gemm/sm90/slim_epilogue.cuh"

namespace flux::sm90 {

// The kernel, which sums by itself where no reduction follows. Its multiplying warp groups end the sums, as the
// first group has given most of its registers away. Of that one, warps that have nothing to do sum what
// stays with the rank.
template <class C, class Base>
struct SummingKernel : Base {
  static constexpr int kGroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr unsigned kMultiplying = (Base::MaxThreadsPerBlock - kGroup) / 32;
  // Warp 0 loads, and with a dynamic scheduler the next one claims tiles.
  static constexpr unsigned kFirstIdle = Base::IsSchedDynamicPersistent ? 2 : 1;
  static constexpr unsigned kIdle = kGroup / 32 - kFirstIdle;
  using Output = typename C::Output;
  // Behind the base's memory, whose parts are aligned: multiplying warps without more tiles.
  static constexpr int SharedStorageSize = Base::SharedStorageSize + 16;
  static_assert(SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);

  CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* memory) {
    SumTargets const& sums = params.epilogue.thread.op_1.sums;
    const bool stays = sums.to.scatters != 0;
    auto& ended = *reinterpret_cast<unsigned*>(memory + Base::SharedStorageSize);
    if (threadIdx.x == 0) {
      ended = 0;
      if (sums.to.counts != nullptr) begin_sums(sums.to);
    }
    Base::operator()(params, memory);
    if (sums.to.counts == nullptr) return;
    if (threadIdx.x < kGroup) {
      if (!stays || threadIdx.x / 32 < kFirstIdle) return;
      sum_beside<Output>(sums, ended, kMultiplying);
      return leave_sums(sums, kMultiplying + kIdle);
    }
    if (stays && threadIdx.x % 32 == 0) atomicAdd(&ended, 1u);
    // The group has these registers. The compiler learns it: else it would make do with those of the other
    // groups, where their ways have joined, and spill.
    cutlass::arch::NamedBarrier::sync(kGroup, threadIdx.x / kGroup);
    cutlass::arch::warpgroup_reg_alloc<Base::MmaRegisterRequirement>();
    if (!stays) return end_all_reduce<Output>(sums, kMultiplying);
    const FluxSync sync = sum_sync(sums);
    if (all_have_begun(sums.to)) sum_the_rest<Output>(sums, sync);
    if (threadIdx.x % 32 == 0) report_failure(sync);
    leave_sums(sums, kMultiplying + kIdle);
  }
};

template <class C>
struct GemmRSParts {
  using Output = typename C::Output;
  // Rows of 128 bytes are what a link and the swizzle of shared memory like best; CUTLASS would choose 64.
  static constexpr int kStoreRows = Types<C>::kPingpong ? 64 : 128;
  static constexpr int kStoreColumns = C::kTileN % 64 == 0 ? 64 : 32;
  using EpilogueTile = cute::Shape<cute::Int<kStoreRows>, cute::Int<kStoreColumns>>;
  // Buffers of the epilogue: a whole tile, if that leaves three stages, or those of C, to the mainloop.
  // Where a tile has to wait for a buffer, it waits for the link, and the tensor cores with it. A tall tile
  // loads more for each multiplication and needs the fourth stage (1.19 of torch.mm without, 1.08 with it,
  // on an H100).
  static constexpr int kBufferBytes = kStoreRows * kStoreColumns * sizeof(Output);
  static constexpr int kStageBytes =
      (C::kTileM + C::kTileN) * C::kTileK * sizeof(typename C::Element);
  static constexpr int kSharedBytes = 225 << 10;  // of 227; barriers take the rest
  static constexpr int kWhole = C::kTileM * C::kTileN / (kStoreRows * kStoreColumns);
  static constexpr int kFitting =
      (kSharedBytes - std::max(C::kStages, 3) * kStageBytes) / kBufferBytes;
  static constexpr int kBuffers = std::min(C::kTileM > 128 ? 2 : std::max(kFitting, 2), kWhole);
  using Descriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
      typename Types<C>::Tile, EpilogueTile, void, Output, typename Types<C>::EpilogueSchedule>;
  using Stride = cute::Stride<std::int64_t, cute::_1, cute::_0>;
  using Aux = cutlass::epilogue::collective::detail::AuxStoreDescriptor<Descriptor, Stride, Output>;
  using CopyOp = std::conditional_t<C::kReduce == Reduce::kInFlight, cute::SM90_TMA_REDUCE_ADD,
                                    cute::SM90_TMA_STORE>;
  using Store = ScatterStore<cutlass::epilogue::fusion::Sm90AuxStore<
                                 kBuffers, typename Aux::EpilogueTile, Output, visit::kRound,
                                 Stride, typename Aux::SmemLayoutAtom, typename Aux::CopyOpR2S>,
                             CopyOp>;
  using Visitor = cutlass::epilogue::fusion::Sm90EVT<Store, typename visit::Scaled<C>::Node>;
  using Epilogue = SlimEpilogue<sm90::StoringEpilogue<C, Visitor, EpilogueTile, kBuffers>>;
  using Kernel = SummingKernel<
      C, sm90::Kernel<C, sm90::Mainloop<C, Epilogue>, Epilogue, typename Types<C>::TileScheduler>>;

  static bool accepts(FluxGemmArgs const& args) {
    const FluxAllReduce& to = args.all_reduce;
    if (to.scatters != 0 && Types<C>::kStreamK) return false;  // whose blocks wait for each other
    if (to.scatters != 0 || to.switch_in != nullptr) {
      if (!sum_targets(args, C::kTileM, C::kTileN, sizeof(Output)).wide) return false;
    }
    return args.order.world <= FLUX_MAX_WORLD && args.order.column_ranges <= kMaxRuns &&
           args.guard_rows >= kGuardRows;
  }
  static void complete(typename Kernel::Arguments& out, FluxGemmArgs const& args) {
    out.epilogue.thread = {visit::Scaled<C>::arguments(args),
                           {scatter_targets(args, C::kTileM, C::kTileN),
                            sum_targets(args, C::kTileM, C::kTileN, sizeof(Output), C::kClusterM)}};
    out.scheduler = scheduler_arguments<C, typename Kernel::TileScheduler>(OpKind::kGemmRS, args);
  }
  static void set_sync(typename Kernel::Params& params, FluxSync const& sync) {
    auto& store = params.epilogue.thread.op_1;
    store.targets.sync = store.sums.sync = sync;
    Kernel::TileScheduler::set_sync(params.scheduler, sync);
    if constexpr (kTraced) params.mainloop.sync = params.epilogue.sync = sync;
  }
};

template <class C>
struct GemmRS : Reduced<Launcher<C, GemmRSParts<C>>, typename C::Output, true> {};

}  // namespace flux::sm90
