// The signal pad: one block of shared memory per rank. Through it ranks announce that data is ready,
// that a call has begun, and that an op has failed or was closed.
//
// Memory ordering
//   raise: data written by this thread  --(store release)-->  signal
//   wait:  signal  --(load acquire)-->  data read by this thread
//   A waiter that goes to sleep first adds itself to `waiters`, then looks at the signal once more;
//   a raiser first stores the signal, then looks at `waiters`. All four accesses are sequentially
//   consistent, so the two cannot both miss each other (store-buffer litmus): no wake-up is lost,
//   and an uncontended raise costs no system call. (Fences would do as well, but ThreadSanitizer
//   does not understand them.) GEMM and memcpy kernels may write with non-temporal stores. On x86 a
//   release store does not order these, so raise_signal issues a store fence before the signal.
//
// Reuse (write after read)
//   Signals carry the epoch of the call and are never cleared (core/signal.h). A rank *enters*
//   epoch e by storing (e, digest) in `entries`. It does so only after it has finished call e-1,
//   that is after its last read of its own and of its peers' buffers for e-1. A rank writes to no
//   buffer of another in epoch e before it has seen every rank enter e. Hence no write of epoch e can
//   overtake a read of e-1, with a single buffer per op. The digest lets the same load reveal that
//   ranks disagree about the call, before any data moves.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "core/signal.h"
#include "cpu/clock.h"
#include "cpu/futex.h"

namespace flux::host {

enum class PadState : std::uint32_t { kOpen = 0, kClosed = 1, kFailed = 2 };

// Version of the layout of shared memory: pads, data, and the meaning of words. Raised with every change;
// ranks with different numbers cannot build an op together.
constexpr int kLayoutNumber = 2;

constexpr int kEntryHistory = 64;  // calls a refusing rank may run ahead of the slowest reader
constexpr int kRefusalWords = 32;  // 256 bytes of explanation
constexpr std::uint32_t kRefused = 0xffffffffu;  // digest of a call whose input a rank refused

struct alignas(64) SignalPad {
  // Written by threads that raise a signal of this pad, read by threads that sleep on it.
  Word wake;
  Word waiters;
  // Written by the owner only.
  alignas(64) std::atomic<std::uint32_t> state;
  std::atomic<std::uint32_t> culprit;  // with kFailed: the rank that the owner gave up on
  // When the owner last looked at its peers in a collective of the library: nanoseconds of the
  // steady clock, which all processes of a host share.
  std::atomic<std::int64_t> looked;
  alignas(64) std::atomic<std::uint64_t> entries[kEntryHistory];
  std::atomic<std::uint64_t> refusal[kRefusalWords];

  Word* signals() { return reinterpret_cast<Word*>(this + 1); }

  static std::size_t bytes(int signal_count) {
    const std::size_t raw =
        sizeof(SignalPad) + sizeof(Word) * static_cast<std::size_t>(signal_count);
    return (raw + 4095) / 4096 * 4096;  // data behind the pad stays page-aligned
  }
};

inline void notify(SignalPad& pad) {
  if (pad.waiters.load(std::memory_order_seq_cst) != 0) {
    pad.wake.fetch_add(1, std::memory_order_release);
    futex_wake_all(pad.wake);
  }
}

inline void raise_signal(SignalPad& pad, int index, std::uint32_t epoch) {
  store_fence();
  pad.signals()[index].store(epoch, std::memory_order_seq_cst);
  notify(pad);
}

inline bool signal_reached(SignalPad& pad, int index, std::uint32_t epoch) {
  return epoch_reached(pad.signals()[index].load(std::memory_order_seq_cst), epoch);
}

// Waits until `ready()` or until `until`; returns whether it was ready. `ready` reads words of
// `pad`. Spins for `spin` first: a peer that runs on another core answers within microseconds, far
// sooner than a sleeping thread can be woken.
template <class Ready>
bool wait_until(SignalPad& pad, Clock::time_point until, std::chrono::nanoseconds spin,
                Ready&& ready) {
  if (ready()) return true;
  const auto spin_end = std::min(until, Clock::now() + spin);
  do {
    for (int i = 0; i < 32; ++i) cpu_relax();
    if (ready()) return true;
    // The peer may be queued on the same core, behind this thread.
    std::this_thread::yield();
  } while (Clock::now() < spin_end);
  pad.waiters.fetch_add(1, std::memory_order_seq_cst);
  bool is_ready = false;
  for (;;) {
    const std::uint32_t seen = pad.wake.load(std::memory_order_acquire);
    is_ready = ready();
    const auto now = Clock::now();
    if (is_ready || now >= until) break;
    futex_wait(pad.wake, seen, until - now);
  }
  pad.waiters.fetch_sub(1, std::memory_order_seq_cst);
  return is_ready;
}

constexpr std::uint64_t entry_of(std::uint32_t epoch, std::uint32_t digest) {
  return (static_cast<std::uint64_t>(epoch) << 32) | digest;
}

inline void publish_entry(SignalPad& pad, std::uint32_t epoch, std::uint32_t digest) {
  pad.entries[epoch % kEntryHistory].store(entry_of(epoch, digest), std::memory_order_seq_cst);
  notify(pad);
}

// Reads the pad's word for `epoch` into `entry` and returns the epoch that the word holds. That is
// an earlier epoch before the pad's owner has entered. It is a later one if the owner refused calls
// and ran ahead.
inline std::uint32_t read_entry(SignalPad& pad, std::uint32_t epoch, std::uint64_t* entry) {
  *entry = pad.entries[epoch % kEntryHistory].load(std::memory_order_seq_cst);
  return static_cast<std::uint32_t>(*entry >> 32);
}

// The explanation is published by the release store of the refusing entry and is read after its
// acquire load. The text is only displayed, so a text torn by a later refusal is harmless.
inline void publish_refusal(SignalPad& pad, std::uint32_t epoch, const std::string& why) {
  char text[kRefusalWords * 8] = {};
  std::memcpy(text, why.data(), std::min(why.size(), sizeof(text) - 1));
  for (int i = 0; i < kRefusalWords; ++i) {
    std::uint64_t word;
    std::memcpy(&word, text + 8 * i, 8);
    pad.refusal[i].store(word, std::memory_order_relaxed);
  }
  publish_entry(pad, epoch, kRefused);
}

inline std::string read_refusal(SignalPad& pad) {
  char text[kRefusalWords * 8];
  for (int i = 0; i < kRefusalWords; ++i) {
    const std::uint64_t word = pad.refusal[i].load(std::memory_order_relaxed);
    std::memcpy(text + 8 * i, &word, 8);
  }
  text[sizeof(text) - 1] = 0;
  return text;
}

}  // namespace flux::host
