// Parts that kernels of all architectures share: template parameters, and the table of functions by
// which a library offers a kernel.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/arguments.h"
#include "cuda/gather.cuh"
#include "cuda/gemm/meet.cuh"
#include "cuda/gemm/tile_counter.cuh"
#include "cuda/load.cuh"

namespace flux {

enum class Schedule { kCooperative, kPingpong, kStreamK, kMultistage };
enum class TileScheduler { kStatic, kDynamic };
enum class Activation { kNone, kGelu, kSilu, kGatedGelu, kGatedSilu };
enum class Scaling { kNone, kTensor, kRow };
enum class Reduce { kLocal, kInFlight };

#ifdef FLUX_TRACE
static __global__ void stamp_kernel(std::uint64_t* times, int count) {
  for (int i = 0; i < count; ++i) times[i] = nanoseconds();
}

// FluxKernel.stamp
inline int stamp_clock(std::uint64_t* times, std::int32_t count, void* stream) {
  stamp_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(times, count);
  return static_cast<int>(cudaGetLastError());
}

inline int prepare_helpers() { return load_code(meet_kernel, collect_kernel, stamp_kernel); }
#else
constexpr int (*stamp_clock)(std::uint64_t*, std::int32_t, void*) = nullptr;
inline int prepare_helpers() { return load_code(meet_kernel, collect_kernel); }
#endif

// What of the device a launch may use.
struct Resources {
  int device_sms = 0;
  int sm_count = 0;
  int blocks_per_sm = 0;  // that fit, or 1 where blocks of others may be on the same device
};

template <class Function>
int resources_of(FluxGemmArgs const& args, Function kernel, int threads, int shared_bytes,
                 Resources* out) {
  cudaError_t status =
      cudaDeviceGetAttribute(&out->device_sms, cudaDevAttrMultiProcessorCount, args.device);
  out->sm_count = args.sm_count > 0 ? args.sm_count : out->device_sms;
  out->blocks_per_sm = 1;
  if (status == cudaSuccess && !shares_device(out->sm_count, out->device_sms)) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out->blocks_per_sm, kernel, threads,
                                                           shared_bytes);
  }
  return static_cast<int>(status);
}

// Loads all code of a kernel, with what captured calls and traces need beside it.
template <class Kernel>
int prepare(int device) {
  const int status = Kernel::prepare(device);
  return status != 0 ? status : prepare_helpers();
}

// FluxKernel.route: Kernel::kRoute, where there is one.
template <class Kernel, class = void>
constexpr int (*route_of)(FluxRouteArgs const*, void*) = nullptr;
template <class Kernel>
constexpr int (*route_of<Kernel, std::void_t<decltype(Kernel::kRoute)>>)(FluxRouteArgs const*,
                                                                         void*) = Kernel::kRoute;

}  // namespace flux

// Offers Kernel (workspace_bytes, prepare, launch, reduce, kTileM, kTileN) under `symbol`.
#define FLUX_KERNEL(symbol, ...)                            \
  extern "C" __attribute__((visibility("default")))         \
  const FluxKernel symbol = {FLUX_ABI_VERSION,              \
                             sizeof(FluxGemmArgs),          \
                             #symbol,                       \
                             __VA_ARGS__::kTileM,           \
                             __VA_ARGS__::kTileN,           \
                             &__VA_ARGS__::workspace_bytes, \
                             &flux::prepare<__VA_ARGS__>,   \
                             &__VA_ARGS__::launch,          \
                             &flux::meet,                   \
                             __VA_ARGS__::kReduce,          \
                             &flux::collect,                \
                             flux::stamp_clock,             \
                             flux::route_of<__VA_ARGS__>};
