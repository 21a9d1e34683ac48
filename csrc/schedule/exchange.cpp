#include "schedule/exchange.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/reducing.h"

namespace flux::host {
namespace {

// The other ranks in the order in which `rank` sends to them: other hosts first, since a wire is
// slower than memory; shifted by rank, so that no two ranks send to one at the same step.
struct Peers {
  std::vector<int> far;
  std::vector<int> near;
};

Peers peers_of(const ScheduleSpec& s, int rank, int direction) {
  const Placement placement = placement_of(s);
  Peers peers;
  for (int i = 1; i < s.problem.world; ++i) {
    const int peer = wrap(rank + direction * i, s.problem.world);
    (placement.host(peer) == placement.host(rank) ? peers.near : peers.far).push_back(peer);
  }
  return peers;
}

class Exchange {
 public:
  explicit Exchange(Schedule* s)
      : s_(*s), rank_(s->spec.tiles.rank), world_(s->spec.problem.world) {
    chunk_ = chunk_rows(s->spec.problem.m, world_);
  }

  // Rows of the block from `source` to `target`.
  int rows(int source, int target) const {
    return s_.spec.rows[s_.spec.problem.op == OpKind::kGemmAllToAll ? source : target];
  }

  // The tile of `length` rows from `begin` on of the block for `peer`, which is there after the
  // visit. `columns`: of the GEMM that computes it; none: x is only copied.
  void send(int peer, int tile, Range rows, int columns) {
    const int at = static_cast<int>(s_.transfers.size());
    const Range of_peer = {peer * chunk_ + rows.begin, peer * chunk_ + rows.end};
    s_.visits.push_back({of_peer, {0, columns}, {0, 0}, peer, {at, at + 1}});
    s_.transfers.push_back({static_cast<int>(s_.visits.size()) - 1, rank_, peer, peer, tile,
                            of_peer, signal_index(s_.spec.comm, rank_, tile), false,
                            s_.homes[peer].block});
  }

  void receive(int peer, int tile, Range rows, int columns) {
    const int signal = signal_index(s_.spec.comm, peer, tile);
    s_.visits.push_back({{peer * chunk_ + rows.begin, peer * chunk_ + rows.end},
                         {0, columns},
                         {signal, signal + 1},
                         peer,
                         {0, 0}});
  }

  // The block that stays: one GEMM tile.
  void stay(int columns) {
    if (const int own = rows(rank_, rank_)) {
      const int begin = rank_ * chunk_;
      s_.visits.push_back({{begin, begin + own}, {0, columns}, {0, 0}, rank_, {0, 0}});
    }
  }

  template <class Use>
  void by_peer(const std::vector<int>& far, bool sends, Use&& use) const {
    for (const int peer : far) {
      for (int tile = 0; tile < tiles(peer, sends); ++tile)
        use(peer, tile, tile_rows(peer, sends, tile));
    }
  }

  template <class Use>
  void by_tile(const std::vector<int>& far, bool sends, Use&& use) const {
    for (int tile = 0; tile < tiles_per_chunk(s_.spec.comm); ++tile) {
      for (const int peer : far) {
        if (tile < tiles(peer, sends)) use(peer, tile, tile_rows(peer, sends, tile));
      }
    }
  }

  template <class Use>
  void whole(const std::vector<int>& near, bool sends, Use&& use) const {
    for (const int peer : near) {
      const int count = block(peer, sends);
      if (count > 0) use(peer, 0, Range{0, count});
    }
  }

 private:
  int block(int peer, bool sends) const { return sends ? rows(rank_, peer) : rows(peer, rank_); }
  int tiles(int peer, bool sends) const { return ceil_div(block(peer, sends), s_.spec.comm.rows); }
  Range tile_rows(int peer, bool sends, int tile) const {
    const int size = s_.spec.comm.rows;
    return {tile * size, std::min(block(peer, sends), (tile + 1) * size)};
  }

  Schedule& s_;
  const int rank_;
  const int world_;
  int chunk_ = 0;
};

}  // namespace

void check_exchange(const ScheduleSpec& s) {
  const auto require = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument("an all-to-all " + what);
  };
  const int world = s.problem.world;
  require(is_push(s) && s.store == Store::kDirect && s.tiles.order == Order::kDirect &&
              s.tiles.swizzle == Swizzle::kRankShift,
          "pushes, stores directly, and has the order direct and the swizzle rank_shift");
  require(static_cast<int>(s.rows.size()) == world && s.problem.m % world == 0,
          "needs the rows of each rank, and M = world * rows of a block; got " +
              std::to_string(s.rows.size()) + " for " + std::to_string(world) +
              " ranks and M = " + std::to_string(s.problem.m));
  for (const int rows : s.rows) {
    require(rows >= 0 && rows <= s.problem.m / world,
            "has 0 to " + std::to_string(s.problem.m / world) + " rows in a block, got " +
                std::to_string(rows));
  }
}

void build_exchange(Schedule* s) {
  const int world = s->spec.problem.world, rank = s->spec.tiles.rank;
  for (int peer = 0; peer < world; ++peer) {
    s->homes.push_back({peer, peer == rank ? -1 : wrap(rank - peer - 1, world)});
    s->supplier.push_back(peer);
  }
  Exchange plan(s);
  const Peers to = peers_of(s->spec, rank, 1), from = peers_of(s->spec, rank, -1);
  const int columns = s->spec.problem.n;
  const bool gemm_first = s->spec.problem.op == OpKind::kGemmAllToAll;
  const int sent = gemm_first ? columns : 0, received = gemm_first ? 0 : columns;
  const auto send = [&](int peer, int tile, Range rows) { plan.send(peer, tile, rows, sent); };
  const auto receive = [&](int peer, int tile, Range rows) {
    plan.receive(peer, tile, rows, received);
  };
  // A block is computed as a whole before the next one, whose columns of the weight differ. Copies
  // are quick and leave all at once, so that the first tiles of all ranks arrive first.
  gemm_first ? plan.by_peer(to.far, true, send) : plan.by_tile(to.far, true, send);
  plan.whole(to.near, true, send);
  plan.stay(columns);
  plan.whole(from.near, false, receive);
  plan.by_tile(from.far, false, receive);
}

}  // namespace flux::host
