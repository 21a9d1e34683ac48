// The reduction that ends GEMM + ReduceScatter: this rank's rows, summed over sources in rank order and
// in fp32 whatever order they arrive in, so that results repeat bit for bit. Between nodes it also
// runs beside the GEMM, in few blocks, and sums what its node has for a rank of another one.
//
// It starts on a strip of a tile as soon as all sources have raised the tile's flag. Its blocks spin
// until then, and must not hold what a GEMM that they wait for needs to start:
//   one rank per device   launched behind the own GEMM, it gets no multiprocessor before that has them
//                         all or has given some back; GEMMs of other streams, which a peer may wait for,
//                         have two thirds of the multiprocessors (reduce_blocks)
//   ranks that share one  each multiprocessor with a block of it has no room for one of a GEMM, and a
//                         device places blocks breadth-first: so it has no more blocks than the rank
//                         has multiprocessors (FluxReduceArgs.most_blocks)
//
// With `early` it does not wait for the own GEMM to end (programmatic dependent launch). All blocks of
// the GEMM have executed griddepcontrol.launch_dependents by then, so all of them are on their
// multiprocessors: no block of the reduction can keep one from starting, and those that wait take what
// blocks of the GEMM have left when there are no more tiles for them. Flags order the data, the own
// rank's too. What the reduction reads else was written before the GEMM was launched. Each block ends
// with griddepcontrol.wait, so the reduction ends after the GEMM, and what follows on the stream, or in
// a graph, comes behind both. `early` is not for ranks that share a device, nor where multiprocessors
// are left to kernels of other streams (Knobs.sm_margin): blocks of the reduction would take those, and
// wait there.
#pragma once

#include <cuda_runtime.h>

#include "core/relay.h"
#include "cuda/arguments.h"
#include "cuda/load.cuh"
#include "cuda/nvls.cuh"
#include "cuda/sync.cuh"
#include "cutlass/array.h"
#include "cutlass/numeric_conversion.h"

namespace flux {

constexpr int kReduceThreads = 256;  // of a team, which sums one strip at a time
constexpr int kReduceTeams = 4;      // of a block
constexpr int kReduceBlock = kReduceThreads * kReduceTeams;

// Whether `value` holds for all threads of the team, which meets here.
template <int kThreads = kReduceThreads>
__device__ __forceinline__ bool all_of_team(int team, bool value) {
  int all;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.s32 p, %1, 0;\n\t"
      "barrier.cta.red.and.pred q, %2, %3, p;\n\tselp.s32 %0, 1, 0, q;\n\t}"
      : "=r"(all)
      : "r"(static_cast<int>(value)), "r"(team + 1), "n"(kThreads)
      : "memory");
  return all != 0;
}

// Past L1, which is not coherent with what peers and other blocks wrote.
template <class Vector>
__device__ __forceinline__ Vector load_past_l1(const void* at) {
  Vector value;
  if constexpr (sizeof(Vector) == 16) {
    *reinterpret_cast<uint4*>(&value) = __ldcg(static_cast<const uint4*>(at));
  } else if constexpr (sizeof(Vector) == 8) {
    *reinterpret_cast<uint2*>(&value) = __ldcg(static_cast<const uint2*>(at));
  } else if constexpr (sizeof(Vector) == 4) {
    *reinterpret_cast<unsigned*>(&value) = __ldcg(static_cast<const unsigned*>(at));
  } else {
    static_assert(sizeof(Vector) == 2);
    *reinterpret_cast<unsigned short*>(&value) = __ldcg(static_cast<const unsigned short*>(at));
  }
  return value;
}

