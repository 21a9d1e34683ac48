#include "host/gather_tiles.h"

namespace flux::host {

namespace {

constexpr Address kWord = sizeof(std::uint32_t);
constexpr int kGiven = -1;

class Gather {
 public:
  Gather(Driver& driver, const Schedule& schedule, const GatherCall& call)
      : driver_(driver),
        schedule_(schedule),
        call_(call),
        rank_(schedule.spec.tiles.rank),
        world_(schedule.spec.problem.world),
        entered_(world_, call.entries.empty()) {}

  void run() {
    if (pulls()) {
      for (int peer = 0; peer < world_; ++peer) {
        if (in_node(peer)) await_entry(call_.home, peer);
      }
    }
    flush();
    driver_.record(call_.forked, call_.home);
    driver_.await_event(call_.stream, call_.forked);
    keep_own();
    flush();
    if (call_.beside) call_.beside();
    for (const Transfer& t : schedule_.transfers) {
      if (t.src == t.dst) continue;  // own rows are there already
      if (!in_node(t.src) || !in_node(t.dst)) continue;
      if (pulls()) {
        fetch(t);
      } else {
        if (t.forwarded) await_tile(t, rank_);
        send(t);
      }
    }
    flush();
  }

  void run_beside(int real) {
    for (const Transfer& t : schedule_.transfers) {
      if (!pulls()) {
        if (t.dst == real) send(t);
      } else if (t.src == real) {
        fetch(t);
      } else {
        announce(t);
      }
    }
    flush();
  }

 private:
  bool pulls() const { return host::pulls(schedule_); }
  bool in_node(int rank) const {
    const Range& node = call_.node;
    return node.begin == node.end || (rank >= node.begin && rank < node.end);
  }
  static Address row_in(const GatherPart& part, const std::vector<Address>& buffers, int rank,
                        int row) {
    return buffers[rank] + static_cast<Address>(row) * part.row_bytes;
  }
  Address word(const std::vector<Address>& words, int rank, int index) const {
    return words[rank] + index * kWord;
  }
  Address own_row(const GatherPart& part, int row) const {
    const int begin = row_begin(schedule_.spec.problem.m, world_, rank_);
    return part.own + static_cast<Address>(row - begin) * part.row_bytes;
  }
  // Rows to the gathered ones of `to`: from those of `from`, or from where the call got them. `what` says
  // for a trace which tile it is.
  template <class What>
  void copy(Stream stream, int to, Range rows, int from, What&& what) {
    flush();
    stamped(call_.trace, stream, what, [&] {
      for (const GatherPart& part : call_.parts) {
        const Address source = from == kGiven ? own_row(part, rows.begin)
                                              : row_in(part, part.sources, from, rows.begin);
        driver_.copy(stream, row_in(part, part.gathered, to, rows.begin), source,
                     static_cast<std::size_t>(rows.end - rows.begin) * part.row_bytes);
      }
    });
  }

  // What a trace is told of a tile's copy, with `peer`, after which its signal at rank `at` is raised.
  Record copied(int chunk, int tile, Range rows, int peer, int at, int signal) const {
    std::int64_t bytes = 0;
    for (const GatherPart& part : call_.parts) bytes += (rows.end - rows.begin) * part.row_bytes;
    return told(Work::kCopy, call_.epoch, peer, chunk, tile, rows, at, signal, bytes);
  }

  // Memory operations are kept back until something else goes onto their stream: the driver takes
  // them together, which costs it little more than one. Traced waits go alone.
  template <class What>
  void await(Stream stream, MemOp op, What&& what) {
    if (call_.trace == nullptr) return put(stream, op);
    flush();
    stamped(call_.trace, stream, what, [&] { driver_.memory_ops(stream, {op}); });
  }
  void put(Stream stream, MemOp op) {
    if (stream != pending_stream_) flush();
    pending_stream_ = stream;
    pending_.push_back(op);
  }
  void flush() {
    driver_.memory_ops(pending_stream_, pending_);
    pending_.clear();
  }

  void await_entry(Stream stream, int peer) {
    if (peer == rank_ || entered_[peer]) return;
    await(stream, {MemOp::kWait, word(call_.entries, rank_, peer), call_.epoch},
          [&] { return told(Work::kEntry, call_.epoch, peer); });
    entered_[peer] = true;
  }

  void keep_own() {
    const CommTiling& c = schedule_.spec.comm;
    for (int tile = 0; tile < tiles_per_chunk(c); ++tile) {
      const Range rows = comm_tile_rows(c, rank_, tile);
      if (rows.begin == rows.end) continue;
      const int signal = signal_index(c, rank_, tile);
      copy(call_.home, rank_, rows, kGiven,
           [&] { return copied(rank_, tile, rows, rank_, rank_, signal); });
      raise(call_.home, rank_, signal);
    }
  }

  void send(const Transfer& t) {
    await_entry(call_.stream, t.dst);
    copy(call_.stream, t.dst, t.rows, t.forwarded ? rank_ : kGiven,
         [&] { return copied(t.chunk, t.tile, t.rows, t.dst, t.dst, t.signal); });
    raise(call_.stream, t.dst, t.signal);
  }

  void fetch(const Transfer& t) {
    await_tile(t, t.src);
    copy(call_.stream, rank_, t.rows, t.src,
         [&] { return copied(t.chunk, t.tile, t.rows, t.src, rank_, t.signal); });
    raise(call_.stream, rank_, t.signal);
  }

  // Rows that are there from the beginning: as if they had been copied.
  void announce(const Transfer& t) {
    if (call_.trace == nullptr) return raise(call_.stream, rank_, t.signal);
    flush();
    const auto what = [&] {
      return told(Work::kCopy, call_.epoch, rank_, t.chunk, t.tile, t.rows, rank_, t.signal);
    };
    stamped(call_.trace, call_.stream, what, [&] {
      raise(call_.stream, rank_, t.signal);
      flush();
    });
  }

  void await_tile(const Transfer& t, int at) {
    await(call_.stream, {MemOp::kWait, word(call_.signals, at, t.signal), call_.epoch}, [&] {
      return told(Work::kWait, call_.epoch, at, t.chunk, t.tile, t.rows, at, t.signal);
    });
  }
  void raise(Stream stream, int rank, int signal) {
    put(stream, {MemOp::kWrite, word(call_.signals, rank, signal), call_.epoch});
  }

  Driver& driver_;
  const Schedule& schedule_;
  const GatherCall& call_;
  int rank_;
  int world_;
  std::vector<bool> entered_;
  Stream pending_stream_ = 0;
  std::vector<MemOp> pending_;
};

}  // namespace

void gather_tiles(Driver& driver, const Schedule& schedule, const GatherCall& call) {
  Gather(driver, schedule, call).run();
}

void act_as_peer(Driver& driver, const Schedule& schedule, const GatherCall& call, int real) {
  Gather(driver, schedule, call).run_beside(real);
}

}  // namespace flux::host
