// Trace records of a kernel (flux/trace). Only a trace build writes them: one with FLUX_TRACE
// defined (`flux compile --trace`). In any other, everything here is empty, and kernels are the machine
// code that they would be without it.
//
// Recording never waits: memory is allocated before the call, one atomic addition reserves a place in it,
// and records without a place are only counted. Stamps are of %globaltimer, which all multiprocessors
// share; it ticks every 32 ns on some GPUs and every microsecond on others. Records are read when the
// stream is done.
#pragma once

#include <cstdint>

#include "cuda/abi.h"

namespace flux {

#ifdef FLUX_TRACE
constexpr bool kTraced = true;
#else
constexpr bool kTraced = false;
#endif

__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// FluxTraceRecord, as far as it is not found out here.
struct Told {
  int kind;
  int row;
  int column;
  int signal;
};

#ifdef FLUX_TRACE

constexpr int kWarpGroup = 128;

__device__ __forceinline__ int block_number() {
  return static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
}
__device__ __forceinline__ int unit_number() {
  return block_number() * FLUX_TRACE_UNITS + static_cast<int>(threadIdx.x) / kWarpGroup;
}

// What begins a stretch of time that tell() ends.
__device__ __forceinline__ std::uint64_t stamp() { return nanoseconds(); }

// One thread puts down that this went on from `begin` until now.
__device__ __forceinline__ void tell(const FluxSync& sync, std::uint64_t begin, const Told& what,
                                     int unit) {
  FluxTrace* trace = sync.trace;
  if (trace == nullptr) return;
  const std::uint64_t end = nanoseconds();
  const std::uint32_t place = atomicAdd(&trace->count, 1u);
  if (place >= trace->capacity) return;
  int sm;
  asm("mov.u32 %0, %%smid;" : "=r"(sm));
  trace->records[place] = {begin,       end, what.kind, what.row,   what.column,
                           what.signal, sm,  unit,      sync.epoch, sync.launch};
}
__device__ __forceinline__ void tell(const FluxSync& sync, std::uint64_t begin, const Told& what) {
  tell(sync, begin, what, unit_number());
}

// Of what each warp does by itself.
__device__ __forceinline__ void tell_of_warp(const FluxSync& sync, std::uint64_t begin,
                                             const Told& what) {
  if (threadIdx.x % 32 != 0) return;
  tell(sync, begin, what, -1 - block_number() * 32 - static_cast<int>(threadIdx.x) / 32);
}

// The start time of a tile, kept in global memory by warp group: the code that begins a tile and the code
// that ends it share no register. Not in shared memory, since kernels want their dynamic part to begin at
// its start. The same thread ends the tile.
__device__ __forceinline__ void begin_tile(const FluxSync& sync) {
  FluxTrace* trace = sync.trace;
  if (trace == nullptr || threadIdx.x % kWarpGroup != 0) return;
  if (block_number() < static_cast<int>(trace->blocks)) trace->begun[unit_number()] = nanoseconds();
}

// Of the warp groups that share a tile the first tells; with `kApart`, each has its own.
template <bool kApart>
__device__ __forceinline__ void end_tile(const FluxSync& sync, const Told& what) {
  FluxTrace* trace = sync.trace;
  if (trace == nullptr || threadIdx.x % kWarpGroup != 0) return;
  if (!kApart && threadIdx.x != kWarpGroup) return;  // behind the producer's
  if (block_number() >= static_cast<int>(trace->blocks)) {
    atomicAdd(&trace->lost, 1u);
    return;
  }
  tell(sync, trace->begun[unit_number()], what);
  trace->begun[unit_number()] = nanoseconds();  // for an end without a begin
}

// Where several threads wait for the same, thread 0 of them tells.
__device__ __forceinline__ FluxSync told_by_one(FluxSync sync, int thread = threadIdx.x) {
  if (thread != 0) sync.trace = nullptr;
  return sync;
}

#else

__device__ __forceinline__ std::uint64_t stamp() { return 0; }
__device__ __forceinline__ void tell(const FluxSync&, std::uint64_t, const Told&) {}
__device__ __forceinline__ void tell_of_warp(const FluxSync&, std::uint64_t, const Told&) {}
__device__ __forceinline__ const FluxSync& told_by_one(const FluxSync& sync, int = 0) {
  return sync;
}

#endif

}  // namespace flux
