// Routes between hosts: which ranks share a host, and through which rank rows enter and leave it.
//
// csrc/core maps regular meshes, where every node has the same number of ranks. Hosts may differ:
// one host can have 3 ranks and another one 1, and the ranks of a host need not be consecutive. For
// a regular mesh, the routes below are those of Order::kHierarchical.
#pragma once

#include <vector>

#include "core/comm_order.h"

namespace flux::host {

// The hosts of a group of ranks, numbered from 0 without gaps.
class Placement {
 public:
  // `host_of[rank]`; throws std::invalid_argument when a number is missing.
  explicit Placement(std::vector<int> host_of);

  // Nodes of a mesh as hosts.  {2, 1, 2}: 0 0 1 1
  static Placement of(const Mesh& mesh);

  int world() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  int host(int rank) const { return host_of_[rank]; }
  const std::vector<int>& host_of() const { return host_of_; }
  const std::vector<int>& members(int host) const { return members_[host]; }

  // Position of a rank among the members of its host.
  int lane(int rank) const { return lane_[rank]; }

  // The member of `host` that rows of `owner` pass through. On the owner's host it is the owner
  // itself. Owners are assigned to the members in turn, so that all members carry the same load.
  //   hosts 0 1 2 | 3:  proxy(1, 0) = proxy(1, 1) = proxy(1, 2) = 3;  proxy(0, 3) = 0
  int proxy(int host, int owner) const;

  // Owners on other hosts whose partials `rank` combines for its host, in rank order. Empty if
  // `rank` is alone on its host, because there is nothing to combine.
  //   hosts 0 1 | 2 3:  rank 0 combines for 2, rank 1 for 3, rank 2 for 0, rank 3 for 1
  std::vector<int> combined_by(int rank) const;

  // AllGather: (chunk, from) in the order in which chunks reach `rank`. First come chunks of other
  // hosts, directly from their owners. Then come chunks of the own host. Last come chunks of other
  // hosts that other members of the own host have received.
  //   hosts 0 1 | 2 3, rank 1:  3<-3  0<-0  2<-0
  std::vector<Hop> arrivals(int rank) const;

  // ReduceScatter: owners in the order in which `rank` computes their rows. Owners on other hosts
  // come first, then the owners of the own host, shifted by rank. The own rows come last.
  //
  // Without `spread` all members of a host have the owners on other hosts in the same order, so that
  // a combined tile can be sent as early as possible. But then all members store to one proxy at a
  // time. With `spread` these owners too are shifted by rank, so that the members store to different
  // proxies; the owners that `rank` combines for come last among them.
  //   hosts 0 1 | 2 3:   rank 0: 2 3 1 0    rank 1: 2 3 0 1
  //              spread: rank 0: 3 2 1 0    rank 1: 2 3 0 1
  std::vector<int> far_first(int rank, bool spread) const;

 private:
  std::vector<int> host_of_;
  std::vector<int> lane_;
  std::vector<std::vector<int>> members_;
};

}  // namespace flux::host
