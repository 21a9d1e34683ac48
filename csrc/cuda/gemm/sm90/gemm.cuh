// A GEMM on sm_90a from CUTLASS's collectives, and the launch of one behind the C ABI. The fused
// kernels (ag_gemm.cuh, gemm_rs.cuh) exchange a collective and the tile scheduler; nothing of
// CUTLASS is copied.
#pragma once

#include <atomic>

#include "cuda/gemm/kernel.cuh"
#include "cuda/gemm/sm90/dynamic_scheduler.cuh"
#include "cuda/gemm/sm90/stamped.cuh"
#include "cuda/gemm/sm90/tile_scheduler.cuh"
#include "cuda/launch_cache.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

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
  static constexpr bool kDynamic = C::kTileScheduler == flux::TileScheduler::kDynamic;
  using TileScheduler = std::conditional_t<
      kStreamK, OrderedStreamK,
      std::conditional_t<kDynamic, OrderedDynamic<kPingpong ? 2 : 1>, OrderedPersistent>>;
  // fp8: CUTLASS promotes sums from the tensor core's own precision to fp32, unless told to be fast.
  static constexpr bool kFast = sizeof(Element) == 1 && !C::kPromoted;
  using MainloopSchedule = std::conditional_t<
      kPingpong,
      std::conditional_t<kFast, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum,
                         cutlass::gemm::KernelTmaWarpSpecializedPingpong>,
      std::conditional_t<kFast, cutlass::gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum,
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

// CUTLASS's epilogue with kBuffers buffers of results in shared memory.
template <class Collective, int kBuffers>
struct Buffered;
template <int kC, int kD, int kFragment, bool kReuse, bool kDelay, class... Rest, int kBuffers>
struct Buffered<
    cutlass::epilogue::collective::CollectiveEpilogue<
        cutlass::epilogue::Sm90TmaWarpSpecialized<kC, kD, kFragment, kReuse, kDelay>, Rest...>,
    kBuffers> {
  using Policy = cutlass::epilogue::Sm90TmaWarpSpecialized<kC, kBuffers, kFragment, kReuse, kDelay>;
  using Collective = cutlass::epilogue::collective::CollectiveEpilogue<Policy, Rest...>;
};

template <class C, class Visitor, class D, class EpilogueTile>
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Types<C>::Tile,
    typename Types<C>::Cluster, EpilogueTile, float, float, void, typename Types<C>::LayoutD,
    Types<C>::kAlignmentD, D, typename Types<C>::LayoutD, Types<C>::kAlignmentD,
    typename Types<C>::EpilogueSchedule, Visitor>::CollectiveOp;

// CUTLASS's epilogue around an epilogue visitor tree.
template <class C, class Visitor>
using Epilogue =
    StampedEpilogue<CollectiveEpilogue<C, Visitor, typename C::Output,
                                       cutlass::epilogue::collective::EpilogueTileAuto>,
                    Types<C>::kPingpong>;

// The same around a tree that stores by itself, from kBuffers buffers: D is void.
template <class C, class Visitor, class EpilogueTile, int kBuffers>
using StoringEpilogue = StampedEpilogue<
    typename Buffered<CollectiveEpilogue<C, Visitor, void, EpilogueTile>, kBuffers>::Collective,
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
                                                     Epilogue, Scheduler> {
  using Base = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, Scheduler>;
  CUTLASS_DEVICE void operator()(typename Base::Params const& params, char* memory) {
    if constexpr (Base::IsSchedDynamicPersistent) {
      auto& shared = *reinterpret_cast<typename Base::SharedStorage*>(memory);
      Base::TileScheduler::claim_first(params.scheduler, shared.scheduler);
    }
    Base::operator()(params, memory);
  }
};

