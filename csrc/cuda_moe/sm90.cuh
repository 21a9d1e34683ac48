// A grouped GEMM on sm_90a with wgmma. Producers copy operands with cp.async: TMA gathers no rows on
// Hopper, and would need a tensor map for each expert.
//
//   producers   claim -> item | await rows | k tiles ... | claim -> item | await rows | k tiles ...
//   consumers   item | multiply k tiles as they come | store | item | multiply ...
//
// Cooperative: two warp groups share each item. Pingpong: they take items in turn, and one stores while
// the other multiplies. It begins when the other has seen its last k tile: a wait for a stage knows no more
// than the parity of how often that was filled, and would pass while the fill before the awaited one is under way.
//
// Memory ordering (docs/kernels/protocol.md). cp.async reads global memory and writes shared memory in the
// generic proxy, so what makes rows visible to the producers suffices. wgmma reads shared memory in the
// async proxy: a consumer that has acquired a stage's barrier, which the copies arrive at, fences the
// proxies before it multiplies. A stage is written again behind the end of the multiplications that read
// it (wgmma.wait_group) and their arrival at its other barrier. Scales of rows come with the first k tile,
// behind the same waits: a consumer has acquired no signal, and may not read them in global memory.
#pragma once

#include "cuda_moe/await_rows.cuh"
#include "cuda_moe/sum_tokens.cuh"
#include "cute/tensor.hpp"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace flux::sm90 {

constexpr int kWarpGroup = 128;
constexpr int kRowBytes = 128;  // of a tile in shared memory, the width of its swizzle

// A team of kThreads from `first` on, with named barrier `number` + 1.
template <int kThreads>
struct WarpGroups {
  int number, first;
  __device__ int thread() const { return static_cast<int>(threadIdx.x) - first; }
  __device__ static int threads() { return kThreads; }
  __device__ bool all(bool value) const { return all_of_team<kThreads>(number, value); }
  __device__ void sync() const { all(true); }
};

template <class C>
struct GroupedParts {
  using Element = typename C::Element;
  static constexpr int kVector = C::kAlignment;  // elements of one copy
  static constexpr int kDepth = C::kTileK;
  static_assert(kDepth * sizeof(Element) == kRowBytes);
  static constexpr int kTeams = C::kSchedule == flux::Schedule::kPingpong ? 2 : 1;
  static constexpr int kTeamThreads = 2 * kWarpGroup / kTeams;
  static constexpr int kThreads = 3 * kWarpGroup;

