// Reduction of W partial results, in rank order, in at least fp32.
#pragma once

#include <cstddef>

namespace flux::host {

enum class DType : int { kF64 = 0, kF32 = 1, kBF16 = 2, kF16 = 3 };

constexpr std::size_t size_of(DType t) { return t == DType::kF64 ? 8 : t == DType::kF32 ? 4 : 2; }

struct ReduceArgs {
  DType dtype;
  const void* const* sources;  // `source_count` blocks of `count` elements, in rank order
  int source_count;
  void* out;         // may be one of the sources
  const void* bias;  // nullptr, or `columns` elements added to every row
  std::size_t count;
  std::size_t columns;  // count is a multiple of it
  double scale;         // 1, or 1/W for an average; applied before the bias
};

// out = scale * (sources[0] + sources[1] + ...) + bias. Sums are fp64 for fp64 and fp32 otherwise,
// always in the order of `sources`, and rounded once. So the result does not depend on the order of
// arrival.
void reduce(const ReduceArgs& args);

}  // namespace flux::host
