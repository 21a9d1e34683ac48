// mbarrier objects: eight bytes of shared memory that count arrivals and bytes in phases.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "machine.h"

namespace ptx_machine {

// What PTX does not allow with an object. The message does not name the thread.
struct MbarrierError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr std::int64_t kMostCount = (1 << 20) - 1;  // arrivals, and bytes up or down

struct Mbarrier {
  std::int64_t pending = 0;   // arrivals until the phase is complete
  std::int64_t expected = 0;  // arrivals of the next phase
  std::int64_t bytes = 0;     // the tx-count: below zero when bytes come before they are expected
  bool phase = false;         // parity of the phase under way
};

// Returns the object at a place, or throws MbarrierError if there is none.
Mbarrier load_mbarrier(const Place& place);

// mbarrier.complete_tx, as the asynchronous engine performs it.
void complete_bytes(const Place& place, std::uint64_t bytes);
// An arrival without a thread, as cp.async.mbarrier.arrive makes it.
void arrive_once(const Place& place);

}  // namespace ptx_machine
