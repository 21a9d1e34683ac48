// Faults: peers that are late, disagree, refuse, fail or leave, and engines that are destroyed
// during a call.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <iterator>

#include "tests/harness.h"

namespace flux::host::test {
namespace {

using std::chrono::nanoseconds;

constexpr milliseconds kShort{100};
constexpr std::chrono::seconds kLong{60};
// Limit for operations that must not take a whole timeout, on a busy machine too.
constexpr std::chrono::seconds kSoon{10};

// Two or more engines with room for simple_plan of any op.
struct Group {
  explicit Group(int world, std::shared_ptr<Processes> processes = nullptr)
      : fabric(world, 2 * world, 4096) {
    fabric.symmetric.processes = std::move(processes);
    fabric.symmetric.row_bytes = sizeof(float);
    fabric.symmetric.slot_bytes = sizeof(float);
    fabric.symmetric.result_offset = 2048;
    for (int r = 0; r < world; ++r) {
      engines.push_back(std::make_unique<Engine>(r, fabric.symmetric));
    }
  }
  Engine& operator[](int rank) { return *engines[static_cast<std::size_t>(rank)]; }

  Fabric fabric;
  std::vector<std::unique_ptr<Engine>> engines;
};

void begin(Engine& e, const Plan& plan, const Buffers& buffers, bool threaded, nanoseconds timeout,
           std::uint32_t digest = 7) {
  e.begin(plan.schedule(e.rank()), buffers, digest, threaded, timeout);
}

// An AllGather of one row per rank; true when it succeeds.
bool gather_once(Engine& e, const Plan& plan, bool threaded, nanoseconds timeout,
                 std::uint32_t digest = 7) {
  const float x = 1;
  Buffers buffers;
  buffers.x = reinterpret_cast<const char*>(&x);
  buffers.x_stride = sizeof(x);
  begin(e, plan, buffers, threaded, timeout, digest);
  bool ok = threaded || complete_call(e, timeout);
  for (int i = 0; ok && i < plan.m; ++i) ok = complete_visit(e, i, timeout);
  if (ok && threaded) ok = complete_call(e, timeout);
  e.settle();  // x is destroyed on return
  return ok;
}

void expect(Engine& e, Failure kind, int peer) {
  CHECK_TRUE(e.failed() && e.failure().kind == kind && e.failure().peer == peer, describe(e));
}

template <class Body>
nanoseconds time_of(Body&& body) {
  const auto start = Clock::now();
  body();
  return Clock::now() - start;
}

void a_silent_peer_is_named_after_the_timeout() {
  for (const auto direction : {Direction::kPush, Direction::kPull}) {
    for (const bool threaded : {false, true}) {
      const Plan plan = simple_plan(OpKind::kAGGemm, 2, direction);
      Group absent(2);
      const auto waited =
          time_of([&] { CHECK_TRUE(!gather_once(absent[0], plan, threaded, kShort), "absent"); });
      expect(absent[0], Failure::kTimeout, 1);
      CHECK_TRUE(absent[0].failure().tile == -1, describe(absent[0]));
      CHECK_TRUE(waited >= kShort && waited < kSoon, to_string(waited.count()));

      Group three(3);  // rank 1 entered, rank 2 did not: rank 1's tiles are late because of rank 2
      const Plan wide = simple_plan(OpKind::kAGGemm, 3, direction);
      begin(three[1], wide, Buffers{}, false, kLong);
      CHECK_TRUE(!gather_once(three[0], wide, threaded, kShort), "absent");
      expect(three[0], Failure::kTimeout, 2);

      Group stalled(2);  // rank 1 begins the call but moves nothing
      begin(stalled[1], plan, Buffers{}, false, kShort);
      CHECK_TRUE(!gather_once(stalled[0], plan, threaded, kShort), "stalled");
      expect(stalled[0], Failure::kTimeout, 1);
      const FailureReport& f = stalled[0].failure();
      CHECK_TRUE(f.chunk == 1 && f.tile == 0 && f.expected == 1, describe(stalled[0]));
    }
  }
}

void a_missing_partial_is_named() {
  for (const bool threaded : {false, true}) {
    Group group(2);
    const Plan plan = simple_plan(OpKind::kGemmRS, 2);
    begin(group[1], plan, Buffers{}, false, kShort);
    float partial[2] = {1, 2}, out = 0;
    Buffers buffers;
    buffers.partial = reinterpret_cast<char*>(partial);
    buffers.out = reinterpret_cast<char*>(&out);
    begin(group[0], plan, buffers, threaded, kShort);
    for (int i = 0; i < 2; ++i) group[0].visit_done(i);
    CHECK_TRUE(!complete_call(group[0], kShort), "nothing came");
    group[0].settle();
    expect(group[0], Failure::kTimeout, 1);
    CHECK_TRUE(group[0].failure().tile == 0, describe(group[0]));
  }
}

// Also: after a call on which ranks disagreed, the next one works.
void a_mismatch_is_seen_by_all_and_survived() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 3);
  for (const bool threaded : {false, true}) {
    Group group(3);
    for (int round = 0; round < 20; ++round) {
      on_all_ranks(3, [&](int r) {
        const std::uint32_t digest = r == 2 ? 8 : 7;
        CHECK_TRUE(!gather_once(group[r], plan, threaded, kLong, digest), "digests differ");
        CHECK_TRUE(group[r].failure().kind == Failure::kMismatch, describe(group[r]));
        CHECK_TRUE((group[r].failure().peer == 2) == (r != 2), describe(group[r]));
        CHECK_TRUE(group[r].failure().expected == digest, describe(group[r]));
        CHECK_TRUE(group[r].failure().observed == 15 - digest, describe(group[r]));
        CHECK_TRUE(gather_once(group[r], plan, threaded, kLong), describe(group[r]));
      });
    }
  }
}

