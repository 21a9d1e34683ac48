// The engine executes the communication side of a tile schedule on the CPU: it publishes the entry
// of a call, moves communication tiles (on its own thread, or on the calling thread when there is
// little to move), reduces what has arrived, and waits for signals. The calling thread meanwhile
// runs GEMM tiles.
//
//   calling thread   enter --- GEMM tile --- wait --- GEMM tile --- visit_done ... finish
//   worker thread          \-- entries -- copy, raise -- copy, raise -- reduce ... /
//
// One engine serves one op of one rank. Calls are serial; there are no locks, and every wait has a
// deadline.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/lane.h"
#include "cpu/processes.h"
#include "cpu/reduce.h"
#include "cpu/signal_pad.h"
#include "schedule/schedule.h"

namespace flux::host {

// Where the ranks' symmetric memory is mapped in this process, and how an op lays out its data
// there.
struct Symmetric {
  std::vector<SignalPad*> pads;  // by rank
  std::vector<char*> data;       // by rank, behind the pad
  // Ranks on other hosts. Their pads and data are stand-ins in private memory. The network
  // (flux/transport/network.py) sends what is written and raised there, and writes and raises what
  // they send in this rank's own memory and pad.
  std::vector<bool> remote;
  std::size_t row_bytes = 0;      // bytes of a row that travels: K (AllGather) or N elements
  std::size_t slot_bytes = 0;     // ReduceScatter: distance of two partial blocks
  std::size_t result_offset = 0;  // GemmAR: where the reduced result begins
  DType dtype = DType::kF32;
  int signals = 0;                       // in each pad
  std::shared_ptr<Processes> processes;  // of ranks that share memory; null: none is watched
};

// Memory of one call that is private to this rank. Rows are dense but for x.
struct Buffers {
  const char* x = nullptr;     // AllGather: own rows of the input
  std::size_t x_stride = 0;    // bytes from row to row
  char* partial = nullptr;     // staged ReduceScatter: [M, N]
  char* out = nullptr;         // ReduceScatter: [own rows, N]; GemmAR: [M, N]
  const char* bias = nullptr;  // ReduceScatter: [N]
  double scale = 1.0;
};

enum class Failure : int {
  kNone = 0,
  kTimeout = 1,
  kMismatch = 2,
  kPeerFailed = 3,
  kPeerClosed = 4,
  kEnded = 5,    // this rank closes the op: Engine::end_call
  kPeerDied = 6  // its process ended while its pad was open
};

// The wait that failed; -1 where a field does not apply.
struct FailureReport {
  Failure kind = Failure::kNone;
  int peer = -1;
  int chunk = -1;
  int tile = -1;
  int culprit = -1;        // kPeerFailed: the rank that `peer` gave up on
  bool ran_ahead = false;  // kMismatch: the peer is calls ahead of this rank
  std::uint32_t expected = 0;
  std::uint32_t observed = 0;
};

// When to return to the caller for a moment, when to give the peers up, and how long to spin before
// sleeping.
struct Limit {
  Clock::time_point until;
  Clock::time_point deadline;
  std::chrono::nanoseconds spin;
};

class Engine {
 public:
  // How long a sleeping thread may go without looking for an abort or for a peer that has failed or died.
  static constexpr std::chrono::milliseconds kSlice{20};

  Engine(int rank, Symmetric symmetric);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Begins the next call, number epoch() + 1. `digest` stands for all that must be
  // equal on every rank. With `threaded`, the worker starts at once.
  void begin(std::shared_ptr<const Schedule> schedule, const Buffers& buffers, std::uint32_t digest,
             bool threaded, std::chrono::nanoseconds timeout);

  // Takes part in the next call only to tell the others that this rank's input was refused.
  void refuse(const std::string& why);

  // Each of these works until done or until `limit.until`, and says whether it is done. False while
  // failed() is false means "call me again"; the caller looks for interrupts in between.
  bool wait_entries(const Limit& limit);
  bool wait_visit(int visit, const Limit& limit);
  bool finish(const Limit& limit);

  // After a failure: returns once the worker no longer uses this call's memory.
  void settle();

  // A GEMM tile of a ReduceScatter is complete: its rows may leave.
  void visit_done(int visit);

  // State of a peer: kNone while it is open, else kPeerFailed, kPeerClosed or kPeerDied. From any thread,
  // without waiting.
  Failure fate(int peer);

  // For the network, on its own threads. A tile is ready to send when its signal is raised in the
  // stand-in's pad; a tile that has arrived is announced in the own pad. A peer's entry or refusal of a
  // call is published in its stand-in, as the peer would have published it on this host.
  bool await_parcel(int peer, int signal, std::uint32_t epoch);
  bool await_agreement(std::uint32_t epoch);
  void announce(int signal, std::uint32_t epoch);
  void peer_entered(int peer, std::uint32_t epoch, std::uint32_t digest);
  void peer_refused(int peer, std::uint32_t epoch, const std::string& why);
  void peer_left(int peer, PadState state, int culprit);

