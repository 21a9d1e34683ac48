#include "cuda_host/gather_tiles.h"

#include <algorithm>

namespace flux::host {

namespace {

constexpr int kGiven = -1;

Address row_in(const GatherPart& part, const std::vector<Address>& buffers, int rank, int row) {
  return buffers[rank] + static_cast<Address>(row) * part.row_bytes;
}

Address word(const std::vector<Address>& words, int rank, int index) {
  return words[rank] + index * kWord;
}

}  // namespace

std::vector<int> pullers(const TileOrder& tiles, int chunk) {
  std::vector<int> peers;
  for (int step = 0; step < world_of(tiles.mesh) - 1; ++step) {
    const Hop hop = send_hop(tiles.order, tiles.mesh, tiles.direction, tiles.rank, step);
    if (hop.chunk == chunk) peers.push_back(hop.peer);
  }
  return peers;
}

Gather::Gather(Driver& driver, const Schedule& schedule, const GatherCall& call)
    : driver_(driver),
      schedule_(schedule),
      call_(call),
      rank_(schedule.spec.tiles.rank),
      world_(schedule.spec.problem.world),
      entered_(call.entries.empty() ? ~0u : 0u) {
  static_assert(FLUX_MAX_WORLD <= 32, "entered_ has a bit for each rank");
}

void Gather::publish() {
  if (pulls()) {
    for (int peer = 0; peer < world_; ++peer) {
      if (in_node(peer)) await_entry(call_.home, peer);
    }
    flush();
  } else {
    fork();
  }
  const CommTiling& c = schedule_.spec.comm;
  const Range rows{row_begin(c.m, c.world, rank_), row_end(c.m, c.world, rank_)};
  if (rows.begin < rows.end && !call_.own_in_place) {
    copy(call_.home, rank_, rows, kGiven,
         [&] { return copied(rank_, 0, rows, rank_, rank_, signal_index(c, rank_, 0)); });
    const Range signals = signals_of_rows(c, rows.begin, rows.end);
    for (int signal = signals.begin; signal < signals.end; ++signal) {
      raise(call_.home, rank_, signal);
    }
    flush();
  }
  if (pulls()) fork();
}

void Gather::move() {
  if (pulls()) {
    const CommTiling& c = schedule_.spec.comm;
    for (int tile = 0; tile < tiles_per_chunk(c); ++tile) offer(rank_, tile);
  }
  for (const Transfer& t : schedule_.transfers) {
    if (t.src == t.dst) continue;  // publish() has copied own rows
    if (!in_node(t.src) || !in_node(t.dst)) continue;
    if (pulls()) {
      fetch(t);
    } else {
      if (t.forwarded) await_received(t);
      send(t);
    }
  }
  flush();
}

void Gather::act_as_peer(int real) {
  for (int chunk = 0; pulls() && chunk < world_; ++chunk) {
    if (chunk != real) offer_to(real, chunk);
  }
  for (const Transfer& t : schedule_.transfers) {
    if (!pulls()) {
      if (t.dst == real) send(t);
    } else if (t.src == real) {
      fetch(t);
    }
  }
  flush();
}

// Raises the offers of a chunk at one rank, if that rank pulls the chunk from this one. In a trace,
// the rows are available from now on.
void Gather::offer_to(int puller, int chunk) {
  const std::vector<int> all = pullers(schedule_.spec.tiles, chunk);
  if (std::find(all.begin(), all.end(), puller) == all.end()) return;
  const CommTiling& c = schedule_.spec.comm;
  for (int tile = 0; tile < tiles_per_chunk(c); ++tile) {
    const Range rows = comm_tile_rows(c, chunk, tile);
    if (rows.begin == rows.end) continue;
    const int signal = signal_index(c, chunk, tile);
    if (call_.trace != nullptr) flush();
    const auto there = [&] {
      return record_of(Work::kCopy, call_.epoch, rank_, chunk, tile, rows, rank_, signal);
    };
    stamped(call_.trace, call_.stream, there, [&] {
      put(call_.stream, {MemOp::kWrite, word(call_.offers, puller, signal), call_.epoch});
      if (call_.trace != nullptr) flush();
    });
  }
}

// Orders the copy stream after the work that is on `home` now.
void Gather::fork() {
  driver_.record(call_.forked, call_.home);
  driver_.await_event(call_.stream, call_.forked);
}

// Copies rows to the gathered rows of `to`. The source is `from`, or the call's own rows (kGiven).
// `what` returns the trace record.
template <class What>
void Gather::copy(Stream stream, int to, Range rows, int from, What&& what) {
  flush();
  const int own_begin = row_begin(schedule_.spec.problem.m, world_, rank_);
  stamped(call_.trace, stream, what, [&] {
    for (const GatherPart& part : call_.parts) {
      const Address given =
          part.own + static_cast<Address>(rows.begin - own_begin) * part.row_bytes;
      const Address source = from == kGiven ? given : row_in(part, *part.sources, from, rows.begin);
      const Address target = row_in(part, *part.gathered, to, rows.begin);
      if (target == source) continue;  // the user has filled the input slot
      driver_.copy(stream, target, source,
                   static_cast<std::size_t>(rows.end - rows.begin) * part.row_bytes);
    }
  });
}

// Trace record of a copy from or to `peer`, after which a signal at rank `at` is raised.
Record Gather::copied(int chunk, int tile, Range rows, int peer, int at, int signal) const {
  std::int64_t bytes = 0;
  for (const GatherPart& part : call_.parts) bytes += (rows.end - rows.begin) * part.row_bytes;
  return record_of(Work::kCopy, call_.epoch, peer, chunk, tile, rows, at, signal, bytes);
}

// Memory operations are collected until other work goes onto their stream. The driver then takes
// them together, which costs little more than one operation. Traced waits are submitted alone.
void Gather::await(Stream stream, MemOp op, const Record& what) {
  if (call_.trace == nullptr) return put(stream, op);
  flush();
  stamped(call_.trace, stream, [&] { return what; }, [&] { driver_.memory_ops(stream, {op}); });
}

void Gather::put(Stream stream, MemOp op) {
  if (stream != pending_stream_) flush();
  pending_stream_ = stream;
  pending_.push_back(op);
}

void Gather::flush() {
  driver_.memory_ops(pending_stream_, pending_);
  pending_.clear();
}

void Gather::await_entry(Stream stream, int peer) {
  if (peer == rank_ || ((entered_ >> peer) & 1u) != 0) return;
  await(stream, {MemOp::kWait, word(call_.entries, rank_, peer), call_.entered},
        record_of(Work::kEntry, call_.epoch, peer));
  entered_ |= 1u << peer;
}

void Gather::await_received(const Transfer& t) {
  const auto what = [&] {
    return record_of(Work::kWait, call_.epoch, rank_, t.chunk, t.tile, t.rows, rank_, t.signal);
  };
  if (call_.wait == nullptr) {
    const MemOp signal{MemOp::kWait, word(call_.signals, rank_, t.signal), call_.epoch};
    return await(call_.stream, signal, what());
  }
  flush();
  FluxMeetArgs wait = *call_.wait;
  wait.first = t.signal;
  wait.awaited_count = 1;
  stamped(call_.trace, call_.stream, what, [&] { call_.kernel->meet(wait, call_.stream); });
}

void Gather::send(const Transfer& t) {
  await_entry(call_.stream, t.dst);
  copy(call_.stream, t.dst, t.rows, t.forwarded ? rank_ : kGiven,
       [&] { return copied(t.chunk, t.tile, t.rows, t.dst, t.dst, t.signal); });
  raise(call_.stream, t.dst, t.signal);
}

void Gather::fetch(const Transfer& t) {
  // In a trace the wait refers to the signal at the source, which is raised directly before the
  // offer.
  await(call_.stream, {MemOp::kWait, word(call_.offers, rank_, t.signal), call_.epoch},
        record_of(Work::kWait, call_.epoch, t.src, t.chunk, t.tile, t.rows, t.src, t.signal));
  copy(call_.stream, rank_, t.rows, t.src,
       [&] { return copied(t.chunk, t.tile, t.rows, t.src, rank_, t.signal); });
  raise(call_.stream, rank_, t.signal);
  offer(t.chunk, t.tile);
}

void Gather::raise(Stream stream, int rank, int signal) {
  put(stream, {MemOp::kWrite, word(call_.signals, rank, signal), call_.epoch});
}

// Raises the offer of a tile at the ranks that pull the tile from this one.
void Gather::offer(int chunk, int tile) {
  const CommTiling& c = schedule_.spec.comm;
  const Range rows = comm_tile_rows(c, chunk, tile);
  if (rows.begin == rows.end) return;
  for (const int puller : pullers(schedule_.spec.tiles, chunk)) {
    if (!in_node(puller)) continue;
    put(call_.stream,
        {MemOp::kWrite, word(call_.offers, puller, signal_index(c, chunk, tile)), call_.epoch});
  }
}

}  // namespace flux::host
