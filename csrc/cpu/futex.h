// Sleeping on a 32-bit word that may lie in memory shared between processes.
//
// Linux: futex(2) without FUTEX_PRIVATE_FLAG, so that a waiter in another process is woken.
// Elsewhere there is no portable cross-process primitive, so a waiter polls every 100 us.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#endif

namespace flux::host {

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "signals must be plain 32-bit words");

// Sleeps until `word` is woken or `limit` has passed. Returns at once if `word` does not hold
// `expected`. May also return early without a cause, so callers check their condition again.
inline void futex_wait(const Word& word, std::uint32_t expected, std::chrono::nanoseconds limit) {
#if defined(__linux__)
  timespec ts;
  ts.tv_sec = static_cast<time_t>(limit.count() / 1000000000);
  ts.tv_nsec = static_cast<long>(limit.count() % 1000000000);
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &ts, nullptr, 0);
#else
  if (word.load(std::memory_order_acquire) == expected) {
    std::this_thread::sleep_for(std::min(limit, std::chrono::nanoseconds(100000)));
  }
#endif
}

inline void futex_wake_all(const Word& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void store_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace flux::host
