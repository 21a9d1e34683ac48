#include "cpu/engine.h"

#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace flux::host {
namespace {

// Copies are split into pieces, so that an abort is noticed between two pieces.
constexpr std::size_t kCopyPiece = std::size_t{1} << 20;
// The worker shares its core with a GEMM: a long spin would slow the GEMM down.
constexpr std::chrono::microseconds kWorkerSpin{2};
// Number of calls after which all own signals are renewed. It is far below 2^31, the number of
// calls after which an old signal looks new.
constexpr std::uint32_t kRenewal = std::uint32_t{1} << 30;

Needs room_in(const Symmetric& s) {
  const auto count = [](std::size_t bytes, std::size_t each) {
    return each == 0 ? 0 : static_cast<int>(std::min(bytes / each, std::size_t{kMaxExtent}));
  };
  return {s.signals, count(s.result_offset, s.slot_bytes), count(s.slot_bytes, s.row_bytes),
          count(s.data_bytes - std::min(s.data_bytes, s.result_offset), s.row_bytes)};
}

std::string text_of(const Needs& n) {
  return std::to_string(n.signals) + " signals, " + std::to_string(n.blocks) + " blocks of " +
         std::to_string(n.block_rows) + " rows and " + std::to_string(n.result_rows) +
         " gathered or result rows";
}

}  // namespace

Engine::Engine(int rank, Symmetric symmetric)
    : rank_(rank),
      pid_(getpid()),
      symmetric_(std::move(symmetric)),
      room_(room_in(symmetric_)),
      local_(new SignalPad()) {
  symmetric_.remote.resize(symmetric_.pads.size());  // on one host no rank is remote
}

Engine::~Engine() {
  if (getpid() != pid_) {
    // A forked child has a copy of this object but not the thread: a join would never return.
    // The handle is leaked on purpose: there is nothing behind it to clean up.
    new std::thread(std::move(worker_));
    return;
  }
  close(PadState::kClosed, -1);
}

void Engine::close(PadState state, int culprit) {
  if (getpid() != pid_) return;  // a forked child must not close its parent's op
  std::shared_ptr<void> memory;  // released last, without the lock
  // A second caller waits for the first one. Otherwise it could free memory that the worker still
  // uses.
  const std::lock_guard<std::mutex> lock(closing_);
  if (stop_.exchange(true)) return;
  SignalPad& own = pad(rank_);
  own.culprit.store(static_cast<std::uint32_t>(culprit), std::memory_order_relaxed);
  own.state.store(static_cast<std::uint32_t>(state), std::memory_order_seq_cst);
  notify(own);
  submitted_.fetch_add(1);  // any change wakes the worker; it checks stop_ first
  notify(*local_);
  if (worker_.joinable()) worker_.join();
  if (symmetric_.processes != nullptr) symmetric_.processes->close();
  memory.swap(symmetric_.memory);
}

Failure Engine::fate(int peer) {
  // Check the process first: after its end, the state in its pad is final.
  const bool ended = symmetric_.processes != nullptr && symmetric_.processes->ended(peer);
  switch (static_cast<PadState>(pad(peer).state.load(std::memory_order_seq_cst))) {
    case PadState::kFailed:
      return Failure::kPeerFailed;
    case PadState::kClosed:
      return Failure::kPeerClosed;
    case PadState::kOpen:
      break;
  }
  return ended ? Failure::kPeerDied : Failure::kNone;
}

void Engine::look() { pad(rank_).looked.store(Lane::now(), std::memory_order_relaxed); }

bool Engine::looks(int peer) {
  constexpr std::int64_t kRecently = 500'000'000;
  return Lane::now() - pad(peer).looked.load(std::memory_order_relaxed) < kRecently;
}

// A signal that only large M use may stay unraised for 2^31 calls. It would then seem to be of the
// future (core/signal.h). So every kRenewal calls all own signals are set to the previous call.
// This is safe here for two reasons. Before this rank enters, no peer raises a signal of this call
// in its pad. A peer may still wait there, but only for a signal of the previous call. This rank
// has finished the previous call, so that signal is raised already.
void Engine::next_epoch() {
  ++epoch_;
  if (epoch_ % kRenewal != 0) return;
  for (int rank = 0; rank < world(); ++rank) {
    if (rank != rank_ && !symmetric_.remote[rank]) continue;
    for (int i = 0; i < symmetric_.signals; ++i) {
      pad(rank).signals()[i].store(epoch_ - 1, std::memory_order_seq_cst);
    }
    notify(pad(rank));
  }
}

