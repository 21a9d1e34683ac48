#include "schedule/schedule.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/tile_map.h"
#include "cpu/reducing.h"
#include "schedule/exchange.h"

namespace flux::host {
namespace {

void require(bool ok, const std::string& what) {
  if (!ok) throw std::invalid_argument(what);
}

std::string str(std::int64_t v) { return std::to_string(v); }

// A tile count is a product of two sizes. It can be too large although both sizes are legal.
void check_tiles(const TileOrder& t) {
  require(tile_count(t) <= kMaxTiles, "GEMM tiles of " + str(t.tile_m) + " x " + str(t.tile_n) +
                                          " cut [" + str(t.m) + ", " + str(t.n) + "] into " +
                                          str(tile_count(t)) + ", at most " + str(kMaxTiles) +
                                          " are possible: take larger ones");
}

// Signals in each pad: one group per region of partials, one for the result.
int checked_signals(const ScheduleSpec& s) {
  int regions = 1;
  if (s.problem.op == OpKind::kGemmRS || s.problem.op == OpKind::kGemmAR) {
    regions = Reducing(s).room().regions + (s.problem.op == OpKind::kGemmAR ? 1 : 0);
  }
  const std::int64_t signals = std::int64_t{s.comm.world} * tiles_per_chunk(s.comm) * regions;
  require(signals <= kMaxTiles, "communication tiles of " + str(s.comm.rows) + " rows cut " +
                                    str(s.comm.m) + " rows into so many that " + str(signals) +
                                    " signals are needed, at most " + str(kMaxTiles) +
                                    " are possible: take larger ones");
  return static_cast<int>(signals);
}

void check(const ScheduleSpec& s) {
  const Problem& p = s.problem;
  const TileOrder& t = s.tiles;
  const auto code = [&](const char* what, int v, int last) {
    require(v >= 0 && v <= last,
            std::string(what) + " must be in [0, " + str(last) + "], got " + str(v));
  };
  code("op", static_cast<int>(p.op), static_cast<int>(OpKind::kAllToAllGemm));
  code("order", static_cast<int>(t.order), static_cast<int>(Order::kNuma));
  code("direction", static_cast<int>(t.direction), static_cast<int>(Direction::kPull));
  code("swizzle", static_cast<int>(t.swizzle), static_cast<int>(Swizzle::kXor));
  code("store", static_cast<int>(s.store), static_cast<int>(Store::kStaged));
  const auto extent = [&](const char* what, int v) {
    require(v >= 1 && v <= kMaxExtent,
            std::string(what) + " must be in [1, " + str(kMaxExtent) + "], got " + str(v));
  };
  require(t.mesh.nodes >= 1 && t.mesh.domains >= 1 && t.mesh.lanes >= 1,
          "mesh must be positive, got (" + str(t.mesh.nodes) + ", " + str(t.mesh.domains) + ", " +
              str(t.mesh.lanes) + ")");
  require(p.world <= kMaxRanks,
          "world must be at most " + str(kMaxRanks) + ", got " + str(p.world));
  const std::int64_t node = std::int64_t{t.mesh.domains} * t.mesh.lanes;
  require(node <= kMaxRanks && node * t.mesh.nodes == p.world,
          "mesh has " + str(t.mesh.nodes) + " x " + str(t.mesh.domains) + " x " +
              str(t.mesh.lanes) + " ranks, world is " + str(p.world));
  require(s.hosts.empty() || static_cast<int>(s.hosts.size()) == p.world,
          "hosts of " + str(static_cast<int>(s.hosts.size())) + " ranks given, world is " +
              str(p.world));
  require(t.rank >= 0 && t.rank < p.world,
          "rank must be in [0, " + str(p.world) + "), got " + str(t.rank));
  require(p.m >= 1 && p.n >= 1 && p.k >= 1,
          "m, n, k must be positive, got (" + str(p.m) + ", " + str(p.n) + ", " + str(p.k) + ")");
  require(p.m <= kMaxExtent && p.n <= kMaxExtent && p.k <= kMaxExtent,
          "m, n, k must be at most " + str(kMaxExtent) + ", got (" + str(p.m) + ", " + str(p.n) +
              ", " + str(p.k) + ")");
  require(t.tile_m >= 1 && t.tile_n >= 1,
          "GEMM tile must be positive, got (" + str(t.tile_m) + ", " + str(t.tile_n) + ")");
  require(t.raster >= 1, "raster must be at least 1, got " + str(t.raster));
  extent("rows of a GEMM tile", t.tile_m);
  extent("columns of a GEMM tile", t.tile_n);
  extent("comm_tile_rows", s.comm.rows);
  require(is_legal(t.swizzle, t.mesh),
          "swizzle xor needs a power-of-two world, got " + str(p.world));
  check_tiles(t);
}

Needs needs_of(const ScheduleSpec& s) {
  const Problem& p = s.problem;
  Needs needs;
  needs.signals = checked_signals(s);
  if (p.world == 1) return needs;  // no rows travel
  if (p.op == OpKind::kAGGemm) {
    needs.result_rows = p.m;
    return needs;
  }
  needs.blocks = is_exchange(p.op) ? p.world - 1 : Reducing(s).room().blocks;
  needs.block_rows = chunk_rows(p.m, p.world);
  // A pulled result lies in its owner's memory, a pushed one at its rows of a full [M, N].
  if (p.op == OpKind::kGemmAR) needs.result_rows = is_push(s) ? p.m : needs.block_rows;
  return needs;
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

// By chunk, its position in the visiting order: position_of_chunk of all, without its searches.
std::vector<int> positions(const TileOrder& t) {
  const int world = world_of(t.mesh);
  std::vector<int> by_chunk(world);
  for (int p = 0; p < world; ++p) by_chunk[chunk_at(t, p)] = p;
  return by_chunk;
}

// The tile rows in visiting order: tile_row_at of all slots, without its walks.
std::vector<int> rows_in_order(const TileOrder& t) {
  const int world = world_of(t.mesh);
  const std::vector<int> position = positions(t);
  std::vector<std::vector<int>> at(world);
  for (int tile = 0; tile < tiles_m(t); ++tile) {
    const Range rows = clip(tile, t.tile_m, t.m);
    const auto first = position.begin() + owner_of(t.m, world, rows.begin);
    const auto last = position.begin() + owner_of(t.m, world, rows.end - 1) + 1;
    const bool gathers = t.op == OpKind::kAGGemm;  // see position_of_tile
    at[gathers ? *std::max_element(first, last) : *std::min_element(first, last)].push_back(tile);
  }
  std::vector<int> order;
  const int lanes = t.mesh.domains * t.mesh.lanes;
  for (int p = 0; p < sliced_owners(t); p += lanes) {
    for (int slice = 0; slice < slices_of(t); ++slice) {
      for (int of_node = p; of_node < p + lanes; ++of_node) {
        for (const int tile : at[of_node]) {
          if (slice_of_tile(t, chunk_at(t, of_node), tile) == slice) order.push_back(tile);
        }
      }
    }
  }
  at.erase(at.begin(), at.begin() + sliced_owners(t));
  for (const auto& tiles : at) order.insert(order.end(), tiles.begin(), tiles.end());
  return order;
}

void build_visits(Schedule* s) {
  const TileOrder& t = s->spec.tiles;
  const int tiles = static_cast<int>(tile_count(t));  // see check_tiles
  const std::vector<int> order = rows_in_order(t);
  s->visits.reserve(tiles);
  for (int slot = 0; slot < tiles; ++slot) {
    const TileCoord in_order = raster_slot(tiles_m(t), tiles_n(t), t.raster, slot);
    const TileCoord at{order[in_order.m], in_order.n};
    Visit v{clip(at.m, t.tile_m, t.m), clip(at.n, t.tile_n, t.n), {0, 0}, -1, {0, 0}};
    const int first = owner_of(t.m, s->spec.problem.world, v.rows.begin);
    const int last = owner_of(t.m, s->spec.problem.world, v.rows.end - 1);
    if (first == last) v.owner = first;
    s->visits.push_back(v);
  }
}

// Hosts that form no mesh use the routes of Placement. Only the order kHierarchical looks at hosts.
bool is_irregular(const ScheduleSpec& s) {
  return !s.hosts.empty() && s.tiles.order == Order::kHierarchical;
}

struct Departure {
  int step;
  Hop hop;  // the chunk, and the rank it goes to
};

// Chunks that `rank` sends, in order. They are derived from the arrivals at all other ranks.
std::vector<Departure> departures(const ScheduleSpec& s, int rank) {
  const int world = s.problem.world;
  std::vector<Departure> list;
  if (!is_irregular(s)) {
    const TileOrder& t = s.tiles;
    for (int step = 0; step < world - 1; ++step) {
      list.push_back({step, send_hop(t.order, t.mesh, t.direction, rank, step)});
    }
    return list;
  }
  const Placement placement = placement_of(s);
  for (int i = 1; i < world; ++i) {
    const int peer = wrap(rank + i, world);
    const std::vector<Hop> hops = placement.arrivals(peer);
    for (int step = 0; step < world - 1; ++step) {
      if (hops[step].peer == rank) list.push_back({step, Hop{hops[step].chunk, peer}});
    }
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Departure& a, const Departure& b) { return a.step < b.step; });
  return list;
}

// AllGather. Push: this rank moves the tiles that it sends. Pull: it moves the tiles that it
// receives. In both cases the tile (chunk, tile) lies in rank q's gathered buffer exactly when q's
// pad carries its signal. A forwarding hop and a pulling peer wait for this same signal.
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
  const bool pull = !is_push(s->spec);
  s->publishes_own = s->spec.problem.world > 1 && (pull || mixed);
  const auto publish = [&] {
    for_each_comm_tile(c, rank, [&](int tile, Range rows) {
      s->transfers.push_back(
          {-1, rank, rank, rank, tile, rows, signal_index(c, rank, tile), false});
    });
  };
  // Pull: own rows must be visible in the gathered buffer before a peer can pull them, so they are
  // published first. Push: only this rank's own straddling tiles read the own rows there, so the
  // peers are served first; but for what is forwarded to them, which waits for other peers.
  if (pull && s->publishes_own) publish();
  s->supplier.assign(s->spec.problem.world, rank);
  const std::vector<Hop> in = arrivals(s->spec, rank);
  for (const Hop& hop : in) s->supplier[hop.chunk] = hop.peer;
  const auto move = [&](int step, const Hop& hop, int src, int dst) {
    for_each_comm_tile(c, hop.chunk, [&](int tile, Range rows) {
      s->transfers.push_back({step, src, dst, hop.chunk, tile, rows,
                              signal_index(c, hop.chunk, tile), hop.chunk != src});
    });
  };
  if (pull) {
    for (int step = 0; step < static_cast<int>(in.size()); ++step) {
      move(step, in[step], in[step].peer, rank);
    }
    return;
  }
  bool published = !s->publishes_own;
  for (const Departure& d : departures(s->spec, rank)) {
    if (d.hop.chunk != rank && !std::exchange(published, true)) publish();
    move(d.step, d.hop, rank, d.hop.peer);
  }
  if (!published) publish();
}

// Every (owner, tile) is sent once, after the last GEMM tile that computes a part of it. Transfers
// are listed in the order in which they become complete, so that one counter describes the
// progress.
void build_sends(Schedule* s, const Reducing& plan) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  for (int owner = 0; owner < s->spec.problem.world; ++owner) {
    const int holder = plan.holder(owner, t.rank);
    const bool pull = !is_push(s->spec);
    Home home{owner == t.rank || pull ? t.rank : holder, -1};
    if (owner != t.rank) home.block = plan.block(holder, owner, t.rank);
    s->homes.push_back(home);
  }
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
  const std::vector<int> position = positions(t);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const auto key = [&](int i) {
      return std::make_pair(last_visit[i], position[i / tiles_per_chunk(c)]);
    };
    return key(a) < key(b);
  });
  for (const int i : order) {
    const int owner = i / tiles_per_chunk(c);
    const int tile = i % tiles_per_chunk(c);
    const int holder = plan.holder(owner, t.rank);
    Visit& v = s->visits[last_visit[i]];
    const int index = static_cast<int>(s->transfers.size());
    if (v.completes.begin == v.completes.end) v.completes = Range{index, index};
    ++v.completes.end;
    s->transfers.push_back(
        {position[owner], t.rank, holder, owner, tile, comm_tile_rows(c, owner, tile),
         plan.signal(holder, owner, t.rank, tile), false, s->homes[owner].block});
  }
}

