// How stand-in kernels wait, report failures and record what they do: the contract of FluxSync and
// FluxTrace (csrc/cuda/abi.h) once more, on the emulated GPU.
#pragma once

#include <cstdint>

#include "cuda/abi.h"
#include "gpu/device.h"

namespace emulated {

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

// Writes a failed wait, its code last.
inline void record_failure(const FluxSync& sync, const Wait& wait, std::uint32_t seen) {
  for (std::uint64_t* to : {sync.status, sync.report}) {
    if (to == nullptr) continue;
    to[FLUX_STATUS_TILE] = static_cast<std::uint64_t>(wait.row);
    to[FLUX_STATUS_SIGNAL] = static_cast<std::uint64_t>(wait.index);
    to[FLUX_STATUS_EXPECTED] = wait.value;
    to[FLUX_STATUS_OBSERVED] = seen;
    __atomic_store_n(to, static_cast<std::uint64_t>(wait.code), __ATOMIC_RELEASE);
  }
}

// Copies a failure that stands in the status to the host. Peers that gave up have written there.
inline void report_failure(const FluxSync& sync) {
  if (sync.report == nullptr) return;
  const std::uint64_t code = __atomic_load_n(sync.status, __ATOMIC_ACQUIRE);
  for (int i = 1; code != 0 && i < FLUX_STATUS_WORDS; ++i) sync.report[i] = sync.status[i];
  if (code != 0) __atomic_store_n(sync.report, code, __ATOMIC_RELEASE);
}

// Lets work wait by `sync`; with `reports`, it reports failures when its last block ends.
inline void set_sync(const FluxSync& sync, bool reports, Work* work) {
  work->patience = std::chrono::nanoseconds(sync.timeout_ns);
  work->abandoned = [=] { return __atomic_load_n(sync.status, __ATOMIC_ACQUIRE) != 0; };
  work->late = [=](const Wait& wait, std::uint32_t seen) { record_failure(sync, wait, seen); };
  work->waited = [=](const Wait& wait, std::uint64_t since, Place at) {
    tell(sync, since, FLUX_TRACE_WAIT, wait.row, wait.code, wait.index, at);
  };
  if (reports) work->over = [=] { report_failure(sync); };
}

}  // namespace emulated
