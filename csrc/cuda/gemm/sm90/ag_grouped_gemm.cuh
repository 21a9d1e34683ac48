// AllGather + grouped GEMM for sm_90a.
#pragma once

#include "cuda/gemm/await_rows.cuh"
#include "cuda/gemm/sm90/grouped.cuh"

namespace flux::sm90 {

template <class C>
struct AGGroupedGemm : GroupedLauncher<C, AwaitRows<C>, GroupedKernel> {};

}  // namespace flux::sm90