int result_signal(const Reducing& plan, const CommTiling& c, int owner, int tile) {
  return plan.room().regions * signal_count(c) + signal_index(c, owner, tile);
}

// The sums that this rank computes. Sums for other owners come first, in the order in which this
// rank computes its own part of them. The own rows come last.
void build_reductions(Schedule* s, const Reducing& plan) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  const auto add = [&](int owner, int tile, Range rows) {
    Reduction r{owner, tile, rows, {}, owner, 0, -1};
    for (const int source : plan.sources(t.rank, owner)) {
      r.shares.push_back({source, plan.signal(t.rank, owner, source, tile),
                          source == t.rank ? -1 : plan.block(t.rank, owner, source)});
    }
    if (owner == t.rank) {
      r.signal = result_signal(plan, c, owner, tile);
    } else {
      r.signal = plan.signal(owner, owner, t.rank, tile);
      r.block = plan.block(owner, owner, t.rank);
    }
    s->reductions.push_back(std::move(r));
  };
  for (const Transfer& sent : s->transfers) {
    if (sent.dst == t.rank && sent.chunk != t.rank) add(sent.chunk, sent.tile, sent.rows);
  }
  for_each_comm_tile(c, t.rank, [&](int tile, Range rows) { add(t.rank, tile, rows); });
}

