// The engine executes the communication side of a tile schedule on the CPU. It publishes the entry
// of a call, moves communication tiles, reduces tiles that have arrived, and waits for signals. It
// does this on its own thread, or on the calling thread when there is little to move. The calling
// thread meanwhile runs GEMM tiles.
//
//   calling thread   enter --- GEMM tile --- wait --- GEMM tile --- visit_done ... finish
//   worker thread          \-- entries -- copy, raise -- copy, raise -- reduce ... /
//
// One engine serves one op of one rank. Calls are serial and take no lock, and every wait has a
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
#include "schedule/selection.h"

namespace flux::host {

// Where the ranks' symmetric memory is mapped in this process, and how an op lays out its data
// there.
struct Symmetric {
  std::vector<SignalPad*> pads;  // by rank
  std::vector<char*> data;       // by rank, behind the pad
  // Ranks on other hosts. Their pads and data are stand-ins in private memory. The network
  // (flux/transport/network.py) sends the data that is written there and the signals that are
  // raised there. Data and signals that it receives go to this rank's own memory and pad.
  std::vector<bool> remote;
  std::size_t row_bytes = 0;      // bytes of a row that is moved: K (AllGather) or N elements
  std::size_t slot_bytes = 0;     // ReduceScatter: distance between two partial blocks
  std::size_t result_offset = 0;  // GemmAR: where the reduced result begins
  std::size_t data_bytes = 0;     // of each rank
  DType dtype = DType::kF32;
  int signals = 0;                       // in each pad
  std::shared_ptr<Processes> processes;  // of ranks that share memory; null: not watched
  std::shared_ptr<void> memory;          // keeps pads and data mapped until the engine is closed
};

// Memory of one call that is private to this rank. Rows are dense, except those of x.
struct Buffers {
  const char* x = nullptr;     // AllGather: own rows of the input
  std::size_t x_stride = 0;    // bytes from row to row
  char* partial = nullptr;     // staged ReduceScatter: [M, N]
  char* out = nullptr;         // ReduceScatter: [own rows, N]; GemmAR: [M, N]
  const char* bias = nullptr;  // ReduceScatter: [N]
  double scale = 1.0;
  std::shared_ptr<const Selection> selection = nullptr;  // the rows that travel; null: all
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
  bool ran_ahead = false;  // kMismatch: the peer is one or more calls ahead
  std::uint32_t expected = 0;
  std::uint32_t observed = 0;
};

// Bounds of a wait: when to return to the caller for a moment, when to give up on the peers, and
// how long to spin before sleeping.
struct Limit {
  Clock::time_point until;
  Clock::time_point deadline;
  std::chrono::nanoseconds spin;
};

class Engine {
 public:
  // Longest time between two checks of a sleeping thread for an abort and for peers that have
  // failed or died.
  static constexpr std::chrono::milliseconds kSlice{20};

  Engine(int rank, Symmetric symmetric);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws std::invalid_argument when the pads or the data are too small for a schedule, or when it
  // is of another rank or world. Memory and needs are the same on all ranks, so all of them throw.
  void require_room(const Schedule& schedule) const;

  // Begins the next call, number epoch() + 1. `digest` covers everything that must be equal on all
  // ranks. With `threaded`, the worker starts at once. Throws as require_room, before the call has
  // begun. Without a schedule the ranks only meet: there is nothing to do but wait_entries.
  void begin(std::shared_ptr<const Schedule> schedule, const Buffers& buffers, std::uint32_t digest,
             bool threaded, std::chrono::nanoseconds timeout);

  // Counts a call that this rank makes elsewhere (collectives.h); `is_entered` returns whether some
  // peer makes it here, with a schedule or to refuse it.
  void skip();
  bool is_entered();

  // Enters the next call only to tell the peers that this rank's input was refused.
  void refuse(const std::string& why);

  // Each of these runs until it is done or until `limit.until`, and returns whether it is done.
  // False while failed() is false means that the caller must call again. The caller checks for
  // interrupts in between.
  bool wait_entries(const Limit& limit);
  bool wait_visit(int visit, const Limit& limit);
  bool finish(const Limit& limit);

