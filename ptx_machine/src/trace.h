// What warps did and when, as far as it is recorded.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "machine.h"

namespace ptx_machine {

struct Event {
  std::uint64_t time;   // statements that were executed before, by all warps
  std::uint32_t block;  // in the order of their start
  std::int32_t warp;
  std::int32_t statement;  // of the kernel
  Mask lanes;
  std::uint32_t waits;  // 1: it was not executed, because it had to wait
};
static_assert(sizeof(Event) == 32);  // ptx_machine/trace.py reads them

struct Events {
  std::uint64_t most = 0;     // that are kept
  std::uint64_t dropped = 0;  // that came later
  std::vector<Event> all;
  std::vector<Dim> blocks;  // their indices, in the order of their start

  // Of a wait only the first try counts, until the warp does something else.
  void add(const Event& event) {
    Event& last = last_[{event.block, event.warp}];
    if (event.waits != 0 && last.waits != 0 && last.statement == event.statement) return;
    last = event;
    if (all.size() < most) {
      all.push_back(event);
    } else {
      ++dropped;
    }
  }

 private:
  std::map<std::pair<std::uint32_t, std::int32_t>, Event> last_;  // by block and warp
};

}  // namespace ptx_machine