// GemmAR, second phase: reduced tiles travel from their owners to all ranks. On one host they
// travel directly: the reduction has serialised them already, so a ring would only add hops. A
// pushing owner sends each tile to all peers as soon as it is reduced. A pulling rank takes the
// tiles of one owner after the other. With two levels the owner sends to its own host and to one
// rank of each other host. That rank forwards the tiles that it has received.
void build_results(Schedule* s, const Reducing& plan) {
  const TileOrder& t = s->spec.tiles;
  const CommTiling& c = s->spec.comm;
  const int world = s->spec.problem.world;
  s->supplier.assign(world, t.rank);
  const auto transfer = [&](int step, int src, int dst, int owner, int tile, Range rows) {
    return Transfer{step,        src, dst, owner, tile, rows, result_signal(plan, c, owner, tile),
                    src != owner};
  };
  const auto take = [&](int step, const Hop& hop, std::vector<Transfer>* list) {
    s->supplier[hop.chunk] = hop.peer;
    for_each_comm_tile(c, hop.chunk, [&](int tile, Range rows) {
      list->push_back(transfer(step, hop.peer, t.rank, hop.chunk, tile, rows));
    });
  };
  std::vector<Departure> out;
  if (plan.two_levels()) {
    const auto in = plan.placement().arrivals(t.rank);
    for (int step = 0; step < world - 1; ++step) take(step, in[step], &s->receipts);
    ScheduleSpec gathering = s->spec;  // a mesh also uses the routes of its placement
    gathering.hosts = plan.placement().host_of();
    out = departures(gathering, t.rank);
  } else {
    const bool pull = !is_push(s->spec);
    for (int step = 0; step < world - 1; ++step) {
      const int peer = wrap(t.rank + (pull ? 1 : -1) * (step + 1), world);
      take(step, Hop{peer, peer}, pull ? &s->results : &s->receipts);
      out.push_back({step, Hop{t.rank, wrap(t.rank + step + 1, world)}});
    }
    if (pull) return;
  }
  // Own tiles come first, tile by tile: each is sent as soon as it is reduced. Forwarded tiles
  // follow.
  for_each_comm_tile(c, t.rank, [&](int tile, Range rows) {
    for (const Departure& d : out) {
      if (d.hop.chunk == t.rank) {
        s->results.push_back(transfer(d.step, t.rank, d.hop.peer, t.rank, tile, rows));
      }
    }
  });
  for (const Departure& d : out) {
    if (d.hop.chunk == t.rank) continue;
    for_each_comm_tile(c, d.hop.chunk, [&](int tile, Range rows) {
      s->results.push_back(transfer(d.step, t.rank, d.hop.peer, d.hop.chunk, tile, rows));
    });
  }
}

