// Communication order: the sequence in which the W - 1 remote chunks reach a rank, and from which peers.
//
// An order is a pure integer map (rank, step) -> (chunk, peer). Relative to rank r, step s brings
// the chunk at `offset(s)` from the peer at `via(s)`; both are offsets on a mesh of ranks, so that
// the map of one rank is the map of every rank, shifted. Two facts follow, and the tests check them:
//   - at each step the ranks that send and the ranks that receive are permutations of each other,
//     so no destination is written by two ranks at one step;
//   - a chunk that is passed on (via != offset) had reached the peer at an earlier step, so
//     executing the steps in order can never deadlock.
//
// Orders (Flux paper, 4.3 "Communication order among tiles"), for 4 ranks; rank 1 receives
//   direct        pull 2<-2 3<-3 0<-0, push 0<-0 3<-3 2<-2     ("chunk <- peer")
//   ring1d        0<-0 3<-0 2<-0     every hop is from the left neighbour
//   ring2d        0<-0 3<-3 2<-0     2 x 2: along the row, then down the column, then along the row
//   hierarchical  3<-3 0<-0 2<-0     2 nodes x 2: inter-node first, then own node, then fan-out
//   numa          3<-3 0<-0 2<-0     2 domains x 2: inter-NUMA first, then inside the domain
#pragma once

#include "core/problem.h"