  // After a failure: returns once the worker no longer uses this call's memory.
  void settle();

  // Reports that a GEMM tile of a ReduceScatter is complete. Its rows may be sent.
  void visit_done(int visit);

  // State of a peer: kNone while it is open, else kPeerFailed, kPeerClosed or kPeerDied. May be
  // called from any thread. Does not wait.
  Failure fate(int peer);

  // Notes in the own pad that this rank looks at its peers while it waits in a collective. `looks`
  // returns whether a peer on this host did so within the last half second: a peer that is stopped,
  // or busy elsewhere, does not.
  void look();
  bool looks(int peer);

  // These are for the network, on its own threads. A tile is ready to send when its signal is
  // raised in the stand-in's pad. A tile that has arrived is announced in the own pad. A peer's
  // entry or refusal of a call is published in its stand-in, as the peer would publish it on this
  // host.
  bool await_parcel(int peer, int signal, std::uint32_t epoch);
  bool await_agreement(std::uint32_t epoch);
  void announce(int signal, std::uint32_t epoch);
  void peer_entered(int peer, std::uint32_t epoch, std::uint32_t digest);
  void peer_refused(int peer, std::uint32_t epoch, const std::string& why);
  void peer_left(int peer, PadState state, int culprit);

  // Writes `state` to the own pad, stops the worker, stops watching the peers' processes and lets go
  // of Symmetric::memory. Idempotent.
  void close(PadState state, int culprit);
  // Makes the current call, and any later one, fail: waits return in all threads. May be called from
  // any thread, and from a signal handler of the calling thread.
  void end_call();

  // Random pauses of up to `longest` around every move and every raise, for race tests.
  void set_delay(std::chrono::nanoseconds longest, std::uint64_t seed);

  // Between calls: from now on both threads record their work in these lanes. Null lanes end the
  // trace.
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
  void reduce_rows(const std::vector<const void*>& sources, char* sum, int rows, bool own);
  int reduce_carried(const Reduction& r, const std::vector<const void*>& sources, char* sum);
  bool carries(const Share& s, int row) const;
  // Calls `copy` with each run of rows that these groups need, without a selection with all rows.
  // Returns the number of rows.
  template <class Copy>
  int each_run(const Groups* groups, Range rows, Copy&& copy) const {
    if (groups != nullptr) return buffers_.selection->each_run(*groups, rows, copy);
    copy(rows);
    return rows.end - rows.begin;
  }
  bool move_result(const Transfer& t, const Limit& limit);
  bool receive_result(const Transfer& t, const Limit& limit);
  void forget_failure();
  FailureReport ended_here() const;
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
  // Lane of this thread, or null without a trace. Without a trace, this check is the only cost.
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
  const Needs room_;  // what the symmetric memory has, at most
  std::chrono::nanoseconds timeout_{0};
  std::chrono::nanoseconds delay_{0};
  std::atomic<std::uint64_t> delay_state_{0};

  std::uint32_t epoch_ = 0;
  std::uint32_t digest_ = 0;
  std::shared_ptr<const Schedule> schedule_;
  Buffers buffers_;
  Lanes lanes_;
  bool threaded_ = false;
  std::size_t next_action_ = 0;      // used only by the thread that runs the program
  bool entries_seen_ = false;        // the same
  bool visits_entered_ = false;      // used only by the calling thread
  Clock::time_point last_progress_;  // of the thread that runs the program

  // Private pad on which the two threads wait for each other. Never shared with other processes.
  std::unique_ptr<SignalPad> local_;
  std::atomic<int> computed_{0};             // transfers whose GEMM tiles are done
  std::atomic<std::uint32_t> submitted_{0};  // epoch handed to the worker
  std::atomic<std::uint32_t> finished_{0};   // epoch the worker has ended, complete or failed
  std::atomic<bool> stop_{false};
  std::mutex reporting_;             // held while failure_ or ending_ is written
  std::atomic<bool> failed_{false};  // failure_ is complete
  bool ending_ = false;              // end_call was called: later calls fail as well
  FailureReport failure_;            // read without the lock once failed()
  std::mutex closing_;
  std::thread worker_;
};

}  // namespace flux::host
