// A GEMM on sm_90a from CUTLASS's collectives, and the launch of one behind the C ABI. The fused
// kernels (ag_gemm.cuh, gemm_rs.cuh) exchange a collective and the tile scheduler; nothing of
// CUTLASS is copied.
#pragma once

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/sm90/stamped.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

namespace flux::sm90 {

// Types that follow from a configuration C (flux/kernels/config.py).
template <class C>
struct Types {
  using Element = typename C::Element;
  using Output = typename C::Output;
  using Tile = cute::Shape<cute::Int<C::kTileM>, cute::Int<C::kTileN>, cute::Int<C::kTileK>>;
  using Cluster = cute::Shape<cute::Int<C::kClusterM>, cute::Int<C::kClusterN>, cute::_1>;
  using LayoutA = cutlass::layout::RowMajor;
  using LayoutB = std::conditional_t<C::kTransposedWeight, cutlass::layout::RowMajor,
                                     cutlass::layout::ColumnMajor>;
  using LayoutD = cutlass::layout::RowMajor;
  static constexpr int kAlignment = 16 / sizeof(Element);
  static constexpr int kAlignmentD = 16 / sizeof(Output);
  static constexpr bool kPingpong = C::kSchedule == flux::Schedule::kPingpong;
  static constexpr bool kStreamK = C::kSchedule == flux::Schedule::kStreamK;
  static constexpr bool kFp8 = sizeof(Element) == 1;
  // Partial sums of fp8 stay in the tensor core's own precision, as torch._scaled_mm does by default
  // in training forward passes.
  using MainloopSchedule = std::conditional_t<
      kPingpong,
      std::conditional_t<kFp8, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpong>,
      std::conditional_t<kFp8, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;
};

// CUTLASS's mainloop; stages fill the shared memory that the epilogue leaves, unless given.
template <class C, class Epilogue>
using Mainloop = StampedMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Types<C>::Element,
    typename Types<C>::LayoutA, Types<C>::kAlignment, typename Types<C>::Element,
    typename Types<C>::LayoutB, Types<C>::kAlignment, float, typename Types<C>::Tile,
    typename Types<C>::Cluster,
    std::conditional_t<C::kStages == 0,
                       cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
                           sizeof(typename Epilogue::SharedStorage))>,
                       cutlass::gemm::collective::StageCount<C::kStages>>,
    typename Types<C>::MainloopSchedule>::CollectiveOp>;

// CUTLASS's epilogue around an epilogue visitor tree. D is void when the tree stores by itself.
template <class C, class Visitor, class D>
using Epilogue = StampedEpilogue<
    typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Types<C>::Tile,
        typename Types<C>::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
        void, typename Types<C>::LayoutD, Types<C>::kAlignmentD, D, typename Types<C>::LayoutD,
        Types<C>::kAlignmentD, typename Types<C>::EpilogueSchedule, Visitor>::CollectiveOp,
    Types<C>::kPingpong>;

namespace visit {
using namespace cutlass::epilogue::fusion;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
template <template <class> class Function>
using Compute = Sm90Compute<Function, float, float, kRound>;

// scale_a[m] * scale_b[n] * (alpha * accumulator), as far as C scales.
template <class C, Scaling = C::kScaling>
struct Scaled {
  using Alpha = Sm90ScalarBroadcast<float>;
  using Node = Sm90EVT<Compute<cutlass::multiplies>, Alpha, Sm90AccFetch>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {{{args.alpha}}, {}, {}};
  }
};
template <class C>
struct Scaled<C, Scaling::kTensor> {
  // One scalar from three: alpha and the scales, which are in device memory.
  using Scales = Sm90ScalarBroadcast<float, cute::Stride<cute::_0, cute::_0, cute::_0>, 2,
                                     cutlass::multiplies>;
  using Node =
      Sm90EVT<Compute<cutlass::multiplies>, Scales, typename Scaled<C, Scaling::kNone>::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {{{1.0f, 1.0f}, {args.scale_a, args.scale_b}},
            Scaled<C, Scaling::kNone>::arguments(args),
            {}};
  }
};
template <class C>
struct Scaled<C, Scaling::kRow> {
  using Tile = typename Types<C>::Tile;
  using OfRows = Sm90ColBroadcast<0, Tile, float>;
  using OfColumns = Sm90RowBroadcast<0, Tile, float>;
  using ByColumn =
      Sm90EVT<Compute<cutlass::multiplies>, OfColumns, typename Scaled<C, Scaling::kNone>::Node>;
  using Node = Sm90EVT<Compute<cutlass::multiplies>, OfRows, ByColumn>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {{args.scale_a, 1.0f, {}},
            {{args.scale_b, 1.0f, {}}, Scaled<C, Scaling::kNone>::arguments(args), {}},
            {}};
  }
};

