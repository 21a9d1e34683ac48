// A grouped GEMM on sm_80 and newer from CUTLASS 2.x, multistage: tiles of rows of one expert, gathered by
// an index with cp.async (docs/kernels/protocol.md, "Mixtures of experts").
#pragma once

#include "cuda/gemm/sm80/gemm.cuh"
#include "cuda_moe/await_rows.cuh"
#include "cuda_moe/sum_tokens.cuh"

namespace flux::sm80 {

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
  static_assert(kHalves<C> == 1, "iterators of CUTLASS 2.x load neighbouring columns");
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

// C is there for the name alone: profiles and the compiler's report show it.
template <class C, class Duty>
__global__ void __launch_bounds__(GroupedParts<C>::kThreads)
    grouped_kernel(const __grid_constant__ typename GroupedParts<C>::Params params) {
  extern __shared__ __align__(128) char memory[];
  __shared__ int claimed;
  auto& shared = *reinterpret_cast<typename GroupedParts<C>::Shared*>(memory);
  GroupedParams const& p = params.own;
  if (threadIdx.x == 0) stored_rows() = {p.groups.rows, p.d, p.ldd};
  const int items = items_of(p.groups);
  for (;;) {
    if (threadIdx.x == 0) claimed = claim_tile(p.counter, items, gridDim.x);
    __syncthreads();
    const int number = claimed;
    if (number >= items) break;
    const int item = p.groups.items[number];
    if (item >= 0) {
      const int tile = item / p.columns, column = item % p.columns;
      Duty::before(p, tile, WholeBlock{});
      [[maybe_unused]] const std::uint64_t began = stamp();
      multiply_tile<C>(params, shared, tile, column);
      Duty::after(p, tile, column, WholeBlock{});
      if (threadIdx.x == 0) tell(p.sync, began, {FLUX_TRACE_TILE, tile, column, 0});
    } else {
      Duty::item(p, -1 - item, WholeBlock{});
    }
    // The next tile's operands come to where this one's epilogue still reads its results.
    __syncthreads();
  }
  if (p.signals != nullptr && threadIdx.x == 0) report_failure(p.sync);
}

template <class C, class Duty>
struct GroupedKernel {
  using Parts = GroupedParts<C>;
  static constexpr int kThreads = Parts::kThreads;
  static constexpr int kSharedBytes = static_cast<int>(sizeof(typename Parts::Shared));
  static constexpr auto kKernel = &grouped_kernel<C, Duty>;

  static typename Parts::Params params(FluxGemmArgs const& args, GroupedParams const& own) {
    return {own, typename Parts::Mma::IteratorA::Params(args.lda),
            typename Parts::Mma::IteratorB::Params(args.ldb),
            Parts::Visitor::to_underlying_arguments(
                cute::Shape<int, int, int>{args.m, args.n, args.groups->experts_count},
                StoredByRow<C>::arguments(args), nullptr)};
  }
};

// The two ops: GroupedGemmAR is the second one, with another reduction.
template <class C>
struct AGGroupedGemm : GroupedLauncher<C, AwaitRows<C>, GroupedKernel> {};
template <class C>
struct GroupedGemmRS
    : Reduced<GroupedLauncher<C, SumTokens<C>, GroupedKernel>, typename C::Output, false> {};

}  // namespace flux::sm80
