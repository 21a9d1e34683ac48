// Times of work on streams of a GPU, for a trace (flux/trace). Driver events before and after the
// work on a stream measure them.
//
// Events measure and not kernels that read the clock. A kernel needs a multiprocessor, and a
// persistent GEMM that waits for the very copy that is measured may hold all of them. All events
// are created before the call. Work that finds no free event is counted. An event costs a stream
// about a microsecond.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/lane.h"
#include "cuda_host/driver.h"
#include "cuda_host/kernels.h"

namespace flux::host {

// Relation of the clocks: the offset from stamps of the device (%globaltimer) to Lane::now, and the
// time of a reference event.
struct ClockTie {
  std::int64_t event_ns = 0;        // by Lane::now, when the reference event passed
  std::int64_t offset_ns = 0;       // of %globaltimer
  std::int64_t uncertainty_ns = 0;  // of both, against Lane::now
  std::int64_t between_ns = 0;      // of events against %globaltimer
  std::int64_t resolution_ns = 0;   // of %globaltimer: the smallest step observed
};

class StreamTrace {
 public:
  static constexpr int kNone = -1;

  // Creates events for `capacity` stretches of time, on all streams together.
  StreamTrace(std::shared_ptr<Driver> driver, std::size_t capacity);
  ~StreamTrace();
  StreamTrace(const StreamTrace&) = delete;
  // Destroys the events. All recorded events must have passed. Idempotent.
  void close();

  // `what` describes the work that is put on `stream` between begin() and end().
  int begin(Stream stream);
  void end(int token, Stream stream, const Record& what);
  // The same for several records.
  void end(int token, Stream stream, const std::vector<Record>& what);

  // Relates the clocks on an idle device, by the quickest of some rounds. With `kernel`, of a trace
  // build, the device's clock too. This needs `times`, memory of kStamps words that device and host
  // can address.
  static constexpr int kStamps = 512;
  ClockTie tie(Stream stream, const Kernel* kernel, std::uint64_t* times);

  // All records with their times and streams. Called after the streams are done and after tie().
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
inline Record record_of(Work work, std::uint32_t call, int peer = -1, int chunk = -1, int tile = -1,
                        Range rows = {0, 0}, int at = -1, int signal = -1, std::int64_t bytes = 0) {
  return {0, 0, call, work, peer, chunk, tile, rows, at, signal, bytes};
}

// Runs `body`, which puts work on a stream, with events around it during a trace. `what` returns
// the record or records of the work. It is called only during a trace.
template <class What, class Body>
void stamped(StreamTrace* trace, Stream stream, What&& what, Body&& body) {
  const int token = trace != nullptr ? trace->begin(stream) : StreamTrace::kNone;
  std::forward<Body>(body)();
  if (token != StreamTrace::kNone) trace->end(token, stream, what());
}

}  // namespace flux::host
