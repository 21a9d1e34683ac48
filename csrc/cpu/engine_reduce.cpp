// The engine's part in ReduceScatter and AllReduce: it sends partials, sums them and distributes
// sums.
#include <cstring>

#include "cpu/engine.h"

namespace flux::host {

// Sends one staged partial tile once its GEMM tiles are done. Own tiles are not moved.
bool Engine::send(int index, const Limit& limit) {
  const Transfer& t = schedule_->transfers[index];
  if (!await_computed(index + 1, limit)) return false;
  const bool moves = t.dst != rank_ && !symmetric_.remote[t.dst];
  const std::int64_t began = lane() == nullptr || !moves ? 0 : Lane::now();
  int count = 0;
  if (moves) {
    const bool pull = schedule_->spec.tiles.direction == Direction::kPull;
    const std::size_t row_bytes = symmetric_.row_bytes;
    const Selection* selection = buffers_.selection.get();
    count = each_run(selection == nullptr ? nullptr : &selection->hops().from(rank_, false), t.rows,
                     [&](Range rows) {
                       copy_rows(
                           block_row(pull ? rank_ : t.dst, t.block, t.chunk, rows.begin), row_bytes,
                           buffers_.partial + static_cast<std::size_t>(rows.begin) * row_bytes,
                           row_bytes, rows);
                     });
  }
  raise(t.dst, t.signal);
  if (began != 0) record(Work::kCopy, began, t, t.dst, t.dst, bytes_of({0, count}));
  return true;
}

void Engine::visit_done(int visit) {
  const Range done = schedule_->visits.at(visit).completes;
  if (done.begin == done.end) return;
  if (schedule_->spec.store == Store::kStaged) {
    computed_.store(done.end, std::memory_order_seq_cst);
    notify(*local_);
    return;
  }
  for (int i = done.begin; i < done.end; ++i) {
    pause();
    raise(schedule_->transfers[i].dst, schedule_->transfers[i].signal);
  }
}

bool Engine::await_computed(int count, const Limit& limit) {
  const auto computed = [&] { return computed_.load(std::memory_order_seq_cst) >= count; };
  if (lane() == nullptr || computed()) return see_computed(count, limit);
  const std::int64_t began = Lane::now();
  const bool is_computed = see_computed(count, limit);
  record_wait(Work::kOwnGemm, began, rank_, &schedule_->transfers[count - 1], -1, -1);
  return is_computed;
}

bool Engine::see_computed(int count, const Limit& limit) {
  // Only this rank's calling thread can be late here. A long GEMM is no failure, so there is no
  // deadline.
  while (computed_.load(std::memory_order_seq_cst) < count) {
    if (failed() || stop_.load(std::memory_order_relaxed)) return false;
    const auto until = std::min(limit.until, Clock::now() + kSlice);
    wait_until(*local_, until, std::chrono::nanoseconds(0),
               [&] { return computed_.load(std::memory_order_seq_cst) >= count; });
    if (Clock::now() >= limit.until) break;
  }
  if (computed_.load(std::memory_order_seq_cst) < count) {
    last_progress_ = Clock::now();
    return false;
  }
  return true;
}

// Waits for all shares of one reduction, for the own share first. A long own GEMM is no failure of
// a peer, so the peers' deadline starts when the own share is done.
bool Engine::await_shares(const Reduction& r, const Limit& limit) {
  Limit patient = limit;
  for (const bool own : {true, false}) {
    for (const Share& s : r.shares) {
      if ((s.source == rank_) != own) continue;
      const Transfer what{0, s.source, rank_, r.owner, r.tile, r.rows, s.signal, false};
      if (!own) {
        if (!await_signal(rank_, s.source, what, s.signal, patient)) return false;
      } else if (!signal_reached(pad(rank_), s.signal, epoch_)) {
        const Limit unbounded{limit.until, Clock::time_point::max(), limit.spin};
        const bool is_done = await_signal(rank_, rank_, what, s.signal, unbounded);
        last_progress_ = Clock::now();
        if (!is_done) return false;
        patient.deadline = std::max(limit.deadline, last_progress_ + timeout_);
      }
    }
  }
  return true;
}

// Address of the rows of one share. The own rows are where the GEMM wrote them.
const char* Engine::share(const Reduction& r, const Share& s) const {
  const ScheduleSpec& spec = schedule_->spec;
  if (s.source != rank_) {
    const bool pull = spec.tiles.direction == Direction::kPull;
    return block_row(pull ? s.source : rank_, s.block, r.owner, r.rows.begin);
  }
  if (spec.store == Store::kStaged) {
    return buffers_.partial + static_cast<std::size_t>(r.rows.begin) * symmetric_.row_bytes;
  }
  return r.owner == rank_
             ? out_row(r.rows.begin)
             : block_row(rank_, schedule_->homes[r.owner].block, r.owner, r.rows.begin);
}

// Sums the partials of one tile, in rank order, after the last of them has arrived. The sum may
// overwrite a share, but only the own one, at the same place: reduce() reads each element before it
// writes it.
bool Engine::reduce_tile(const Reduction& r, const Limit& limit) {
  if (!await_shares(r, limit)) return false;
  const std::int64_t began = lane() == nullptr ? 0 : Lane::now();
  const ScheduleSpec& spec = schedule_->spec;
  const bool own = r.target == rank_;
  std::vector<const void*> sources;
  for (const Share& s : r.shares) sources.push_back(share(r, s));
  char* sum = own ? out_row(r.rows.begin) : block_row(r.target, r.block, r.owner, r.rows.begin);
  const int all = (r.rows.end - r.rows.begin) * static_cast<int>(r.shares.size());
  int summed = all;
  if (buffers_.selection != nullptr) {
    summed = reduce_carried(r, sources, sum);
  } else {
    reduce_rows(sources, sum, r.rows.end - r.rows.begin, own);
  }
  bool raises = !own;
  if (!own) {
    raise(r.target, r.signal);
  } else if (spec.problem.op == OpKind::kGemmAR && spec.tiles.direction == Direction::kPull &&
             world() > 1) {
    copy_rows(result_row(rank_, rank_, r.rows.begin), symmetric_.row_bytes, sum,
              symmetric_.row_bytes, r.rows);
    raise(rank_, r.signal);
    raises = true;
  }
  if (began != 0) {
    const Transfer what{0, rank_, r.target, r.owner, r.tile, r.rows, r.signal, false};
    record(Work::kReduce, began, what, r.target, raises ? r.target : -1, bytes_of({0, summed}));
  }
  return true;
}

void Engine::reduce_rows(const std::vector<const void*>& sources, char* sum, int rows, bool own) {
  const std::size_t columns = symmetric_.row_bytes / size_of(symmetric_.dtype);
  reduce(ReduceArgs{symmetric_.dtype, sources.data(), static_cast<int>(sources.size()), sum,
                    own ? buffers_.bias : nullptr, columns * static_cast<std::size_t>(rows),
                    columns, own ? buffers_.scale : 1.0});
}

// Whether a share has a row of the tile: its source, or its source's host, has an expert of it.
bool Engine::carries(const Share& s, int row) const {
  const Selection& selection = *buffers_.selection;
  const Hops& hops = selection.hops();
  // This rank adds up shares, for itself or for its host.
  return selection.needs(hops.from(s.source, hops.is_combined(s.source, rank_)), row);
}

// Sums the shares that have a row, for runs of rows that the same shares have. A token without an
// expert is zero. Returns the number of rows of all shares.
int Engine::reduce_carried(const Reduction& r, const std::vector<const void*>& sources, char* sum) {
  const bool own = r.target == rank_;
  const auto at = [&](int row) {
    return static_cast<std::size_t>(row - r.rows.begin) * symmetric_.row_bytes;
  };
  const auto present = [&](int row) {
    std::vector<bool> list;
    for (const Share& s : r.shares) list.push_back(carries(s, row));
    return list;
  };
  int summed = 0;
  std::vector<bool> shares = present(r.rows.begin);
  for (Range run{r.rows.begin, r.rows.begin + 1}; run.begin < r.rows.end; ++run.end) {
    const std::vector<bool> next = run.end < r.rows.end ? present(run.end) : std::vector<bool>();
    if (next == shares) continue;
    std::vector<const void*> rows;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (shares[i]) rows.push_back(static_cast<const char*>(sources[i]) + at(run.begin));
    }
    const int count = run.end - run.begin;
    if (!rows.empty()) {
      reduce_rows(rows, sum + at(run.begin), count, own);
    } else if (own) {
      std::memset(sum + at(run.begin), 0, at(r.rows.begin + count));
    }
    summed += count * static_cast<int>(rows.size());
    run.begin = run.end;
    shares = next;
  }
  return summed;
}