// Sends depend on the own GEMM only, reductions depend on the peers' sends, and results depend on
// reductions. All ranks execute the actions in this order. So no action waits for an action that
// waits for it.
//
// There is one exception, which keeps links between hosts busy. A tile that is combined for another
// host is combined as soon as the own part has been sent, before later tiles are sent. This waits
// for the same tile of the other members of the host. They send it in the same order if they follow
// the common sequence. If their sequences are spread, it could wait in a circle.
void build_program(Schedule* s) {
  const auto add = [&](ActionKind kind, std::size_t i) {
    s->program.push_back({kind, static_cast<int>(i)});
  };
  const ScheduleSpec& spec = s->spec;
  const int rank = spec.tiles.rank;
  if (spec.problem.world == 1 && spec.problem.op == OpKind::kAGGemm) return;
  if (spec.problem.op == OpKind::kAGGemm) {
    for (std::size_t i = 0; i < s->transfers.size(); ++i) add(ActionKind::kGather, i);
    return;
  }
  const bool in_step = spec.tiles.sequence != nullptr && !spec.spread;
  std::size_t reduced = 0;
  for (std::size_t i = 0; spec.store == Store::kStaged && i < s->transfers.size(); ++i) {
    add(ActionKind::kSend, i);
    const Transfer& t = s->transfers[i];
    if (in_step && t.dst == rank && t.chunk != rank) add(ActionKind::kReduce, reduced++);
  }
  const bool push_results = spec.problem.op == OpKind::kGemmAR && is_push(spec);
  std::size_t pushed = 0;
  for (; reduced < s->reductions.size(); ++reduced) {
    add(ActionKind::kReduce, reduced);
    const Reduction& r = s->reductions[reduced];
    while (push_results && r.owner == rank && pushed < s->results.size() &&
           s->results[pushed].chunk == rank && s->results[pushed].tile == r.tile) {
      add(ActionKind::kResult, pushed++);
    }
  }
  for (; pushed < s->results.size(); ++pushed) add(ActionKind::kResult, pushed);
  for (std::size_t i = 0; i < s->receipts.size(); ++i) add(ActionKind::kReceive, i);
}

