// A grouped GEMM on sm_80 and newer from CUTLASS 2.x, multistage: tiles of rows of one expert, gathered by
// an index with cp.async (docs/kernels/protocol.md, "Mixtures of experts").
//
// Blocks claim items one by one. An item is a tile, or work that other tiles come before; so what an
// item waits for on this device is with blocks that run.
#pragma once

#include "cuda/gemm/sm80/gemm.cuh"

namespace flux::sm80 {

// What a kernel needs beyond the parts of CUTLASS.
struct GroupedParams {
  FluxGroups groups{};
  const void* a = nullptr;
  void* d = nullptr;
  std::int64_t ldd = 0;
  int n = 0, k = 0, columns = 0;
  const std::uint32_t* signals = nullptr;
  CommTiling tiling{};
  ScatterTargets targets{};
  std::uint32_t* counter = nullptr;  // of claimed items
  std::uint32_t* finished =
      nullptr;  // by tile of sums: rows of products; 0 whenever no kernel runs
  FluxSync sync{};
};

// The block's copy of what the epilogue's store reads, in shared memory: its callbacks get no arguments.
struct StoredRows {
  const int* rows;
  void* d;
  std::int64_t ldd;
};
CUTLASS_DEVICE StoredRows& stored_rows() {
  __shared__ __align__(16) char memory[sizeof(StoredRows)];
  return *reinterpret_cast<StoredRows*>(memory);
}

// CUTLASS's auxiliary store, with the row of d from a map.
template <class Base, class Element>
struct RowStore : Base {
  CUTLASS_HOST_DEVICE RowStore() {}
  CUTLASS_HOST_DEVICE RowStore(typename Base::Params const& params,
                               typename Base::SharedStorage const& storage)
      : Base(params, storage) {}

  template <class BaseCallbacks>
  struct Callbacks : BaseCallbacks {
    CUTLASS_DEVICE explicit Callbacks(BaseCallbacks&& base)
        : BaseCallbacks(static_cast<BaseCallbacks&&>(base)) {}

    CUTLASS_DEVICE void end_step(int step) {
      const StoredRows to = stored_rows();
      auto values = cute::filter(this->tC_rAux);
      auto coords = cute::filter(this->tC_cAux(cute::_, cute::_, cute::_, step));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(values); ++i) {
        const int column = cute::get<1>(coords(i));
        const bool is_column = column < cute::get<1>(this->problem_shape);
        const int row = is_column ? to.rows[cute::get<0>(coords(i))] : -1;
        auto* at = static_cast<Element*>(to.d) + row * to.ldd + column;
        using Vector = typename Base::VecType;
        cutlass::arch::global_store<Vector, sizeof(Vector)>(values(i), at, row >= 0);
      }
    }
  };

  // The base's own destination is null and never written to; it only gives the shape of things.
  template <class Problem>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, Problem problem) {
    auto base = Base::get_callbacks(tile, thread, problem);
    return Callbacks<decltype(base)>(static_cast<decltype(base)&&>(base));
  }
};

// activation(accumulator + bias[expert, n]) to a row of d. Experts are batches of the bias.
template <class C>
struct StoredByRow {
  using Output = typename C::Output;
  using BiasStride = cute::Stride<cute::_0, cute::_1, std::int64_t>;
  using Bias = visit::VisitorRowBroadcast<typename Types<C>::Threads, Output, BiasStride>;
  using Linear = visit::Sm80EVT<visit::Compute<cutlass::plus>, Bias,
                                cutlass::epilogue::threadblock::VisitorAccFetch>;
  template <Activation kActivation, class = void>
  struct Activated {
    using Node = Linear;
    static typename Node::Arguments arguments(typename Linear::Arguments const& linear) {
      return linear;
    }
  };
  template <class Unused>
  struct Activated<Activation::kGelu, Unused> {
    using Node = visit::Sm80EVT<visit::Compute<cutlass::epilogue::thread::GELU>, Linear>;
    static typename Node::Arguments arguments(typename Linear::Arguments const& linear) {
      return {linear, {}};
    }
  };
  template <class Unused>
  struct Activated<Activation::kSilu, Unused> {
    using Node = visit::Sm80EVT<visit::Compute<cutlass::epilogue::thread::SiLu>, Linear>;
    static typename Node::Arguments arguments(typename Linear::Arguments const& linear) {
      return {linear, {}};
    }
  };
  using Value = Activated<C::kActivation>;
  using Store = RowStore<
      visit::VisitorAuxStore<typename Types<C>::Threads, Output, visit::kRound, visit::RowStride>,
      Output>;
  using Node = visit::Sm80EVT<Store, typename Value::Node>;
  static typename Node::Arguments arguments(FluxGemmArgs const& args) {
    auto const* bias = static_cast<Output const*>(args.groups->bias);
    const BiasStride stride = cute::make_stride(cute::_0{}, cute::_1{}, std::int64_t{args.n});
    return {Value::arguments({{bias, Output(0), stride}, {}, {}}), {}};
  }
};

