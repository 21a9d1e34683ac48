// What the kernels of all architectures share: template parameters, and the table of functions by
// which a library offers a kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/arguments.h"
#include "cuda/gemm/meet.cuh"

namespace flux {

enum class Schedule { kCooperative, kPingpong, kStreamK, kMultistage };
enum class Activation { kNone, kGelu, kSilu };
enum class Scaling { kNone, kTensor, kRow };
enum class Reduce { kLocal, kInFlight };

// Loads all code of a kernel, with what captured calls need beside it.
template <class Kernel>
int prepare(int device) {
  const int status = Kernel::prepare(device);
  return status != 0 ? status : prepare_meet();
}

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
                             __VA_ARGS__::kReduce};