// Offers (FLUX_KERNEL) a GemmUniversal kernel. It is launched as GemmUniversalAdapter of CUTLASS does,
// but what that asks of the driver for each launch (attributes of the kernel, tensor maps) is asked once:
// by prepare(), or for the first of the launches that differ in FluxSync alone. `Parts` has the Kernel,
// and the functions
//   accepts      whether the kernel can do what the arguments say, as far as CUTLASS does not know
//   complete     sets the arguments that are about the op
//   set_sync     puts the FluxSync of a launch into parameters that were made for another
template <class C, class Parts>
struct Launcher {
  using Kernel = typename Parts::Kernel;
  using Arguments = typename Kernel::Arguments;
  using Params = typename Kernel::Params;
  static constexpr auto kKernel = &cutlass::device_kernel<Kernel>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int kClusterSize = C::kClusterM * C::kClusterN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;

  static int prepare(int device) {
    return prepare_on(device, kKernel, Kernel::SharedStorageSize, &ask_device);
  }

  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    cutlass::KernelHardwareInfo info;
    if (hardware(*args, &info) != 0) return 0;
    return workspace_bytes(*args, arguments(*args, info));
  }

  static int launch(FluxGemmArgs const* requested, void* stream) {
    FluxGemmArgs const& args = *requested;
    if (!Parts::accepts(args)) return FLUX_REFUSED;
    auto* queue = static_cast<cudaStream_t>(stream);
    cutlass::KernelHardwareInfo info;
    if (const int status = hardware(args, &info); status != 0) return status;
    const LaunchKey key = launch_key(args);
    std::optional<Params> params = cache().find(key);
    if (!params || Types<C>::kStreamK) {
      const Arguments given = arguments(args, info);
      if (!params) {
        if (!Kernel::can_implement(given)) return FLUX_REFUSED;
        if (workspace_bytes(args, given) > args.workspace_bytes) return FLUX_TOO_SMALL;
        params = Kernel::to_underlying_arguments(given, behind_counter(args));
        cache().keep(key, *params);
      }
      // Stream-K counts in its workspace, from zero in each launch.
      const auto status = Kernel::initialize_workspace(given, behind_counter(args), queue);
      if (status != cutlass::Status::kSuccess) {
        const cudaError_t error = cudaGetLastError();
        return error != cudaSuccess ? static_cast<int>(error) : FLUX_REFUSED;
      }
    }
    Parts::set_sync(*params, args.sync);
    Launch start(Kernel::get_grid_shape(*params), queue);
    void* values[] = {&*params};
    const cudaError_t status =
        cudaLaunchKernelExC(&start.config, reinterpret_cast<void const*>(kKernel), values);
    if (status == cudaSuccess) return FLUX_OK;
    cudaGetLastError();  // it is returned, and not to be found again later
    return static_cast<int>(status);
  }

 private:
  static constexpr int kDevices = 64;  // whose properties are kept; no host has more

  struct Launch {
    Launch(dim3 grid, cudaStream_t stream) {
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {C::kClusterM, C::kClusterN, 1};
      config.gridDim = grid;
      config.blockDim = Kernel::get_block_shape();
      config.dynamicSmemBytes = Kernel::SharedStorageSize;
      config.stream = stream;
      config.attrs = &cluster;
      config.numAttrs = kClusterSize > 1 ? 1 : 0;
    }
    Launch(Launch const&) = delete;

    cudaLaunchAttribute cluster{};
    cudaLaunchConfig_t config{};
  };

  // What does not change: multiprocessors, and clusters that fit on them.
  static int ask_device(int device) {
    if (device < 0 || device >= kDevices) return FLUX_REFUSED;
    int sms = 0, clusters = 0;
    const cudaError_t status = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (status == cudaSuccess && kClusterSize > 1) {
      Launch launch(dim3(C::kClusterM, C::kClusterN), nullptr);
      if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config) != cudaSuccess) {
        cudaGetLastError();
        clusters = 0;  // CUTLASS estimates them
      }
    }
    clusters_of()[device] = clusters;
    sms_of()[device] = sms;
    return static_cast<int>(status);
  }

  static LaunchCache<Params>& cache() {
    static LaunchCache<Params> kept;
    return kept;
  }
  static std::atomic<int>* sms_of() {
    static std::atomic<int> count[kDevices];
    return count;
  }
  static std::atomic<int>* clusters_of() {
    static std::atomic<int> count[kDevices];
    return count;
  }

  static std::uint64_t workspace_bytes(FluxGemmArgs const& args, Arguments const& given) {
    const std::uint64_t bytes =
        Kernel::get_workspace_size(given) + taken_bytes(args, C::kTileM, C::kTileN);
    return bytes == 0 && !Types<C>::kDynamic ? 0 : kCounterBytes + bytes;
  }
  static void* behind_counter(FluxGemmArgs const& args) {
    return args.workspace == nullptr ? nullptr : static_cast<char*>(args.workspace) + kCounterBytes;
  }

  // Multiprocessors to use, and clusters that fit on them: CUTLASS would compute those from an H100's
  // number of multiprocessors per GPC, which for four blocks a cluster leaves some of them idle.
  static int hardware(FluxGemmArgs const& args, cutlass::KernelHardwareInfo* info) {
    if (args.device < 0 || args.device >= kDevices) return FLUX_REFUSED;
    if (sms_of()[args.device] == 0) {
      if (const int status = prepare(args.device); status != 0) return status;
    }
    const int sms = args.sm_count > 0 ? args.sm_count : sms_of()[args.device].load();
    info->device_id = args.device;
    info->sm_count = max_of(sms, kClusterSize);
    if (kClusterSize > 1) {
      info->max_active_clusters =
          min_of(clusters_of()[args.device].load(), info->sm_count / kClusterSize);
    }
    return 0;
  }

  static Arguments arguments(FluxGemmArgs const& args, cutlass::KernelHardwareInfo const& info) {
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
    out.hw_info = info;
    if constexpr (kTraced) out.mainloop.sync = out.epilogue.sync = args.sync;
    Parts::complete(out, args);
    return out;
  }
};

