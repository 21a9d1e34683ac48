// AllGather in the kernel that reads the rows (docs/kernels/protocol.md): before its first tile it pushes
// the own rows to all ranks, in pieces that its warps claim one by one. Blocks that have not started claim
// none, so peers wait for no block that waits for room on its device.
//
// Memory ordering. Behind the lanes' stores of a piece, and a barrier of the warp, one lane counts it and
// acquires what was counted before. The warp that counts the last piece releases the words at all ranks.
// Order passes from one to the next, so a rank that acquires its word sees all pieces: no lane fences
// at the system's scope by itself, which would wait for the link once for each piece.
#pragma once

#include <cuda_runtime.h>

#include "cuda/nvls.cuh"
#include "cuda/sync.cuh"

namespace flux {

constexpr int kPushWarps = 4;  // of a block; all of them would only wait in line for the counters
constexpr unsigned kPieceBytes = 2048;

__device__ __forceinline__ std::uint32_t add_acq_rel(std::uint32_t* word, std::uint32_t addend) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(addend)
               : "memory");
  return before;
}

// Counts the warp; whether it was the last of `all`. What those before it did is visible to its lanes.
__device__ __forceinline__ bool counts_to(std::uint32_t* word, std::uint32_t all) {
  __syncwarp();
  const bool is_last = threadIdx.x % 32 == 0 && add_acq_rel(word, 1) + 1 == all;
  const bool result = __any_sync(~0u, is_last);
  __syncwarp();
  return result;
}

// The warp's next piece.
__device__ __forceinline__ unsigned claim_of_warp(std::uint32_t* count) {
  const unsigned piece = threadIdx.x % 32 == 0 ? atomicAdd(count, 1u) : 0u;
  return __shfl_sync(~0u, piece, 0);
}

// Number of the current call, once begin_gather() has returned.
__device__ __forceinline__ std::uint32_t gather_number(const FluxGather& g) {
  return *reinterpret_cast<const volatile std::uint32_t*>(g.counts + FLUX_GATHER_NUMBER);
}

// Bytes [begin, end) of the own rows, to all ranks: by one store that the NVLink switch spreads, or to the
// next one first, so that no two ranks begin at the same one. Four loads of a lane are under way together.
template <class Vector>
__device__ __forceinline__ void push_piece(const FluxGather& g, std::int64_t begin,
                                           std::int64_t end, std::int64_t odd, int world,
                                           int rank) {
  constexpr int kLoads = 4;
  const auto* from = reinterpret_cast<const Vector*>(static_cast<const char*>(g.rows) + begin);
  const int count = static_cast<int>((end - begin) / sizeof(Vector));
  for (int at = static_cast<int>(threadIdx.x % 32); at < count; at += kLoads * 32) {
    Vector values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (at + i * 32 < count) values[i] = from[at + i * 32];
    }
    if constexpr (sizeof(Vector) == sizeof(uint4)) {
      if (g.everywhere != nullptr) {
        auto* to = reinterpret_cast<Vector*>(static_cast<char*>(g.everywhere) + odd + begin);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (at + i * 32 < count) store_everywhere(to + at + i * 32, values[i]);
        }
        continue;
      }
    }
    for (int step = 1; step <= world; ++step) {
      const int peer = rank + step < world ? rank + step : rank + step - world;
      auto* to = reinterpret_cast<Vector*>(static_cast<char*>(g.to[peer]) + odd + begin);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (at + i * 32 < count) to[at + i * 32] = values[i];
      }
    }
  }
}

// One warp's part: pieces, until all are claimed. The words are raised behind the last one.
template <class Element>
__device__ __forceinline__ void push_rows(const FluxGather& g, const FluxSync& sync, int world,
                                          int rank) {
  const std::uint32_t number = sync.epoch;
  const unsigned lane = threadIdx.x % 32;
  const auto bytes = static_cast<std::int64_t>(g.bytes);
  const std::int64_t odd = number % 2 != 0 ? g.odd : 0;
  // A rank without rows has an empty piece, and raises its words behind that.
  const auto pieces = static_cast<unsigned>((bytes + kPieceBytes - 1) / kPieceBytes);
  const unsigned all = pieces == 0 ? 1 : pieces;
  const bool wide = (reinterpret_cast<std::uintptr_t>(g.rows) |
                     reinterpret_cast<std::uintptr_t>(g.to[rank]) | g.bytes) %
                        sizeof(uint4) ==
                    0;
  for (;;) {
    const unsigned piece = claim_of_warp(g.counts + FLUX_GATHER_CLAIMED);
    if (piece >= all) return;
    const std::uint64_t began = stamp();
    const std::int64_t begin = std::int64_t{piece} * kPieceBytes;
    const std::int64_t end = begin + kPieceBytes < bytes ? begin + kPieceBytes : bytes;
    if (wide) {
      push_piece<uint4>(g, begin, end, odd, world, rank);
    } else {
      push_piece<Element>(g, begin, end, odd, world, rank);
    }
    // Peers read the rows at other addresses than they were stored at.
    if (g.everywhere != nullptr) fence_alias();
    const bool last = counts_to(g.counts + FLUX_GATHER_PUSHED, all);
    for (int peer = static_cast<int>(lane); last && peer < world; peer += 32) {
      store_release_sys(g.raised[peer], number);
    }
    tell_of_warp(sync, began, {FLUX_TRACE_PUSH, static_cast<int>(piece), 0, last ? 1 : 0});
  }
}

