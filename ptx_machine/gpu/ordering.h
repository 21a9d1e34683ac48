// What the emulated GPU tells the machine that runs its kernels: which copies, launches and words of streams
// come behind which. The thread that runs a stream's items calls these, unless they name a stream.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulated {

struct Ordering {
  // The host puts something on a stream: a number for what the host has waited for so far.
  std::uint64_t (*submitted)();
  // An item of a stream begins, which the host has put there then.
  void (*begins)(int stream, std::uint64_t submitted);
  // The host has waited for all that is on a stream.
  void (*awaited)(int stream);
  // A copy, or a fill (no source), begins or has ended; whether it writes whole words.
  void (*copies)(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, int words, int ended);
  // A NIC begins to write, or has written.
  void (*puts)(std::uintptr_t to, std::size_t bytes, int ended);
  // A stream writes a word; a stream has seen the value of a word that it waited for.
  void (*writes)(std::uintptr_t word, std::uint32_t value);
  void (*sees)(std::uintptr_t word, std::uint32_t value);
  // What the stream knows, which a later item of another one is put behind. The former is dropped in the end.
  void* (*knows)();
  void (*learns)(const void* known);
  void (*drop)(void* known);
};

}  // namespace emulated
