#include "host/schedule.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace flux::host {
namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument(what);
}

void check(const ScheduleSpec& s) {
  const Problem& p = s.problem;
  const TileOrder& t = s.tiles;
  const auto str = [](int v) { return std::to_string(v); };
  const auto code = [&](const char* what, int v, int last) {
    require(v >= 0 && v <= last,
            std::string(what) + " must be in [0, " + str(last) + "], got " + str(v));
  };
  code("op", static_cast<int>(p.op), static_cast<int>(OpKind::kGemmAR));
  code("order", static_cast<int>(t.order), static_cast<int>(Order::kNuma));
  code("direction", static_cast<int>(t.direction), static_cast<int>(Direction::kPull));
  code("swizzle", static_cast<int>(t.swizzle), static_cast<int>(Swizzle::kXor));
  code("store", static_cast<int>(s.store), static_cast<int>(Store::kStaged));
  require(t.mesh.nodes >= 1 && t.mesh.domains >= 1 && t.mesh.lanes >= 1,
          "mesh must be positive, got (" + str(t.mesh.nodes) + ", " + str(t.mesh.domains) + ", " +
              str(t.mesh.lanes) + ")");
  require(world_of(t.mesh) == p.world,
          "mesh has " + str(world_of(t.mesh)) + " ranks, world is " + str(p.world));
  require(t.rank >= 0 && t.rank < p.world,
          "rank must be in [0, " + str(p.world) + "), got " + str(t.rank));
  require(p.m >= 1 && p.n >= 1 && p.k >= 1,
          "m, n, k must be positive, got (" + str(p.m) + ", " + str(p.n) + ", " + str(p.k) + ")");
  require(t.tile_m >= 1 && t.tile_n >= 1,
          "GEMM tile must be positive, got (" + str(t.tile_m) + ", " + str(t.tile_n) + ")");
  require(t.raster >= 1, "raster must be at least 1, got " + str(t.raster));
  require(s.comm.rows >= 1, "comm_tile_rows must be at least 1, got " + str(s.comm.rows));
  require(is_legal(t.swizzle, t.mesh),
          "swizzle xor needs a power-of-two world, got " + str(p.world));
}

Range clip(int tile, int size, int limit) {
  return Range{tile * size, std::min(limit, (tile + 1) * size)};
}

template <class Use>
void for_each_comm_tile(const CommTiling& c, int chunk, Use&& use) {
  for (int tile = 0; tile < tiles_per_chunk(c); ++tile) {
    const Range rows = comm_tile_rows(c, chunk, tile);
    if (rows.begin < rows.end) use(tile, rows);
  }
}

void build_visits(Schedule* s) {
  const TileOrder& t = s->spec.tiles;
  for (int slot = 0; slot < tile_count(t); ++slot) {
    const TileCoord at = tile_at(t, slot);
    Visit v{clip(at.m, t.tile_m, t.m), clip(at.n, t.tile_n, t.n), {0, 0}, -1, {0, 0}};
    const int first = owner_of(t.m, s->spec.problem.world, v.rows.begin);
    const int last = owner_of(t.m, s->spec.problem.world, v.rows.end - 1);
    if (first == last) v.owner = first;
    s->visits.push_back(v);
  }
}

// AllGather. Push: this rank moves what it sends; pull: what it receives. In either case the tile
// (chunk, tile) lies in rank q's gathered buffer exactly when q's pad carries its signal, which is
// also what a forwarding hop or a pulling peer waits for.
void build_all_gather(Schedule* s) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  const int rank = t.rank;
  bool mixed = false;
  for (Visit& v : s->visits) {
    if (v.owner == rank) continue;
    v.waits = signals_of_rows(c, v.rows.begin, v.rows.end);
    mixed |= v.owner < 0 && row_begin(t.m, s->spec.problem.world, rank) < v.rows.end &&
             row_end(t.m, s->spec.problem.world, rank) > v.rows.begin;
  }
  const bool pull = t.direction == Direction::kPull;
  s->publishes_own = s->spec.problem.world > 1 && (pull || mixed);
  const auto publish = [&] {
    for_each_comm_tile(c, rank, [&](int tile, Range rows) {
      s->transfers.push_back(
          {-1, rank, rank, rank, tile, rows, signal_index(c, rank, tile), false});
    });
  };
  // A pulled peer's data must be visible before anyone can pull it; a pushed copy at home is only
  // read by this rank's own straddling tiles, so the peers are served first.
  if (pull) publish();
  s->supplier.assign(s->spec.problem.world, rank);
  for (int step = 0; step < s->spec.problem.world - 1; ++step) {
    const Hop arrival = recv_hop(t.order, t.mesh, t.direction, rank, step);
    const Hop hop = pull ? arrival : send_hop(t.order, t.mesh, t.direction, rank, step);
    s->supplier[arrival.chunk] = arrival.peer;
    const int src = pull ? hop.peer : rank;
    const int dst = pull ? rank : hop.peer;
    for_each_comm_tile(c, hop.chunk, [&](int tile, Range rows) {
      s->transfers.push_back({step, src, dst, hop.chunk, tile, rows,
                              signal_index(c, hop.chunk, tile), hop.chunk != src});
    });
  }
  if (!pull && s->publishes_own) publish();
}

