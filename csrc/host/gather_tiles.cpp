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
      for (int peer = 0; peer < world_; ++peer) await_entry(call_.home, peer);
    }
    flush();
    driver_.record(call_.forked, call_.home);
    driver_.await_event(call_.stream, call_.forked);
    keep_own();
    for (const Transfer& t : schedule_.transfers) {
      if (t.src == t.dst) continue;  // own rows are there already
      if (pulls()) {
        fetch(t);
      } else {
        if (t.forwarded) await_tile(rank_, t.signal);
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
        raise(call_.stream, rank_, t.signal);
      }
    }
    flush();
  }

 private:
  bool pulls() const { return host::pulls(schedule_); }
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
  // Rows to the gathered ones of `to`: from those of `from`, or from where the call got them.
  void copy(Stream stream, int to, Range rows, int from) {
    flush();
    for (const GatherPart& part : call_.parts) {
      const Address source =
          from == kGiven ? own_row(part, rows.begin) : row_in(part, part.sources, from, rows.begin);
      driver_.copy(stream, row_in(part, part.gathered, to, rows.begin), source,
                   static_cast<std::size_t>(rows.end - rows.begin) * part.row_bytes);
    }
  }

  // Memory operations are kept back until something else goes onto their stream: the driver takes
  // them together, which costs it little more than one.
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
    put(stream, {MemOp::kWait, word(call_.entries, rank_, peer), call_.epoch});
    entered_[peer] = true;
  }

  void keep_own() {
    const CommTiling& c = schedule_.spec.comm;
    for (int tile = 0; tile < tiles_per_chunk(c); ++tile) {
      const Range rows = comm_tile_rows(c, rank_, tile);
      if (rows.begin == rows.end) continue;
      copy(call_.home, rank_, rows, kGiven);
      raise(call_.home, rank_, signal_index(c, rank_, tile));
    }
  }

  void send(const Transfer& t) {
    await_entry(call_.stream, t.dst);
    copy(call_.stream, t.dst, t.rows, t.forwarded ? rank_ : kGiven);
    raise(call_.stream, t.dst, t.signal);
  }

  void fetch(const Transfer& t) {
    await_tile(t.src, t.signal);
    copy(call_.stream, rank_, t.rows, t.src);
    raise(call_.stream, rank_, t.signal);
  }

  void await_tile(int rank, int signal) {
    put(call_.stream, {MemOp::kWait, word(call_.signals, rank, signal), call_.epoch});
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
