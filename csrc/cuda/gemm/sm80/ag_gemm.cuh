// AllGather + GEMM in one kernel, for sm_80 and newer (Flux paper, 3.1 and Algorithm 2). All of it is
// in the placement of tiles: sm80/gemm.cuh.
#pragma once

#include "cuda/gemm/sm80/gemm.cuh"

namespace flux::sm80 {

template <class C>
struct AGGemm : Launcher<C, visit::Stored<C>, OpKind::kAGGemm> {};

}  // namespace flux::sm80
