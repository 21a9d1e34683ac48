// Ranks as threads: the engine's symmetric memory on the heap, so that ThreadSanitizer sees every
// access of every rank. No framework: a failed check prints where and ends the process with
// status 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/engine.h"

namespace flux::host::test {

[[noreturn]] inline void fail_check(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

#define CHECK_TRUE(condition, what) \
  if (!(condition))                 \
  ::flux::host::test::fail_check(__FILE__, __LINE__, std::string(#condition) + ": " + (what))

using std::to_string;
using std::chrono::milliseconds;

// One rank's pad and data, each of its exact size, so that AddressSanitizer sees the first access
// behind either.
class Fabric {
 public:
  Fabric(int world, int signals, std::size_t data_bytes) : signals_(signals) {
    symmetric.signals = signals;
    symmetric.data_bytes = data_bytes;
    for (int r = 0; r < world; ++r) {
      const std::size_t words = sizeof(Word) * static_cast<std::size_t>(signals);
      symmetric.pads.push_back(static_cast<SignalPad*>(zeros(sizeof(SignalPad) + words)));
      symmetric.data.push_back(static_cast<char*>(zeros(data_bytes)));
    }
  }

  // As if every rank had made `epoch` calls.
  void pretend_epoch(std::uint32_t epoch) {
    for (SignalPad* pad : symmetric.pads) {
      for (auto& entry : pad->entries) entry.store(entry_of(epoch, 0));
      for (int i = 0; i < signals_; ++i) pad->signals()[i].store(epoch);
    }
  }

  int world() const { return static_cast<int>(symmetric.pads.size()); }

  Symmetric symmetric;

 private:
  static constexpr std::align_val_t kAlignment{alignof(SignalPad)};
  struct Free {
    void operator()(void* block) const { ::operator delete(block, kAlignment); }
  };

  void* zeros(std::size_t bytes) {
    blocks_.emplace_back(::operator new(bytes, kAlignment));
    return std::memset(blocks_.back().get(), 0, bytes);
  }

  int signals_;
  std::vector<std::unique_ptr<void, Free>> blocks_;
};

inline std::string describe(Engine& e) {
  const FailureReport& f = e.failure();
  return "rank " + to_string(e.rank()) + " call " + to_string(e.epoch()) + ": failure kind " +
         to_string(static_cast<int>(f.kind)) + " peer " + to_string(f.peer) + " chunk " +
         to_string(f.chunk) + " tile " + to_string(f.tile) + " expected " + to_string(f.expected) +
         " observed " + to_string(f.observed) + " culprit " + to_string(f.culprit);
}

// Calls `wait` again and again, as the bindings do; false when the engine has failed.
template <class Wait>
bool complete(Engine& e, std::chrono::nanoseconds timeout, Wait&& wait) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const Limit limit{Clock::now() + milliseconds(50), deadline, std::chrono::microseconds(5)};
    if (wait(limit)) return true;
    if (e.failed()) return false;
  }
}

inline bool complete_entries(Engine& e, std::chrono::nanoseconds timeout) {
  return complete(e, timeout, [&](const Limit& l) { return e.wait_entries(l); });
}
inline bool complete_visit(Engine& e, int visit, std::chrono::nanoseconds timeout) {
  return complete(e, timeout, [&](const Limit& l) { return e.wait_visit(visit, l); });
}
inline bool complete_call(Engine& e, std::chrono::nanoseconds timeout) {
  return complete(e, timeout, [&](const Limit& l) { return e.finish(l); });
}

// Runs `body(rank)` on a thread per rank.
inline void on_all_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) threads.emplace_back(body, r);
  for (auto& t : threads) t.join();
}

// Everything about a call that all ranks agree on.
struct Plan {
  OpKind op;
  int m, n;
  Mesh mesh;
  int tile_m, tile_n, raster, comm_rows;
  Direction direction;
  Order order;
  Swizzle swizzle;
  Store store;

  int world() const { return world_of(mesh); }
  std::shared_ptr<const Schedule> schedule(int rank) const {
    const Problem problem{op, m, op == OpKind::kAGGemm ? n * world() : n, world(), world()};
    const TileOrder tiles{op, m, n, tile_m, tile_n, raster, swizzle, order, direction, mesh, rank};
    return std::make_shared<const Schedule>(
        build_schedule(ScheduleSpec{problem, tiles, CommTiling{m, world(), comm_rows}, store}));
  }
};

// The smallest sensible plan, for tests that are about something else.
inline Plan simple_plan(OpKind op, int world, Direction direction = Direction::kPush) {
  return Plan{op,
              world,
              1,
              Mesh{1, 1, world},
              1,
              1,
              1,
              1,
              direction,
              Order::kDirect,
              Swizzle::kRankShift,
              Store::kStaged};
}

}  // namespace flux::host::test
