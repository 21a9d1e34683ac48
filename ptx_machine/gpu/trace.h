// What kernels of a trace build put down, on an emulated device (driver.cpp): the contract of
// FluxTrace once more. Its clock is the host's, so far off that nobody can take one for the other.
#pragma once

#include <chrono>
#include <cstdint>

#include "cuda/abi.h"

namespace emulated {

constexpr std::uint64_t kClockOffset = 3'000'000'000'000'000;  // 35 days
constexpr int kMultiprocessors = 8;

// Where something is done.
struct Place {
  int block = 0;
  int sm = 0;
};

inline std::uint64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1) +
         kClockOffset;
}

inline void tell(const FluxSync& sync, std::uint64_t begin, int kind, int row, int column,
                 int signal, Place at) {
  FluxTrace* trace = sync.trace;
  if (trace == nullptr) return;
  const std::uint64_t end = now();
  const std::uint32_t place = __atomic_fetch_add(&trace->count, 1u, __ATOMIC_RELAXED);
  if (place >= trace->capacity) return;
  trace->records[place] = {begin,      end,        kind,  row,
                           column,     signal,     at.sm, at.block * FLUX_TRACE_UNITS,
                           sync.epoch, sync.launch};
}

inline int stamp(std::uint64_t* times, int count) {
  for (int i = 0; i < count; ++i) times[i] = now();
  return 0;
}

}  // namespace emulated