  static constexpr auto kMajorB =
      C::kTransposedWeight ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  using Tile = cute::Shape<cute::Int<C::kTileM>, cute::Int<C::kTileN>, cute::Int<kDepth>>;
  using Atoms = cute::Layout<cute::Shape<cute::Int<kTeamThreads / kWarpGroup>, cute::_1, cute::_1>>;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, Tile, cute::GMMA::Major::K, kMajorB>(),
      Atoms{}));

  static constexpr bool kScaledRows = C::kScaling == flux::Scaling::kRow;
  static constexpr int kScales = kScaledRows ? C::kTileM : 0;  // of a stage
  static constexpr int kStageBytes = (C::kTileM + C::kTileN) * kRowBytes + kScales * 4;
  static constexpr int kMostBytes = 227 * 1024 - 1024;  // what else is shared is less than 1 KiB
  static constexpr int kStages = C::kStages > 0 ? C::kStages : min_of(kMostBytes / kStageBytes, 8);
  using Rows = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using Columns =
      std::conditional_t<C::kTransposedWeight, cute::GMMA::Layout_MN_SW128_Atom<Element>, Rows>;
  template <class Atom, int kExtent>
  using Stacked = decltype(cute::tile_to_shape(
      Atom{}, cute::Shape<cute::Int<kExtent>, cute::Int<kDepth>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using LayoutA = Stacked<Rows, C::kTileM>;
  using LayoutB = Stacked<Columns, C::kTileN>;

  using Stages = cutlass::PipelineAsync<kStages>;
  using Items = cutlass::PipelineAsync<2>;
  using Turns = cutlass::OrderedSequenceBarrier<1, 2>;
  static constexpr int kNoItem = 0x7fffffff;
  // Scales of the rows that a thread has sums of.
  using RowScales = cutlass::Array<float, kScaledRows ? C::kTileM * 4 / kTeamThreads : 1>;

  struct Shared {
    alignas(1024) Element a[cute::cosize_v<LayoutA>];
    alignas(1024) Element b[cute::cosize_v<LayoutB>];
    float scales[max_of(kStages * kScales, 1)];
    typename Stages::SharedStorage stages;
    typename Items::SharedStorage handed;
    typename Turns::SharedStorage turns;
    int item[Items::Stages];
  };
};

// Copies the k tiles of a tile's operands. In shared memory both have rows of 128 bytes, whose 16 byte
// columns are exchanged by the number of the row: eight threads copy a row, and each of them the same column
// of every 16th. A row of [K, N] has 64 columns of the weight. Zeros come from beyond the matrices. Of a gated
// product eight columns of the first half are followed by eight of the second.
template <class C, class Parts = GroupedParts<C>>
CUTLASS_DEVICE void copy_tile(GroupedParams const& p, typename Parts::Shared& shared,
                              typename Parts::Stages& stages,
                              typename Parts::Stages::PipelineState& write, int thread, int tile,
                              int column) {
  using Element = typename C::Element;
  constexpr int kStep = kWarpGroup / 8, kDepth = Parts::kDepth;
  const int row = thread / 8, at = thread % 8 * Parts::kVector;
  const int place = row * kDepth + (thread % 8 ^ row % 8) * Parts::kVector;
  const auto copy = [](Element* to, const Element* from, bool inside) {
    cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(to, from, inside);
  };
  if constexpr (Parts::kScaledRows) {
    stages.producer_acquire(write);
    float* to = shared.scales + write.index() * C::kTileM;
    for (int i = thread; i < C::kTileM; i += kWarpGroup) {
      const int source = p.groups.sources[tile * C::kTileM + i];
      cutlass::arch::cp_async<sizeof(float)>(to + i, p.scale_a + source);
    }
  }
  const Element* rows[C::kTileM / kStep];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < C::kTileM / kStep; ++i) {
    const int source = p.groups.sources[tile * C::kTileM + row + i * kStep];
    rows[i] = static_cast<const Element*>(p.a) + source * p.lda + at;
  }
  constexpr bool kGated = kHalves<C> == 2;
  const int half = p.n / kHalves<C>, in_tile = C::kTransposedWeight ? at : row;
  const int first =
      column * C::kTileN / kHalves<C> + (kGated ? in_tile / 16 * 8 + in_tile % 8 : in_tile);
  const std::int64_t from_column = first + (kGated && in_tile / 8 % 2 != 0 ? half : 0);
  const auto* weight =
      static_cast<const Element*>(p.groups.weights[p.groups.experts[tile]]) +
      (C::kTransposedWeight ? row * p.ldb + from_column : from_column * p.ldb + at);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int k = 0; k < p.k; k += kDepth, ++write) {
    stages.producer_acquire(write);
    Element* a = shared.a + write.index() * C::kTileM * kDepth + place;
    Element* b = shared.b + write.index() * C::kTileN * kDepth + place;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kTileM / kStep; ++i) {
      copy(a + i * kStep * kDepth, rows[i] + k, k + at < p.k);
    }
    const Element* from = weight;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kTileN / kStep; ++i) {
      const int deep = C::kTransposedWeight ? row + i * kStep % kDepth : at;
      const int n = C::kTransposedWeight ? i * kStep / kDepth * kDepth : i * kStep;
      copy(b + i * kStep * kDepth, from, k + deep < p.k && first + n / kHalves<C> < half);
      const bool ends = C::kTransposedWeight && (i + 1) * kStep % kDepth == 0;  // 64 columns
      const int down = C::kTransposedWeight ? kStep : kStep / kHalves<C>;
      from += ends ? kDepth / kHalves<C> - (kDepth - kStep) * p.ldb : down * p.ldb;
      asm volatile("" : "+l"(from));  // else all sixteen would be in registers
    }
    weight += C::kTransposedWeight ? kDepth * p.ldb : kDepth;
    cutlass::arch::cpasync_barrier_arrive_noinc(stages.producer_get_barrier(write));
  }
}