// Rows of cluster tiles that plain kernels sweep together, of `rows`, as fused ones do. With CUTLASS's
// default of one, B comes from memory in every wave, which costs a tenth at M = 8192. CUTLASS fills the
// last band up with tiles that do nothing, so a band of few rows divides them.
constexpr int plain_raster(int rows) {
  constexpr int kMost = 8;
  return rows > 4 * kMost ? kMost : min_of(rows & -rows, kMost);
}

// The plain GEMM: unchanged CUTLASS. The reference for the fused kernels' speed, and their fallback.
template <class C>
struct GemmParts {
  using Visitor = visit::Activated<C>;
  using Epilogue = sm90::Epilogue<C, typename Visitor::Node>;
  using Kernel =
      sm90::Kernel<C, sm90::Mainloop<C, Epilogue>, Epilogue,
                   std::conditional_t<Types<C>::kStreamK, cutlass::gemm::StreamKScheduler,
                                      cutlass::gemm::PersistentScheduler>>;

  static bool accepts(FluxGemmArgs const&) { return true; }
  static void complete(typename Kernel::Arguments& out, FluxGemmArgs const& args) {
    out.epilogue.thread = Visitor::arguments(args);
    out.epilogue.ptr_D = static_cast<typename C::Output*>(args.d);
    cute::get<0>(out.epilogue.dD) = args.ldd;
    out.scheduler.max_swizzle_size = plain_raster(ceil_div(args.m, C::kTileM * C::kClusterM));
  }
  static void set_sync(typename Kernel::Params& params, FluxSync const& sync) {
    if constexpr (kTraced) params.mainloop.sync = params.epilogue.sync = sync;
  }
};
template <class C>
struct Gemm : Launcher<C, GemmParts<C>> {};

}  // namespace flux::sm90
