// One product, as tests pass it to CUTLASS's own GEMMs: D = alpha A B + beta C, without a batch.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/layout/matrix.h"

namespace plain {

struct Problem {
  int m, n, k;
  int lda, ldb, ldd;  // of C too
  const void *a, *b, *c;
  void* d;
  float alpha, beta;
  int sms;    // that a persistent kernel may use
  int parts;  // of K, for kernels that divide it
  void* workspace;
};

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

// Numbers of scaling and bias: whole ones for whole results.
template <class Result>
using Scalar = std::conditional_t<std::is_integral_v<Result>, Result, float>;

// Runs a GEMM with these arguments; returns a cutlass::Status.
template <class Gemm>
int run(typename Gemm::Arguments const& arguments, void* workspace) {
  Gemm gemm;
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(arguments, workspace);
  if (status == cutlass::Status::kSuccess) status = gemm();
  return static_cast<int>(status);
}

}  // namespace plain

// The functions of one GEMM: `Type` has a Gemm and arguments(problem).
#define PLAIN_GEMM(name, ...)                                                                 \
  extern "C" __attribute__((visibility("default"))) int name(plain::Problem const* problem) { \
    using Type = __VA_ARGS__;                                                                 \
    return plain::run<Type::Gemm>(Type::arguments(*problem), problem->workspace);             \
  }                                                                                           \
  extern "C" __attribute__((visibility("default"))) std::size_t name##_workspace(             \
      plain::Problem const* problem) {                                                        \
    using Type = __VA_ARGS__;                                                                 \
    return Type::Gemm::get_workspace_size(Type::arguments(*problem));                         \
  }
