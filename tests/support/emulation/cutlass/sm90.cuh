// GEMMs of CUTLASS 3.x for sm_90a as its CollectiveBuilder composes them.
#pragma once

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "problem.h"

namespace plain {

using cute::_1;
using cute::_128;
using cute::_16;
using cute::_2;
using cute::_256;
using cute::_32;
using cute::_64;
namespace gemm = cutlass::gemm;
namespace epilogue = cutlass::epilogue;

struct Cooperative {
  using Mainloop = gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = epilogue::TmaWarpSpecializedCooperative;
  using Scheduler = gemm::PersistentScheduler;
};
struct FastCooperative : Cooperative {  // e4m3 without sums in registers of full precision
  using Mainloop = gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
};
struct Pingpong {
  using Mainloop = gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = epilogue::TmaWarpSpecialized;
  using Scheduler = gemm::PersistentScheduler;
};
struct FastPingpong : Pingpong {
  using Mainloop = gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
};
struct StreamK : Cooperative {
  using Scheduler = gemm::StreamKScheduler;
};
// A block for each tile; without TMA in the epilogue.
struct OneTile {
  using Mainloop = gemm::KernelTmaWarpSpecialized;
  using Epilogue = epilogue::NoSmemWarpSpecialized;
  using Scheduler = void;
};

// Operands that threads copy with cp.async, for rows that TMA does not take.
struct CpAsyncCooperative {
  using Mainloop = gemm::KernelCpAsyncWarpSpecializedCooperative;
  using Epilogue = epilogue::NoSmemWarpSpecialized;
  using Scheduler = gemm::PersistentScheduler;
};
struct CpAsyncPingpong : CpAsyncCooperative {
  using Mainloop = gemm::KernelCpAsyncWarpSpecializedPingpong;
};
struct CpAsyncOneTile : CpAsyncCooperative {
  using Mainloop = gemm::KernelCpAsyncWarpSpecialized;
  using Scheduler = void;
};

template <class Element, class Result, class A, class B, class Tile, class Cluster, class How>
struct Built {
  using Sum = Scalar<Result>;
  static constexpr int kLoaded = 16 / sizeof(Element), kStored = 16 / sizeof(Result);
  using Arch = cutlass::arch::Sm90;
  using Class = cutlass::arch::OpClassTensorOp;
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      Arch, Class, Tile, Cluster, epilogue::collective::EpilogueTileAuto, Sum, Sum, Result, Row,
      kStored, Result, Row, kStored, typename How::Epilogue>::CollectiveOp;
  using Stages = gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>;
  using Mainloop =
      typename gemm::collective::CollectiveBuilder<Arch, Class, Element, A, kLoaded, Element, B,
                                                   kLoaded, Sum, Tile, Cluster, Stages,
                                                   typename How::Mainloop>::CollectiveOp;
  using Kernel = gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                             typename How::Scheduler>;
  using Gemm = gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Gemm::Arguments arguments(Problem const& p) {
    const auto stride = [&](auto kind, int rows) {
      return cutlass::make_cute_packed_stride(kind, cute::make_shape(rows, p.k, 1));
    };
    const auto of_result =
        cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(p.m, p.n, 1));
    auto const* a = static_cast<Element const*>(p.a);
    auto const* b = static_cast<Element const*>(p.b);
    auto const* c = static_cast<Result const*>(p.c);
    cutlass::KernelHardwareInfo device;
    device.sm_count = p.sms;
    typename Gemm::Arguments made{
        gemm::GemmUniversalMode::kGemm,
        {p.m, p.n, p.k, 1},
        {a, stride(typename Kernel::StrideA{}, p.m), b, stride(typename Kernel::StrideB{}, p.n)},
        {{static_cast<Sum>(p.alpha), static_cast<Sum>(p.beta)},
         c,
         of_result,
         static_cast<Result*>(p.d),
         of_result},
        device};
    if constexpr (std::is_same_v<How, StreamK>) {
      using Mode = std::decay_t<decltype(made.scheduler.decomposition_mode)>;
      made.scheduler.splits = p.parts;
      made.scheduler.decomposition_mode = p.parts > 1 ? Mode::SplitK : Mode::StreamK;
    }
    return made;
  }
};

}  // namespace plain
