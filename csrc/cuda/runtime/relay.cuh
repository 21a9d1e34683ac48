// GEMM + ReduceScatter between nodes, on the device: a node's sum of an owner's rows goes to the owner
// strip by strip, while GEMMs are still at work on other rows (Flux paper, 4.3: AllToAll across nodes,
// reduction apart from it).
//
//   GEMM of each rank of node A    tile -> slot at the relay (its rank in A), flag there
//   relay on A                     entry of the owner, flags of the strip? | sum | put, word at the owner
//   owner on B, after its GEMM     flags of its own node, word of A? | sum of all
//
// Blocks of the relay do nothing else, on multiprocessors that the GEMM leaves to them. It waits for
// GEMMs of its node and for entries; GEMMs wait for entries only, so wherever blocks of either have to
// wait for a multiprocessor, they get one in the end.
//
// Memory ordering, per strip:
//   1. A source stores its tile and then releases its flag at system scope (scatter_store.cuh). A
//      thread of the relay reads the flag with ld.acquire.sys; the barrier of the block makes what it
//      acquired visible to all its threads, which read the partials past L1.
//   2. Each thread stores its part of the sum to `staging` and fences at system scope; the barrier puts
//      all of that before the put. Only the thread that hands the put on fences inside NVSHMEM, and a NIC
//      reads without taking part in the memory model: so no thread relies on another's fence.
//   3. NVSHMEM writes the word at the owner when the data is there. The owner reads the word whole with
//      ld.acquire.sys; the barrier of its block and loads past L1, as in 1. That a NIC's two writes
//      arrive in order is a property of the owner's device: see nvshmem_abi.h.
// Nothing is put, no word raised, unless all flags of the strip and the owner's entry have come.
//
// Which writer may overwrite which memory, and when:
//   slot at the relay    its source, after the relay rank's entry of the next call, which comes behind
//                        the relay on its stream (the caller joins the two).
//   staging              the relay, after the owner's entry of the next call. That entry comes behind the
//                        owner's sum, which has seen the words of all strips: the puts have arrived, and
//                        have read their source. So no wait for the completion of puts is needed.
//   slot at the owner    the relay, after the same entry.
//   words                only ever raised, by one relay each; they hold the epoch.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "cuda/gemm/reduce.cuh"
#include "cuda/runtime/nvshmem_abi.h"

namespace flux {

// Whether all partials of a strip of `tile_row` have arrived, as far as this thread has waited for them.
__device__ __forceinline__ bool strip_came(FluxRelayArgs const& args, ScatterTiling const& s,
                                           int place, int tile_row) {
  const int owner = args.owners[place];
  const int thread = static_cast<int>(threadIdx.x);
  bool came = true;
  if (thread == 0 && args.entries != nullptr) {
    came = await_word(args.entries + owner, owner, args.sync, FLUX_WAIT_ENTRY, tile_row);
  }
  const int columns = flag_columns(s);
  for (int at = thread; at < args.source_count * columns; at += kReduceThreads) {
    const int flag = flag_index(s, args.sources[at / columns], owner, tile_row, at % columns);
    came = await(args.flags[place], flag, args.sync, FLUX_WAIT_PARTIAL, tile_row) && came;
  }
  return came;
}

// Strip `index` of the owner at `place`: sums, and sends. All threads of the block.
template <class Element, int Width>
__device__ __forceinline__ void send_strip(FluxRelayArgs const& args, ScatterTiling const& s,
                                           int place, int index) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const int owner = args.owners[place];
  const Strip strip = strip_of_owner(s, owner, index);
  if (strip.begin >= strip.end) return;
  if (!__syncthreads_and(strip_came(args, s, place, strip.tile_row))) return;
  const auto* slots = static_cast<const char*>(args.slots[place]);
  const auto slot = [&](int source) -> const void* { return slots + source * args.slot_bytes; };
  auto* staging = static_cast<Element*>(args.staging[place]);
  const int first = row_begin(s.m, s.world, owner);
  const std::int64_t begin = static_cast<std::int64_t>(strip.begin - first) * s.n;
  const std::int64_t end = static_cast<std::int64_t>(strip.end - first) * s.n;
  for (std::int64_t at = begin + threadIdx.x * Width; at < end; at += kReduceThreads * Width) {
    const auto sum = sum_of_slots<Element, Width>(args.source_count, slot, at);
    Vector rounded;
#pragma unroll
    for (int e = 0; e < Width; ++e) rounded[e] = Element(sum[e]);
    *reinterpret_cast<Vector*>(staging + at) = rounded;
  }
  __threadfence_system();
  __syncthreads();
  nvshmemx_putmem_signal_nbi_block(static_cast<Element*>(args.to[place]) + begin, staging + begin,
                                   (end - begin) * sizeof(Element), args.words[place] + index,
                                   args.sync.epoch, NVSHMEM_SIGNAL_SET, owner);
}

template <class Element, int Width>
__global__ void __launch_bounds__(kReduceThreads)
    relay_kernel(const __grid_constant__ FluxRelayArgs args) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  int index = blockIdx.x;  // among the strips of all owners, one owner after another
  for (int place = 0; place < args.owner_count; ++place) {
    const int strips = strips_of_owner(s, args.owners[place]);
    for (; index < strips; index += gridDim.x) send_strip<Element, Width>(args, s, place, index);
    index -= strips;
  }
}

// Whether partials of this node and sums of others have come for one tile's strip.
__device__ __forceinline__ bool parts_came(FluxNodeSumArgs const& args, ScatterTiling const& s,
                                           int index, int tile_row, int column) {
  const FluxReduceArgs& sum = args.sum;
  const int thread = static_cast<int>(threadIdx.x);
  const int node = thread - args.source_count;
  if (node < 0) {
    const int flag = flag_index(s, args.sources[thread], sum.rank, tile_row, column);
    return await(sum.flags, flag, sum.sync, FLUX_WAIT_PARTIAL, tile_row);
  }
  if (node >= args.node_count) return true;
  return await_word(args.words[node] + index, node, sum.sync, FLUX_WAIT_NODE, tile_row);
}

// Strips, each column of tiles by itself; like reduce_kernel, but for what it waits for.
template <class Element, int Width>
__global__ void __launch_bounds__(kReduceThreads)
    node_sum_kernel(const __grid_constant__ FluxNodeSumArgs args) {
  const FluxReduceArgs& sum = args.sum;
  const ScatterTiling s{sum.m, sum.n, sum.world, sum.tile_m, sum.tile_n};
  const int columns = flag_columns(s);
  const int units = strips_of_owner(s, sum.rank) * columns;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int column = unit % columns;
    const Strip strip = strip_of_owner(s, sum.rank, unit / columns);
    if (strip.begin >= strip.end) continue;
    const bool complete =
        __syncthreads_and(parts_came(args, s, unit / columns, strip.tile_row, column));
    const int first = column * s.tile_n;
    reduce_strip<Element, Width>(sum, strip.begin - sum.first_row, strip.end - strip.begin, first,
                                 min_of(s.tile_n, sum.n - first), complete);
  }
  if (threadIdx.x == 0) report_failure(sum.sync);
}

}  // namespace flux
