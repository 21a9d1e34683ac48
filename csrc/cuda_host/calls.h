// The eager calls that one of this process's ranks has on streams, of all its ops.
//
// They run one after the other, in the order in which the host makes them. If two of them waited for
// peers at the same time, each with the multiprocessors that the other one needs on a peer, neither
// would end.
//
// A kernel that waits gives up by itself. A stream cannot, so the host must find out which call has
// gone on for too long. Calls whose streams wait therefore have an event at either end, of their own.
// A device's memory would tell as much, but a copy of words that kernels change is a race.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "cuda_host/driver.h"

namespace flux::host {

class Calls {
 public:
  struct Call {
    const void* op;
    std::uint64_t number;
  };

  // One object for each `lane`, the rank's number in the process. It lives as long as an op holds it.
  static std::shared_ptr<Calls> of(const std::shared_ptr<Driver>& driver, int lane);
  explicit Calls(std::shared_ptr<Driver> driver);
  ~Calls();
  Calls(const Calls&) = delete;

  // Orders the next work on `stream` after the last call. `waits`: streams of this call wait for peers.
  void begin(Stream stream, const void* op, bool waits);
  // After the last work of a call.
  void end(Stream stream);
  // The call whose streams may wait for peers now: it has begun and not ended.
  std::optional<Call> waiting();

 private:
  struct Ends {
    Call call;
    Event begun;
    Event ended;
  };

  Event event();
  void forget_ended();

  std::shared_ptr<Driver> driver_;
  std::deque<Ends> waits_;    // calls whose streams wait, oldest first
  std::vector<Event> spare_;  // of such calls
  Event ended_;               // of the last of the other calls
  Event last_ = 0;            // after which the next call comes; 0: there is nothing to come after
  bool in_waits_ = false;     // the call that is being put on streams is the last of waits_
  std::optional<Stream> stream_;  // of the last call; torch's default stream is 0
  std::uint64_t number_ = 0;
};

}  // namespace flux::host