// ReduceScatter. Every (owner, tile) leaves once, when the last GEMM tile that computes a part of
// it is done; transfers are listed in that order so that progress is a single counter. The signal
// index is that of (source, tile): the owner waits for one signal per source. It is raised in the
// owner's pad for pushed and for pulled partials alike.
void build_reduce_scatter(Schedule* s) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  std::vector<int> last_visit(signal_count(c), -1);
  for (int slot = 0; slot < static_cast<int>(s->visits.size()); ++slot) {
    const Visit& v = s->visits[slot];
    const Range touched = signals_of_rows(c, v.rows.begin, v.rows.end);
    for (int i = touched.begin; i < touched.end; ++i) last_visit[i] = slot;
  }
  std::vector<int> order;
  for (int i = 0; i < signal_count(c); ++i) {
    if (last_visit[i] >= 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const auto key = [&](int i) {
      return std::make_pair(last_visit[i], position_of_chunk(t, i / tiles_per_chunk(c)));
    };
    return key(a) < key(b);
  });
  for (const int i : order) {
    const int owner = i / tiles_per_chunk(c);
    const int tile = i % tiles_per_chunk(c);
    Visit& v = s->visits[last_visit[i]];
    const int index = static_cast<int>(s->transfers.size());
    if (v.completes.begin == v.completes.end) v.completes = Range{index, index};
    ++v.completes.end;
    s->transfers.push_back({position_of_chunk(t, owner), t.rank, owner, owner, tile,
                            comm_tile_rows(c, owner, tile), signal_index(c, t.rank, tile), false});
  }
}

// GemmAR, second phase: reduced tiles travel from their owners to everyone, directly (the reduction
// has serialised them already, so a ring would only add hops). A pushing owner sends each tile to
// all peers as soon as it is reduced; a pulling rank takes one owner's tiles after the other.
void build_results(Schedule* s) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  const int world = s->spec.problem.world;
  const auto transfer = [&](int step, int src, int dst, int tile, Range rows) {
    return Transfer{step, src, dst, src, tile, rows, signal_count(c) + signal_index(c, src, tile),
                    false};
  };
  const auto from_peers = [&](int sign, std::vector<Transfer>* list) {
    for (int step = 0; step < world - 1; ++step) {
      const int src = wrap(t.rank + sign * (step + 1), world);
      for_each_comm_tile(c, src, [&](int tile, Range rows) {
        list->push_back(transfer(step, src, t.rank, tile, rows));
      });
    }
  };
  if (t.direction == Direction::kPull) {
    from_peers(1, &s->results);
    return;
  }
  for_each_comm_tile(c, t.rank, [&](int tile, Range rows) {
    for (int step = 0; step < world - 1; ++step) {
      s->results.push_back(transfer(step, t.rank, wrap(t.rank + step + 1, world), tile, rows));
    }
  });
  from_peers(-1, &s->receipts);
}

// Sends depend on the own GEMM only, reductions on the peers' sends, results on reductions:
// executed in this order on every rank, no rank can wait for something that waits for it.
void build_program(Schedule* s) {
  const auto add_all = [&](ActionKind kind, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) s->program.push_back({kind, static_cast<int>(i)});
  };
  const ScheduleSpec& spec = s->spec;
  if (spec.problem.world == 1 && spec.problem.op == OpKind::kAGGemm) return;
  if (spec.problem.op == OpKind::kAGGemm) {
    add_all(ActionKind::kGather, s->transfers.size());
    return;
  }
  if (spec.store == Store::kStaged) add_all(ActionKind::kSend, s->transfers.size());
  const bool push_results =
      spec.problem.op == OpKind::kGemmAR && spec.tiles.direction == Direction::kPush;
  const int peers = spec.problem.world - 1;
  int next = 0;
  for_each_comm_tile(spec.comm, spec.tiles.rank, [&](int tile, Range) {
    s->program.push_back({ActionKind::kReduce, tile});
    for (int i = 0; push_results && i < peers; ++i) {
      s->program.push_back({ActionKind::kResult, next++});
    }
  });
  if (!push_results) add_all(ActionKind::kResult, s->results.size());
  add_all(ActionKind::kReceive, s->receipts.size());
}

}  // namespace

Schedule build_schedule(const ScheduleSpec& spec) {
  check(spec);
  Schedule s;
  s.spec = spec;
  build_visits(&s);
  if (spec.problem.op == OpKind::kAGGemm) {
    build_all_gather(&s);
    build_program(&s);
    return s;
  }
  for (const Visit& v : s.visits) {
    require(spec.store == Store::kStaged || v.owner >= 0,
            "store direct needs GEMM tiles inside one rank's rows: tile_m " +
                std::to_string(spec.tiles.tile_m) + " straddles the chunks of " +
                std::to_string(chunk_rows(spec.problem.m, spec.problem.world)) +
                " rows; use store staged");
  }
  build_reduce_scatter(&s);
  if (spec.problem.op == OpKind::kGemmAR) build_results(&s);
  build_program(&s);
  return s;
}

}  // namespace flux::host