template <class C>
struct GroupedParts {
  using T = Types<C>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
  using Linear =
      cutlass::epilogue::thread::LinearCombination<typename C::Output, C::kAlignment, float, float>;
  using Gemm = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      typename C::Element, typename T::LayoutA, cutlass::ComplexTransform::kNone, C::kAlignment,
      typename C::Element, typename T::LayoutB, cutlass::ComplexTransform::kNone, C::kAlignment,
      typename C::Output, cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, typename T::Tile, typename T::Warp, typename T::Instruction, Linear,
      Swizzle, C::kStages, cutlass::arch::OpMultiplyAdd,
      cutlass::gemm::SharedMemoryClearOption::kNone, /*GatherA=*/true>::GemmKernel;
  using Mma = typename Gemm::Mma;
  using Visitor = typename StoredByRow<C>::Node;
  using Epilogue =
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Gemm::Epilogue, Visitor,
                                                                   1>;
  static constexpr int kThreads = 32 * C::kWarpsM * C::kWarpsN;

  union Shared {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };
  struct Params {
    GroupedParams own;
    typename Mma::IteratorA::Params a;
    typename Mma::IteratorB::Params b;
    typename Visitor::Params visitor;
  };
};

// Tile `tile` of rows, column `column` of tiles: the body of CUTLASS's GemmWithEpilogueVisitor, for rows
// that have an expert.
template <class C>
CUTLASS_DEVICE void multiply_tile(typename GroupedParts<C>::Params const& params,
                                  typename GroupedParts<C>::Shared& shared, int tile, int column) {
  using Mma = typename GroupedParts<C>::Mma;
  GroupedParams const& p = params.own;
  const int expert = p.groups.experts[tile];
  using Element = typename C::Element;
  const int thread = threadIdx.x, lane = threadIdx.x % 32;
  const int warp = cutlass::canonical_warp_idx_sync();
  auto* weight = static_cast<Element*>(const_cast<void*>(p.groups.weights[expert]));
  auto* a = static_cast<Element*>(const_cast<void*>(p.a));
  typename Mma::IteratorA rows(params.a, a, {(tile + 1) * C::kTileM, p.k}, thread,
                               {tile * C::kTileM, 0}, p.groups.sources);
  typename Mma::IteratorB columns(params.b, weight, {p.k, p.n}, thread, {0, column * C::kTileN});
  Mma mma(shared.mainloop, thread, warp, lane);
  typename Mma::FragmentC sums;
  sums.clear();
  mma((p.k + C::kTileK - 1) / C::kTileK, sums, rows, columns, sums);
  typename GroupedParts<C>::Epilogue epilogue(params.visitor, shared.epilogue, thread, warp, lane);
  const cute::Shape<std::int32_t, std::int32_t, std::int32_t> problem{(tile + 1) * C::kTileM, p.n,
                                                                      p.groups.experts_count};
  epilogue(sums, {tile, column, expert}, problem, thread);
}