void Engine::require_room(const Schedule& schedule) const {
  const Needs& needs = schedule.needs;
  const int ranks = schedule.spec.problem.world, rank = schedule.spec.tiles.rank;
  if (ranks != world() || rank != rank_) {
    throw std::invalid_argument("the schedule is of rank " + std::to_string(rank) + " of " +
                                std::to_string(ranks) + ", the op of rank " +
                                std::to_string(rank_) + " of " + std::to_string(world()));
  }
  if (needs.signals > room_.signals || needs.blocks > room_.blocks ||
      needs.block_rows > room_.block_rows || needs.result_rows > room_.result_rows) {
    throw std::invalid_argument("the schedule needs " + text_of(needs) +
                                "; the op's shared memory has " + text_of(room_));
  }
}

void Engine::begin(std::shared_ptr<const Schedule> schedule, const Buffers& buffers,
                   std::uint32_t digest, bool threaded, std::chrono::nanoseconds timeout) {
  if (schedule != nullptr) require_room(*schedule);
  next_epoch();
  schedule_ = std::move(schedule);
  buffers_ = buffers;
  digest_ = digest;
  threaded_ = threaded;
  timeout_ = timeout;
  next_action_ = 0;
  entries_seen_ = false;
  visits_entered_ = false;
  last_progress_ = Clock::now();
  computed_.store(0, std::memory_order_relaxed);
  forget_failure();
  publish_entry(pad(rank_), epoch_, digest_);
  if (!threaded_) return;
  // Set explicitly: after a wrap-around the epoch can be that of the last threaded call.
  finished_.store(epoch_ - 1, std::memory_order_relaxed);
  submitted_.store(epoch_, std::memory_order_seq_cst);
  if (worker_.joinable()) {
    notify(*local_);
  } else {
    worker_ = std::thread([this, done = epoch_ - 1] { worker_main(done); });
  }
}

void Engine::skip() {
  next_epoch();
  schedule_ = nullptr;
  threaded_ = false;
  forget_failure();
}

bool Engine::is_entered() {
  for (int peer = 0; peer < world(); ++peer) {
    std::uint64_t entry = 0;
    if (peer != rank_ && epoch_reached(read_entry(pad(peer), epoch_, &entry), epoch_)) return true;
  }
  return false;
}

void Engine::refuse(const std::string& why) {
  next_epoch();
  publish_refusal(pad(rank_), epoch_, why);
}

void Engine::worker_main(std::uint32_t done) {
  become_worker();
  for (;;) {
    const auto ready = [&] { return stop_.load() || submitted_.load() != done; };
    while (!wait_until(*local_, Clock::now() + std::chrono::hours(1), std::chrono::nanoseconds(0),
                       ready)) {
    }
    if (stop_.load()) return;
    done = submitted_.load();
    last_progress_ = Clock::now();  // by this thread's clock
    while (!failed() && !stop_.load()) {
      const auto now = Clock::now();
      if (run_program(Limit{now + std::chrono::seconds(1), last_progress_ + timeout_, kWorkerSpin}))
        break;
    }
    finished_.store(done, std::memory_order_seq_cst);
    notify(*local_);
  }
}

// end_call may come from another thread at any time. The lock orders it: it comes before the reset,
// which then sees `ending_`, or after it, and then the report stays.
void Engine::forget_failure() {
  const std::lock_guard<std::mutex> lock(reporting_);
  failure_ = FailureReport{};
  if (ending_) failure_ = ended_here();
  failed_.store(ending_, std::memory_order_release);
}

void Engine::fail(const FailureReport& report) {
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    if (failed()) return;
    failure_ = report;
    failed_.store(true, std::memory_order_release);
  }
  notify(pad(rank_));
  notify(*local_);
}

FailureReport Engine::ended_here() const {
  FailureReport report;
  report.kind = Failure::kEnded;
  report.peer = rank_;
  return report;
}

void Engine::end_call() {
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    ending_ = true;
  }
  fail(ended_here());
}