// Sets the order in which this rank visits chunks, if csrc/core has no closed form for it.
void choose_sequence(Schedule* s) {
  ScheduleSpec& spec = s->spec;
  const Swizzle swizzle = spec.tiles.swizzle;
  if (swizzle != Swizzle::kRankShift) return;
  const int rank = spec.tiles.rank;
  if (spec.problem.op == OpKind::kAGGemm) {
    if (!is_irregular(spec)) return;
    // As visited_step: chunks of the own host arrive before those that set out first.
    const std::vector<Hop> hops = arrivals(spec, rank);
    const auto is_near = [&](const Hop& hop) { return spec.hosts[hop.chunk] == spec.hosts[rank]; };
    s->sequence.push_back(rank);
    for (const bool near : {true, false}) {
      for (const Hop& hop : hops) {
        if (is_near(hop) == near) s->sequence.push_back(hop.chunk);
      }
    }
  } else {
    const Reducing plan(spec);
    if (!plan.two_levels()) return;
    s->sequence = plan.placement().far_first(rank, spec.spread);
    // Ranks that visit owners in one order complete a sum with each owner.
    if (spec.spread) spec.tiles.slice_rows = slice_rows_of(spec.tiles, spec.comm.rows);
  }
  spec.tiles.sequence = s->sequence.data();
}

}  // namespace

Schedule build_schedule(const ScheduleSpec& spec) {
  check(spec);
  Schedule s;
  s.spec = spec;
  s.needs = needs_of(spec);
  if (is_exchange(spec.problem.op)) {
    check_exchange(spec);
    build_exchange(&s);
    return s;
  }
  choose_sequence(&s);
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
  const Reducing plan(s.spec);
  build_sends(&s, plan);
  build_reductions(&s, plan);
  if (spec.problem.op == OpKind::kGemmAR) build_results(&s, plan);
  build_program(&s);
  return s;
}

std::vector<Hop> arrivals(const ScheduleSpec& s, int rank) {
  if (is_irregular(s)) return placement_of(s).arrivals(rank);
  std::vector<Hop> hops;
  for (int step = 0; step < s.problem.world - 1; ++step) {
    hops.push_back(recv_hop(s.tiles.order, s.tiles.mesh, s.tiles.direction, rank, step));
  }
  return hops;
}

Room room_for(Order order, Direction direction, const Mesh& mesh, const std::vector<int>& hosts) {
  ScheduleSpec spec{};
  spec.problem.world = world_of(mesh);
  spec.tiles.order = order;
  spec.tiles.direction = direction;
  spec.tiles.mesh = mesh;
  spec.hosts = hosts;
  return Reducing(spec).room();
}

std::vector<Parcel> parcels_for(const Schedule& s, int peer) {
  std::vector<Parcel> list;
  const bool gathers = s.spec.problem.op == OpKind::kAGGemm;
  for (const Transfer& t : s.transfers) {
    if (t.dst != peer) continue;
    const auto kind = gathers ? ParcelKind::kGather : ParcelKind::kPartial;
    list.push_back({kind, t.chunk, t.rows, t.signal, t.block});
  }
  for (const Reduction& r : s.reductions) {
    if (r.target != peer) continue;
    list.push_back({ParcelKind::kCombined, r.owner, r.rows, r.signal, r.block});
  }
  for (const Transfer& t : s.results) {
    if (t.dst == peer) list.push_back({ParcelKind::kResult, t.chunk, t.rows, t.signal, -1});
  }
  return list;
}

}  // namespace flux::host
