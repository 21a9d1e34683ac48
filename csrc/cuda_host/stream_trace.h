// What streams of a GPU did when, for a trace (flux/trace): by events of the driver on both sides of what
// is put on a stream.
//
// Events and not kernels that read the clock: a kernel needs a multiprocessor, and a persistent GEMM which
// waits for the very copy that is to be stamped may hold all of them. All events are there before the
// call; what finds none is counted. They cost a stream about a microsecond each.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/lane.h"
#include "cuda_host/driver.h"
#include "cuda_host/kernels.h"

namespace flux::host {

// How clocks are related: what is added to stamps of the device (%globaltimer) to have Lane::now, and an
// event whose time is known.
struct ClockTie {
  std::int64_t event_ns = 0;        // of Lane::now, when the reference event passed
  std::int64_t offset_ns = 0;       // of %globaltimer
  std::int64_t uncertainty_ns = 0;  // of both, against Lane::now
  std::int64_t between_ns = 0;      // of events against %globaltimer
  std::int64_t resolution_ns = 0;   // of %globaltimer: the least step seen
};

class StreamTrace {
 public:
  static constexpr int kNone = -1;

  // Room for `capacity` stretches of time, on all streams together.
  StreamTrace(std::shared_ptr<Driver> driver, std::size_t capacity);
  ~StreamTrace();
  StreamTrace(const StreamTrace&) = delete;
  // Gives the events back, when all that was recorded has passed. Idempotent.
  void close();

  // What is put on `stream` between these two is what `what` says.
  int begin(Stream stream);
  void end(int token, Stream stream, const Record& what);
  // Several things at once.
  void end(int token, Stream stream, const std::vector<Record>& what);

  // Ties the clocks, on an idle device: the quickest of some rounds. With `kernel`, of a trace build, the
  // device's clock too; it needs `times`, memory of kStamps words that device and host can address.
  static constexpr int kStamps = 512;
  ClockTie tie(Stream stream, const Kernel* kernel, std::uint64_t* times);

  // By what was recorded: on which stream, and what. When the streams are done, and after tie().
  std::vector<std::pair<Stream, Record>> read() const;
  std::size_t dropped() const { return dropped_; }

 private:
  struct Stretch {
    Stream stream;
    int token;
    Record what;
  };
  Event event(int token, bool end) const { return events_[2 * token + (end ? 1 : 0)]; }

  std::shared_ptr<Driver> driver_;
  std::vector<Event> events_;  // begin and end of each token
  std::vector<Stretch> stretches_;
  std::size_t used_ = 0;  // tokens
  std::size_t dropped_ = 0;
  Event reference_ = 0;
  ClockTie tie_;
};

// The part of a record that is known at submission: all but its times.
inline Record told(Work work, std::uint32_t call, int peer = -1, int chunk = -1, int tile = -1,
                   Range rows = {0, 0}, int at = -1, int signal = -1, std::int64_t bytes = 0) {
  return {0, 0, call, work, peer, chunk, tile, rows, at, signal, bytes};
}

// Puts `body` on a stream, with stamps during a trace. Only then `what` is called, for the record of
// it, or for several.
template <class What, class Body>
void stamped(StreamTrace* trace, Stream stream, What&& what, Body&& body) {
  const int token = trace != nullptr ? trace->begin(stream) : StreamTrace::kNone;
  std::forward<Body>(body)();
  if (token != StreamTrace::kNone) trace->end(token, stream, what());
}

}  // namespace flux::host
