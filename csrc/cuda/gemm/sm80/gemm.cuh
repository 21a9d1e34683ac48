// A GEMM on sm_80 and newer from CUTLASS 2.x: multistage, or stream-K. Tiles come in Flux's order,
// and rows are waited for where a block learns which tile is its own: in the threadblock swizzle.
#pragma once

#include <type_traits>

#include "cuda/gather.cuh"
#include "cuda/gemm/all_reduce.cuh"
#include "cuda/gemm/kernel.cuh"
#include "cuda/sync.cuh"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
// After the kernels: CUTLASS's header relies on names that those declare.
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"

namespace flux::sm80 {

// Parameters of a block beyond CUTLASS's own: the tile of a slot, the signals to wait for before it is
// read, and the destinations of a scattering epilogue.
struct BlockParams {
  TileMap map{};
  Needs needs{};  // AllGather. Own rows are in the other batch
  int tile_m = 0;
  int buffer = 0;  // of the gathered rows, where there are two: a batch of CUTLASS
  int slot = 0;    // dynamic tile scheduler: the one that the block has claimed
  FluxSync sync{};
  ScatterTargets targets{};
  bool silent = false;  // a wait has failed: nothing is sent
#ifdef FLUX_TRACE
  std::uint64_t began = 0;  // the tile that the block is at
  TileCoord tile{-1, -1};
#endif
};

// The block's copy of it, in shared memory: CUTLASS's stream-K kernel keeps its parameters in local
// memory, where tables that are indexed at run time would be slow.
CUTLASS_DEVICE BlockParams& block_params() {
  __shared__ __align__(16) char memory[sizeof(BlockParams)];
  return *reinterpret_cast<BlockParams*>(memory);
}

CUTLASS_DEVICE void share_block_params(BlockParams const& params) {
  static_assert(sizeof(BlockParams) % 4 == 0);
  auto const* from = reinterpret_cast<unsigned const*>(&params);
  auto* to = reinterpret_cast<unsigned*>(&block_params());
  for (unsigned i = threadIdx.x; i < sizeof(BlockParams) / 4; i += blockDim.x) to[i] = from[i];
  __syncthreads();
}

// Trace builds: the block is done with its tile if it comes to another one, and ends if to none. Only
// thread 0 reads which: volatile, as the compiler loads other memory for all threads and tests them later.
#ifdef FLUX_TRACE
CUTLASS_DEVICE TileCoord tile_of_block() {
  TileCoord& tile = block_params().tile;
  return {*static_cast<volatile int*>(&tile.m), *static_cast<volatile int*>(&tile.n)};
}
#endif
CUTLASS_DEVICE void leave_tile([[maybe_unused]] TileCoord next) {
#ifdef FLUX_TRACE
  if (threadIdx.x != 0) return;
  BlockParams& p = block_params();
  const TileCoord tile = tile_of_block();
  if (tile.m < 0 || (tile.m == next.m && tile.n == next.n)) return;
  tell(p.sync, p.began, {FLUX_TRACE_TILE, tile.m, tile.n, 0});
  p.tile = {-1, -1};
#endif
}
CUTLASS_DEVICE void enter_tile([[maybe_unused]] TileCoord at) {
#ifdef FLUX_TRACE
  if (threadIdx.x != 0 || tile_of_block().m >= 0) return;
  BlockParams& p = block_params();
  p.began = stamp();
  p.tile = at;
#endif
}

CUTLASS_DEVICE Range rows_of_tile(BlockParams const& p, int row) {
  return {row * p.tile_m, min_of((row + 1) * p.tile_m, p.needs.tiling.m)};
}

// Every thread of the block waits for itself: each acquires what it then reads with cp.async, which
// belongs to the generic proxy, so neither a barrier nor a proxy fence is needed.
CUTLASS_DEVICE cutlass::gemm::GemmCoord tile_of_slot(int slot) {
  BlockParams const& p = block_params();
  if (slot >= p.map.rows * p.map.columns) return {p.map.rows, p.map.columns, 0};
  const TileCoord at = tile_at(p.map, slot);
  leave_tile(at);
  const Range rows = rows_of_tile(p, at.m), words = awaited(p.needs, rows);
  for (int i = words.begin; i < words.end; ++i)
    await(p.needs.words, i, told_by_one(p.sync), FLUX_WAIT_GATHER, at.m);
  enter_tile(at);
  return {at.m, at.n, are_own(p.needs, rows) ? 1 : p.buffer};
}

// Multistage: our loop over slots says which one.
struct OrderedSwizzle : cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<> {
  int slot = 0;

