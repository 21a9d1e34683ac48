// The plan of a ReduceScatter that flux::host::Schedule unrolls: which rank sums which rows, and where.
#pragma once

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "schedule/schedule.h"

namespace flux::host {

inline bool is_push(const ScheduleSpec& s) { return s.tiles.direction == Direction::kPush; }

inline Placement placement_of(const ScheduleSpec& s) {
  return s.hosts.empty() ? Placement::of(s.tiles.mesh) : Placement(s.hosts);
}

// Flat: every rank's partial goes to the owner of its rows (push: block wrap(source - owner - 1) of
// the owner's memory; pull: block wrap(owner - source - 1) of the source's).
//
// Two levels (order hierarchical, push, several hosts): the ranks of a host send their partials for
// an owner on another host to one rank of their own host, the owner's proxy there. The proxy adds
// them up and sends the sum. So one block travels between two hosts instead of one per rank.
// Example with 2 hosts x 2 ranks, rows of rank 2:
//   rank 0 (proxy)  own + 1's --sum--> block of rank 2
//   rank 1          ----^              rank 2: (0 + 1) + own + 3's
class Reducing {
 public:
  explicit Reducing(const ScheduleSpec& s)
      : spec_(s), placement_(placement_of(s)), world_(s.problem.world) {
    two_levels_ = s.tiles.order == Order::kHierarchical && is_push(s) && placement_.hosts() > 1;
    room_ = Room{world_ - 1, 1};
    for (int rank = 0; two_levels_ && rank < world_; ++rank) {
      // What blocks(rank) and owners(rank) list: one of each rank of the host and of each other
      // host for the own rows, one of each rank of the host for rows that it combines.
      const int size = static_cast<int>(placement_.members(placement_.host(rank)).size());
      const int combined = static_cast<int>(placement_.combined_by(rank).size());
      room_.blocks = std::max(room_.blocks, size + placement_.hosts() - 2 + combined * size);
      room_.regions = std::max(room_.regions, 1 + combined);
    }
  }

  bool two_levels() const { return two_levels_; }
  const Placement& placement() const { return placement_; }

  // The rank that adds up the partials of `source`'s host for `owner`. It is the owner itself
  // without two levels, on the owner's host, and if `source` is alone on its host.
  int holder(int owner, int source) const {
    if (!two_levels_) return owner;
    const int host = placement_.host(source);
    const bool alone = placement_.members(host).size() == 1;
    return alone ? owner : placement_.proxy(host, owner);
  }

  // The sources whose blocks `holder` adds up for `owner`, in the order of the sum.
  std::vector<int> sources(int holder, int owner) const {
    std::vector<int> list;
    for (int rank = 0; rank < world_; ++rank) {
      if (this->holder(owner, rank) == holder) list.push_back(rank);
    }
    if (holder == owner && two_levels_) {
      // Another host contributes one sum, from its proxy. A host with one rank is listed already.
      for (int host = 0; host < placement_.hosts(); ++host) {
        if (host != placement_.host(owner) && placement_.members(host).size() > 1) {
          list.push_back(placement_.proxy(host, owner));
        }
      }
    }
    std::sort(list.begin(), list.end());
    return list;
  }

  // Owners whose rows `rank` adds up: itself, then the owners on other hosts for which it combines.
  std::vector<int> owners(int rank) const {
    std::vector<int> list{rank};
    if (two_levels_) {
      const auto combined = placement_.combined_by(rank);
      list.insert(list.end(), combined.begin(), combined.end());
    }
    return list;
  }

  // Group of W signals in the pad of `holder` for the partials of `owner`.
  int region(int holder, int owner) const {
    if (holder == owner) return 0;
    const auto held = owners(holder);
    return static_cast<int>(std::find(held.begin(), held.end(), owner) - held.begin());
  }

  int signal(int holder, int owner, int source, int tile) const {
    return region(holder, owner) * signal_count(spec_.comm) +
           signal_index(spec_.comm, source, tile);
  }

  // Block in the memory of `holder` (pull: of `source`) for the rows of `owner`.
  int block(int holder, int owner, int source) const {
    if (!is_push(spec_)) return wrap(owner - source - 1, world_);
    if (!two_levels_) return wrap(source - owner - 1, world_);
    const auto& list = blocks(holder);
    const auto block = std::find(list.begin(), list.end(), std::make_pair(owner, source));
    return static_cast<int>(block - list.begin());
  }

  // Blocks and groups of signals that the largest holder needs.
  Room room() const { return room_; }

 private:
  // Two levels: (owner, source) of each block in the memory of `holder`. The own partial of own rows
  // goes to the own output instead.
  const std::vector<std::pair<int, int>>& blocks(int holder) const {
    const auto [known, is_new] = blocks_.try_emplace(holder);
    auto& list = known->second;
    if (!is_new) return list;
    for (const int owner : owners(holder)) {
      for (const int source : sources(holder, owner)) {
        if (owner != holder || source != holder) list.emplace_back(owner, source);
      }
    }
    return list;
  }

  const ScheduleSpec& spec_;
  Placement placement_;
  int world_;
  bool two_levels_ = false;
  Room room_{};
  mutable std::map<int, std::vector<std::pair<int, int>>> blocks_;  // see blocks()
};

}  // namespace flux::host