// Waits until the epoch that `observe` returns has reached this call. `observe` reads a word of
// that pad, and `peer` writes this word. Gives up when the deadline passes or when the peer has
// failed, left or died. A peer that raised the awaited word and *then* left or died has done its
// part. So the word is checked once more after fate().
template <class Observe>
bool Engine::await(int pad_of, int peer, const Transfer* what, const Limit& limit,
                   Observe&& observe) {
  SignalPad& awaited = pad(pad_of);
  const auto ready = [&] { return epoch_reached(observe(), epoch_); };
  auto spin = limit.spin;
  for (;;) {
    if (failed() || stop_.load(std::memory_order_relaxed)) return false;
    const auto slice = std::min({limit.until, limit.deadline, Clock::now() + kSlice});
    if (wait_until(awaited, slice, spin, ready)) return true;
    spin = std::chrono::nanoseconds(0);
    FailureReport report;
    report.peer = peer;
    report.expected = epoch_;
    report.observed = observe();
    if (what != nullptr) {
      report.chunk = what->chunk;
      report.tile = what->tile;
    }
    const Failure fate_of_peer = peer == rank_ ? Failure::kNone : fate(peer);
    if (fate_of_peer != Failure::kNone) {
      if (ready()) return true;
      report.kind = fate_of_peer;
      report.culprit = static_cast<int>(pad(peer).culprit.load(std::memory_order_relaxed));
    } else if (Clock::now() >= limit.deadline) {
      report.kind = Failure::kTimeout;
    }
    if (report.kind != Failure::kNone) {
      fail(report);
      return false;
    }
    if (Clock::now() >= limit.until) return false;
  }
}

bool Engine::await_signal(int pad_of, int peer, const Transfer& what, int index,
                          const Limit& limit) {
  const Word& signal = pad(pad_of).signals()[index];
  const auto observe = [&] { return signal.load(std::memory_order_seq_cst); };
  if (lane() == nullptr) return await(pad_of, peer, &what, limit, observe);
  if (signal_reached(pad(pad_of), index, epoch_)) return true;  // there is no wait
  const std::int64_t began = Lane::now();
  const bool is_there = await(pad_of, peer, &what, limit, observe);
  record_wait(Work::kWait, began, peer, &what, pad_of, index);
  return is_there;
}

bool Engine::wait_entries(const Limit& limit) {
  if (lane() == nullptr) return see_entries(limit);
  const std::int64_t began = Lane::now();
  const bool are_seen = see_entries(limit);
  record_wait(Work::kBarrier, began, -1, nullptr, -1, -1);
  return are_seen;
}

bool Engine::see_entries(const Limit& limit) {
  for (int i = 1; i < world(); ++i) {
    const int peer = wrap(rank_ + i, world());
    std::uint64_t entry = 0;
    const auto entered = [&] { return read_entry(pad(peer), epoch_, &entry); };
    if (!await(peer, peer, nullptr, limit, entered)) return false;
    if (entry != entry_of(epoch_, digest_)) {
      FailureReport report;
      report.kind = Failure::kMismatch;
      report.peer = peer;
      report.expected = digest_;
      report.observed = static_cast<std::uint32_t>(entry);
      report.ran_ahead = static_cast<std::uint32_t>(entry >> 32) != epoch_;
      fail(report);
      return false;
    }
  }
  return true;
}

bool Engine::wait_visit(int visit, const Limit& limit) {
  const CommTiling& c = schedule_->spec.comm;
  const Range waits = schedule_->visits.at(visit).waits;
  if (waits.begin == waits.end) return true;
  const bool pull = schedule_->spec.tiles.direction == Direction::kPull;
  // A pushing peer that has entered may still wait for another rank to enter. It must not be blamed
  // for its missing tiles, so all entries are awaited first.
  if (!pull && !visits_entered_) {
    if (!wait_entries(limit)) return false;
    visits_entered_ = true;
  }
  for (int i = waits.begin; i < waits.end; ++i) {
    const Transfer what{0,      0, rank_, i / tiles_per_chunk(c), i % tiles_per_chunk(c),
                        {0, 0}, i, false};
    // This rank's own worker stores pulled tiles and own tiles. The worker watches the peers and
    // their deadline.
    const int raiser = pull ? rank_ : schedule_->supplier[what.chunk];
    const auto deadline = raiser == rank_ ? Clock::time_point::max() : limit.deadline;
    const Limit bound{limit.until, deadline, limit.spin};
    if (!await_signal(rank_, raiser, what, i, bound)) return false;
  }
  return true;
}

bool Engine::finish(const Limit& limit) {
  if (!threaded_) {
    const auto deadline = std::max(limit.deadline, last_progress_ + timeout_);
    return run_program(Limit{limit.until, deadline, limit.spin});
  }
  const auto ready = [&] { return finished_.load() == epoch_; };
  const std::int64_t began = lane() == nullptr || ready() ? 0 : Lane::now();
  const bool is_done = wait_until(*local_, limit.until, limit.spin, ready) && !failed();
  if (began != 0) record_wait(Work::kOwnCopies, began, rank_, nullptr, -1, -1);
  return is_done;
}

void Engine::settle() {
  if (!threaded_ || !worker_.joinable()) return;
  const auto ready = [&] { return finished_.load() == epoch_; };
  while (!wait_until(*local_, Clock::now() + kSlice, std::chrono::nanoseconds(0), ready)) {
  }
}

