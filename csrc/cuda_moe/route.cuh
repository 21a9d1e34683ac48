// Makes the maps of a grouped GEMM from the experts of all tokens, on the device: what csrc/schedule/grouped.h
// makes on the host, of which the comments say what the maps are. The GEMM comes behind it on the stream.
// One block goes through all phases; of more than kManyChoices choices, kRouteBlocks blocks through each,
// with a launch of its own.
//
//   clear
//   count     rows by expert and span, and by expert and warp, which has a run of the choices
//   sum up    where a warp's rows of an expert begin; an expert's rows by visit; tiles by (span that decides
//             when they are computed, expert)
//   cut       (one block) where experts begin, and their tiles
//   place     each choice: its routed row (by token)
//   fill      the rows of tiles (by visit): a search among the spans of the expert
//             and the list of tiles (AllGather), or the last item of each
//   sums      (ReduceScatter) by visit: their rows, and what they await
//   order     (ReduceScatter) sums in the list of items
//   merge     (ReduceScatter) products between the sums, by binary search
//
// Numbers of atomics are counts and maxima, so no order of threads changes a map. A routing without a result
// (too many rows, an expert that there is none of) is reported as a failed wait is, by all ranks alike, since
// all have the same choices. There are no items then: no rank stores to another one, and all waits of the
// call give up.
#pragma once

#include <cuda_runtime.h>

#include "cuda/load.cuh"
#include "cuda_moe/route_maps.cuh"

namespace flux {

constexpr int kRouteThreads = 1024;    // of large routings
constexpr int kFewRouteThreads = 256;  // of up to kFewChoices and kFewExperts
constexpr int kFewChoices = 4096, kFewExperts = 32;
constexpr int kTailThreads = 256;

static __global__ void __launch_bounds__(kRouteThreads)
    route_kernel(const __grid_constant__ RouteParams p, int first, int end) {
  extern __shared__ int shared[];
  __shared__ int chunks[FLUX_MAX_WORLD];
  __shared__ Verdict own;
  const int threads = static_cast<int>(blockDim.x);
  for (int i = static_cast<int>(threadIdx.x); i < p.comm.world; i += threads) {
    chunks[i] = p.chunks[i];
  }
  Verdict& verdict = p.warps > kRouteWarps ? *reinterpret_cast<Verdict*>(p.maps.verdict) : own;
  int* const room = p.shared ? shared : p.maps.scratch;
  Router router{p, p.order, route_scratch(room, p.maps.experts, p.maps.spans, p.warps), verdict};
  router.order.sequence = chunks;
  for (int phase = first; phase < end; ++phase) {
    __syncthreads();
    const bool is_first = phase == kSumUp;  // behind the counts
    if ((is_first || (phase > kSumUp && phase == first)) && !router.check(is_first)) return;
    router.run(static_cast<RoutePhase>(phase));
  }
}

// Of experts whose weights' addresses the launch of route_kernel has no room for, or did not know.
struct Addresses {
  const void* from[kAddresses];
  const void** to;
  int count;
};

static __global__ void __launch_bounds__(kAddresses)
    address_kernel(const __grid_constant__ Addresses p) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < p.count) p.to[thread] = p.from[thread];
}

// Zeros behind the routed rows, 16 bytes at a time. Rows of kernels for any N begin anywhere: what is in front
// of the first 16 bytes, and behind the last ones, is stored byte by byte.
static __global__ void __launch_bounds__(kTailThreads)
    tail_kernel(char* to, std::int64_t row_bytes, int max_rows, const int* rows) {
  constexpr std::int64_t kBytes = sizeof(uint4);
  const auto base = reinterpret_cast<std::int64_t>(to);
  const std::int64_t begin = base + *rows * row_bytes, end = base + max_rows * row_bytes;
  const std::int64_t up = (begin + kBytes - 1) / kBytes * kBytes, down = end / kBytes * kBytes;
  const std::int64_t first = up < end ? up : end, last = down > first ? down : first;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTailThreads;
  const std::int64_t thread = blockIdx.x * kTailThreads + threadIdx.x;
  for (std::int64_t at = first + thread * kBytes; at + kBytes <= last; at += step * kBytes) {
    *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
  }
  if (begin + thread < first) *reinterpret_cast<char*>(begin + thread) = 0;
  if (last + thread < end) *reinterpret_cast<char*>(last + thread) = 0;
}

// Of the phases but kCut, which one block goes through.
struct RouteThreads {
  int blocks, of_block;
  int warps() const { return blocks * of_block / 32; }
  // Of a single block, which is laid out for kRouteWarps.
  int laid_out() const { return blocks > 1 ? warps() : kRouteWarps; }
  std::int64_t shared_words(const RouteMaps& maps) const {
    return scratch_words(maps.experts, maps.spans, laid_out());
  }
};