  // Marks the own pad, stops the worker and stops watching the peers' processes; idempotent. Memory may
  // be unmapped afterwards.
  void close(PadState state, int culprit);
  // Makes the current call fail: its waits return, in any thread, and it gives up. From any thread, or
  // from a signal handler of the calling thread.
  void end_call();

  // Random pauses of up to `longest` around every move and every raise, for race tests.
  void set_delay(std::chrono::nanoseconds longest, std::uint64_t seed);

  // Between calls: from now on both threads record what they do, until other lanes (none) are given.
  void trace(const Lanes& lanes);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const FailureReport& failure() const { return failure_; }  // once failed()
  std::uint32_t epoch() const { return epoch_; }
  void set_epoch(std::uint32_t epoch) { epoch_ = epoch; }
  int rank() const { return rank_; }
  SignalPad& pad(int rank) { return *symmetric_.pads[rank]; }

 private:
  int world() const { return static_cast<int>(symmetric_.pads.size()); }
  void next_epoch();
  bool gone() const;
  template <class Ready>
  void await_unless_gone(SignalPad& awaited, Ready&& ready);
  template <class Observe>
  bool await(int pad, int peer, const Transfer* what, const Limit& limit, Observe&& observe);
  bool await_signal(int pad, int peer, const Transfer& what, int index, const Limit& limit);
  bool see_entries(const Limit& limit);
  bool await_computed(int count, const Limit& limit);
  bool see_computed(int count, const Limit& limit);
  bool run_program(const Limit& limit);
  bool run(const Action& action, const Limit& limit);
  bool gather(const Transfer& t, const Limit& limit);
  bool send(int index, const Limit& limit);
  bool reduce_tile(const Reduction& r, const Limit& limit);
  bool await_shares(const Reduction& r, const Limit& limit);
  const char* share(const Reduction& r, const Share& s) const;
  bool move_result(const Transfer& t, const Limit& limit);
  bool receive_result(const Transfer& t, const Limit& limit);
  void fail(const FailureReport& report);
  char* block_row(int holder, int block, int owner, int row) const;
  char* result_row(int holder, int owner, int row) const;
  char* out_row(int row) const;
  std::size_t offset_in_chunk(int owner, int row) const;
  void copy_rows(char* dst, std::size_t dst_stride, const char* src, std::size_t src_stride,
                 Range rows);
  void raise(int pad, int index);
  void pause();
  void worker_main(std::uint32_t done);
  static void become_worker();
  // Lane of this thread; null without a trace, and then a call costs this one check.
  Lane* lane() const { return lanes_.caller == nullptr ? nullptr : lane_of_this_thread(); }
  Lane* lane_of_this_thread() const;
  void record(Work work, std::int64_t began, const Transfer& t, int peer, int at,
              std::int64_t bytes);
  void record_wait(Work work, std::int64_t began, int peer, const Transfer* what, int at,
                   int signal);
  std::int64_t bytes_of(Range rows) const {
    return static_cast<std::int64_t>(rows.end - rows.begin) *
           static_cast<std::int64_t>(symmetric_.row_bytes);
  }

  const int rank_;
  const pid_t pid_;
  Symmetric symmetric_;
  std::chrono::nanoseconds timeout_{0};
  std::chrono::nanoseconds delay_{0};
  std::atomic<std::uint64_t> delay_state_{0};

  std::uint32_t epoch_ = 0;
  std::uint32_t digest_ = 0;
  std::shared_ptr<const Schedule> schedule_;
  Buffers buffers_;
  Lanes lanes_;
  bool threaded_ = false;
  std::size_t next_action_ = 0;      // touched by the one thread that runs the program
  bool entries_seen_ = false;        // by that thread
  bool visits_entered_ = false;      // the same, by the calling thread
  Clock::time_point last_progress_;  // of that thread

  // Own waiting place for the two threads: never shared with other processes.
  std::unique_ptr<SignalPad> local_;
  std::atomic<int> computed_{0};             // transfers whose GEMM tiles are done
  std::atomic<std::uint32_t> submitted_{0};  // epoch handed to the worker
  std::atomic<std::uint32_t> finished_{0};   // epoch the worker is done with, for better or worse
  std::atomic<bool> stop_{false};
  std::atomic<bool> claimed_{false};  // a thread is writing failure_
  std::atomic<bool> failed_{false};   // failure_ is complete
  FailureReport failure_;
  std::mutex closing_;
  std::thread worker_;
};

}  // namespace flux::host
