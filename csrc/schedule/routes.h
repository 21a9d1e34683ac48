// Routes between hosts: which ranks share a host, and through which rank rows enter and leave it.
//
// csrc/core maps regular meshes, where every node has as many ranks; hosts need not be alike (3 ranks
// + 1 rank, or ranks dealt out in turn). What the routes below say of a mesh is what
// Order::kHierarchical says.
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

  // The member of `host` that rows of `owner` go through; on its own host, the owner itself. Owners
  // take turns, so that no member carries more than its share.
  //   hosts 0 1 2 | 3:  proxy(1, 0) = proxy(1, 1) = proxy(1, 2) = 3;  proxy(0, 3) = 0
  int proxy(int host, int owner) const;

  // Owners on other hosts whose partials `rank` combines for its host, by rank; none when it is
  // alone there, for then there is nothing to combine.
  //   hosts 0 1 | 2 3:  rank 0 combines for 2, rank 1 for 3, rank 2 for 0, rank 3 for 1
  std::vector<int> combined_by(int rank) const;

  // AllGather: (chunk, from) in the order in which they reach `rank`: from other hosts straight from
  // their owners, then from the own host, then what its other members have received.
  //   hosts 0 1 | 2 3, rank 1:  3<-3  0<-0  2<-0
  std::vector<Hop> arrivals(int rank) const;

  // ReduceScatter: owners in the order in which `rank` computes their rows. Owners on other hosts
  // come first, in an order that is the same for all members of a host, so that a combined tile can
  // leave as soon as it can; then the own host, shifted by rank, and the own rows last.
  //   hosts 0 1 | 2 3:  rank 0: 2 3 1 0    rank 1: 2 3 0 1
  std::vector<int> far_first(int rank) const;

 private:
  std::vector<int> host_of_;
  std::vector<int> lane_;
  std::vector<std::vector<int>> members_;
};

}  // namespace flux::host