void a_refusal_reaches_the_peers_with_its_reason() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);
  Group group(2);
  const std::string why = "x must be float32, got int64";
  on_all_ranks(2, [&](int r) {
    for (int round = 0; round < 50; ++round) {
      if (r == 1) {
        group[1].refuse(why + " in round " + to_string(round));
      } else {
        CHECK_TRUE(!gather_once(group[0], plan, round % 2 == 0, kLong), "refused");
        expect(group[0], Failure::kMismatch, 1);
        CHECK_TRUE(group[0].failure().observed == kRefused, describe(group[0]));
        CHECK_TRUE(!group[0].failure().ran_ahead, describe(group[0]));
        const std::string message = read_refusal(group[0].pad(1));
        CHECK_TRUE(message == why + " in round " + to_string(round), message);
      }
      CHECK_TRUE(gather_once(group[r], plan, round % 3 == 0, kLong), describe(group[r]));
    }
  });

  Group far(2);  // rank 1 refuses so often that its entry of rank 0's call is overwritten
  for (int i = 0; i < kEntryHistory + 1; ++i) far[1].refuse(std::string(1000, 'x'));
  CHECK_TRUE(!gather_once(far[0], plan, false, kLong), "ahead");
  expect(far[0], Failure::kMismatch, 1);
  CHECK_TRUE(far[0].failure().ran_ahead, describe(far[0]));
  CHECK_TRUE(read_refusal(far[0].pad(1)) == std::string(kRefusalWords * 8 - 1, 'x'),
             "cut, not torn");
}

void a_peer_that_leaves_is_noticed_at_once() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);
  for (const bool threaded : {false, true}) {
    for (const auto state : {PadState::kClosed, PadState::kFailed}) {
      Group group(2);
      const auto waited = time_of([&] {
        on_all_ranks(2, [&](int r) {
          if (r == 0) {
            CHECK_TRUE(!gather_once(group[0], plan, threaded, kLong), "left");
          } else {
            std::this_thread::sleep_for(milliseconds(30));
            group[1].close(state, 5);
            group[1].close(PadState::kOpen, 6);  // idempotent: the first one counts
          }
        });
      });
      CHECK_TRUE(waited < kSoon, to_string(waited.count()));
      const bool failed = state == PadState::kFailed;
      expect(group[0], failed ? Failure::kPeerFailed : Failure::kPeerClosed, 1);
      CHECK_TRUE(!failed || group[0].failure().culprit == 5, describe(group[0]));
    }
  }
}

