// Grouped GEMM + ReduceScatter for sm_90a.
#pragma once

#include "cuda/gemm/sm90/grouped.cuh"
#include "cuda/gemm/sum_tokens.cuh"

namespace flux::sm90 {

template <class C>
struct GroupedGemmRS : SummingLauncher<C, GroupedKernel> {};

}  // namespace flux::sm90
