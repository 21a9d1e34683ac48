// The values that words of strong accesses have had.
#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "order.h"

namespace ptx_machine {

// A value that a strong access stored, and what it releases.
struct SyncValue {
  std::uint64_t value = 0;
  Scoped views;
  Position position;
  Agent agent = kNobody;  // that stored it; kNobody: from outside
  int lane = 0;
  std::uint32_t clock = 0;
  std::uint64_t number = 0;  // among all values that were stored
  std::uint64_t vector = 0;  // of the vector that it was an element of
  // The first load of each thread that has returned it. Of more, some are forgotten.
  static constexpr std::size_t kMostReaders = 64;
  std::vector<Access> readers;

  Access store() const { return {agent, clock, Mask{1} << lane, 0}; }
  void add_reader(Agent reader, std::uint32_t clock, Mask lane);
};

// A word that strong accesses are made to: its last values, the newest at the end.
struct SyncPlace {
  static constexpr std::size_t kKept = 4;
  static constexpr std::size_t kMostLoads = 64;
  struct Seen {
    Access load;
    std::uint64_t number = 0;  // of the value that it returned
  };
  std::uint64_t bytes = 0;
  std::deque<SyncValue> values;
  std::vector<Seen> seen;  // the last load of each thread, while there is more than one value
};
using SyncPlaces = std::unordered_map<std::uint64_t, SyncPlace>;

}  // namespace ptx_machine
