// AllGather between nodes (Flux paper, 4.3). There is one exchange for each step of the
// communication order and each communication tile, so that both ends reach it at the same place.
// Signals are raised when the exchange is done.
//
// A rank that forwards rows between nodes (ring orders) waits for their signal, of an earlier step.
#include "cuda_host/gather_tiles.h"

namespace flux::host {

namespace {

bool inside(const Range& node, int rank) { return rank >= node.begin && rank < node.end; }

class NetworkGather {
 public:
  NetworkGather(Driver& driver, Remote& remote, const Schedule& schedule, const NetworkCall& call)
      : driver_(driver),
        remote_(remote),
        comm_(schedule.spec.comm),
        tiles_(schedule.spec.tiles),
        call_(call) {}

  void run() {
    remote_.open(call_.stream, call_.epoch);
    const auto hop = [&](auto&& function, int step) {
      return function(tiles_.order, tiles_.mesh, tiles_.direction, tiles_.rank, step);
    };
    for (int step = 0; step < comm_.world - 1; ++step) {
      const Hop out = hop(send_hop, step);
      const Hop in = hop(recv_hop, step);
      for (int tile = 0; tile < tiles_per_chunk(comm_); ++tile) move(out, in, tile);
    }
  }

 private:
  void move(const Hop& out, const Hop& in, int tile) {
    std::vector<Move> moves;
    if (!inside(call_.node, out.peer)) {
      add(&moves, Move::kSend, out, tile);
      if (!moves.empty() && out.chunk != tiles_.rank) {
        const auto wait = [&] { return about(Work::kWait, tiles_.rank, out, tile); };
        stamped(call_.trace, call_.stream, wait, [&] { await(out.chunk, tile); });
      }
    }
    const std::size_t sends = moves.size();
    if (!inside(call_.node, in.peer)) add(&moves, Move::kReceive, in, tile);
    if (moves.empty()) return;
    const auto parts = [&] {
      std::vector<Record> records;
      if (sends > 0) records.push_back(about(Work::kSend, out.peer, out, tile));
      if (moves.size() > sends) records.push_back(about(Work::kReceive, in.peer, in, tile));
      return records;
    };
    stamped(call_.trace, call_.stream, parts,
            [&] { remote_.exchange(call_.stream, moves, call_.epoch); });
    if (moves.size() > sends) arrived(in.chunk, tile);
  }

  // See GatherCall::wait.
  void await(int chunk, int tile) {
    if (call_.wait == nullptr) {
      return driver_.await_signal(call_.stream, signal(chunk, tile), call_.epoch);
    }
    FluxMeetArgs wait = *call_.wait;
    wait.first = signal_index(comm_, chunk, tile);
    wait.awaited_count = 1;
    call_.kernel.meet(wait, call_.stream);
  }

  // Tells kernels of this rank that they may read the tile, and ranks of the node that they may
  // pull it.
  void arrived(int chunk, int tile) {
    std::vector<MemOp> ops{{MemOp::kWrite, signal(chunk, tile), call_.epoch}};
    if (tiles_.direction == Direction::kPull) {
      for (const int puller : pullers(tiles_, chunk)) {
        if (!inside(call_.node, puller)) continue;
        const Address word = call_.offers[puller] + signal_index(comm_, chunk, tile) * kWord;
        ops.push_back({MemOp::kWrite, word, call_.epoch});
      }
    }
    driver_.memory_ops(call_.stream, ops);
  }

  // Trace record of a tile that is sent, received, or awaited here.
  Record about(Work work, int peer, const Hop& hop, int tile) const {
    const Range rows = comm_tile_rows(comm_, hop.chunk, tile);
    std::int64_t bytes = 0;
    for (const std::int64_t row : call_.row_bytes) bytes += (rows.end - rows.begin) * row;
    return record_of(work, call_.epoch, peer, hop.chunk, tile, rows, tiles_.rank,
                     signal_index(comm_, hop.chunk, tile), bytes);
  }

  void add(std::vector<Move>* moves, Move::Kind kind, const Hop& hop, int tile) const {
    const Range rows = comm_tile_rows(comm_, hop.chunk, tile);
    if (rows.begin == rows.end) return;
    const int parts = static_cast<int>(call_.parts.size());
    for (int part = 0; part < parts; ++part) {
      const std::int64_t at = call_.parts[part] + rows.begin * call_.row_bytes[part];
      const auto bytes = static_cast<std::size_t>((rows.end - rows.begin) * call_.row_bytes[part]);
      const int box = signal_index(comm_, hop.chunk, tile) * parts + part;
      moves->push_back({kind, hop.peer, at, at, bytes, box});
    }
  }

  Address signal(int chunk, int tile) const {
    return call_.signals[tiles_.rank] + signal_index(comm_, chunk, tile) * kWord;
  }

  Driver& driver_;
  Remote& remote_;
  const CommTiling& comm_;
  const TileOrder& tiles_;
  const NetworkCall& call_;
};

}  // namespace

void gather_from_nodes(Driver& driver, Remote& remote, const Schedule& schedule,
                       const NetworkCall& call) {
  NetworkGather(driver, remote, schedule, call).run();
}

}  // namespace flux::host