// The producers: claim items, hand them on, and copy what tiles need.
template <class C, class Duty, class Parts = GroupedParts<C>>
CUTLASS_DEVICE void produce(GroupedParams const& p, typename Parts::Shared& shared,
                            typename Parts::Stages& stages, typename Parts::Items& items) {
  const WarpGroups<kWarpGroup> team{0, 0};
  auto write = cutlass::make_producer_start_state<typename Parts::Stages>();
  auto hand = cutlass::make_producer_start_state<typename Parts::Items>();
  const int all = items_of(p.groups);
  for (;; ++hand) {
    if (team.thread() == 0) {
      items.producer_acquire(hand);
      const int number = claim_tile(p.counter, all, gridDim.x);
      shared.item[hand.index()] = number < all ? p.groups.items[number] : Parts::kNoItem;
      items.producer_commit(hand);
    }
    team.sync();
    const int item = shared.item[hand.index()];
    if (item == Parts::kNoItem) break;
    if (item < 0) continue;
    const int tile = item / p.columns, column = item % p.columns;
    Duty::before(p, tile, team);
    copy_tile<C>(p, shared, stages, write, team.thread(), tile, column);
  }
  if (p.signals != nullptr && team.thread() == 0) report_failure(p.sync);
}

// Sums = the product of k tiles, of which the next one is multiplied while the one before ends; or
// (kPromoted) each is added in float32: a tensor core keeps sums of float8 to some 14 bits.
template <class C, class Sums, class Parts = GroupedParts<C>>
CUTLASS_DEVICE void multiply(typename Parts::Shared& shared, typename Parts::Stages& stages,
                             typename Parts::Turns& turns,
                             typename Parts::Stages::PipelineState& read, int k_tiles, int thread,
                             Sums& sums, typename Parts::RowScales& scales) {
  auto a = cute::make_tensor(cute::make_smem_ptr(shared.a), typename Parts::LayoutA{});
  auto b = cute::make_tensor(cute::make_smem_ptr(shared.b), typename Parts::LayoutB{});
  typename Parts::Mma mma;
  // Of the warp group's first thread: descriptors are the same for all, and stay in uniform registers.
  const int of_group = __shfl_sync(~0u, thread / kWarpGroup * kWarpGroup, 0);
  auto part = mma.get_slice(of_group);
  auto of_a = part.make_fragment_A(part.partition_A(a));
  auto of_b = part.make_fragment_B(part.partition_B(b));
  const auto release = [&stages](auto const& state) {
    if (cutlass::canonical_lane_idx() == 0) stages.consumer_release(state);
  };
  const auto begin = [&](auto& to) {
    cutlass::arch::fence_view_async_shared();
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < cute::size<2>(of_a); ++step) {
      cute::gemm(mma, of_a(cute::_, cute::_, step, read.index()),
                 of_b(cute::_, cute::_, step, read.index()), to);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  };
  const auto await = [&](int i) {
    stages.consumer_wait(read);
    if (Parts::kTeams == 2 && i + 1 == k_tiles) turns.arrive();
  };
  if constexpr (Parts::kScaledRows) {
    stages.consumer_wait(read);
    const float* from =
        shared.scales + read.index() * C::kTileM + thread / 32 * 16 + thread % 32 / 4;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Parts::RowScales::kElements; ++i) {
      scales[i] = from[i / 2 * Parts::kTeamThreads / 2 + i % 2 * 8];
    }
    __syncwarp();  // one lane gives the stage back
  }
  if constexpr (C::kPromoted) {
    auto products = cute::make_fragment_like(sums);
    cute::clear(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_tiles; ++i, ++read) {
      await(i);
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      cute::warpgroup_fence_operand(products);
      begin(products);
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(products);
      release(read);
      CUTLASS_PRAGMA_UNROLL
      for (int at = 0; at < cute::size(sums); ++at) sums(at) += products(at);
    }
  } else {
    auto before = read;
    mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < k_tiles; ++i, ++read) {
      await(i);
      begin(sums);
      if (i > 0) {
        cute::warpgroup_wait<1>();
        release(before);
        ++before;
      }
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(sums);
    release(before);
  }
}

