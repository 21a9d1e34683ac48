// Collectives of ranks on several hosts, without a GEMM: all_reduce, reduce_scatter, all_gather.
//
//   host 0:  rank 0 \  shared                  rank 2 \  shared
//            rank 1 /  memory  -- link 0-2, -- rank 3 /  memory      : host 1
//                                 link 1-3
//
// Inside a host ranks meet in shared memory. Between hosts every byte travels once, on a link between
// the two ranks of the same lane, and each rank that needs it sends or receives it by itself. There
// is no message in advance. The caller's thread polls for a short time and then sleeps.
//
// A call is cut into rounds. In each a rank
//   A  copies its input into its slot (IN), sums the slots of its host where it is the one to send
//      them, and sends;
//   B  awaits what other hosts send, sums it in the order of hosts, and publishes the sum (OUT);
//   C  copies what others of its host have published.
// The order is A0, A1 B0 C0, A2 B1 C1, ...: while one round is on the wire, the next one is summed.
// With little data there is one round, and so one message per link and direction: all ranks send
// once, and sum in the same order, so they return the same bits. A rank that is alone on its host
// sends from the caller's memory. So it runs A of as many rounds in advance as its buffers for what
// arrives have room for: A0, A1, A2, ... B0, A.. B1, ... If the caller computes between rounds, they
// have room for all rounds.
//
// A multiply before or after the collective is cut along the rounds (`produce`, `consume`). During a
// multiply the kernel sends and receives what its buffers have room for. With more data than that, a
// thread (Mover) moves bytes between those buffers and the caller's memory every millisecond, and only
// during a multiply: the links are under its lock then, and the caller's at all other times.
//   sums       multiply rows of others, send them; the same for the next round; ... own rows last
//   AllReduce  the same with rows of all, or with blocks of columns
//   AllGather  send the own rows; multiply the own rows; multiply each round's rows as they come
//
// Memory ordering and reuse. Slots alternate between two, over all rounds of all completed calls. A
// rank raises a flag behind its IN, OUT and C (DONE) of each round: a release store of (call, round)
// into its own memory, read with acquire. Flags only grow, so nothing is reset.
//   IN    of round g overwrites that of g-2. Peers have read it: this rank waits for their DONE of
//         g-2, or, in the second round of a call, for their first IN of this call, which follows their
//         whole previous call. In the first round it knows already: it has seen their OUT of the last
//         round, which follows their DONE of the one before.
//   OUT   of round g is written, by the sum or by a link, after the IN flags of all ranks of the host
//         for g. Each of those follows that rank's C of g-2.
//   links see link.h. The private buffers of round g are used again once the frames of g - ahead_
//         (2 with shared memory) have been sent, or summed: only then is g opened.
// If one rank completes a call, all ranks have entered it with the same digest: its result depends
// on data of every rank, which each hop passes on only after it has compared digests. So ranks that
// disagree all leave the call without a result, and the next call's number tells its data from theirs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpu/engine.h"
#include "cpu/link.h"
#include "schedule/routes.h"

