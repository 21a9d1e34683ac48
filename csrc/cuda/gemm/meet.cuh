// Where the ranks of a captured call meet (docs/kernels/protocol.md, captured calls): one block, launched on the
// caller's stream when the kernels of earlier calls have ended, so it finds a multiprocessor free.
//
// Memory ordering. The block's resets come before its raises: a barrier and a fence lie between. Writes of
// a peer before its own `meet` are visible to later work of this stream: the acquire that saw the peer's
// word is before the end of the kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sync.cuh"

namespace flux {

constexpr int kMeetThreads = 256;

// Plain stores, no atomics: a peer behind PCIe supports none. The code is stored last.
__device__ inline void tell_given_up(FluxMeetArgs const& args, int peer, std::uint32_t number) {
  auto* status = reinterpret_cast<volatile std::uint64_t*>(args.statuses[peer]);
  status[FLUX_STATUS_SIGNAL] = static_cast<std::uint64_t>(args.rank);
  status[FLUX_STATUS_EXPECTED] = number;
  __threadfence_system();
  status[FLUX_STATUS_CODE] = FLUX_ABANDONED;
}

static __global__ void __launch_bounds__(kMeetThreads)
    meet_kernel(const __grid_constant__ FluxMeetArgs args) {
  __shared__ std::uint32_t shared_number;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) *args.count = shared_number = *args.count + args.advance;
  for (int i = thread; i < args.reset_count; i += kMeetThreads) args.reset[i] = 0;
  __threadfence_system();
  __syncthreads();
  const std::uint32_t number = shared_number;
  bool came = true;
  if (thread < args.world) {
    store_release_sys(args.raised[thread], number);
    FluxSync sync = args.sync;
    sync.epoch = number;
    if (args.awaited != nullptr) came = await(args.awaited, thread, sync, FLUX_WAIT_MEET, 0);
  }
  const bool complete = __syncthreads_and(came);
  if (!complete && thread < args.world && thread != args.rank) tell_given_up(args, thread, number);
}

// FluxKernel.meet, of all kernels.
inline int meet(FluxMeetArgs const* args, void* stream) {
  if (args->world > FLUX_MAX_WORLD) return FLUX_REFUSED;
  meet_kernel<<<1, kMeetThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return static_cast<int>(cudaGetLastError());
}

inline int prepare_meet() {
  cudaFuncAttributes attributes;
  return static_cast<int>(cudaFuncGetAttributes(&attributes, meet_kernel));
}

}  // namespace flux
