// Reduction of W partial results, in rank order, in at least fp32.
#pragma once

#include <cstddef>

namespace flux::host {

// The integers are only summed by collectives without a GEMM. Their sums wrap around.
enum class DType : int { kF64 = 0, kF32 = 1, kBF16 = 2, kF16 = 3, kI8 = 4, kI32 = 5, kI64 = 6 };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI8:
      return 1;
    default:
      return 2;
  }
}

struct ReduceArgs {
  DType dtype;
  const void* const* sources;  // `source_count` blocks of `count` elements, in rank order
  int source_count;
  void* out;         // may be one of the sources
  const void* bias;  // nullptr, or `columns` elements added to every row
  std::size_t count;
  std::size_t columns;  // count is a multiple of it
  double scale;         // 1, or 1/W for an average; applied before the bias; 1 for integers
};

// out = scale * (sources[0] + sources[1] + ...) + bias. Sums are fp64 for fp64 and fp32 for the others,
// always in the order of `sources`, and rounded once. So the result does not depend on the order of
// arrival.
void reduce(const ReduceArgs& args);

}  // namespace flux::host