bool Engine::run_program(const Limit& limit) {
  if (!entries_seen_) {
    if (!wait_entries(limit)) return false;
    entries_seen_ = true;
  }
  if (schedule_ == nullptr) return true;
  const auto& program = schedule_->program;
  Limit now = limit;
  for (; next_action_ < program.size(); ++next_action_) {
    pause();
    if (!run(program[next_action_], now)) return false;
    last_progress_ = Clock::now();
    now.deadline = last_progress_ + timeout_;
  }
  return true;
}

bool Engine::run(const Action& action, const Limit& limit) {
  const Schedule& s = *schedule_;
  switch (action.kind) {
    case ActionKind::kGather:
      return gather(s.transfers[action.index], limit);
    case ActionKind::kSend:
      return send(action.index, limit);
    case ActionKind::kReduce:
      return reduce_tile(s.reductions[action.index], limit);
    case ActionKind::kResult:
      return move_result(s.results[action.index], limit);
    case ActionKind::kReceive:
      return receive_result(s.receipts[action.index], limit);
  }
  return true;
}

// Moves one AllGather tile from the user's shard (own rows) or from a gathered buffer into a
// gathered buffer.
bool Engine::gather(const Transfer& t, const Limit& limit) {
  const bool from_shard = t.src == rank_ && t.chunk == rank_;
  // The signal of a forwarded tile was raised in the own pad by the rank that sent the tile. Its
  // owner does not raise it there, and may have finished and closed the op.
  const int raiser = t.src == rank_ ? schedule_->supplier[t.chunk] : t.src;
  if (!from_shard && !await_signal(t.src, raiser, t, t.signal, limit)) return false;
  const std::int64_t began = lane() == nullptr ? 0 : Lane::now();
  const std::size_t row_bytes = symmetric_.row_bytes;
  const auto copy = [&](Range rows) {
    char* dst = symmetric_.data[t.dst] + static_cast<std::size_t>(rows.begin) * row_bytes;
    if (from_shard) {
      copy_rows(dst, row_bytes, buffers_.x + offset_in_chunk(rank_, rows.begin) * buffers_.x_stride,
                buffers_.x_stride, rows);
    } else {
      copy_rows(dst, row_bytes,
                symmetric_.data[t.src] + static_cast<std::size_t>(rows.begin) * row_bytes,
                row_bytes, rows);
    }
  };
  int count = 0;
  if (!symmetric_.remote[t.dst]) {  // else the network reads the tile at its source
    const Selection* selection = buffers_.selection.get();
    count = each_run(selection == nullptr ? nullptr : &selection->hops().to(t.chunk, t.dst), t.rows,
                     copy);
  }
  raise(t.dst, t.signal);
  if (began != 0 && !symmetric_.remote[t.dst]) {
    record(Work::kCopy, began, t, t.src == rank_ ? t.dst : t.src, t.dst, bytes_of({0, count}));
  }
  return true;
}

std::size_t Engine::offset_in_chunk(int owner, int row) const {
  return static_cast<std::size_t>(row - row_begin(schedule_->spec.problem.m, world(), owner));
}

void Engine::copy_rows(char* dst, std::size_t dst_stride, const char* src, std::size_t src_stride,
                       Range rows) {
  const std::size_t row_bytes = symmetric_.row_bytes;
  std::size_t count = static_cast<std::size_t>(rows.end - rows.begin);
  std::size_t width = row_bytes;
  if (dst_stride == row_bytes && src_stride == row_bytes) {
    width = row_bytes * count;
    count = 1;
  }
  for (std::size_t row = 0; row < count; ++row) {
    for (std::size_t at = 0; at < width; at += kCopyPiece) {
      if (stop_.load(std::memory_order_relaxed)) return;
      std::memcpy(dst + row * dst_stride + at, src + row * src_stride + at,
                  std::min(kCopyPiece, width - at));
    }
  }
}

void Engine::raise(int pad_of, int index) {
  pause();
  if (stop_.load(std::memory_order_relaxed)) return;  // the copy before it may be incomplete
  raise_signal(pad(pad_of), index, epoch_);
}

void Engine::set_delay(std::chrono::nanoseconds longest, std::uint64_t seed) {
  delay_ = longest;
  delay_state_.store(seed * 2 + 1);
}

void Engine::pause() {
  if (delay_.count() == 0) return;
  // splitmix64. Both threads draw from one sequence. Their interleaving may vary, as intended for
  // race tests.
  std::uint64_t z = delay_state_.fetch_add(0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  const auto span = static_cast<std::uint64_t>(delay_.count());
  if (z % 4 != 0) std::this_thread::sleep_for(std::chrono::nanoseconds((z >> 8) % span));
}

}  // namespace flux::host