// Moves one tile of a GemmAR result: pushes it into a peer's buffer, or pulls it directly into the
// output. A forwarded tile lies in the own buffer, where its sender has written it.
bool Engine::move_result(const Transfer& t, const Limit& limit) {
  const std::size_t row_bytes = symmetric_.row_bytes;
  if (t.src == rank_) {
    if (t.forwarded && !await_signal(rank_, schedule_->supplier[t.chunk], t, t.signal, limit)) {
      return false;
    }
    const bool moves = !symmetric_.remote[t.dst];
    const std::int64_t began = lane() == nullptr || !moves ? 0 : Lane::now();
    if (moves) {
      const char* from =
          t.forwarded ? result_row(rank_, t.chunk, t.rows.begin) : out_row(t.rows.begin);
      copy_rows(result_row(t.dst, t.chunk, t.rows.begin), row_bytes, from, row_bytes, t.rows);
    }
    raise(t.dst, t.signal);
    if (began != 0) record(Work::kCopy, began, t, t.dst, t.dst, bytes_of(t.rows));
    return true;
  }
  if (!await_signal(t.src, t.src, t, t.signal, limit)) return false;
  const std::int64_t began = lane() == nullptr ? 0 : Lane::now();
  copy_rows(out_row(t.rows.begin), row_bytes, result_row(t.src, t.src, t.rows.begin), row_bytes,
            t.rows);
  if (began != 0) record(Work::kCopy, began, t, t.src, -1, bytes_of(t.rows));
  return true;
}

