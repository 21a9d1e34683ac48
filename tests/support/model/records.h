// What recording_gpu.cpp writes down, and the parts of a tile that it does so with.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

namespace {

// records.py has the same lists.
enum Kind : std::int32_t {
  kCopy,    // bytes from `from` to `at`
  kFill,    // bytes at `at` with `value`
  kRaise,   // word `at` becomes `value`
  kAwait,   // until word `at` has reached `value`
  kEvent,   // event number `value` is recorded
  kJoin,    // until event number `value` has come
  kLaunch,  // a kernel begins; what follows with tile >= 0 belongs to it
  kRead,    // of `bytes` at `at`, which should be `what` of rank `source`, from byte `offset` on
  kWrite,   // in the same way
  kReset    // word `at` becomes 0 again
};
// Contents, each a matrix without gaps. Rows of x count from the first of the rank that has them.
// A sum is what the ranks of a node, of which `source` is the first, have for the rows of another.
enum What : std::int32_t { kNothing, kX, kPartial, kResult, kOutput, kSum };

struct Record {
  std::int32_t kind;
  std::int32_t tile;  // -1: an operation of the stream itself
  std::int32_t what;
  std::int32_t source;
  std::uint64_t stream;
  std::uint64_t at;
  std::uint64_t from;
  std::uint64_t bytes;
  std::uint64_t offset;
  std::uint32_t value;  // with a read or a write: the epoch of what it is
  std::uint32_t pad;
};

std::vector<Record> records;
std::uint32_t events = 0;
std::uint32_t call_epoch = 0;  // by which contents are told apart
int call_rank = 0;             // whose call it is
std::uint32_t first_epoch = 0;
bool no_call_yet = true;
std::uint64_t capture = 0;  // that calls belong to; 0: none

Record& add(Kind kind, const void* stream, const void* at = nullptr, std::uint32_t value = 0) {
  Record r{};
  r.kind = kind;
  r.tile = -1;
  r.stream = reinterpret_cast<std::uint64_t>(stream);
  r.at = reinterpret_cast<std::uint64_t>(at);
  r.value = value;
  records.push_back(r);
  return records.back();
}

constexpr int kTileM = 2;
constexpr int kTileN = 8;
constexpr std::uint64_t kElement = 2;  // bytes

// The records of one tile.
struct Tile {
  const void* stream;
  std::uint32_t epoch;
  int number;

  template <class Word>
  void word(Kind kind, const Word* words, int index) const {
    add(kind, stream, words + index, epoch).tile = number;
  }
  // `elements` at `at`; `first` is the number of the first one in the matrix that they belong to.
  void touch(Kind kind, const void* at, int elements, What what, int source,
             std::int64_t first) const {
    Record& r = add(kind, stream, at, call_epoch);
    r.tile = number;
    r.what = what;
    r.source = source;
    r.bytes = elements * kElement;
    r.offset = first * kElement;
  }
};

template <class Element>
Element* element(Element* base, std::int64_t at) {
  using Byte = std::conditional_t<std::is_const_v<Element>, const char, char>;
  return static_cast<Element*>(static_cast<Byte*>(base) + at * kElement);
}

// A kernel, or the device, does something beside a stream when it pleases: a thread of its own, for which
// a stream is invented.
struct Invented {
  std::uint64_t stream;
  int rank;
};
std::vector<Invented> invented;

void* invent(int rank) {
  auto* stream = new int;
  invented.push_back({reinterpret_cast<std::uint64_t>(stream), rank});
  return stream;
}

}  // namespace
