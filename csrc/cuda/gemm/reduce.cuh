// The reduction that ends GEMM + ReduceScatter: this rank's rows, summed over sources in rank order and
// in fp32 whatever order they arrive in, so that results repeat bit for bit.
//
// It starts on a strip of a tile as soon as all sources have raised the tile's flag. Launched behind
// the GEMM on the same stream, it needs no multiprocessor before the own GEMM gives some back, so it
// cannot keep a peer's GEMM on the same device from running.
#pragma once

#include <cuda_runtime.h>

#include "core/relay.h"
#include "cuda/sync.cuh"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

namespace flux {

constexpr int kReduceThreads = 256;

// Sum of `Width` neighbouring elements over `count` sources, in their order. slot(i): where elements of
// source i begin.
template <class Element, int Width, class Slot>
__device__ __forceinline__ cutlass::Array<float, Width> sum_of_sources(int count, Slot slot,
                                                                       std::int64_t offset) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  cutlass::NumericArrayConverter<float, Element, Width> to_float;
  cutlass::Array<float, Width> sum;
  sum.clear();
  // Four sources at a time: their loads are under way together.
  for (int first = 0; first < count; first += 4) {
    Vector loaded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= count) break;
      auto const* at = static_cast<Element const*>(slot(first + i)) + offset;
      // Past L1, which is not coherent with what peers wrote.
      if constexpr (sizeof(Vector) == 16) {
        *reinterpret_cast<uint4*>(&loaded[i]) = __ldcg(reinterpret_cast<uint4 const*>(at));
      } else {
        *reinterpret_cast<unsigned short*>(&loaded[i]) =
            __ldcg(reinterpret_cast<unsigned short const*>(at));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i >= count) break;
      const auto addend = to_float(loaded[i]);
#pragma unroll
      for (int e = 0; e < Width; ++e) sum[e] += addend[e];
    }
  }
  return sum;
}

// Rows [row, row + rows) of the own rows, columns [column, column + columns). Without all partials
// the sums are NaN: AllReduce gives them to peers, who must not take them for right.
template <class Element, int Width>
__device__ void reduce_strip(FluxReduceArgs const& args, int row, int rows, int column, int columns,
                             bool complete) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const auto slot = [&args](int source) { return args.slots[source]; };
  const int vectors = columns / Width;
  for (int at = threadIdx.x; at < rows * vectors; at += kReduceThreads) {
    const int r = row + at / vectors;
    const int c = column + at % vectors * Width;
    auto sum = sum_of_sources<Element, Width>(args.slot_count, slot, r * args.slot_ld + c);
    Vector result;
#pragma unroll
    for (int e = 0; e < Width; ++e) {
      float value = complete ? sum[e] * args.scale : nanf("");
      if (args.bias != nullptr) value += float(static_cast<Element const*>(args.bias)[c + e]);
      result[e] = Element(value);
    }
    for (int out = 0; out < args.out_count; ++out) {
      *reinterpret_cast<Vector*>(static_cast<Element*>(args.outs[out]) + r * args.out_ld + c) =
          result;
    }
  }
}

// The sums of all own rows. Units are strips of one tile each: strips of a tile row, column by column.
// came(index, tile_row, column): whether what is summed of the owner's strip `index` has come, as far
// as this thread has waited for it.
template <class Element, int Width, class Came>
__device__ __forceinline__ void reduce_rows(FluxReduceArgs const& args, ScatterTiling const& s,
                                            Came came) {
  const int per_tile = strips_per_tile(s.tile_m);
  const int columns = flag_columns(s);
  const int units = strips_of_owner(s, args.rank) * columns;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int index = unit / (columns * per_tile) * per_tile + unit % per_tile;
    const int column = unit / per_tile % columns;
    const Strip strip = strip_of_owner(s, args.rank, index);
    if (strip.begin < strip.end) {
      const bool complete = __syncthreads_and(came(index, strip.tile_row, column));
      const int first = column * s.tile_n;
      reduce_strip<Element, Width>(args, strip.begin - args.first_row, strip.end - strip.begin,
                                   first, min_of(s.tile_n, args.n - first), complete);
    }
  }
}

template <class Element, int Width>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const __grid_constant__ FluxReduceArgs args) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  reduce_rows<Element, Width>(args, s, [&](int, int tile_row, int column) {
    const int source = static_cast<int>(threadIdx.x);
    if (args.flags == nullptr || source >= args.world) return true;
    const int flag = flag_index(s, source, args.rank, tile_row, column);
    return await(args.flags, flag, args.sync, FLUX_WAIT_PARTIAL, tile_row);
  });
}

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

// Whether all rows can be read and written 16 bytes at a time.
template <class Element>
bool wide(FluxReduceArgs const& args) {
  constexpr int kWidth = 16 / sizeof(Element);
  bool ok = args.n % kWidth == 0 && args.tile_n % kWidth == 0 && args.slot_ld % kWidth == 0 &&
            args.out_ld % kWidth == 0;
  for (int i = 0; i < args.slot_count; ++i) ok = ok && aligned16(args.slots[i]);
  for (int i = 0; i < args.out_count; ++i) ok = ok && aligned16(args.outs[i]);
  return ok;
}

// Blocks that do it: eight of 256 threads fill a multiprocessor.
inline int reduce_blocks(FluxReduceArgs const& args) {
  if (args.rows == 0) return 0;
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  return min_of(strips_of_owner(s, args.rank) * flag_columns(s), 8 * max_of(args.sm_count, 1));
}

// Launches it: FluxKernel.reduce of the kernels whose output is Element.
template <class Element>
int reduce_partials(FluxReduceArgs const* args, void* stream) {
  if (args->world > FLUX_MAX_WORLD || args->out_count > FLUX_MAX_WORLD) return FLUX_REFUSED;
  const int blocks = reduce_blocks(*args);
  if (blocks == 0) return FLUX_OK;
  auto* queue = static_cast<cudaStream_t>(stream);
  if (wide<Element>(*args)) {
    reduce_kernel<Element, 16 / sizeof(Element)><<<blocks, kReduceThreads, 0, queue>>>(*args);
  } else {
    reduce_kernel<Element, 1><<<blocks, kReduceThreads, 0, queue>>>(*args);
  }
  return static_cast<int>(cudaGetLastError());
}

template <class Element>
int prepare_reduce() {
  cudaFuncAttributes attributes;
  cudaError_t status =
      cudaFuncGetAttributes(&attributes, reduce_kernel<Element, 16 / sizeof(Element)>);
  if (status == cudaSuccess) {
    status = cudaFuncGetAttributes(&attributes, reduce_kernel<Element, 1>);
  }
  return static_cast<int>(status);
}

}  // namespace flux
