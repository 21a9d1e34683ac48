// Waits on a stream that copies of what peers have written come behind (docs/kernels/protocol.md): one block.
// On the caller's stream it is launched when the kernels of earlier calls have ended, so it finds a
// multiprocessor free. On a copy stream it runs beside a GEMM, on one that this leaves (Knobs.sm_margin).
//
// Memory ordering. The block's resets come before its raises: a barrier and a fence lie between. Writes of
// a peer before its own `meet` are visible to later work of this stream: the acquire that saw the peer's
// word is before the end of the kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sync.cuh"

namespace flux {

constexpr int kMeetThreads = 256;  // if words are reset, or many awaited

// Plain stores, no atomics: a peer behind PCIe supports none. The code is stored last.
__device__ inline void tell_given_up(FluxMeetArgs const& args, int peer, std::uint32_t number) {
  auto* status = reinterpret_cast<volatile std::uint64_t*>(args.statuses[peer]);
  status[FLUX_STATUS_SIGNAL] = static_cast<std::uint64_t>(args.rank);
  status[FLUX_STATUS_EXPECTED] = number;
  __threadfence_system();
  status[FLUX_STATUS_CODE] = FLUX_ABANDONED;
}

static __global__ void __launch_bounds__(kMeetThreads, 8)
    meet_kernel(const __grid_constant__ FluxMeetArgs args) {
  __shared__ std::uint32_t shared_number;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) {
    shared_number = args.sync.epoch;
    if (args.count != nullptr) *args.count = shared_number = *args.count + args.advance;
  }
  for (int i = thread; i < args.reset_count; i += threads) args.reset[i] = 0;
  __threadfence_system();
  __syncthreads();
  FluxSync sync = args.sync;
  sync.epoch = shared_number;
  const bool has_peer = thread < args.world;
  // After a failed wait this rank's work is not done.
  const volatile std::uint64_t* failed = sync.status + FLUX_STATUS_CODE;
  bool came = *failed == FLUX_WAIT_NONE;
  if (came && has_peer && args.raised[thread] != nullptr) {
    store_release_sys(args.raised[thread], sync.epoch);
  }
  const int words = args.awaited_count * max_of(args.rows, 1);
  for (int i = thread; args.awaited != nullptr && i < words; i += threads) {
    const int row = i / args.awaited_count;
    const int word = args.first + row * args.row_step + i - row * args.awaited_count;
    came &= await(args.awaited, word, sync, args.code, 0);
  }
  const bool complete = __syncthreads_and(came);
  const bool tells = !complete && !known_to_all(sync);
  if (tells && has_peer && thread != args.rank && args.statuses[thread] != nullptr) {
    tell_given_up(args, thread, sync.epoch);
  }
}

// FluxKernel.meet, of all kernels.
inline int meet(FluxMeetArgs const* args, void* stream) {
  if (args->world > FLUX_MAX_WORLD) return FLUX_REFUSED;
  const bool small = args->reset_count == 0 && args->awaited_count * max_of(args->rows, 1) <= 32;
  meet_kernel<<<1, small ? 32 : kMeetThreads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace flux