// Sum of `Width` neighbouring elements over `count` slots, in their order. slot(i): where elements of
// slot i begin. `there`: bits of the slots that are summed.
template <class Element, int Width, class Slot>
__device__ __forceinline__ cutlass::Array<float, Width> sum_of_slots(int count, Slot slot,
                                                                     std::int64_t offset,
                                                                     std::uint32_t there = ~0u) {
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
      if ((there >> (first + i) & 1u) == 0) {
        loaded[i].clear();
        continue;
      }
      loaded[i] = load_past_l1<Vector>(static_cast<Element const*>(slot(first + i)) + offset);
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

// What a sum ends as, from `column` on.
template <class Element, int Width>
__device__ __forceinline__ cutlass::AlignedArray<Element, Width> result_of(
    const cutlass::Array<float, Width>& sum, float scale, const void* bias, int column) {
  cutlass::AlignedArray<Element, Width> result;
#pragma unroll
  for (int e = 0; e < Width; ++e) {
    float value = sum[e] * scale;
    if (bias != nullptr) value += float(static_cast<const Element*>(bias)[column + e]);
    result[e] = Element(value);
  }
  return result;
}

// The same of neighbouring elements at all ranks, as the switch adds them up.
template <class Element, int Width>
__device__ __forceinline__ cutlass::Array<float, Width> sum_by_switch(const void* partials,
                                                                      std::int64_t offset) {
  cutlass::AlignedArray<Element, Width> added;
  static_assert(sizeof(added) == sizeof(uint4) && sizeof(Element) == 2);
  *reinterpret_cast<uint4*>(&added) = load_sum<std::is_same_v<Element, cutlass::bfloat16_t>>(
      static_cast<Element const*>(partials) + offset);
  return cutlass::NumericArrayConverter<float, Element, Width>{}(added);
}

// The same over all sources, in rank order, or as the switch adds them up.
template <class Element, int Width>
__device__ __forceinline__ cutlass::Array<float, Width> sum_of_sources(FluxReduceArgs const& args,
                                                                       int row, int column) {
  const std::int64_t offset = row * args.slot_ld + column;
  if constexpr (Width * sizeof(Element) == sizeof(uint4)) {
    if (args.switch_in != nullptr) return sum_by_switch<Element, Width>(args.switch_in, offset);
  }
  const std::uint32_t there = args.shares == nullptr ? ~0u : args.shares[row];
  return sum_of_slots<Element, Width>(
      args.slot_count, [&args](int source) { return args.slots[source]; }, offset, there);
}

// Rows [row, row + rows) of the own rows, columns [column, column + columns). Without all partials the sums
// are NaN, and AllReduce sends none: a peer may still read the result of its last call there, and waits for
// the word of this rank, which `meet` does not raise.
template <class Element, int Width>
__device__ void reduce_strip(FluxReduceArgs const& args, int row, int rows, int column, int columns,
                             bool complete) {
  using Vector = cutlass::AlignedArray<Element, Width>;
  const int vectors = columns / Width;
  const int thread = static_cast<int>(threadIdx.x) % kReduceThreads;
  const int own = args.out_count > 1 ? args.rank - args.first_source : 0;
  const int begin = complete ? 0 : own, end = complete ? args.out_count : own + 1;
  for (int at = thread; at < rows * vectors; at += kReduceThreads) {
    const int r = row + at / vectors;
    const int c = column + at % vectors * Width;
    cutlass::Array<float, Width> sum;
    sum.fill(nanf(""));
    // Missing partials are not loaded: the GEMM beside an early reduction may still store them.
    if (complete) sum = sum_of_sources<Element, Width>(args, r, c);
    const Vector result = result_of<Element, Width>(sum, args.scale, args.bias, c);
    if constexpr (sizeof(Vector) == 16) {
      if (args.switch_out != nullptr && complete) {
        store_everywhere(static_cast<Element*>(args.switch_out) + r * args.out_ld + c,
                         *reinterpret_cast<uint4 const*>(&result));
        continue;
      }
    }
    for (int out = begin; out < end; ++out) {
      *reinterpret_cast<Vector*>(static_cast<Element*>(args.outs[out]) + r * args.out_ld + c) =
          result;
    }
  }
}

// Returns when the GEMM that the launch did not wait for has ended and its writes are visible; at once
// if there is none. Before sm_90 no launch is early.
__device__ __forceinline__ void await_gemm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Each block of a GEMM of sm_90 calls it when it starts.
__device__ __forceinline__ void let_reduction_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}