  CUTLASS_DEVICE cutlass::gemm::GemmCoord get_tile_offset(int) const { return tile_of_slot(slot); }
};

// The block's next slot, for all of its threads.
CUTLASS_DEVICE int claim_slot(TileClaims const& claims, int slots) {
  BlockParams& p = block_params();
  if (threadIdx.x == 0) {
    p.slot = claim_tile(claims, slots, gridDim.x, blockIdx.x,
                        [&p](int slot) { return rows_of_tile(p, tile_at(p.map, slot).m); });
  }
  __syncthreads();
  return block_params().slot;
}

// Stream-K: CUTLASS says which slots, or which parts of them, a block computes.
struct OrderedStreamKSwizzle : cutlass::gemm::threadblock::ThreadblockSwizzleStreamK {
  using Base = cutlass::gemm::threadblock::ThreadblockSwizzleStreamK;
  using Base::Base;
  CUTLASS_DEVICE cutlass::gemm::GemmCoord get_tile_offset(int slot) const {
    return tile_of_slot(slot);
  }
};

template <class C>
struct Types {
  using Element = typename C::Element;
  using Output = typename C::Output;
  using LayoutA = cutlass::layout::RowMajor;
  using LayoutB = std::conditional_t<C::kTransposedWeight, cutlass::layout::RowMajor,
                                     cutlass::layout::ColumnMajor>;
  using Tile = cutlass::gemm::GemmShape<C::kTileM, C::kTileN, C::kTileK>;
  using Warp = cutlass::gemm::GemmShape<C::kTileM / C::kWarpsM, C::kTileN / C::kWarpsN, C::kTileK>;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  static constexpr bool kStreamK = C::kSchedule == flux::Schedule::kStreamK;
  static constexpr bool kDynamic = C::kTileScheduler == flux::TileScheduler::kDynamic;
  using Swizzle = std::conditional_t<kStreamK, OrderedStreamKSwizzle, OrderedSwizzle>;
  using Threads =
      cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Output, C::kAlignment, 1>;
};

template <class C, class Visitor>
using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    typename Types<C>::Element, typename Types<C>::LayoutA, cutlass::ComplexTransform::kNone,
    C::kAlignment, typename Types<C>::Element, typename Types<C>::LayoutB,
    cutlass::ComplexTransform::kNone, C::kAlignment, typename Types<C>::Output,
    cutlass::layout::RowMajor, C::kAlignment, float, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, typename Types<C>::Tile, typename Types<C>::Warp,
    typename Types<C>::Instruction, Visitor, typename Types<C>::Swizzle, C::kStages,
    cutlass::arch::OpMultiplyAdd, 1>::GemmKernel;

namespace visit {
using namespace cutlass::epilogue::threadblock;
constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
using RowStride = cute::Stride<std::int64_t, cute::_1, cute::_0>;
template <template <class> class Function>
using Compute = VisitorCompute<Function, float, float, kRound>;

struct Scaled {
  using Alpha = VisitorScalarBroadcast<float>;
  using Node = Sm80EVT<Compute<cutlass::multiplies>, Alpha, VisitorAccFetch>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {{{args.alpha}}, {}, {}};
  }
};

// activation(alpha * accumulator + bias[n]); a null bias adds nothing.
template <class C, Activation = C::kActivation>
struct Activated {
  using Bias = VisitorRowBroadcast<typename Types<C>::Threads, typename C::Output,
                                   cute::Stride<cute::_0, cute::_1, cute::_0>>;
  using Node = Sm80EVT<Compute<cutlass::plus>, Bias, Scaled::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    auto const* bias = static_cast<typename C::Output const*>(args.bias);
    return {{bias, typename C::Output(0), {}}, Scaled::arguments(args), {}};
  }
};
template <class C, template <class> class Function>
struct WithFunction {
  using Linear = Activated<C, Activation::kNone>;
  using Node = Sm80EVT<Compute<Function>, typename Linear::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    return {Linear::arguments(args), {}};
  }
};
template <class C>
struct Activated<C, Activation::kGelu> : WithFunction<C, cutlass::epilogue::thread::GELU> {};
template <class C>
struct Activated<C, Activation::kSilu> : WithFunction<C, cutlass::epilogue::thread::SiLu> {};

