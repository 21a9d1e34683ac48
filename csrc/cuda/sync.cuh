// Signals between the GPUs of a group, as a thread sees them: acquire, release, and waits that end.
//
// Memory ordering. The mover of a tile (copy engine, or the epilogue of a peer) writes its data and
// then its signal; a stream memory operation and st.release.sys both order the two. A waiter reads
// the signal with ld.acquire.sys, so the announced data is visible to its later reads. TMA
// reads through another proxy: after the acquire, and before the first TMA instruction that touches
// the data, the thread that issues it (or one ordered before it by a barrier) executes
// fence.proxy.async.global. In the other direction, bulk stores are complete only after
// cp.async.bulk.wait_group (not .read, which says no more than that their shared memory is free);
// only then may the thread that waited release a flag.
#pragma once

#include <cstdint>

#include "core/signal.h"
#include "cuda/abi.h"
#include "cuda/trace.cuh"

namespace flux {

__device__ __forceinline__ std::uint32_t load_acquire_sys(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Words between nodes (cuda/runtime/nvshmem_abi.h), whose lower half is the epoch. Read whole, as they
// are written: halves of them have no order that the memory model knows of.
__device__ __forceinline__ std::uint32_t load_acquire_sys(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return static_cast<std::uint32_t>(value);
}

__device__ __forceinline__ void store_release_sys(std::uint32_t* word, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Writes the words of a failure, its code last: a host that sees the code sees the rest.
// Plain stores, no atomics: the host's memory is behind PCIe, and has no contention.
__device__ inline void write_report(std::uint64_t* report, std::uint64_t code, std::uint64_t tile,
                                    std::uint64_t signal, std::uint64_t expected,
                                    std::uint64_t observed) {
  if (report == nullptr) return;
  volatile std::uint64_t* words = report;
  words[FLUX_STATUS_TILE] = tile;
  words[FLUX_STATUS_SIGNAL] = signal;
  words[FLUX_STATUS_EXPECTED] = expected;
  words[FLUX_STATUS_OBSERVED] = observed;
  __threadfence_system();
  words[FLUX_STATUS_CODE] = code;
}

// Keeps the first failure of a launch: of waits that fail at the same time that of the thread that claims
// it, in a word of its own. Peers that give up write to the others, and no order has that with an atomic.
__device__ inline void record_failure(const FluxSync& sync, int code, int tile, int signal,
                                      std::uint32_t observed) {
  if (atomicExch(reinterpret_cast<unsigned*>(sync.status + FLUX_STATUS_CLAIM), 1u) != 0) return;
  const auto where = static_cast<std::uint64_t>(tile), what = static_cast<std::uint64_t>(signal);
  write_report(sync.status, static_cast<std::uint64_t>(code), where, what, sync.epoch, observed);
  write_report(sync.report, static_cast<std::uint64_t>(code), where, what, sync.epoch, observed);
}

// Whether all ranks have found by themselves that a call has no result (FLUX_MANY_ROWS and others): who
// tells a peer that it gave up would hide why.
__device__ __forceinline__ bool known_to_all(const FluxSync& sync) {
  const volatile std::uint64_t* status = sync.status;
  const std::uint64_t code = status[FLUX_STATUS_CODE];
  return code == FLUX_MANY_ROWS || code == FLUX_BAD_EXPERT;
}

// Called at the end of a kernel: reports to the host that a peer has given up, which the peer wrote to
// the own status only. One thread of each block calls it; without a failure it is one load from L2.
//
// It misses no failure that affects the data. A peer writes FLUX_ABANDONED here, then raises the words
// that its own streams wait for (csrc/cuda_host/cuda_op.cpp, let_go). Those streams then raise signals or
// flags here without the data. So the status is written before any such signal. A thread that
// acquired the signal, or one behind it at a barrier, loads the status later than that: it sees it.
// Failures of the own waits are reported where they are found (record_failure).
__device__ __forceinline__ void report_failure(const FluxSync& sync) {
  if (sync.report == nullptr) return;
  const volatile std::uint64_t* status = sync.status;
  if (status[FLUX_STATUS_CODE] != FLUX_ABANDONED) return;
  __threadfence_system();  // the code is the last word that the peer wrote
  write_report(sync.report, FLUX_ABANDONED, status[FLUX_STATUS_TILE], status[FLUX_STATUS_SIGNAL],
               status[FLUX_STATUS_EXPECTED], status[FLUX_STATUS_OBSERVED]);
}

// Spins until `word`, which is reported as `signal`, has reached the epoch. Gives up, with false, when
// the time is over, or when another wait has: the kernel then ends. Its own result is wrong and the
// host discards it; it neither stores to peers nor raises their signals any more. Inlined: a
// producer warp has 40 registers, and a call would make it spill those it keeps across.
template <class Word>
__device__ __forceinline__ bool await_epoch(const Word* word, int signal, const FluxSync& sync,
                                            int code, int tile) {
  const volatile std::uint64_t* failed = sync.status + FLUX_STATUS_CODE;
  const std::uint64_t begin = nanoseconds();
  for (;;) {
    const std::uint32_t seen = load_acquire_sys(word);
    if (epoch_reached(seen, sync.epoch)) {
      tell(sync, begin, {FLUX_TRACE_WAIT, tile, code, signal});
      return true;
    }
    if (*failed != 0) return false;
    if (nanoseconds() - begin > sync.timeout_ns) {
      record_failure(sync, code, tile, signal, seen);
      return false;
    }
    __nanosleep(32);
  }
}

// What entries are awaited with: in a captured call, the number of which it is on this replay.
__device__ __forceinline__ FluxSync entry_sync(FluxSync sync) {
  if (sync.count != nullptr) sync.epoch = *sync.count;
  return sync;
}

// Waits for one word; quick when it is there. Whether it came.
template <class Word>
__device__ __forceinline__ bool await_word(const Word* word, int signal, const FluxSync& sync,
                                           int code, int tile) {
  if (epoch_reached(load_acquire_sys(word), sync.epoch)) return true;
  return await_epoch(word, signal, sync, code, tile);
}

// The same for one of several signals.
__device__ __forceinline__ bool await(const std::uint32_t* words, int index, const FluxSync& sync,
                                      int code, int tile) {
  return await_word(words + index, index, sync, code, tile);
}

}  // namespace flux
