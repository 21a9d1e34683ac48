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
#pragma once

#include <cstdint>
#include <vector>

#include "host/driver.h"
#include "host/schedule.h"

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
};

// Whether rows are fetched by their destination.
inline bool pulls(const Schedule& schedule) {
  return schedule.spec.tiles.op == OpKind::kAGGemm &&
         schedule.spec.tiles.direction == Direction::kPull;
}

void gather_tiles(Driver& driver, const Schedule& schedule, const GatherCall& call);

// The part of a rank that exists on paper only, in a group where `real` is the one rank that does not
// (flux/transport/loopback.py): all rows but those of `real` lie at the rank's `sources` from the
// beginning, so it moves what comes from or goes to `real`, on `stream`, and announces the rest.
void act_as_peer(Driver& driver, const Schedule& schedule, const GatherCall& call, int real);

}  // namespace flux::host