// C is there for the name alone: profiles and the compiler's report show it. Duty: before(tile) and
// after(tile, column) of a tile, by all threads, and item(number) for items that are no tile.
template <class C, class Duty>
__global__ void __launch_bounds__(GroupedParts<C>::kThreads)
    grouped_kernel(const __grid_constant__ typename GroupedParts<C>::Params params) {
  extern __shared__ __align__(128) char memory[];
  __shared__ int claimed;
  auto& shared = *reinterpret_cast<typename GroupedParts<C>::Shared*>(memory);
  GroupedParams const& p = params.own;
  if (threadIdx.x == 0) stored_rows() = {p.groups.rows, p.d, p.ldd};
  for (;;) {
    if (threadIdx.x == 0) claimed = claim_tile(p.counter, p.groups.item_count, gridDim.x);
    __syncthreads();
    const int number = claimed;
    if (number >= p.groups.item_count) break;
    const int item = p.groups.items[number];
    if (item >= 0) {
      const int tile = item / p.columns, column = item % p.columns;
      Duty::before(p, tile);
      [[maybe_unused]] const std::uint64_t began = stamp();
      multiply_tile<C>(params, shared, tile, column);
      Duty::after(p, tile, column);
      if (threadIdx.x == 0) tell(p.sync, began, {FLUX_TRACE_TILE, tile, column, 0});
    } else {
      Duty::item(p, -1 - item);
    }
    // The next tile's operands come to where this one's epilogue still reads its results.
    __syncthreads();
  }
  if (p.signals != nullptr && threadIdx.x == 0) report_failure(p.sync);
}

template <class C, class Duty>
struct GroupedLauncher {
  using Parts = GroupedParts<C>;
  static constexpr int kTileM = C::kTileM;
  static constexpr int kTileN = C::kTileN;
  static constexpr int (*kReduce)(FluxReduceArgs const*, void*) = nullptr;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Parts::Shared));
  static constexpr auto kKernel = &grouped_kernel<C, Duty>;

  static int prepare(int device) { return prepare_on(device, kKernel, kSharedBytes); }

  static std::uint64_t workspace_bytes(FluxGemmArgs const* args) {
    return kCounterBytes + Duty::template words<C>(*args) * sizeof(std::uint32_t);
  }

  static int launch(FluxGemmArgs const* args, void* stream) {
    if (args->groups == nullptr || args->order.world > FLUX_MAX_WORLD) return FLUX_REFUSED;
    if (args->lda % C::kAlignment != 0 || args->ldb % C::kAlignment != 0) return FLUX_REFUSED;
    if (args->n % C::kAlignment != 0 || args->k % C::kAlignment != 0) return FLUX_REFUSED;
    if (workspace_bytes(args) > args->workspace_bytes) return FLUX_TOO_SMALL;
    Resources with;
    if (const int status = resources_of(*args, kKernel, Parts::kThreads, kSharedBytes, &with);
        status != 0) {
      return status;
    }
    typename Parts::Params params{
        own(*args), typename Parts::Mma::IteratorA::Params(args->lda),
        typename Parts::Mma::IteratorB::Params(args->ldb),
        Parts::Visitor::to_underlying_arguments(
            cute::Shape<int, int, int>{args->m, args->n, args->groups->experts_count},
            StoredByRow<C>::arguments(*args), nullptr)};
    const int blocks =
        shared_blocks(args->groups->item_count, with.sm_count, with.device_sms, with.blocks_per_sm);
    kKernel<<<blocks, Parts::kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(params);
    return static_cast<int>(cudaGetLastError());
  }

  static GroupedParams own(FluxGemmArgs const& args) {
    GroupedParams p;
    p.groups = *args.groups;
    p.a = args.a;
    p.d = args.d;
    p.ldd = args.ldd;
    p.n = args.n;
    p.k = args.k;
    p.columns = ceil_div(args.n, C::kTileN);
    p.signals = Duty::kGathers ? args.signals : nullptr;
    p.tiling = comm_tiling(args);
    p.targets = scatter_targets(args, C::kTileM, C::kTileN);
    p.counter = static_cast<std::uint32_t*>(args.workspace);
    p.finished = p.counter + kCounterBytes / sizeof(std::uint32_t);
    p.sync = args.sync;
    return p;
  }
};

}  // namespace flux::sm80
