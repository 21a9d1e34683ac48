// The copies of an AllGather on a GPU: the transfers of a schedule, put on streams.
//
//   home of rank r (the stream of its kernel)       entry | (pull: await all entries) | own rows, signals | kernel
//   copy stream, push:  (forked behind the entry)   await entry of d, rows -> d, signal d ...
//                pull:  (forked behind own rows)    offers of own rows -> pullers |
//                                                   await s's offer, rows of s -> own buffer, signal, offer ...
//
// Own rows are copied before the kernel and not beside it. A copy inside one device may run on its
// multiprocessors, and the kernel that waits for the copy may hold all of them. Own rows are one
// copy and one batch of signals. The kernel is launched directly after them, and the copies of
// other rows are submitted after the kernel. With one hardware queue
// (CUDA_DEVICE_MAX_CONNECTIONS=1), work that is submitted after a wait starts after that wait. A
// kernel that is submitted after the copies would overlap with none of them.
//
// A stream waits only for words of its own rank's pad; peers write to these words. Rows that a peer has
// pushed are forwarded after a kernel has waited for their signal. A stream's own wait orders no
// writes of other devices: this one might see the signal and copy what was there before the rows.
// A puller waits
// for the *offer* of a tile. The source raises the offer at the puller when the source has the
// tile. (A *signal* says that the tile is in the gathered rows of the rank whose pad has the
// signal. Kernels wait for signals.)
//
// Buffer reuse. A rank's gathered rows are last read by its kernel of call e - 1. The rank raises
// its entry of call e, at every peer, in the order of its own stream, so after that kernel.
//   Push: a peer writes to the rank only after that entry, or (two buffers, cuda_op_buffers.cpp) after
//   the one before.
//   Pull: peers read the rank's own rows. They have finished this when they enter call e + 1. The rank
//   awaits these entries before it writes its own rows of call e + 1.
// The rank itself writes its own rows and pulled rows, after its own kernel. The caller's stream
// waits for the copy stream at the end of a call, so an entry also says that the rank has forwarded
// all tiles that it had to forward. An offer of call e is raised at a puller after the puller's
// entry of call e, because a source awaits all entries first.
//
// gather_from_nodes moves rows between nodes on the network's stream and raises their signals. The
// copy stream forwards these rows inside the node, after it has waited for the signals.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda_host/driver.h"
#include "cuda_host/kernels.h"
#include "cuda_host/remote.h"
#include "cuda_host/stream_trace.h"
#include "schedule/schedule.h"

namespace flux::host {

// One gathered array: the rows of x, or the scale of each row. Both use the same signals.
struct GatherPart {
  Address own;  // own rows, without gaps
  std::int64_t row_bytes;
  const std::vector<Address>* gathered;  // by rank: [M, ...] without gaps
  const std::vector<Address>* sources;   // by rank: [M, ...] that copies read from
};

struct GatherCall {
  Stream home;    // copies own rows; all other work comes after them
  Stream stream;  // the copy stream
  Event forked;   // orders the copy stream after `home`
  std::uint32_t epoch;
  std::uint32_t entered;  // number of the entry that lets rows be written at a peer
  const std::vector<GatherPart>& parts;
  const std::vector<Address>& entries;  // by rank: W words of its pad; empty: all have entered
  const std::vector<Address>& signals;  // by rank: the signals of its pad
  const std::vector<Address>& offers;   // by rank: the offers of its pad, numbered as signals
  Range node = {0, 0};                  // ranks that share memory; empty: all ranks
  StreamTrace* trace = nullptr;
  // Waits in a kernel for signals, before rows that peers have written are forwarded. Null: all ranks
  // are on this device, so no write is remote, and the stream waits; no multiprocessor may be free.
  const Kernel* kernel = nullptr;
  const FluxMeetArgs* wait = nullptr;
  bool own_in_place = false;  // kernels read the own rows of x: they are not copied, nor announced
};

// Whether rows are fetched by their destination.
inline bool pulls(const Schedule& schedule) {
  return schedule.spec.tiles.op == OpKind::kAGGemm &&
         schedule.spec.tiles.direction == Direction::kPull;
}

// The copies of one call. The caller launches its kernel between publish() and move().
class Gather {
 public:
  Gather(Driver& driver, const Schedule& schedule, const GatherCall& call);

  // Own rows, on `home`. Forks the copy stream.
  void publish();
  // Other rows, on the copy stream.
  void move();
  // Does the work of a simulated rank, in a group in which only the rank `real` is not simulated
  // (flux/transport/loopback.py). All rows except those of `real` lie at the simulated rank's
  // sources from the beginning. So this moves only rows that come from or go to `real`, on
  // `stream`, and raises the offers of the rest at `real`.
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

// Ranks that pull `chunk` from this one, in the order in which they pull it.
std::vector<int> pullers(const TileOrder& tiles, int chunk);

// Rows from and to other nodes. `stream` is ordered after the copy of own rows. `parts` are offsets
// from the beginning of each rank's data, in the order of GatherCall::parts.
struct NetworkCall {
  Stream stream;
  std::uint32_t epoch;
  Range node;
  const std::vector<std::int64_t>& parts;
  const std::vector<std::int64_t>& row_bytes;  // by part
  const std::vector<Address>& signals;         // by rank: the signals of its pad
  const std::vector<Address>& offers;          // by rank
  StreamTrace* trace = nullptr;
  const Kernel& kernel;  // as in GatherCall
  const FluxMeetArgs* wait;
};
void gather_from_nodes(Driver& driver, Remote& remote, const Schedule& schedule,
                       const NetworkCall& call);

}  // namespace flux::host
