// Makes the maps of a grouped GEMM from the experts of all tokens, on the device: what csrc/schedule/grouped.h
// makes on the host, of which the comments say what the maps are. One block, which the GEMM comes behind on
// the stream.
//
//   count     rows by expert and span, and by expert and warp, which has a run of the choices
//   sum up    where experts begin; where a warp's rows of an expert do; an expert's rows by visit
//   place     each choice: its routed row (by token), and its place among the rows of tiles (by visit)
//   list      tiles by (span that decides when they are computed, expert): a prefix sum over both
//   merge     (ReduceScatter) sums between the products, by binary search
//
// Numbers of atomics are counts and maxima, so no order of threads changes a map. A routing without a result
// (too many rows, an expert that there is none of) is reported as a failed wait is, by all ranks alike, since
// all have the same choices. There are no items then: no rank stores to another one, and all waits of the
// call give up.
#pragma once

#include <cuda_runtime.h>

#include "cuda/gemm/route_maps.cuh"

namespace flux {

constexpr int kRouteThreads = 1024;    // of large routings
constexpr int kFewRouteThreads = 256;  // of up to kFewChoices
constexpr int kFewChoices = 4096;
constexpr int kTailThreads = 256;

static __global__ void __launch_bounds__(kRouteThreads)
    route_kernel(const __grid_constant__ RouteParams p) {
  __shared__ int chunks[FLUX_MAX_WORLD];
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.comm.world; i += static_cast<int>(blockDim.x)) chunks[i] = p.chunks[i];
  Router router{p, p.order};
  router.order.sequence = chunks;
  if (!router.check()) {  // has a barrier
    if (thread < kRouteTotals) p.maps.totals[thread] = 0;
    return;
  }
  router.clear();
  for (int e = thread; e < min_of(p.maps.experts, kAddresses); e += static_cast<int>(blockDim.x)) {
    p.maps.weights[e] = p.weights[e];
  }
  __syncthreads();
  router.count();
  __syncthreads();
  router.sum_up();
  const int tiles = router.cut();
  __syncthreads();
  router.place();
  __syncthreads();
  router.fill();
  router.group();
  __syncthreads();
  p.args.gathers != 0 ? router.list_gather(tiles) : router.list_sums(tiles);
  if (p.args.parallel == 0) return;
  p.args.gathers != 0 ? router.list_pushes() : router.list_shares();
}

// Of experts whose weights' addresses the launch of route_kernel has no room for.
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

// Zeros behind the routed rows.
static __global__ void __launch_bounds__(kTailThreads)
    tail_kernel(char* to, std::int64_t row_bytes, int max_rows, const int* rows) {
  const std::int64_t end = max_rows * row_bytes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kTailThreads;
  const std::int64_t begin = *rows * row_bytes, first = blockIdx.x * kTailThreads + threadIdx.x;
  const bool wide = (reinterpret_cast<std::uintptr_t>(to) | row_bytes) % sizeof(uint4) == 0;
  if (wide) {
    for (std::int64_t at = begin + first * 16; at < end; at += step * 16) {
      *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  for (std::int64_t at = begin + first; at < end; at += step) to[at] = 0;
}

inline RouteParams route_params(FluxRouteArgs const& args) {
  RouteParams p{};
  p.args = args;
  p.maps = route_maps(args);
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
  for (int e = 0; e < min_of(p.maps.experts, kAddresses); ++e) p.weights[e] = args.weights[e];
  return p;
}

// FluxKernel.route
inline int route(FluxRouteArgs const* args, void* stream) {
  const bool experts = args->expert_bytes == 4 || args->expert_bytes == 8;
  const int world = max_of(args->order.world, 1);
  if (!experts || world > FLUX_MAX_WORLD || args->ep < 1 || world % args->ep != 0)
    return FLUX_REFUSED;
  const RouteParams p = route_params(*args);
  if (p.maps.items > kMaxTiles || std::int64_t{args->m} * args->topk > kMaxExtent ||
      std::int64_t{p.maps.experts} * p.maps.spans > kMaxTiles) {
    return FLUX_REFUSED;
  }
  auto* const on = static_cast<cudaStream_t>(stream);
  const bool few = args->m * args->topk <= kFewChoices;
  route_kernel<<<1, few ? kFewRouteThreads : kRouteThreads, 0, on>>>(p);
  for (int e = kAddresses; e < p.maps.experts; e += kAddresses) {
    Addresses more{{}, p.maps.weights + e, min_of(kAddresses, p.maps.experts - e)};
    for (int i = 0; i < more.count; ++i) more.from[i] = args->weights[e + i];
    address_kernel<<<1, kAddresses, 0, on>>>(more);
  }
  if (args->tail != nullptr && args->max_rows > 0) {
    constexpr std::int64_t kBlocks = 64, kBlockBytes = 16 * kTailThreads;
    const std::int64_t row_bytes = std::int64_t{args->n} * args->element_bytes;
    const std::int64_t blocks = (args->max_rows * row_bytes + kBlockBytes - 1) / kBlockBytes;
    tail_kernel<<<static_cast<unsigned>(std::min(blocks, kBlocks)), kTailThreads, 0, on>>>(
        static_cast<char*>(args->tail), row_bytes, args->max_rows, p.maps.totals + kRouteRows);
  }
  return static_cast<int>(cudaGetLastError());
}

inline int prepare_route() {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, route_kernel);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, address_kernel);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, tail_kernel);
  return static_cast<int>(status);
}

}  // namespace flux