template <class Element, int Width>
__global__ void __launch_bounds__(kReduceBlock, 1)
    reduce_kernel(const __grid_constant__ FluxReduceArgs args) {
  const ScatterTiling s{args.m, args.n, args.world, args.tile_m, args.tile_n};
  const Range tiles = tiles_of_owner(s, args.rank);
  const int strips = ceil_div(args.tile_m, kStripRows);
  const int columns = flag_columns(s);
  const int units = (tiles.end - tiles.begin) * columns * strips;  // as reduce_units() says
  const int team = static_cast<int>(threadIdx.x) / kReduceThreads;
  const int thread = static_cast<int>(threadIdx.x) % kReduceThreads;
  const int blocks = static_cast<int>(gridDim.x);
  for (int unit = static_cast<int>(blockIdx.x) + team * blocks; unit < units;
       unit += kReduceTeams * blocks) {
    const int tile_row = tiles.begin + unit / (columns * strips);
    const int column = unit / strips % columns;
    const int begin = max_of(tile_row * s.tile_m + unit % strips * kStripRows, args.first_row);
    const int end = min_of(
        min_of(tile_row * s.tile_m + (unit % strips + 1) * kStripRows, (tile_row + 1) * s.tile_m),
        args.first_row + args.rows);
    if (begin < end) {
      bool came = true;
      if (args.flags != nullptr && thread < args.source_count) {
        const int source = args.first_source + thread;
        const int flag =
            args.by_source != 0 ? source : flag_index(s, source, args.rank, tile_row, column);
        came = await(args.flags, flag, args.sync, FLUX_WAIT_PARTIAL, tile_row);
      }
      const bool complete = all_of_team(team, came);
      if (args.out_count == 0) continue;
      // The partials were written at other addresses than the switch reads them at.
      if (args.switch_in != nullptr) fence_alias();
      const int first = column * s.tile_n;
      const std::uint64_t began = stamp();
      reduce_strip<Element, Width>(args, begin - args.first_row, end - begin, first,
                                   min_of(s.tile_n, args.n - first), complete);
      if (thread == 0) tell(args.sync, began, {FLUX_TRACE_SUM, begin, column, end - begin});
    }
  }
  await_gemm();
  if (thread == 0) report_failure(args.sync);
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
  return ok && aligned16(args.switch_in) && aligned16(args.switch_out);
}

// Launches it: FluxKernel.reduce of the kernels whose output is Element. kEarly: their GEMM says when
// blocks of it may start; without that, and on devices that know nothing of it, it waits for its end.
template <class Element, bool kEarly>
int reduce_partials(FluxReduceArgs const* args, void* stream) {
  if (args->slot_count > FLUX_MAX_WORLD || args->out_count > FLUX_MAX_WORLD ||
      args->source_count > kReduceThreads) {
    return FLUX_REFUSED;
  }
  if (args->rows == 0) return FLUX_OK;
  const bool by_switch = args->switch_in != nullptr || args->switch_out != nullptr;
  if (by_switch && !wide<Element>(*args)) return FLUX_REFUSED;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(reduce_blocks(*args));
  config.blockDim = dim3(kReduceBlock);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = kEarly && args->early != 0 ? 1 : 0;
  const auto kernel = wide<Element>(*args) ? &reduce_kernel<Element, 16 / sizeof(Element)>
                                           : &reduce_kernel<Element, 1>;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, *args);
  if (status != cudaSuccess) cudaGetLastError();  // it is returned, and not to be found again later
  return static_cast<int>(status);
}

template <class Element>
int prepare_reduce() {
  return load_code(reduce_kernel<Element, 16 / sizeof(Element)>, reduce_kernel<Element, 1>);
}

// A launcher of GEMMs whose partials are reduced behind them.
template <class Launcher, class Element, bool kEarly>
struct Reduced : Launcher {
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = &reduce_partials<Element, kEarly>;
  static int prepare(int device) {
    const int status = Launcher::prepare(device);
    return status != 0 ? status : prepare_reduce<Element>();
  }
};

}  // namespace flux
