// The copies of an AllGather on a GPU: the transfers of a schedule, put on streams.
//
//   home of rank r (the stream of its kernel):  pull: await all entries | own rows -> own buffer, signal
//   copy stream, push:  await entry of d, rows -> d, signal d ...
//                pull:  (behind the entries)  await s's signal at s, rows of s -> own buffer, signal ...
//
// Own rows are copied in front of the kernel and not beside it: a copy inside one device may be done by
// its multiprocessors, and the kernel that waits for it may hold them all.
//
// Buffer reuse. A rank's gathered rows are last read by its kernel of call e - 1. It raises its entry
// of call e, at every peer, in the order of its own stream, so after that kernel. Push: a peer writes
// to the rank only after that entry. Pull: peers read the rank's own rows, and have done so when they
// enter call e + 1, which the rank awaits before it writes its own rows of call e + 1. The rank's own
// rows and pulled rows it writes itself, behind its own kernel. The caller's stream waits for the copy
// stream at the end of a call, so an entry also says that the rank has forwarded what it had to.
//
// Rows that cross between nodes are moved by gather_from_nodes, on a stream of the network; the same
// copy stream forwards them inside the node behind the signals that it raises.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "host/driver.h"
#include "host/remote.h"
#include "host/schedule.h"
#include "host/stream_trace.h"

namespace flux::host {

// What is gathered: rows of x and, under the same signals, what goes with each row (its scale).
struct GatherPart {
  Address own;  // own rows, without gaps
  std::int64_t row_bytes;
  std::vector<Address> gathered;  // by rank: [M, ...] without gaps
  std::vector<Address> sources;   // by rank: the same, to read from
};

struct GatherCall {
  Stream home;    // own rows; behind it everything else
  Stream stream;  // the copy stream
  Event forked;   // by which it comes behind it
  std::uint32_t epoch;
  const std::vector<GatherPart>& parts;
  const std::vector<Address>& entries;  // by rank: W words of its pad; none: all have entered
  const std::vector<Address>& signals;  // by rank: the signals of its pad
  Range node = {0, 0};                  // ranks that share memory, when those are not all
  // Puts on streams what is to run beside the copies, once own rows have been put on `home`.
  std::function<void()> beside = {};
  StreamTrace* trace = nullptr;
};

// Whether rows are fetched by their destination.
inline bool pulls(const Schedule& schedule) {
  return schedule.spec.tiles.op == OpKind::kAGGemm &&
         schedule.spec.tiles.direction == Direction::kPull;
}

void gather_tiles(Driver& driver, const Schedule& schedule, const GatherCall& call);

// Rows from and to other nodes. `stream` comes behind the copy of own rows; parts lie at these
// distances from the beginning of each rank's data, in the order of GatherCall::parts.
struct NetworkCall {
  Stream stream;
  std::uint32_t epoch;
  Range node;
  const std::vector<std::int64_t>& parts;
  const std::vector<std::int64_t>& row_bytes;  // by part
  Address signals;                             // of this rank's pad
  StreamTrace* trace = nullptr;
};
void gather_from_nodes(Driver& driver, Remote& remote, const Schedule& schedule,
                       const NetworkCall& call);

// The part of a rank that exists on paper only, in a group where `real` is the one rank that does not
// (flux/transport/loopback.py): all rows but those of `real` lie at the rank's `sources` from the
// beginning, so it moves what comes from or goes to `real`, on `stream`, and announces the rest.
void act_as_peer(Driver& driver, const Schedule& schedule, const GatherCall& call, int real);

}  // namespace flux::host
