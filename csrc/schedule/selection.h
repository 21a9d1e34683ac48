// Expert parallelism: the rows of a communication tile that a transfer carries.
//
// A rank needs a token only if one of the token's experts is its own. Tokens are owned, cut into
// tiles, ordered and announced as in the dense schedule, but a transfer carries only the rows that
// a rank behind it needs. W = 4 on two hosts (0 1 | 2 3), a token of rank 0 with experts on 2 and 3:
//
//   dispatch   0 -> 2 -> 3        the hop 0 -> 2 carries what 2 or 3 needs: one row between hosts
//   combine    3 -> 2 -> 0        2 adds the part of 3 to its own, and sends one row
//
// Ordering and reuse of memory are those of the dense schedule (csrc/cpu/signal_pad.h, and
// flux/transport/network.py between hosts):
//   - A row keeps its place, and its tile's signal is raised behind it, also if no row travels. So a
//     call writes a subset of what the dense call writes, each row at the same point.
//   - A row that a transfer does not carry is never read at its destination. The product reads the
//     rows that its rank needs. A transfer that forwards rows carries a subset of the one before it,
//     which carries what any rank behind it needs. A sum reads the shares that were carried.
//   - Both ends of a transfer agree on its rows: these follow from the schedule and the choices,
//     which the digest of a call covers. Ranks compare digests before the first row moves.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "schedule/routing.h"
#include "schedule/schedule.h"

namespace flux::host {

// A set of groups of ranks, which have equal experts: one bit of each of `ep`.
using Groups = std::vector<std::uint64_t>;

// The groups behind each transfer of one schedule.
class Hops {
 public:
  Hops(const Schedule& schedule, int ep);

  int ep() const { return ep_; }
  // AllGather: groups of `dst` and of the ranks that get the chunk from it, directly or not. Known
  // for the destinations of this rank's transfers, and for this rank.
  const Groups& to(int chunk, int dst) const { return to_.at({chunk, dst}); }
  // ReduceScatter: the group whose partial rows a source sends, or with `combined` the groups of its
  // host, whose sum it sends.
  const Groups& from(int source, bool combined) const {
    return combined ? of_host_[source] : of_rank_[source];
  }
  // Whether the share of `source` in a sum at `holder` is the sum of its host.
  bool is_combined(int source, int holder) const {
    return two_levels_ && host_of_[source] != host_of_[holder];
  }

 private:
  int ep_;
  bool two_levels_ = false;
  std::vector<int> host_of_;
  std::vector<Groups> of_rank_;
  std::vector<Groups> of_host_;  // by rank
  std::map<std::pair<int, int>, Groups> to_;
};

// The rows of one call.
class Selection {
 public:
  Selection(std::shared_ptr<const Hops> hops, const Choices& choices);

  const Hops& hops() const { return *hops_; }
  bool needs(const Groups& groups, int row) const {
    for (std::size_t i = 0; i < words_; ++i) {
      if (masks_[static_cast<std::size_t>(row) * words_ + i] & groups[i]) return true;
    }
    return false;
  }
  // Calls `use` with each run of rows that one of the groups needs; returns the number of rows.
  template <class Use>
  int each_run(const Groups& groups, Range rows, Use&& use) const {
    int count = 0;
    for (int row = rows.begin; row < rows.end;) {
      if (!needs(groups, row)) {
        ++row;
        continue;
      }
      Range run{row, row + 1};
      while (run.end < rows.end && needs(groups, run.end)) ++run.end;
      use(run);
      count += run.end - run.begin;
      row = run.end;
    }
    return count;
  }

 private:
  std::shared_ptr<const Hops> hops_;
  std::size_t words_;
  std::vector<std::uint64_t> masks_;  // by row: the groups that have an expert of it
};

}  // namespace flux::host