// d[m, n], one matrix.
template <class C>
struct Stored {
  using Value = Activated<C>;
  using Store = VisitorAuxStore<typename Types<C>::Threads, typename C::Output, kRound, RowStride>;
  using Node = Sm80EVT<Store, typename Value::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    const RowStride stride = cute::make_stride(args.ldd, cute::_1{}, cute::_0{});
    return {Value::arguments(args), {static_cast<typename C::Output*>(args.d), stride}};
  }
};
}  // namespace visit

template <class Base>
struct Params {
  typename Base::Params base;
  BlockParams block;
  FluxGather gather;
  SumTargets sums;
  int rank;
  TileClaims claims;  // of a dynamic tile scheduler
};

// What a kernel does beside its multiplication, where it does so by itself (path in_kernel).
enum class Moves { kNothing, kGathers, kSums };

// C is there for the name alone: profiles and the compiler's report show it.
template <class C, class Base, bool kStreamK, Moves kMoves>
__global__ void __launch_bounds__(Base::kThreadCount)
    kernel(const __grid_constant__ Params<Base> params) {
  extern __shared__ __align__(128) char memory[];
  auto& storage = *reinterpret_cast<typename Base::SharedStorage*>(memory);
  share_block_params(params.block);
  if constexpr (kMoves == Moves::kGathers) {
    if (params.gather.counts != nullptr) {
      const Needs& needs = params.block.needs;
      const std::uint32_t number = begin_gather<typename C::Element>(
          params.gather, needs.words, params.block.sync, needs.tiling.world, params.rank);
      if (threadIdx.x == 0) {
        block_params().sync.epoch = number;
        block_params().buffer = static_cast<int>(number % 2);
      }
      __syncthreads();
    }
  }
  const bool sums = kMoves == Moves::kSums && params.sums.to.counts != nullptr;
  if (sums) {
    if (threadIdx.x == 0) {
      begin_sums(params.sums.to);
      block_params().targets.sync.epoch = sum_number(params.sums.to);
      block_params().silent = has_failed(params.sums.sync);
    }
    __syncthreads();
  }
  if constexpr (kStreamK) {
    Base::invoke(params.base, storage);
  } else {
    constexpr bool kDynamic = Types<C>::kDynamic;
    const int slots = params.block.map.rows * params.block.map.columns;
    int slot = kDynamic ? claim_slot(params.claims, slots) : blockIdx.x;
    CUTLASS_PRAGMA_NO_UNROLL
    while (slot < slots) {
      OrderedSwizzle swizzle;
      swizzle.slot = slot;
      Base().run_with_swizzle(params.base, storage, swizzle);
      // The next tile's operands come to where this one's epilogue still reads its results.
      __syncthreads();
      slot = kDynamic ? claim_slot(params.claims, slots) : slot + gridDim.x;
    }
  }
  leave_tile({-1, -1});
  if constexpr (kMoves == Moves::kSums) {
    if (sums) end_all_reduce<typename C::Output>(params.sums, Base::kThreadCount / 32);
  }
  // AllGather: every row that the block waited for has been read. GemmRS leaves it to the reduction.
  if (params.block.needs.words != nullptr && threadIdx.x == 0) report_failure(block_params().sync);
}

// Offers (FLUX_KERNEL) and launches a kernel whose visitor arguments `Visited` makes, for the op `kOp`.
template <class C, class Visited, OpKind kOp,
          Moves kMoves = kOp == OpKind::kAGGemm ? Moves::kGathers : Moves::kNothing>
