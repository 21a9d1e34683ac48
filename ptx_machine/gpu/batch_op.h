// Arguments of drivers that are not there, and cuStreamBatchMemOp by their waits and writes of one word.
#pragma once

#include <cstddef>
#include <cstdint>

// CUstreamBatchMemOpParams, as far as waits and writes of 32 bits go.
struct BatchOp {
  int operation;
  std::uint64_t address, value;
  unsigned flags;
  std::uint64_t alias, pad;
};

// CUDA_MEMCPY2D_v2
struct Copy2D {
  std::size_t from_x, from_y;
  int from_kind;
  const void* from_host;
  std::uintptr_t from;
  void* from_array;
  std::size_t from_pitch;
  std::size_t to_x, to_y;
  int to_kind;
  void* to_host;
  std::uintptr_t to;
  void* to_array;
  std::size_t to_pitch;
  std::size_t width, height;
};
static_assert(sizeof(Copy2D) == 128);

using WordOp = int(void* stream, std::uintptr_t word, std::uint32_t value, unsigned flags);

inline int one_by_one(void* stream, unsigned count, const BatchOp* ops, WordOp* wait,
                      WordOp* write) {
  for (unsigned i = 0; i < count; ++i) {
    const auto value = static_cast<std::uint32_t>(ops[i].value);
    (ops[i].operation == 1 ? wait : write)(stream, ops[i].address, value, 0);
  }
  return 0;
}
