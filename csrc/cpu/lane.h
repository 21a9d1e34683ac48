// Events of one thread of an op with their times, for a trace (flux/trace).
//
// Only one thread records in a lane. Its memory is allocated beforehand, so a traced call neither
// allocates nor locks. Events that do not fit are counted. A lane is read between calls. The
// reading thread has observed the end of the call in the recording thread, which orders the two.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/signal.h"

namespace flux::host {

// Values as in flux/core/recorder.py.
enum class Work : int {
  kGemm = 0,
  kReduce = 1,
  kCopy = 2,
  kSend = 3,       // to another host
  kReceive = 4,    // from one
  kWait = 5,       // for a signal
  kBarrier = 6,    // for all ranks to enter the call
  kOwnGemm = 7,    // waits for a tile of this rank's own GEMM
  kOwnCopies = 8,  // waits for this rank's own copies and reductions
  // 9: a collective of the library. On streams of a GPU (stream_trace.h):
  kCall = 10,     // from the begin of a call to its end
  kEnter = 11,    // tells the peers that this rank has entered
  kEntry = 12,    // waits for a peer's entry
  kResult = 13,   // waits for all ranks' rows of the result
  kCollect = 14,  // copies rows from symmetric memory to the caller's memory
  kSlab = 15      // a simulated peer's partials; `range`: the flags that follow
};

struct Record {
  std::int64_t begin_ns = 0;  // by Lane::now
  std::int64_t end_ns = 0;
  std::uint32_t call = 0;
  Work work = Work::kGemm;
  int peer = -1;         // the other rank that takes part
  int chunk = -1;        // the owner of the rows
  int tile = -1;         // communication tile of that chunk
  Range range = {0, 0};  // rows; of a GEMM: visits; of a send or receive: its number for that peer
  int at = -1;           // the rank in whose pad `signal` was raised or awaited, if one was
  int signal = -1;
  std::int64_t bytes = 0;
};

class Lane {
 public:
  explicit Lane(std::size_t capacity) : records_(capacity) {}

  // The clock of all stamps: the same in all processes of a host.
  static std::int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  // Adds a record. It ends now, unless its end_ns is set.
  void add(Record record) {
    if (record.end_ns == 0) record.end_ns = now();
    if (count_ == records_.size()) {
      ++dropped_;
    } else {
      records_[count_++] = record;
    }
  }

  // The same for one of several tiles that are awaited together and arrive one after the other. The
  // record begins when the one before it ends.
  void add_after_last(Record record) {
    if (count_ > 0) record.begin_ns = std::max(record.begin_ns, records_[count_ - 1].end_ns);
    add(record);
  }

  // The same for a wait. It stays one record if the thread returned to its caller during the wait.
  void add_wait(const Record& record) {
    if (count_ > 0) {
      Record& last = records_[count_ - 1];
      if (last.work == record.work && last.call == record.call && last.at == record.at &&
          last.signal == record.signal && last.range.begin == record.range.begin) {
        last.end_ns = now();
        return;
      }
    }
    add(record);
  }

  void clear() { count_ = dropped_ = 0; }
  std::size_t count() const { return count_; }
  std::size_t dropped() const { return dropped_; }
  const Record& operator[](std::size_t i) const { return records_[i]; }

 private:
  std::vector<Record> records_;
  std::size_t count_ = 0;
  std::size_t dropped_ = 0;
};

// The lanes of an engine's two threads; null without a trace.
struct Lanes {
  Lane* caller = nullptr;
  Lane* worker = nullptr;
};

}  // namespace flux::host