struct Launcher {
  using Base = Kernel<C, typename Visited::Node>;
  static constexpr bool kStreamK = Types<C>::kStreamK;
  using Params = sm80::Params<Base>;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Base::SharedStorage));
  static constexpr auto kKernel = &kernel<C, Base, kStreamK, kMoves>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;

  static int prepare(int device) { return prepare_on(device, kKernel, kSharedBytes); }

  static int resources(FluxGemmArgs const& args, Resources* out) {
    return resources_of(args, kKernel, Base::kThreadCount, kSharedBytes, out);
  }

  static Params params(FluxGemmArgs const& args, Resources const& with) {
    typename Base::Arguments arguments(
        cutlass::gemm::GemmUniversalMode::kGemm, {args.m, args.n, args.k}, 1,
        Visited::arguments(args), args.a, args.b, nullptr, nullptr, 0, 0, 0, 0,
        typename Types<C>::LayoutA::Stride::LongIndex(args.lda),
        typename Types<C>::LayoutB::Stride::LongIndex(args.ldb), std::int64_t(0), std::int64_t(0));
    Params out{typename Base::Params(arguments, with.sm_count, with.blocks_per_sm),
               {},
               args.gather,
               sum_targets(args, C::kTileM, C::kTileN, sizeof(typename C::Output)),
               args.order.rank,
               tile_claims(kOp, args, with.blocks_per_sm, 1)};
    BlockParams& at = out.block;
    at.map = tile_map(tile_order(args, kOp, C::kTileM, C::kTileN));
    at.needs.tiling = comm_tiling(args);
    if constexpr (kOp == OpKind::kAGGemm) at.needs = needs_of(kOp, args);
    at.tile_m = C::kTileM;
    at.sync = args.sync;
    at.targets = scatter_targets(args, C::kTileM, C::kTileN);
    const std::int64_t other = other_rows(args, sizeof(typename C::Element));
    if (kOp == OpKind::kAGGemm && other != 0) read_two_buffers(other, &out.base);
    // Partial sums of a tile are added up by the block that finishes it: one epilogue per tile.
    if constexpr (kStreamK) {
      out.base.block_mapping.reduction_blocks = 0;
      if (shares_device(with.sm_count, with.device_sms)) keep_to_share(out.base.block_mapping);
    }
    return out;
  }

  // The rows of odd calls, or the own ones, are a second batch of A for CUTLASS; B and the result have one
  // for both. That is set where CUTLASS has already laid out its blocks, which stream-K does for one batch
  // alone.
  static void read_two_buffers(std::int64_t bytes, typename Base::Params* params) {
    params->mode = cutlass::gemm::GemmUniversalMode::kBatched;
    params->batch_stride_A = bytes / static_cast<std::int64_t>(sizeof(typename C::Element));
    params->batch_stride_B = 0;
    cute::get<2>(params->problem_shape) = 2;
  }

  // Stream-K launches a block for each whole tile, which on a shared device would wait for rows on
  // multiprocessors of other ranks. Here the blocks of the first wave take the tiles of all full waves,
  // so less than two blocks remain for each multiprocessor of the share, and one for split tiles.
  static void keep_to_share(OrderedStreamKSwizzle& blocks) {
    const int share = blocks.avail_sms;
    const int whole = blocks.tiled_shape().m() * blocks.tiled_shape().n() - blocks.sk_tiles;
    blocks.cohort_raster = false;  // the order of tiles is ours in any case
    blocks.dp_first_wave_tiles = max_of(whole / share, 1);
    blocks.dp_blocks = whole - (blocks.dp_first_wave_tiles - 1) * share;
  }

  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    Resources with;
    if (!kStreamK) return Types<C>::kDynamic ? kCounterBytes : 0;
    return resources(*args, &with) != 0 ? 0 : workspace_bytes(params(*args, with));
  }

  static std::uint64_t workspace_bytes(Params const& p) {
    const std::uint64_t bytes = kStreamK ? p.base.get_workspace_size() : 0;
    return bytes == 0 && !Types<C>::kDynamic ? 0 : kCounterBytes + bytes;
  }

  static int launch(FluxGemmArgs const* requested, void* stream) {
    FluxGemmArgs const& args = *requested;
    if (max_of(args.order.world, args.order.column_ranges) > kMaxRuns) return FLUX_REFUSED;
    if (args.lda % C::kAlignment != 0 || args.ldb % C::kAlignment != 0) return FLUX_REFUSED;
    if (args.n % C::kAlignment != 0 || args.k % C::kAlignment != 0) return FLUX_REFUSED;
    Resources with;
    if (const int status = resources(args, &with); status != 0) return status;
    auto* queue = static_cast<cudaStream_t>(stream);
    Params p = params(args, with);
    dim3 grid(shared_blocks(p.block.map.rows * p.block.map.columns, with.sm_count, with.device_sms,
                            with.blocks_per_sm));
    if (workspace_bytes(p) > args.workspace_bytes) return FLUX_TOO_SMALL;
    if constexpr (kStreamK) {
      auto* behind_counter = static_cast<char*>(args.workspace) + kCounterBytes;
      if (p.base.init_workspace(behind_counter, queue) != cutlass::Status::kSuccess) {
        return FLUX_REFUSED;
      }
      grid = p.base.get_grid_dims();
    }
    kKernel<<<grid, Base::kThreadCount, kSharedBytes, queue>>>(p);
    return static_cast<int>(cudaGetLastError());
  }
};

template <class C>
struct Gemm : Launcher<C, visit::Stored<C>, OpKind::kGemmRS> {};

}  // namespace flux::sm80