namespace flux::host {

enum class Collective : int { kAllReduce = 0, kReduceScatter = 1, kAllGather = 2 };

using Progressed = std::function<void(std::size_t begin, std::size_t end)>;

// What a call works on. Sizes in bytes.
struct CollectiveCall {
  Collective kind = Collective::kAllReduce;
  std::uint64_t number = 0;          // larger than that of the call before
  std::uint32_t digest = 0;          // of what must be equal on all ranks
  const char* in = nullptr;          // AllGather: the own part; else the whole vector
  char* out = nullptr;               // ReduceScatter: the own part; else the whole vector
  std::vector<std::size_t> offsets;  // W + 1: where each rank's part begins, and the end
  DType dtype = DType::kF32;         // of a sum
  const char* bias = nullptr;        // `columns` elements added to every row of the result
  std::size_t columns = 0;           // elements of a row, where there is a bias or blocks
  // AllReduce: if not 0, `in` has the columns in blocks of as many (the last one has the rest), one block
  // behind the other, and is overwritten; `out` has whole rows, and is other memory.
  std::size_t block_columns = 0;
  double scale = 1.0;
  // Of each rank's part in a round (AllReduce: of the vector), at most; 0: as many as fit.
  std::size_t round_bytes = 0;
  // Called on the caller's thread with a range of bytes, once for each byte; or null.
  Progressed produce;  // of `in`: is about to be sent or summed
  Progressed consume;  // of `out`: has arrived (AllGather), or is the own part, which is in `in`
  // Called once, when this rank has nothing left to send or to compute before others' data arrive.
  std::function<void()> meanwhile;
  std::chrono::nanoseconds timeout{0};
  std::chrono::nanoseconds spin{0};
};

enum class Outcome : int {
  kDone = 0,
  kDisagrees = 1,    // ranks called with other arguments, or refused: no rank has a result
  kFailed = 2,       // see report()
  kEnded = 3,        // end_call
  kInterrupted = 4,  // the caller's `interrupted` returned true
};

struct CollectiveReport {
  Failure kind = Failure::kNone;
  int peer = -1;
  int culprit = -1;
  std::uint64_t expected = 0;  // rounds of the awaited data
  std::uint64_t observed = 0;
  std::string text;  // of the connection, or why a peer refused
};

// Calls a function every millisecond on a thread of its own, while it is asked to.
class Mover {
 public:
  explicit Mover(std::function<void()> move);
  ~Mover();  // ends the thread
  // Begins and ends the calls. None is made once `end` has returned.
  void begin();
  void end();

 private:
  void main();

  const std::function<void()> move_;
  std::mutex lock_;  // held during a call
  std::condition_variable changed_;
  bool moving_ = false;
  bool ending_ = false;
  std::thread thread_;
};

class Collectives {
 public:
  // Bytes of each rank's memory behind its pad.
  static std::size_t data_bytes(std::size_t slot_bytes, bool shares);

  // `pads` and `data` as in Symmetric: only those of this host are used. `descriptors`: by rank, the
  // connected socket to a rank on another host, or -1.
  Collectives(int rank, std::vector<int> host_of, std::vector<SignalPad*> pads,
              std::vector<char*> data, const std::vector<int>& descriptors,
              std::shared_ptr<Processes> processes, std::shared_ptr<void> memory,
              std::size_t slot_bytes);
  ~Collectives();
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // The ranks that this one needs a connection to.
  static std::vector<int> partners(const Placement& placement, int rank);

  // Makes a call. `interrupted` is asked about every 50 ms of a wait. `engine`: of the op that these
  // collectives serve, or null; a rank that enters this call there does not make it here.
  Outcome run(const CollectiveCall& call, const std::function<bool()>& interrupted, Engine* engine);
  const CollectiveReport& report() const { return report_; }

  // Makes the call of this number only to tell the peers that this rank does not.
  void refuse(std::uint64_t number, const std::string& why);

  // Makes a call that is inside another thread return, and all later ones.
  void end_call() { ending_.store(true); }
  // Tells the peers, on which rank this one has given up (if it failed), and lets go of connections
  // and memory. Idempotent. Waits for a call that is inside another thread.
  void close(PadState state, int culprit);

  void set_delay(std::chrono::nanoseconds longest, std::uint64_t seed);
  std::uint64_t bytes_sent() const;  // to other hosts
  // Bytes of buffers that no other rank sees: those for sums, and those for what arrives, which grow.
  std::size_t private_bytes() const { return sums_.size() + received_bytes_.load(); }

 private:
  // At the start of each rank's data. Written by its owner only.
  struct alignas(64) Flags {
    std::atomic<std::uint64_t> in;
    alignas(64) std::atomic<std::uint64_t> out;
    alignas(64) std::atomic<std::uint64_t> done;
  };
  // A range of the whole vector that is sent or summed as one.
  struct Part {
    std::size_t at;
    std::size_t bytes;
    std::size_t in_slot;  // where it lies in a slot
    int index;            // lane (AllReduce) or owner
  };
  // Frames of a link, counted from the start of the call.
  using Frames = std::vector<std::pair<Link*, std::uint32_t>>;
  struct Round {
    std::vector<Part> parts;
    Frames needs;  // how many must have arrived
    Frames posts;  // how many must have been sent
  };
  struct Left {  // thrown to leave a call
    Outcome outcome;
  };