// activation(scaled + bias[n]); a null bias adds nothing.
template <class C, Activation = C::kActivation>
struct Activated {
  using Bias = Sm90RowBroadcast<0, typename Types<C>::Tile, typename C::Output, float>;
  using Node = Sm90EVT<Compute<cutlass::plus>, Bias, typename Scaled<C>::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    auto const* bias = static_cast<typename C::Output const*>(args.bias);
    return {{bias, typename C::Output(0), {}}, Scaled<C>::arguments(args), {}};
  }
};
template <class C, template <class> class Function>
struct WithFunction {
  using Linear = Activated<C, Activation::kNone>;
  using Node = Sm90EVT<Compute<Function>, typename Linear::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {Linear::arguments(args), {}};
  }
};
template <class C>
struct Activated<C, Activation::kGelu> : WithFunction<C, cutlass::epilogue::thread::GELU> {};
template <class C>
struct Activated<C, Activation::kSilu> : WithFunction<C, cutlass::epilogue::thread::SiLu> {};
}  // namespace visit

// GemmUniversal under a name that tells its configuration: in profiles, and in the compiler's report
// of registers and spills.
template <class C, class Mainloop, class Epilogue, class Scheduler>
struct Kernel : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                     Epilogue, Scheduler> {};

// Launches a GemmUniversal kernel. `Op` provides kOp and the arguments of the collectives.
template <class C, class Kernel>
struct Launcher {
  using Adapter = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Arguments = typename Adapter::Arguments;
  using Scheduler = typename Kernel::TileScheduler;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;

  // The launch needs the occupancy of the kernel: asking loads its code too.
  static int prepare(int device) {
    int before = 0;
    cudaError_t status = cudaGetDevice(&before);
    if (status == cudaSuccess) status = cudaSetDevice(device);
    if (status != cudaSuccess) return status;
    status = cudaFuncSetAttribute(cutlass::device_kernel<Kernel>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Kernel::SharedStorageSize);
    cudaFuncAttributes attributes;
    if (status == cudaSuccess) {
      status = cudaFuncGetAttributes(&attributes, cutlass::device_kernel<Kernel>);
    }
    const cudaError_t restored = cudaSetDevice(before);
    return status != cudaSuccess ? status : restored;
  }

  static cutlass::KernelHardwareInfo hardware(FluxGemmArgs const& args) {
    cutlass::KernelHardwareInfo info;
    info.device_id = args.device;
    info.sm_count = args.sm_count;  // 0: the adapter asks the device
    return info;
  }

  static Arguments arguments(FluxGemmArgs const& args) {
    using Element = typename C::Element;
    Arguments out{};
    out.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    out.problem_shape = {args.m, args.n, args.k, 1};
    out.mainloop.ptr_A = static_cast<Element const*>(args.a);
    out.mainloop.ptr_B = static_cast<Element const*>(args.b);
    cute::get<0>(out.mainloop.dA) = args.lda;
    if constexpr (C::kTransposedWeight) {
      cute::get<1>(out.mainloop.dB) = args.ldb;
    } else {
      cute::get<0>(out.mainloop.dB) = args.ldb;
    }
    out.hw_info = hardware(args);
    if constexpr (kTraced) out.mainloop.sync = out.epilogue.sync = args.sync;
    return out;
  }

  static std::uint64_t workspace(Arguments const& args) {
    return Adapter::get_workspace_size(args);
  }

  static int run(FluxGemmArgs const& args, Arguments const& arguments, void* stream) {
    if (Kernel::can_implement(arguments) == false) return FLUX_REFUSED;
    if (workspace(arguments) > args.workspace_bytes) return FLUX_TOO_SMALL;
    Adapter adapter;
    const cutlass::Status status =
        adapter.run(arguments, args.workspace, static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess) return FLUX_OK;
    const cudaError_t error = cudaGetLastError();
    return error != cudaSuccess ? static_cast<int>(error) : FLUX_REFUSED;
  }
};

// The plain GEMM: CUTLASS as it is. The yardstick of the fused kernels, and what they fall back to.
template <class C>
struct Gemm {
  using Visitor = visit::Activated<C>;
  using Epilogue = sm90::Epilogue<C, typename Visitor::Node, typename C::Output>;
  using Kernel =
      sm90::Kernel<C, sm90::Mainloop<C, Epilogue>, Epilogue,
                   std::conditional_t<Types<C>::kStreamK, cutlass::gemm::StreamKScheduler,
                                      cutlass::gemm::PersistentScheduler>>;
  using Launch = Launcher<C, Kernel>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;

  static typename Launch::Arguments arguments(FluxGemmArgs const& args) {
    auto out = Launch::arguments(args);
    out.epilogue.thread = Visitor::arguments(args);
    out.epilogue.ptr_D = static_cast<typename C::Output*>(args.d);
    cute::get<0>(out.epilogue.dD) = args.ldd;
    return out;
  }
  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    return Launch::workspace(arguments(*args));
  }
  static int prepare(int device) { return Launch::prepare(device); }
  static int launch(FluxGemmArgs const* args, void* stream) {
    return Launch::run(*args, arguments(*args), stream);
  }
};

}  // namespace flux::sm90
