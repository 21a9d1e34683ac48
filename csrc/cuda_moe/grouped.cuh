// What kernels of experts share on all architectures (docs/kernels/protocol.md, "Mixtures of experts").
//
// Blocks claim items one by one. An item is a tile, or work that other tiles come before; so what an
// item waits for on this device is with blocks that run. A *team* of threads has an item: the threads of a
// block, or warp groups of it. A *duty* says what an op does with items beside the multiplication:
//   before(p, tile, team)          until the tile's rows may be read
//   after(p, tile, column, team)   behind the team's stores
//   item(p, number, team)          an item that is no tile
#pragma once

#include "cuda/gemm/kernel.cuh"
#include "cuda/sync.cuh"
#include "cuda_moe/groups.h"
#include "cuda_moe/route.cuh"

namespace flux {

struct GroupedParams {
  FluxGroups groups{};
  const void* a = nullptr;
  const void* own = nullptr;
  void* d = nullptr;
  const float* scale_a = nullptr;  // by row of a, or one value
  const float* scale_b = nullptr;  // [experts, n], or one value for each
  std::int64_t lda = 0, ldb = 0, ldd = 0;
  int n = 0, k = 0, columns = 0;
  const std::uint32_t* signals = nullptr;
  CommTiling tiling{};
  ScatterTargets targets{};
  TileCounter* counter = nullptr;  // of claimed items
  std::uint32_t* finished =
      nullptr;  // by tile of sums: rows of products; 0 whenever no kernel runs
  FluxSync sync{};
};

// Halves of a gated product: activation(first) * second is the result. Of a tile both have every other
// eight columns, so a thread that has one of first has the same of second.
template <class C>
constexpr int kHalves =
    C::kActivation == Activation::kGatedGelu || C::kActivation == Activation::kGatedSilu ? 2 : 1;

// Elements of the result that are loaded or stored at once: as many bytes as of operands.
template <class C>
constexpr int kResultVector =
    C::kAlignment * int{sizeof(typename C::Element)} / int{sizeof(typename C::Output)};

// How many items there are.
__device__ __forceinline__ int items_of(FluxGroups const& groups) {
  return groups.item_total != nullptr ? *groups.item_total : groups.item_count;
}

// All threads of a block.
struct WholeBlock {
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ static void sync() { __syncthreads(); }
  __device__ static bool all(bool value) { return __syncthreads_and(value); }
};

// Launches Kernel<C, Duty>, which has kKernel, kThreads, kSharedBytes and params(args, own).
template <class C, class Duty, template <class, class> class Kernel>
struct GroupedLauncher {
  using K = Kernel<C, Duty>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;

  static constexpr int (*kRoute)(FluxRouteArgs const*, void*) = &route<>;

  static int prepare(int device) {
    const int status = prepare_on(device, K::kKernel, K::kSharedBytes);
    return status != 0 ? status : prepare_route(device);
  }

  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    return kCounterBytes + Duty::words(*args) * sizeof(std::uint32_t);
  }

  static int launch(FluxGemmArgs const* args, void* stream) {
    if (args->groups == nullptr || args->order.world > FLUX_MAX_WORLD) return FLUX_REFUSED;
    if (args->lda % C::kAlignment != 0 || args->ldb % C::kAlignment != 0) return FLUX_REFUSED;
    if (args->n % (kResultVector<C> * kHalves<C>) != 0) return FLUX_REFUSED;
    const bool scaled = args->scale_a != nullptr && args->scale_b != nullptr;
    if (C::kScaling != Scaling::kNone && !scaled) return FLUX_REFUSED;
    if (args->k % C::kAlignment != 0) return FLUX_REFUSED;
    if (workspace_bytes(args) > args->workspace_bytes) return FLUX_TOO_SMALL;
    Resources with;
    if (const int status = resources_of(*args, K::kKernel, K::kThreads, K::kSharedBytes, &with);
        status != 0) {
      return status;
    }
    const int blocks =
        shared_blocks(args->groups->item_count, with.sm_count, with.device_sms, with.blocks_per_sm);
    K::kKernel<<<blocks, K::kThreads, K::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(
        K::params(*args, own(*args)));
    return static_cast<int>(cudaGetLastError());
  }

 private:
  static GroupedParams own(FluxGemmArgs const& args) {
    GroupedParams p;
    p.groups = *args.groups;
    p.a = args.a;
    p.own = args.own;
    p.d = args.d;
    p.scale_a = args.scale_a;
    p.scale_b = args.scale_b;
    p.lda = args.lda;
    p.ldb = args.ldb;
    p.ldd = args.ldd;
    p.n = args.n;
    p.k = args.k;
    p.columns = ceil_div(args.n, C::kTileN);
    p.signals = Duty::kGathers ? args.signals : nullptr;
    p.tiling = comm_tiling(args);
    p.targets = scatter_targets(args, C::kTileM, C::kTileN);
    p.counter = static_cast<TileCounter*>(args.workspace);
    p.finished =
        static_cast<std::uint32_t*>(args.workspace) + kCounterBytes / sizeof(std::uint32_t);
    p.sync = args.sync;
    return p;
  }
};

}  // namespace flux
