// cuStreamBatchMemOp for drivers that are not there, by their waits and writes of one word.
#pragma once

#include <cstdint>

// CUstreamBatchMemOpParams, as far as waits and writes of 32 bits go.
struct BatchOp {
  int operation;
  std::uint64_t address, value;
  unsigned flags;
  std::uint64_t alias, pad;
};

using WordOp = int(void* stream, std::uintptr_t word, std::uint32_t value, unsigned flags);

inline int one_by_one(void* stream, unsigned count, const BatchOp* ops, WordOp* wait,
                      WordOp* write) {
  for (unsigned i = 0; i < count; ++i) {
    const auto value = static_cast<std::uint32_t>(ops[i].value);
    (ops[i].operation == 1 ? wait : write)(stream, ops[i].address, value, 0);
  }
  return 0;
}