template <Activation kActivation>
CUTLASS_DEVICE float activated(float x) {
  if constexpr (kActivation == Activation::kGelu || kActivation == Activation::kGatedGelu)
    return cutlass::epilogue::thread::GELU<float>{}(x);
  if constexpr (kActivation == Activation::kSilu || kActivation == Activation::kGatedSilu)
    return cutlass::epilogue::thread::SiLu<float>{}(x);
  return x;
}

// Four lanes have words of the same four columns of 16 bytes: afterwards each has one of these whole.
CUTLASS_DEVICE void transpose_in_quad(std::uint32_t (&words)[4]) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step;
    CUTLASS_PRAGMA_UNROLL
    for (int low = 0; low < 4; ++low) {
      if (low & step) continue;
      const int high = low + step;
      const std::uint32_t got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], step);
      (upper ? words[low] : words[high]) = got;
    }
  }
}

// activation(scales * sums + bias[expert, n]), gated or not, to rows of d. A lane has two neighbouring columns
// of each eight, of rows 8 apart.
template <class C, class Sums, class Parts = GroupedParts<C>>
CUTLASS_DEVICE void store_tile(GroupedParams const& p, Sums const& sums,
                               typename Parts::RowScales const& scales, int thread, int tile,
                               int column) {
  using Output = typename C::Output;
  using Pair = cutlass::Array<Output, 2>;
  using Floats = cutlass::AlignedArray<float, 2>;
  constexpr int kHalf = kHalves<C>;
  const int lane = thread % 32, first = column * C::kTileN / kHalf, half = p.n / kHalf;
  const std::int64_t expert = p.groups.experts[tile];
  const auto* bias = static_cast<const Output*>(p.groups.bias);
  if (bias != nullptr) bias += expert * p.n;
  const float* of_columns = Parts::kScaledRows ? p.scale_b + expert * p.n : nullptr;
  float of_all = 1.0f;
  if constexpr (C::kScaling == Scaling::kTensor) of_all = *p.scale_a * p.scale_b[expert];
  const cutlass::NumericArrayConverter<Output, float, 2> narrow;
  const cutlass::NumericArrayConverter<float, Output, 2> widen;
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < C::kTileM * 2 / Parts::kTeamThreads; ++block) {
    const int* rows = p.groups.rows + tile * C::kTileM + block * Parts::kTeamThreads / 2 +
                      thread / 32 * 16 + lane / 4;
    const int row[] = {rows[0], rows[8]};
    CUTLASS_PRAGMA_UNROLL
    for (int eight = 0; eight < C::kTileN / 8 / kHalf; eight += 4) {
      Pair addend[4 * kHalf];
      Floats factor[4 * kHalf];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4 * kHalf; ++i) {
        const int n = first + 8 * (eight + i / kHalf) + lane % 4 * 2;
        addend[i].clear();
        factor[i].fill(of_all);
        if (Parts::kScaledRows && n < half) {
          factor[i] = *reinterpret_cast<const Floats*>(of_columns + n + i % kHalf * half);
        }
        if (bias != nullptr && n < half) {
          addend[i] = *reinterpret_cast<const Pair*>(bias + n + i % kHalf * half);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int lower = 0; lower < 2; ++lower) {
        std::uint32_t words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          cutlass::Array<float, 2> values;
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 2; ++e) {
            const auto sum = [&](int j) {
              float value = sums(cute::make_coord(e, lower, eight * kHalf + j), block, 0);
              if constexpr (Parts::kScaledRows) value *= scales[block * 2 + lower];
              if constexpr (C::kScaling != Scaling::kNone) value *= factor[j][e];
              return value + widen(addend[j])[e];
            };
            values[e] = activated<C::kActivation>(sum(i * kHalf));
            if constexpr (kHalf == 2) values[e] *= sum(i * kHalf + 1);
          }
          reinterpret_cast<Pair&>(words[i]) = narrow(values);
        }
        transpose_in_quad(words);
        const int n = first + 8 * (eight + lane % 4);
        if (row[lower] < 0 || n >= half) continue;
        *reinterpret_cast<uint4*>(static_cast<Output*>(p.d) + row[lower] * p.ldd + n) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// One team of consumers. All read every item, and skip those of the other team.
template <class C, class Duty, class Parts = GroupedParts<C>>
CUTLASS_DEVICE void consume(GroupedParams const& p, typename Parts::Shared& shared,
                            typename Parts::Stages& stages, typename Parts::Items& items,
                            typename Parts::Turns& turns, int turn) {
  const WarpGroups<Parts::kTeamThreads> team{1 + turn, kWarpGroup + turn * Parts::kTeamThreads};
  const int k_tiles = ceil_div(p.k, Parts::kDepth);
  typename Parts::Stages::PipelineState read;
  typename Parts::Items::PipelineState taken;
  for (int number = 0;; ++number, ++taken) {
    items.consumer_wait(taken);
    const int item = shared.item[taken.index()];
    __syncwarp();
    if (cutlass::canonical_lane_idx() == 0) items.consumer_release(taken);
    if (item == Parts::kNoItem) break;
    if (number % Parts::kTeams != turn) {
      if (item >= 0) read.advance(k_tiles);
      continue;
    }
    if (Parts::kTeams == 2) turns.wait();
    if (item < 0) {
      if (Parts::kTeams == 2) turns.arrive();
      Duty::item(p, -1 - item, team);
      continue;
    }
    const int tile = item / p.columns, column = item % p.columns;
    [[maybe_unused]] const std::uint64_t began = stamp();
    auto sums = cute::partition_fragment_C(
        typename Parts::Mma{}, cute::Shape<cute::Int<C::kTileM>, cute::Int<C::kTileN>>{});
    typename Parts::RowScales scales;
    multiply<C>(shared, stages, turns, read, k_tiles, team.thread(), sums, scales);
    store_tile<C>(p, sums, scales, team.thread(), tile, column);
    Duty::after(p, tile, column, team);
    if (team.thread() == 0) tell(p.sync, began, {FLUX_TRACE_TILE, tile, column, 0});
  }
  if (p.signals == nullptr) return;
  team.sync();  // behind the waits of all its threads
  if (team.thread() == 0) report_failure(p.sync);
}

template <class Pipeline>
CUTLASS_DEVICE typename Pipeline::Params arrivals(bool produces, int producers, int consumers) {
  using Role = typename Pipeline::ThreadCategory;
  typename Pipeline::Params params;
  params.role = produces ? Role::Producer : Role::Consumer;
  params.producer_arv_count = producers;
  params.consumer_arv_count = consumers;
  return params;
}

template <class C, class Duty>
__global__ void __launch_bounds__(GroupedParts<C>::kThreads, 1)
    grouped_kernel(const __grid_constant__ GroupedParams p) {
  using Parts = GroupedParts<C>;
  using Stages = typename Parts::Stages;
  using Items = typename Parts::Items;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<typename Parts::Shared*>(memory);
  const int group = cutlass::canonical_warp_group_idx();
  // Copies arrive for each thread, consumers for each warp. All consumers read items.
  Stages stages(shared.stages, arrivals<Stages>(group == 0, kWarpGroup, Parts::kTeamThreads / 32));
  Items items(shared.handed, arrivals<Items>(group == 0, 1, 2 * kWarpGroup / 32));
  const int turn = Parts::kTeams == 2 ? max_of(group - 1, 0) : 0;
  typename Parts::Turns turns(shared.turns, {static_cast<std::uint32_t>(turn), kWarpGroup});
  __syncthreads();
  // 168 registers for each of the 384 threads, as they are needed.
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<72>();
    produce<C, Duty>(p, shared, stages, items);
  } else {
    cutlass::arch::warpgroup_reg_alloc<216>();
    consume<C, Duty>(p, shared, stages, items, turns, turn);
  }
}

template <class C, class Duty>
struct GroupedKernel {
  using Parts = GroupedParts<C>;
  static constexpr int kThreads = Parts::kThreads;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Parts::Shared));
  static constexpr auto kKernel = &grouped_kernel<C, Duty>;
  static GroupedParams const& params(FluxGemmArgs const&, GroupedParams const& own) { return own; }
};

// The two ops: GroupedGemmAR is the second one, with another reduction.
template <class C>
struct AGGroupedGemm : GroupedLauncher<C, AwaitRows<C>, GroupedKernel> {};
template <class C>
struct GroupedGemmRS
    : Reduced<GroupedLauncher<C, SumTokens<C>, GroupedKernel>, typename C::Output, false> {};

}  // namespace flux::sm90
