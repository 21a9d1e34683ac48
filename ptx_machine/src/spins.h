// Threads that poll: loops that come back to the state that they were in, while nothing changes.
//
// When a launch has changed no memory for some rounds, the state of each thread is followed as a hash
// of its registers and predicates. A group whose hash recurs at a jump back goes on like that until another
// launch, a copy or the host writes. A launch in which all groups do, or wait, is idle: room.h tells
// when all launches are.
#pragma once

#include "machine.h"

namespace ptx_machine {

class Spins {
 public:
  // Rounds without a change before threads are watched; rounds in which each must recur, at first.
  static constexpr std::uint64_t kQuiet = 16, kFirst = 24, kMost = 1 << 14;

  // Whether statements are followed: before() and after() each, loop() behind jumps back.
  bool on() const { return on_; }
  // Whether all groups of the launch have recurred, or wait.
  bool idle() const { return idle_; }
  // How often threads have begun to be watched.
  std::uint64_t watches() const { return watches_; }

  // Behind a round; `changes` counts those of memory so far.
  template <class EachWarp>
  void round(std::uint64_t changes, bool asynchronous, EachWarp&& each_warp) {
    if (changes != changes_ || asynchronous) return reset(changes);
    ++rounds_;
    if (!on_) {
      if (rounds_ >= quiet_) watch();
      return;
    }
    if (rounds_ < length_) return;
    bool all = true;
    each_warp([&](const Warp& warp) { all = all && is_idle(warp); });
    idle_ = all;
    if (all || length_ < kMost) {
      length_ = all ? kFirst : 2 * length_;
      watch();
    } else {  // it computes
      on_ = false;
      quiet_ = 2 * length_;
      rounds_ = 0;
    }
  }

  void before(Context& c, const Op& op, Mask mask) { fold(c, op, mask); }
  void after(Context& c, const Op& op, Mask mask);
  // Lanes of a warp have jumped back from a statement.
  void loop(Warp& warp, int from, Mask mask);

 private:
  void reset(std::uint64_t changes) {
    changes_ = changes;
    on_ = idle_ = false;
    quiet_ = kQuiet;
    length_ = kFirst;
    rounds_ = 0;
  }
  void watch() {
    on_ = true;
    ++watches_;
    rounds_ = 0;
  }
  void fold(Context& c, const Op& op, Mask mask);
  bool is_idle(const Warp& warp) const;
  Spin& spin_of(Warp& warp) const;

  bool on_ = false, idle_ = false;
  std::uint64_t changes_ = 0, rounds_ = 0, watches_ = 0;
  std::uint64_t quiet_ = kQuiet, length_ = kFirst;
};

// What the lanes of a warp did since they are watched.
struct Spin {
  struct Loop {
    int from = 0;
    Mask mask = 0;
    std::uint64_t seen = 0;  // state, when it was last kept: after 1, 2, 4, ... times around
    std::uint64_t times = 0, power = 1;
  };
  std::uint64_t watch = 0;
  std::array<std::uint64_t, kLanes> state{};  // hash of each lane
  std::vector<Loop> loops;
  Mask recurring = 0;  // lanes
};

// What a group that polls has loaded, and what would end its loop. `load`: the statement.
std::string describe_poll(const Context& c, const Warp& warp, const Group& group, const Op& load);

}  // namespace ptx_machine