namespace flux {

enum class Order : int { kDirect = 0, kRing1D = 1, kRing2D = 2, kHierarchical = 3, kNuma = 4 };
enum class Direction : int { kPush = 0, kPull = 1 };
enum class Swizzle : int { kNone = 0, kRankShift = 1, kXor = 2 };

// Ranks as nodes x NUMA domains x lanes, lanes fastest: rank = (node * domains + domain) * lanes +
// lane.
//   {2, 1, 2}:  node 0 = ranks 0 1, node 1 = ranks 2 3
struct Mesh {
  int nodes;
  int domains;
  int lanes;
};

// A position on the mesh, or a difference of two.
struct Coord {
  int node;
  int domain;
  int lane;
};

struct Hop {
  int chunk;  // owner of the rows that travel
  int peer;   // the other end of the transfer
};

FLUX_HD constexpr int world_of(const Mesh& g) { return g.nodes * g.domains * g.lanes; }

// {2, 1, 2}:  rank 0 1 2 3 -> (0,0,0) (0,0,1) (1,0,0) (1,0,1)
FLUX_HD constexpr Coord coord_of(const Mesh& g, int rank) {
  return Coord{rank / (g.domains * g.lanes), rank / g.lanes % g.domains, rank % g.lanes};
}

// rank + sign * offset, each coordinate wrapping by itself.
//   {2, 1, 2}, rank 1 + (1,0,1) -> rank 2
FLUX_HD constexpr int shifted(const Mesh& g, int rank, const Coord& offset, int sign) {
  const Coord c = coord_of(g, rank);
  return (wrap(c.node + sign * offset.node, g.nodes) * g.domains +
          wrap(c.domain + sign * offset.domain, g.domains)) *
             g.lanes +
         wrap(c.lane + sign * offset.lane, g.lanes);
}

// The mesh an order sees: flat orders see one ring, ring2d a rows x lanes grid, hierarchical a
// nodes x ranks-of-a-node grid. For {2, 2, 1}: direct {1,1,4}, ring2d {4,1,1}, hierarchical
// {2,1,2}.
FLUX_HD constexpr Mesh mesh_seen_by(Order order, const Mesh& g) {
  switch (order) {
    case Order::kDirect:
    case Order::kRing1D:
      return Mesh{1, 1, world_of(g)};
    case Order::kRing2D:
      return Mesh{g.nodes * g.domains, 1, g.lanes};
    case Order::kHierarchical:
      return Mesh{g.nodes, 1, g.domains * g.lanes};
    case Order::kNuma:
      break;
  }
  return g;
}

// Step s of hierarchical on H nodes x L lanes: H-1 inter-node hops, L-1 hops inside the own node,
// then for every remote node the fan-out of what the neighbours received.
//   2 x 2:  s = 0 1 2  ->  (1,0) (0,1) (1,1)
FLUX_HD constexpr Coord hierarchical_offset(const Mesh& g, int step) {
  const int inter = g.nodes - 1;
  const int intra = g.lanes - 1;
  if (step < inter) return Coord{step + 1, 0, 0};
  if (step < inter + intra) return Coord{0, 0, step - inter + 1};
  const int rest = step - inter - intra;
  return Coord{rest / intra + 1, 0, rest % intra + 1};
}

// Step s of numa on H nodes x D domains x C lanes, after the paper's PCIe cluster, where traffic
// between domains and between nodes shares the CPU's links and must not run at the same time:
//   1. inter-NUMA, same node                           (0, e, 0)      D-1 steps
//   2. inter-node, beside 3                            (g, 0, 0)      H-1
//   3. inside the domain, all of the own node          (0, e, j)      D*(C-1)
//   4. inter-NUMA for the chunks of other nodes        (g, e, 0)      (H-1)*(D-1)
//   5. inside the domain, for the same                 (g, e, j)      (H-1)*D*(C-1)
//   1 x 2 x 2:  s = 0 1 2  ->  (0,1,0) (0,0,1) (0,1,1)
FLUX_HD constexpr Coord numa_offset(const Mesh& g, int step) {
  const int nodes = g.nodes - 1;
  const int domains = g.domains - 1;
  const int lanes = g.lanes - 1;
  int s = step;
  if (s < domains) return Coord{0, s + 1, 0};
  s -= domains;
  if (s < nodes) return Coord{s + 1, 0, 0};
  s -= nodes;
  if (s < g.domains * lanes) return Coord{0, s / lanes, s % lanes + 1};
  s -= g.domains * lanes;
  if (s < nodes * domains) return Coord{s / domains + 1, s % domains + 1, 0};
  s -= nodes * domains;
  const int per_node = g.domains * lanes;
  return Coord{s / per_node + 1, s % per_node / lanes, s % lanes + 1};
}

// Where the chunk of step s lies relative to the rank, on mesh_seen_by(order, mesh).
//   4 ranks: direct and ring1d 1 2 3;  ring2d on 2 x 2: (0,1) (1,0) (1,1)
FLUX_HD constexpr Coord offset_at(Order order, const Mesh& seen, int step) {
  switch (order) {
    case Order::kHierarchical:
      return hierarchical_offset(seen, step);
    case Order::kNuma:
      return numa_offset(seen, step);
    case Order::kRing2D:
      return Coord{(step + 1) / seen.lanes, 0, (step + 1) % seen.lanes};
    case Order::kDirect:
    case Order::kRing1D:
      break;
  }
  return Coord{0, 0, step + 1};
}

// The peer that sends the chunk at `offset`: its owner (direct), the neighbour (rings), or the member of
// the own node or domain that received it first (hierarchical, numa).
//   hierarchical on 2 x 2:  (1,0) via (1,0)   (0,1) via (0,1)   (1,1) via (0,1)
FLUX_HD constexpr Coord via_of(Order order, const Coord& offset) {
  switch (order) {
    case Order::kDirect:
      return offset;
    case Order::kRing1D:
      return Coord{0, 0, 1};
    case Order::kRing2D:
      return offset.lane == 0 ? Coord{1, 0, 0} : Coord{0, 0, 1};
    case Order::kHierarchical:
    case Order::kNuma:
      break;
  }
  if (offset.lane != 0) return Coord{0, 0, offset.lane};
  if (offset.domain != 0) return Coord{0, offset.domain, 0};
  return offset;
}

// Rings always flow to the right. Elsewhere a puller walks to the right, as in the paper (rank 5 of
// 8 takes 6, 7, 0, 1, 2, 3, 4); when every rank *pushes* to the right, chunks arrive from the left.
FLUX_HD constexpr int arrival_sign(Order order, Direction direction) {
  return order == Order::kRing1D || order == Order::kRing2D || direction == Direction::kPush ? -1
                                                                                             : 1;
}

// Step s as its receiver sees it: `chunk` comes from `peer`. s in [0, W-1).
//   4 ranks, direct, pull, rank 1:  s = 0 1 2  ->  2<-2  3<-3  0<-0
FLUX_HD constexpr Hop recv_hop(Order order, const Mesh& mesh, Direction direction, int rank,
                               int step) {
  const Mesh seen = mesh_seen_by(order, mesh);
  const int sign = arrival_sign(order, direction);
  const Coord offset = offset_at(order, seen, step);
  return Hop{shifted(seen, rank, offset, sign), shifted(seen, rank, via_of(order, offset), sign)};
}

// Step s as its sender sees it: `chunk` goes to `peer`. The inverse of recv_hop at the same step.
//   4 ranks, direct, push, rank 1:  s = 0 1 2  ->  1->2  1->3  1->0
FLUX_HD constexpr Hop send_hop(Order order, const Mesh& mesh, Direction direction, int rank,
                               int step) {
  const Mesh seen = mesh_seen_by(order, mesh);
  const int sign = arrival_sign(order, direction);
  const Coord offset = offset_at(order, seen, step);
  const int receiver = shifted(seen, rank, via_of(order, offset), -sign);
  return Hop{shifted(seen, receiver, offset, sign), receiver};
}

// The step at which `chunk` reaches `rank`, or -1 for the rank's own chunk. Worlds are small, so a
// search is cheaper to get right than five closed forms, and runs once per tile.
//   4 ranks, direct, pull, rank 1:  chunk 0 1 2 3  ->  2 -1 0 1
FLUX_HD constexpr int step_of_chunk(Order order, const Mesh& mesh, Direction direction, int rank,
                                    int chunk) {
  const int steps = world_of(mesh) - 1;
  for (int s = 0; s < steps; ++s) {
    if (recv_hop(order, mesh, direction, rank, s).chunk == chunk) return s;
  }
  return -1;
}

FLUX_HD constexpr bool is_power_of_two(int v) { return v > 0 && (v & (v - 1)) == 0; }

// A communication order is legal on any mesh; xor pairing needs a power-of-two world.
FLUX_HD constexpr bool is_legal(Swizzle swizzle, const Mesh& mesh) {
  return swizzle != Swizzle::kXor || is_power_of_two(world_of(mesh));
}

// Step of the chunk that is visited s-th, after the own one: in the order of arrival. In the hierarchical order
// chunks of other nodes set out first, and those of the own node arrive first.
//   hierarchical on 2 x 2:  s = 0 1 2  ->  1 0 2
FLUX_HD constexpr int visited_step(Order order, const Mesh& seen, int s) {
  const int inter = seen.nodes - 1, intra = seen.lanes - 1;
  if (order != Order::kHierarchical || s >= inter + intra) return s;
  return s < intra ? inter + s : s - intra;
}

// AllGather: position p in [0, W) of the chunk sequence that the GEMM visits.
//   4 ranks, rank 1, direct pull:   rank_shift 1 2 3 0   (own chunk, then in order of arrival)
//                                   xor        1 0 3 2
//                                   none       0 1 2 3
FLUX_HD constexpr int ag_chunk_at(Swizzle swizzle, Order order, const Mesh& mesh,
                                  Direction direction, int rank, int position) {
  switch (swizzle) {
    case Swizzle::kNone:
      return position;
    case Swizzle::kXor:
      return rank ^ position;
    case Swizzle::kRankShift:
      break;
  }
  if (position == 0) return rank;
  const int step = visited_step(order, mesh_seen_by(order, mesh), position - 1);
  return recv_hop(order, mesh, direction, rank, step).chunk;
}

// Offsets from the farthest to the nearest: other nodes, other domains of the own node, own domain,
// and last the rank itself. On a flat mesh: 1 2 ... W-1 0.
//   2 x 2 (nodes x lanes):  p = 0 1 2 3  ->  (1,0) (1,1) (0,1) (0,0)
FLUX_HD constexpr Coord far_first_offset(const Mesh& g, int position) {
  const int node = g.domains * g.lanes;
  const int remote = world_of(g) - node;
  if (position < remote) return coord_of(g, node + position);
  const int local = position - remote;
  if (local < node - g.lanes) return coord_of(g, g.lanes + local);
  return coord_of(g, (local - (node - g.lanes) + 1) % g.lanes);
}

// ReduceScatter: position p in [0, W) of the owner sequence that the GEMM visits. The own rows come
// last because they need no transfer; the owners that are slowest to reach come first.
//   4 ranks, rank 1:   rank_shift, direct 2 3 0 1            xor 0 3 2 1      none 0 1 2 3
//                      rank_shift, hierarchical 2 x 2: 3 2 0 1
// Under rank_shift and xor the W ranks write to W different owners at every position.
FLUX_HD constexpr int rs_owner_at(Swizzle swizzle, Order order, const Mesh& mesh, int rank,
                                  int position) {
  const Mesh seen = mesh_seen_by(order, mesh);
  switch (swizzle) {
    case Swizzle::kNone:
      return position;
    case Swizzle::kXor:
      return rank ^ ((position + 1) % world_of(mesh));
    case Swizzle::kRankShift:
      break;
  }
  return shifted(seen, rank, far_first_offset(seen, position), 1);
}

}  // namespace flux