  int world() const { return placement_.world(); }
  int handler(int host, int lane) const;
  bool is_remote(int rank) const { return placement_.host(rank) != placement_.host(rank_); }
  SignalPad& pad(int rank) { return *pads_[rank]; }
  Flags& flags(int rank) { return *reinterpret_cast<Flags*>(data_[rank]); }
  const char* own_part(const Part& part) const;
  char* in_slot(int rank, std::size_t round) const;
  char* out_slot(int rank, std::size_t round) const;
  std::size_t parity(std::size_t round) const { return (rotation_ + round) % 2; }
  char* received(int host, std::size_t round);
  // Bytes of a round of what a host sends. Slots do not change with the size of a round.
  std::size_t received_each() const;
  Round& plan_of(std::size_t round) { return rounds_[round % ahead_]; }
  std::uint64_t token(std::size_t round) const { return (call_->number << 24) | (round + 1); }

  void run_rounds();
  void cut();
  bool is_ready(std::size_t round);
  void produce(std::size_t begin, std::size_t end);
  void consume(std::size_t begin, std::size_t end);
  void compute(const std::function<void()>& function);
  void abandon();
  void plan_round(std::size_t round, Round* plan);
  void step_in(std::size_t round);
  void step_sum(std::size_t round);
  void step_out(std::size_t round);
  void raise(std::atomic<std::uint64_t>& flag, std::size_t round);
  void await_inputs(std::size_t round);
  void await_flag(int peer, std::atomic<std::uint64_t> Flags::* flag, std::uint64_t least,
                  int hops);
  void await_sent(const Round& plan);
  void await_arrived(Link& link, std::uint32_t count);
  template <class Ready>
  void await(int peer, bool here, int hops, std::uint64_t least, Ready&& ready,
             const std::function<std::uint64_t()>& observe);
  bool progress();
  void check(int peer, bool here, const std::function<bool()>& ready);
  void sleep_on_links(std::chrono::nanoseconds longest);
  void sum(const std::vector<const void*>& sources, char* to, std::size_t at, std::size_t bytes,
           bool is_result);
  template <class Visit>
  void each_run(std::size_t at, std::size_t bytes, Visit&& visit) const;
  void to_rows(const char* from, std::size_t at, std::size_t bytes);
  void sum_of_host(const Part& part, std::size_t round, char* to);
  void pause();
  [[noreturn]] void leave(Outcome outcome, CollectiveReport report);

  const int rank_;
  const pid_t pid_;
  const Placement placement_;
  const std::vector<int> members_;  // of this host
  const bool shares_;               // memory, with other ranks
  int lanes_ = 0;
  std::vector<SignalPad*> pads_;
  std::vector<char*> data_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; null where there is none
  std::shared_ptr<Processes> processes_;
  std::shared_ptr<void> memory_;
  const std::size_t slot_bytes_;
  std::vector<char> sums_;  // two slots: sums of this host, as they are sent
  // For each host: room for ahead_ rounds of what it sends.
  std::unique_ptr<char[]> received_;
  std::atomic<std::size_t> received_bytes_{0};  // any thread may ask for it

  std::mutex busy_;               // held during a call
  std::unique_ptr<Mover> mover_;  // once a call needed it
  std::atomic<bool> ending_{false};
  bool closed_ = false;
  const CollectiveCall* call_ = nullptr;
  const std::function<bool()>* interrupted_ = nullptr;
  Engine* engine_ = nullptr;
  std::size_t rotation_ = 0;  // rounds of completed calls
  std::vector<Round> rounds_;
  std::size_t count_ = 0;      // of rounds
  std::size_t ahead_ = 2;      // rounds whose A may run before the B of the first of them
  std::size_t per_owner_ = 0;  // bytes of each rank's part in a round; AllReduce: of the vector
  CollectiveReport report_;
  std::chrono::nanoseconds delay_{0};
  std::uint64_t delay_state_ = 0;
};

}  // namespace flux::host
