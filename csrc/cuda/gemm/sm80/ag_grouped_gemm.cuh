// AllGather + grouped GEMM for sm_80 and newer.
#pragma once

#include "cuda/gemm/await_rows.cuh"
#include "cuda/gemm/sm80/grouped.cuh"

namespace flux::sm80 {

template <class C>
struct AGGroupedGemm : GroupedLauncher<C, AwaitRows<C>, GroupedKernel> {};

}  // namespace flux::sm80