bool Engine::receive_result(const Transfer& t, const Limit& limit) {
  if (!await_signal(rank_, t.src, t, t.signal, limit)) return false;
  const std::int64_t began = lane() == nullptr ? 0 : Lane::now();
  const std::size_t row_bytes = symmetric_.row_bytes;
  copy_rows(out_row(t.rows.begin), row_bytes, result_row(rank_, t.chunk, t.rows.begin), row_bytes,
            t.rows);
  if (began != 0) record(Work::kCopy, began, t, rank_, -1, bytes_of(t.rows));
  return true;
}

char* Engine::block_row(int holder, int block, int owner, int row) const {
  return symmetric_.data[holder] + static_cast<std::size_t>(block) * symmetric_.slot_bytes +
         offset_in_chunk(owner, row) * symmetric_.row_bytes;
}

// Pull: the result lies in its owner's block. Push: it lies at its rows of a full [M, N].
char* Engine::result_row(int holder, int owner, int row) const {
  const bool pull = schedule_->spec.tiles.direction == Direction::kPull;
  const std::size_t at = pull ? offset_in_chunk(owner, row) : static_cast<std::size_t>(row);
  return symmetric_.data[holder] + symmetric_.result_offset + at * symmetric_.row_bytes;
}

char* Engine::out_row(int row) const {
  const bool full = schedule_->spec.problem.op == OpKind::kGemmAR;
  const std::size_t at = full ? static_cast<std::size_t>(row) : offset_in_chunk(rank_, row);
  return buffers_.out + at * symmetric_.row_bytes;
}

}  // namespace flux::host
