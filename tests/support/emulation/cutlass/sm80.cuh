// GEMMs of CUTLASS 2.x for sm_80 as CUTLASS composes them, through its device-wide interfaces.
#pragma once

#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm.h"
#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle_streamk.h"
#include "problem.h"

namespace plain {

using cutlass::gemm::GemmShape;
using InOrder = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
using StreamK = cutlass::gemm::threadblock::ThreadblockSwizzleStreamK;

template <class Element_, class Result_, class Sum_, class A_, class B_, class Tile_, class Warp_,
          class Instruction_, int kStages_, int kAlignment_, int kStored_>
struct Choice {
  using Element = Element_;
  using Result = Result_;
  using Sum = Sum_;
  using A = A_;
  using B = B_;
  using Tile = Tile_;
  using Warp = Warp_;
  using Instruction = Instruction_;
  static constexpr int kStages = kStages_, kAlignment = kAlignment_, kStored = kStored_;
  using Epilogue =
      cutlass::epilogue::thread::LinearCombination<Result, kStored, Sum, Scalar<Result>>;
};

// cutlass::gemm::device::Gemm. Parts of K are added up one after the other.
template <class C, class Class = cutlass::arch::OpClassTensorOp, bool kSplits = false>
struct Multistage {
  using Gemm =
      cutlass::gemm::device::Gemm<typename C::Element, typename C::A, typename C::Element,
                                  typename C::B, typename C::Result, Row, typename C::Sum, Class,
                                  cutlass::arch::Sm80, typename C::Tile, typename C::Warp,
                                  typename C::Instruction, typename C::Epilogue, InOrder,
                                  C::kStages, C::kAlignment, C::kAlignment, kSplits>;
  static typename Gemm::Arguments arguments(Problem const& p) {
    auto const* a = static_cast<typename C::Element const*>(p.a);
    auto const* b = static_cast<typename C::Element const*>(p.b);
    auto const* c = static_cast<typename C::Result const*>(p.c);
    using Number = Scalar<typename C::Result>;
    return {{p.m, p.n, p.k},
            {a, p.lda},
            {b, p.ldb},
            {c, p.ldd},
            {static_cast<typename C::Result*>(p.d), p.ldd},
            {static_cast<Number>(p.alpha), static_cast<Number>(p.beta)},
            kSplits ? p.parts : 1};
  }
};

// cutlass::gemm::device::GemmUniversal with parts of K of equal size, or stream-K.
template <class C, class Swizzle>
struct Universal {
  using Gemm = cutlass::gemm::device::GemmUniversal<
      typename C::Element, typename C::A, typename C::Element, typename C::B, typename C::Result,
      Row, typename C::Sum, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, typename C::Tile,
      typename C::Warp, typename C::Instruction, typename C::Epilogue, Swizzle, C::kStages,
      C::kAlignment, C::kAlignment>;
  static typename Gemm::Arguments arguments(Problem const& p) {
    typename Gemm::Arguments made(cutlass::gemm::GemmUniversalMode::kGemm, {p.m, p.n, p.k}, p.parts,
                                  {p.alpha, p.beta}, p.a, p.b, p.c, p.d, 0, 0, 0, 0, p.lda, p.ldb,
                                  p.ldd, p.ldd);
    if constexpr (std::is_same_v<Swizzle, StreamK>) made.avail_sms = p.sms;
    return made;
  }
};

}  // namespace plain