// Stands for the process of a rank.
struct Child {
  Child() : pid(fork()) {
    while (pid == 0) pause();
  }
  ~Child() { end(); }
  void end() {
    if (pid > 0) kill(pid, SIGKILL);
    if (pid > 0) waitpid(pid, nullptr, 0);
    pid = -1;
  }
  pid_t pid;
};

void a_peer_that_dies_is_noticed_at_once() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);
  for (const bool threaded : {false, true}) {
    Child child;
    Group group(2, std::make_shared<Processes>(std::vector<pid_t>{0, child.pid}));
    CHECK_TRUE(group[0].fate(1) == Failure::kNone, "it lives");
    const auto waited = time_of([&] {
      on_all_ranks(2, [&](int r) {
        if (r == 0) {
          CHECK_TRUE(!gather_once(group[0], plan, threaded, kLong), "died");
        } else {
          std::this_thread::sleep_for(milliseconds(30));
          child.end();
        }
      });
    });
    CHECK_TRUE(waited < kSoon, to_string(waited.count()));
    expect(group[0], Failure::kPeerDied, 1);
    CHECK_TRUE(group[0].fate(1) == Failure::kPeerDied, "it is dead");
    group[0].close(PadState::kFailed, 1);
    CHECK_TRUE(group[0].fate(1) == Failure::kNone, "nobody is watched any more");
  }

  Child stopped;
  kill(stopped.pid, SIGSTOP);
  Group group(2, std::make_shared<Processes>(std::vector<pid_t>{0, stopped.pid}));
  CHECK_TRUE(!gather_once(group[0], plan, false, kShort), "stopped");
  expect(group[0], Failure::kTimeout, 1);
}

// Words that a peer raised before its process ended count.
void dying_after_a_complete_call_harms_nobody() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);
  const float x = 1;
  Buffers buffers;
  buffers.x = reinterpret_cast<const char*>(&x);
  buffers.x_stride = sizeof(x);
  for (const auto state : {PadState::kOpen, PadState::kClosed, PadState::kFailed}) {
    Child child;
    Group group(2, std::make_shared<Processes>(std::vector<pid_t>{0, child.pid}));
    begin(group[0], plan, buffers, false, kLong);
    begin(group[1], plan, buffers, false, kLong);
    CHECK_TRUE(complete_call(group[1], kLong), describe(group[1]));
    // Not by close(), which would stop the process watch that both engines of this test share.
    group.fabric.symmetric.pads[1]->state.store(static_cast<std::uint32_t>(state));
    child.end();
    CHECK_TRUE(complete_call(group[0], kLong), describe(group[0]));
    for (int i = 0; i < 2; ++i) {
      CHECK_TRUE(complete_visit(group[0], i, kLong), describe(group[0]));
    }
    CHECK_TRUE(!gather_once(group[0], plan, false, kLong), "the next call");
    const auto fate = state == PadState::kOpen     ? Failure::kPeerDied
                      : state == PadState::kClosed ? Failure::kPeerClosed
                                                   : Failure::kPeerFailed;
    expect(group[0], fate, 1);
  }
}

// A ring 0 -> 1 -> 2 -> 0 in which rank 2 moves nothing. Rank 0 has a short timeout and gives up on
// rank 2. Rank 1 has a long timeout and learns from rank 0 that rank 2 is the reason for the
// missing chunk 2.
void a_failure_travels_with_its_culprit() {
  Plan plan = simple_plan(OpKind::kAGGemm, 3);
  plan.order = Order::kRing1D;
  Group group(3);
  begin(group[2], plan, Buffers{}, false, kLong);
  on_all_ranks(2, [&](int r) {
    std::uint64_t entry = 0;  // rank 1 must not be late as well, on a busy machine
    while (r == 0 && read_entry(group[0].pad(1), 1, &entry) != 1) std::this_thread::yield();
    CHECK_TRUE(!gather_once(group[r], plan, true, r == 0 ? kShort : nanoseconds(kLong)),
               "no chunk 2");
    if (r == 0) group[0].close(PadState::kFailed, group[0].failure().peer);
  });
  expect(group[0], Failure::kTimeout, 2);
  expect(group[1], Failure::kPeerFailed, 0);
  CHECK_TRUE(group[1].failure().culprit == 2, describe(group[1]));
  CHECK_TRUE(group[1].failure().chunk == 2, describe(group[1]));
}