// All threads of all blocks call it first. Pushes the own rows, and returns the number of the call. Behind a
// wait that failed nothing is pushed, as peers may still read what was there.
//
// The last warp of the launch awaits the words of all ranks, those without rows as well: so when a call
// has ended here, all ranks have begun it.
template <class Element>
__device__ __forceinline__ std::uint32_t begin_gather(const FluxGather& g,
                                                      const std::uint32_t* words, FluxSync sync,
                                                      int world, int rank) {
  auto* counts = reinterpret_cast<volatile std::uint32_t*>(g.counts);
  sync.epoch = counts[FLUX_GATHER_CALLS] + 1;
  if (threadIdx.x == 0) counts[FLUX_GATHER_NUMBER] = sync.epoch;
  __syncthreads();  // all warps of the block have read the count, which the last warp changes
  const unsigned block_warps = blockDim.x / 32;
  const unsigned warps = block_warps < kPushWarps ? block_warps : kPushWarps;
  if (threadIdx.x / 32 >= warps) return sync.epoch;
  const bool failed = *reinterpret_cast<volatile std::uint64_t*>(sync.status) != 0;
  if (g.first != 0 && !__any_sync(~0u, failed)) {
    push_rows<Element>(g, sync, world, rank);
  }
  if (counts_to(g.counts + FLUX_GATHER_WARPS, gridDim.x * gridDim.y * gridDim.z * warps)) {
    for (int peer = static_cast<int>(threadIdx.x % 32); peer < world; peer += 32) {
      await(words, peer, sync, FLUX_WAIT_GATHER, 0);
    }
    if (threadIdx.x % 32 == 0) {
      counts[FLUX_GATHER_CLAIMED] = counts[FLUX_GATHER_PUSHED] = counts[FLUX_GATHER_WARPS] = 0;
      if (g.last != 0) counts[FLUX_GATHER_CALLS] = sync.epoch;
    }
  }
  return sync.epoch;
}

constexpr int kCollectThreads = 256;

static __global__ void __launch_bounds__(kCollectThreads)
    collect_kernel(const __grid_constant__ FluxCollectArgs args) {
  const bool odd = args.counts[FLUX_GATHER_CALLS] % 2 != 0;
  const char* from = static_cast<const char*>(args.rows) + (odd ? args.odd : 0);
  auto* out = static_cast<char*>(args.out);
  const std::uint64_t vectors = args.bytes / sizeof(uint4);
  const std::uint64_t first = blockIdx.x * kCollectThreads + threadIdx.x;
  for (std::uint64_t at = first; at < vectors; at += gridDim.x * kCollectThreads) {
    reinterpret_cast<uint4*>(out)[at] = reinterpret_cast<const uint4*>(from)[at];
  }
  const std::uint64_t tail = vectors * sizeof(uint4) + first;
  if (tail < args.bytes) out[tail] = from[tail];
}

// FluxKernel.collect
inline int collect(FluxCollectArgs const* args, void* stream) {
  constexpr std::uint64_t kBlocks = 64, kBlockBytes = 16 * kCollectThreads;
  if (reinterpret_cast<std::uintptr_t>(args->out) % sizeof(uint4) != 0) return FLUX_REFUSED;
  const std::uint64_t blocks = (args->bytes + kBlockBytes - 1) / kBlockBytes;
  collect_kernel<<<static_cast<unsigned>(blocks < kBlocks ? blocks : kBlocks), kCollectThreads, 0,
                   static_cast<cudaStream_t>(stream)>>>(*args);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace flux
