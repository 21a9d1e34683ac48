// Turns of streams, so that a run can be repeated: with them one stream acts at a time, and a seed decides
// which is next. Without them streams run at the same time, in whatever order the host's scheduler makes.
//
// Streams start nothing until the host waits for one of them (Stream::drain, Stream::idle). So what the
// host submits before it waits is there before the first turn, and the choice of each turn is among the
// same streams again. A stream gives up its turn between items, while it waits for a word or an event, and
// a kernel of the PTX machine does so after every round of its warps.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>
#include <set>

namespace emulated {

class Turns {
 public:
  // From now on streams take turns; zero: they run at the same time again. While all are idle.
  void take(std::uint64_t seed);
  bool on() const { return seed_ != 0; }

  // A stream has something to run. The host calls it for its own, a stream for one that it starts.
  void join(int stream);
  // Of the host: turns begin.
  void let_go();
  // Returns when it is the turn of the calling thread, which runs this stream from now on.
  void enter(int stream);
  // Gives up the turn; returns when the next one comes. Returns false if there are no turns, or none of
  // this thread.
  bool yield();
  // The stream has nothing more to run.
  void leave();
  // A number that stands for all choices since `take`.
  std::uint64_t digest();

 private:
  void choose();  // with the lock

  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t seed_ = 0, batches_ = 0, digest_ = 0;
  std::mt19937_64 random_;
  bool held_ = true;
  std::set<int> ready_;
  int current_ = -1;
};

Turns& turns();

}  // namespace emulated
