// The copies of an AllGather on a GPU: the transfers of a schedule, put on streams.
//
//   home of rank r (the stream of its kernel)       entry | (pull: await all entries) | own rows, signals | kernel
//   copy stream, push:  (forked behind the entry)   await entry of d, rows -> d, signal d ...
//                pull:  (forked behind own rows)    offers of own rows -> pullers |
//                                                   await s's offer, rows of s -> own buffer, signal, offer ...
//
// Own rows are copied in front of the kernel and not beside it: a copy inside one device may be done by
// its multiprocessors, and the kernel that waits for it may hold them all. They are one copy and one batch
// of signals. The kernel is launched right behind them, and the copies of other rows after it: with one
// hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) what is submitted behind a wait starts behind that wait,
// and a kernel behind the copies would overlap with none of them.
//
// A stream waits for words of its own rank's pad alone; peers write to them. What a puller waits for is
// the *offer* of a tile, which its source raises at the puller when it has the tile. (A *signal* says that
// the tile is in the gathered rows of the rank whose pad it is in; kernels wait for those.)
//
// Buffer reuse. A rank's gathered rows are last read by its kernel of call e - 1. It raises its entry
// of call e, at every peer, in the order of its own stream, so after that kernel. Push: a peer writes
// to the rank only after that entry. Pull: peers read the rank's own rows, and have done so when they
// enter call e + 1, which the rank awaits before it writes its own rows of call e + 1. The rank's own
// rows and pulled rows it writes itself, behind its own kernel. The caller's stream waits for the copy
// stream at the end of a call, so an entry also says that the rank has forwarded what it had to. An offer of
// call e is raised at a puller behind the puller's entry of call e: a source awaits all entries first.
//
// Rows that cross between nodes are moved by gather_from_nodes, on a stream of the network; the same
// copy stream forwards them inside the node behind the signals that it raises.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_host/driver.h"
#include "cuda_host/remote.h"
#include "cuda_host/stream_trace.h"
#include "schedule/schedule.h"

namespace flux::host {

// What is gathered: rows of x and, under the same signals, what goes with each row (its scale).
struct GatherPart {
  Address own;  // own rows, without gaps
  std::int64_t row_bytes;
  const std::vector<Address>* gathered;  // by rank: [M, ...] without gaps
  const std::vector<Address>* sources;   // by rank: the same, to read from
};

struct GatherCall {
  Stream home;    // own rows; behind it everything else
  Stream stream;  // the copy stream
  Event forked;   // by which it comes behind it
  std::uint32_t epoch;
  const std::vector<GatherPart>& parts;
  const std::vector<Address>& entries;  // by rank: W words of its pad; none: all have entered
  const std::vector<Address>& signals;  // by rank: the signals of its pad
  const std::vector<Address>& offers;   // by rank: the offers of its pad, numbered as signals
  Range node = {0, 0};                  // ranks that share memory, when those are not all
  StreamTrace* trace = nullptr;
};

// Whether rows are fetched by their destination.
inline bool pulls(const Schedule& schedule) {
  return schedule.spec.tiles.op == OpKind::kAGGemm &&
         schedule.spec.tiles.direction == Direction::kPull;
}

// One call's copies. The caller launches its kernel between the two.
class Gather {
 public:
  Gather(Driver& driver, const Schedule& schedule, const GatherCall& call);

  // Own rows, on `home`. Forks the copy stream.
  void publish();
  // Other rows, on the copy stream.
  void move();
  // The part of a rank that exists on paper only, in a group where `real` is the one rank that does not
  // (flux/transport/loopback.py): all rows but those of `real` lie at the rank's sources from the beginning,
  // so it moves what comes from or goes to `real`, on `stream`, and offers it the rest.
  void act_as_peer(int real);

 private:
  bool pulls() const { return host::pulls(schedule_); }
  bool in_node(int rank) const {
    const Range& node = call_.node;
    return node.begin == node.end || (rank >= node.begin && rank < node.end);
  }
  void fork();
  template <class What>
  void copy(Stream stream, int to, Range rows, int from, What&& what);
  Record copied(int chunk, int tile, Range rows, int peer, int at, int signal) const;
  void await(Stream stream, MemOp op, const Record& what);
  void put(Stream stream, MemOp op);
  void flush();
  void await_entry(Stream stream, int peer);
  void await_received(const Transfer& t);
  void send(const Transfer& t);
  void fetch(const Transfer& t);
  void raise(Stream stream, int rank, int signal);
  void offer(int chunk, int tile);
  void offer_to(int puller, int chunk);

  Driver& driver_;
  const Schedule& schedule_;
  const GatherCall& call_;
  int rank_;
  int world_;
  std::uint32_t entered_;  // bit of each peer whose entry has been awaited
  Stream pending_stream_ = 0;
  std::vector<MemOp> pending_;
};

// Ranks that pull `chunk` from this one, in the order in which they come to it.
std::vector<int> pullers(const TileOrder& tiles, int chunk);

// Rows from and to other nodes. `stream` comes behind the copy of own rows; parts lie at these
// distances from the beginning of each rank's data, in the order of GatherCall::parts.
struct NetworkCall {
  Stream stream;
  std::uint32_t epoch;
  Range node;
  const std::vector<std::int64_t>& parts;
  const std::vector<std::int64_t>& row_bytes;  // by part
  const std::vector<Address>& signals;         // by rank: the signals of its pad
  const std::vector<Address>& offers;          // by rank
  StreamTrace* trace = nullptr;
};
void gather_from_nodes(Driver& driver, Remote& remote, const Schedule& schedule,
                       const NetworkCall& call);

}  // namespace flux::host
