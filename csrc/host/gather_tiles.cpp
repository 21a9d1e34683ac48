#include "host/gather_tiles.h"

namespace flux::host {

namespace {

constexpr Address kWord = sizeof(std::uint32_t);

class Gather {
 public:
  Gather(Driver& driver, const Schedule& schedule, const GatherCall& call)
      : driver_(driver),
        schedule_(schedule),
        call_(call),
        rank_(schedule.spec.tiles.rank),
        world_(schedule.spec.problem.world),
        entered_(world_, false) {}

  void run() {
    if (pulls()) {
      for (int peer = 0; peer < world_; ++peer) await_entry(call_.home, peer);
    }
    driver_.order_after(call_.stream, call_.home);
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
  }

 private:
  bool pulls() const { return schedule_.spec.tiles.direction == Direction::kPull; }
  Address row_in(const std::vector<Address>& buffers, int rank, int row) const {
    return buffers[rank] + static_cast<Address>(row) * call_.row_bytes;
  }
  Address word(const std::vector<Address>& words, int rank, int index) const {
    return words[rank] + index * kWord;
  }
  std::size_t bytes(Range rows) const {
    return static_cast<std::size_t>(rows.end - rows.begin) * call_.row_bytes;
  }
  Address own_row(int row) const {
    const int begin = row_begin(schedule_.spec.problem.m, world_, rank_);
    return call_.x + static_cast<Address>(row - begin) * call_.row_bytes;
  }

  void await_entry(Stream stream, int peer) {
    if (peer == rank_ || entered_[peer]) return;
    driver_.await_signal(stream, word(call_.entries, rank_, peer), call_.epoch);
    entered_[peer] = true;
  }

  void keep_own() {
    const CommTiling& c = schedule_.spec.comm;
    for (int tile = 0; tile < tiles_per_chunk(c); ++tile) {
      const Range rows = comm_tile_rows(c, rank_, tile);
      if (rows.begin == rows.end) continue;
      driver_.copy(call_.home, row_in(call_.gathered, rank_, rows.begin), own_row(rows.begin),
                   bytes(rows));
      raise(call_.home, rank_, signal_index(c, rank_, tile));
    }
  }

  void send(const Transfer& t) {
    await_entry(call_.stream, t.dst);
    const Address from =
        t.forwarded ? row_in(call_.sources, rank_, t.rows.begin) : own_row(t.rows.begin);
    driver_.copy(call_.stream, row_in(call_.gathered, t.dst, t.rows.begin), from, bytes(t.rows));
    raise(call_.stream, t.dst, t.signal);
  }

  void fetch(const Transfer& t) {
    await_tile(t.src, t.signal);
    driver_.copy(call_.stream, row_in(call_.gathered, rank_, t.rows.begin),
                 row_in(call_.sources, t.src, t.rows.begin), bytes(t.rows));
    raise(call_.stream, rank_, t.signal);
  }

  void await_tile(int rank, int signal) {
    driver_.await_signal(call_.stream, word(call_.signals, rank, signal), call_.epoch);
  }
  void raise(Stream stream, int rank, int signal) {
    driver_.signal(stream, word(call_.signals, rank, signal), call_.epoch);
  }

  Driver& driver_;
  const Schedule& schedule_;
  const GatherCall& call_;
  int rank_;
  int world_;
  std::vector<bool> entered_;
};

}  // namespace

void gather_tiles(Driver& driver, const Schedule& schedule, const GatherCall& call) {
  Gather(driver, schedule, call).run();
}

void act_as_peer(Driver& driver, const Schedule& schedule, const GatherCall& call, int real) {
  Gather(driver, schedule, call).run_beside(real);
}

}  // namespace flux::host