// A call that has all it needs succeeds although its peers have left. This includes tiles of a rank
// that has left which a slow rank still forwards.
void leaving_after_a_complete_call_harms_nobody() {
  for (const auto direction : {Direction::kPush, Direction::kPull}) {
    for (const auto order : {Order::kDirect, Order::kRing1D, Order::kHierarchical}) {
      // The long delay lets the others check for peers that have left (every 20 ms). It is needed
      // only where ranks forward tiles that they hold.
      const bool forwards = direction == Direction::kPush && order == Order::kRing1D;
      for (int slow = 0; slow < 4; ++slow) {
        Plan plan = simple_plan(OpKind::kAGGemm, 4, direction);
        plan.mesh = Mesh{2, 1, 2};
        plan.order = order;
        Group group(4);
        on_all_ranks(4, [&](int r) {
          if (r == slow) group[r].set_delay(milliseconds(forwards ? 150 : 5), 3);
          CHECK_TRUE(gather_once(group[r], plan, r % 2 == 0, kLong), describe(group[r]));
          group[r].close(PadState::kClosed, -1);
        });
      }
    }
  }
}

// How often the moment is tried for. ThreadSanitizer finds races by their order, in a few rounds,
// and makes each round slower; the plain program has to meet the moment itself.
#ifdef __SANITIZE_THREAD__
constexpr int kRounds = 250;
#else
constexpr int kRounds = 2500;
#endif

// The same, but the peer raises its signal and leaves between two checks of the waiting rank. Here
// the waiting rank only checks and never sleeps.
void leaving_right_after_the_signal_harms_nobody() {
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);
  const float x = 1;
  Buffers buffers;
  buffers.x = reinterpret_cast<const char*>(&x);
  buffers.x_stride = sizeof(x);
  for (int round = 0; round < kRounds; ++round) {
    Group group(2);
    begin(group[0], plan, buffers, false, kLong);
    CHECK_TRUE(!group[0].finish(Limit{Clock::now(), Clock::now() + kLong, nanoseconds(0)}),
               "alone");
    on_all_ranks(2, [&](int r) {
      Engine& e = group[r];
      if (r == 1) {
        begin(e, plan, buffers, false, kLong);
        // Waits until rank 0, whose row has arrived, only checks. Then does the stores of a raise
        // and of close(), without the code between them: both have to fall between two checks.
        for (int i = 0; i < 2; ++i) CHECK_TRUE(complete_visit(e, i, kLong), describe(e));
        e.pad(0).signals()[1].store(e.epoch(), std::memory_order_seq_cst);
        e.pad(1).state.store(static_cast<std::uint32_t>(PadState::kClosed),
                             std::memory_order_seq_cst);
        e.close(PadState::kClosed, -1);
        return;
      }
      const auto deadline = Clock::now() + kLong;
      const auto look = [&](auto wait) {
        while (!wait(Limit{Clock::now(), deadline, nanoseconds(0)}))
          CHECK_TRUE(!e.failed(), describe(e));
      };
      look([&](const Limit& limit) { return e.finish(limit); });
      for (int i = 0; i < 2; ++i) look([&](const Limit& limit) { return e.wait_visit(i, limit); });
    });
  }
}

void an_engine_can_be_destroyed_while_its_worker_waits() {
  for (const auto op : {OpKind::kAGGemm, OpKind::kGemmRS, OpKind::kGemmAR}) {
    for (const bool entered : {false, true}) {
      Group group(2);
      const Plan plan = simple_plan(op, 2, Direction::kPull);
      if (entered) begin(group[1], plan, Buffers{}, false, kLong);
      float memory[8] = {};
      Buffers buffers;
      buffers.x = buffers.partial = buffers.out = reinterpret_cast<char*>(memory);
      begin(group[0], plan, buffers, true, kLong);
      std::this_thread::sleep_for(milliseconds(entered ? 10 : 0));
      const auto waited = time_of([&] { group.engines[0].reset(); });
      CHECK_TRUE(waited < kSoon, to_string(waited.count()));
      CHECK_TRUE(group[1].pad(0).state.load() == static_cast<std::uint32_t>(PadState::kClosed), "");
    }
  }
  Group idle(1);  // never used; closed, then destroyed
  idle[0].close(PadState::kClosed, -1);
}

