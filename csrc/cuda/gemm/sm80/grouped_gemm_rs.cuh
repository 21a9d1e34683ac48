// Grouped GEMM + ReduceScatter for sm_80 and newer.
#pragma once

#include "cuda/gemm/sm80/grouped.cuh"
#include "cuda/gemm/sum_tokens.cuh"

namespace flux::sm80 {

template <class C>
struct GroupedGemmRS : SummingLauncher<C, GroupedKernel> {};

}  // namespace flux::sm80