inline RouteParams route_params(FluxRouteArgs const& args, const RouteThreads& threads) {
  RouteParams p{};
  p.args = args;
  p.warps = threads.laid_out();
  p.maps = route_maps(args, p.warps);
  p.comm = route_comm(args);
  FluxGemmArgs gemm{};
  gemm.m = args.m;
  gemm.n = args.n;
  gemm.order = args.order;
  const OpKind op = args.gathers != 0 ? OpKind::kAGGemm : OpKind::kGemmRS;
  p.order = tile_order(gemm, op, args.tile_m, args.tile_n);
  const int world = p.comm.world, own = p.order.rank;
  for (int place = 0; place < world; ++place) p.chunks[place] = chunk_at(p.order, place);
  // To the ranks first that take these rows first; of those at one place, by number.
  int known = 0;
  for (int place = 0; p.maps.pushes > 0 && place < world; ++place) {
    for (int peer = 0; peer < world; ++peer) {
      TileOrder theirs = p.order;
      theirs.rank = peer;
      if (peer != own && position_of_chunk(theirs, own) == place) p.peers[known++] = peer;
    }
  }
  p.order.sequence = nullptr;  // (host)
  const int addresses = args.weights != nullptr ? min_of(p.maps.experts, kAddresses) : 0;
  for (int e = 0; e < addresses; ++e) p.weights[e] = args.weights[e];
  p.shared = threads.blocks == 1 && threads.shared_words(p.maps) <= kRouteSharedWords;
  for (p.step = 1; 2 * p.step < p.maps.spans;) p.step *= 2;
  // Rounded up, it is exact for choices below 2 ** 31: the error, times one, is less than 2 ** shift.
  for (p.shift = 31; std::int64_t{1} << (p.shift - 31) < args.topk;) ++p.shift;
  p.reciprocal =
      static_cast<std::uint32_t>(((std::int64_t{1} << p.shift) + args.topk - 1) / args.topk);
  return p;
}

inline void launch_phases(const RouteParams& p, const RouteThreads& threads, cudaStream_t stream) {
  const int phases = p.args.gathers != 0 ? kSums : kRoutePhases;
  if (threads.blocks == 1) {
    const std::size_t shared = p.shared ? threads.shared_words(p.maps) * sizeof(int) : 0;
    route_kernel<<<1, threads.of_block, shared, stream>>>(p, kClear, phases);
    return;
  }
  for (int phase = kClear; phase < phases; ++phase) {
    const int blocks = phase == kCut ? 1 : threads.blocks;
    const int of_block = phase == kCut ? kRouteThreads : threads.of_block;
    route_kernel<<<blocks, of_block, 0, stream>>>(p, phase, phase + 1);
  }
}

// FluxKernel.route. kMost: choices of one block.
template <int kMost = kManyChoices, int kBlocks = kRouteBlocks>
int route(FluxRouteArgs const* args, void* stream) {
  const bool experts = args->expert_bytes == 4 || args->expert_bytes == 8;
  const int world = max_of(args->order.world, 1);
  if (!experts || world > FLUX_MAX_WORLD || args->ep < 1 || world % args->ep != 0)
    return FLUX_REFUSED;
  const std::int64_t choices = std::int64_t{args->m} * args->topk;
  const bool few = choices <= kFewChoices && ceil_div(args->total, args->ep) <= kFewExperts;
  const RouteThreads threads = choices > kMost
                                   ? RouteThreads{kBlocks, 32 * kRouteBlockWarps}
                                   : RouteThreads{1, few ? kFewRouteThreads : kRouteThreads};
  const RouteParams p = route_params(*args, threads);
  if (p.maps.items > kMaxTiles || choices > kMaxExtent ||
      std::int64_t{p.maps.experts} * p.maps.spans > kMaxTiles) {
    return FLUX_REFUSED;
  }
  auto* const on = static_cast<cudaStream_t>(stream);
  const bool makes = args->experts != nullptr;
  if (makes) launch_phases(p, threads, on);
  const int addresses = args->weights != nullptr ? p.maps.experts : 0;
  for (int e = makes ? kAddresses : 0; e < addresses; e += kAddresses) {
    Addresses more{{}, p.maps.weights + e, min_of(kAddresses, addresses - e)};
    for (int i = 0; i < more.count; ++i) more.from[i] = args->weights[e + i];
    address_kernel<<<1, kAddresses, 0, on>>>(more);
  }
  if (args->tail != nullptr && args->max_rows > 0) {
    constexpr std::int64_t kTailBlocks = 64, kBlockBytes = 16 * kTailThreads;
    const std::int64_t row_bytes = std::int64_t{args->n} * args->element_bytes;
    const std::int64_t blocks = (args->max_rows * row_bytes + kBlockBytes - 1) / kBlockBytes;
    tail_kernel<<<static_cast<unsigned>(std::min(blocks, kTailBlocks)), kTailThreads, 0, on>>>(
        static_cast<char*>(args->tail), row_bytes, args->max_rows, p.maps.totals + kRouteRows);
  }
  return static_cast<int>(cudaGetLastError());
}

inline int prepare_route(int device) {
  const auto others = [](int) { return load_code(address_kernel, tail_kernel); };
  return prepare_on(device, route_kernel, kRouteSharedWords * sizeof(int), others);
}

}  // namespace flux