// The caller of the second close may be about to free the memory that the worker still uses.
void a_second_close_waits_for_the_worker_too() {
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const auto before = threads();
  Group group(2);
  const Plan plan = simple_plan(OpKind::kAGGemm, 2, Direction::kPull);
  begin(group[1], plan, Buffers{}, false, kLong);
  float memory[8] = {};
  Buffers buffers;
  buffers.x = reinterpret_cast<char*>(memory);
  group[0].set_delay(milliseconds(500), 179);  // a seed whose first delay is a long one
  begin(group[0], plan, buffers, true, kLong);
  std::this_thread::sleep_for(milliseconds(50));  // the worker is in this delay now
  std::thread first([&] { group[0].close(PadState::kClosed, -1); });
  while (group[1].pad(0).state.load() != static_cast<std::uint32_t>(PadState::kClosed)) {
    std::this_thread::yield();
  }
  group[0].close(PadState::kClosed, -1);
  CHECK_TRUE(threads() <= before + 1, "the worker is still there");
  first.join();
}

// The deadline is for peers. Both ranks' GEMMs take longer than the deadline, and no rank fails.
void a_long_gemm_is_no_timeout() {
  for (const auto store : {Store::kStaged, Store::kDirect}) {
    for (int slow_visit = 0; slow_visit < 2; ++slow_visit) {
      Group group(2);
      Plan plan = simple_plan(OpKind::kGemmRS, 2, Direction::kPull);
      plan.store = store;
      std::atomic<int> computing{2};
      on_all_ranks(2, [&](int r) {
        float partial[2] = {1, 2}, out = 1;
        Buffers buffers;
        buffers.partial = reinterpret_cast<char*>(partial);
        buffers.out = reinterpret_cast<char*>(&out);
        begin(group[r], plan, buffers, true, 3 * kShort);
        for (int i = 0; i < 2; ++i) {
          if (i == slow_visit) {
            std::this_thread::sleep_for(6 * kShort);
            // Both ranks end nearly together: one rank's delay *is* a reason for the other to give
            // up.
            for (--computing; computing.load() > 0;) std::this_thread::yield();
            if (r == 1) std::this_thread::sleep_for(kShort / 2);
          }
          group[r].visit_done(i);
        }
        CHECK_TRUE(complete_call(group[r], kLong), describe(group[r]));
      });
    }
  }
}

// A signal last raised almost 2^31 calls ago must not turn from "long ago" into "reached".
void seldom_used_signals_do_not_come_of_age() {
  const std::uint32_t start = (std::uint32_t{3} << 30) - 1;
  const Plan plan = simple_plan(OpKind::kAGGemm, 2);  // uses signals 0 and 1 of 4
  Group group(2);
  group.fabric.pretend_epoch(start);
  for (SignalPad* pad : group.fabric.symmetric.pads) {
    pad->signals()[3].store(start - (std::uint32_t{1} << 31) + 10);
  }
  on_all_ranks(2, [&](int r) {
    group[r].set_epoch(start);
    for (int i = 0; i < 3; ++i)
      CHECK_TRUE(gather_once(group[r], plan, i % 2 == 0, kLong), "renewal");
    CHECK_TRUE(!signal_reached(group[r].pad(r), 3, start + 20), "an old signal looks new");
  });
}

}  // namespace

void run_fault_tests() {
  a_silent_peer_is_named_after_the_timeout();
  a_missing_partial_is_named();
  a_mismatch_is_seen_by_all_and_survived();
  a_refusal_reaches_the_peers_with_its_reason();
  a_peer_that_leaves_is_noticed_at_once();
  a_peer_that_dies_is_noticed_at_once();
  dying_after_a_complete_call_harms_nobody();
  a_failure_travels_with_its_culprit();
  leaving_after_a_complete_call_harms_nobody();
  leaving_right_after_the_signal_harms_nobody();
  an_engine_can_be_destroyed_while_its_worker_waits();
  a_second_close_waits_for_the_worker_too();
  a_long_gemm_is_no_timeout();
  seldom_used_signals_do_not_come_of_age();
}

}  // namespace flux::host::test
