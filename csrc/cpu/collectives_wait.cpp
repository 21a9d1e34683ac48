// The waits of collectives.h: for flags of this host, for links, and for what ends a call early; and
// what goes on while the caller computes.
#include <poll.h>

#include <algorithm>

#include "cpu/collectives.h"

namespace flux::host {
namespace {

// A rank that waits for one that waits itself is more patient, so that the first one reports.
constexpr std::chrono::milliseconds kHop{300};

// Bytes under way to this rank from which the kernel's buffer may be too small.
constexpr std::size_t kMuch = std::size_t{256} << 10;

}  // namespace

Mover::Mover(std::function<void()> move) : move_(std::move(move)), thread_([this] { main(); }) {}

Mover::~Mover() {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Mover::begin() {
  {
    const std::lock_guard<std::mutex> lock(lock_);
    moving_ = true;
  }
  changed_.notify_one();
}

void Mover::end() {
  const std::lock_guard<std::mutex> lock(lock_);
  moving_ = false;
}

void Mover::main() {
  std::unique_lock<std::mutex> lock(lock_);
  while (!ending_) {
    if (!moving_) {
      changed_.wait(lock);
    } else {
      move_();
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
}

void Collectives::produce(std::size_t begin, std::size_t end) {
  if (call_->produce && begin != end) compute([&] { call_->produce(begin, end); });
}

void Collectives::consume(std::size_t begin, std::size_t end) {
  if (call_->consume && begin != end) compute([&] { call_->consume(begin, end); });
}

// Makes the caller compute, while bytes move on.
void Collectives::compute(const std::function<void()>& function) {
  std::size_t much = 0;
  for (const auto& link : links_) {
    if (link != nullptr) much += link->awaited() + (link->sent() < link->posted() ? kMuch : 0);
  }
  if (much < kMuch) {
    function();
  } else {
    if (mover_ == nullptr) mover_ = std::make_unique<Mover>([this] { progress(); });
    mover_->begin();
    try {
      function();
    } catch (...) {
      mover_->end();
      throw;
    }
    mover_->end();
  }
  progress();
}

void Collectives::leave(Outcome outcome, CollectiveReport report) {
  report_ = std::move(report);
  throw Left{outcome};
}

void Collectives::raise(std::atomic<std::uint64_t>& flag, std::size_t round) {
  pause();
  store_fence();
  flag.store(token(round), std::memory_order_seq_cst);
  notify(pad(rank_));
}

void Collectives::await_inputs(std::size_t round) {
  for (const int peer : members_) {
    if (peer != rank_) await_flag(peer, &Flags::in, token(round), 0);
  }
}

// Besides the flag, the peer's entry must be this call's: one with other arguments raises flags, too.
void Collectives::await_flag(int peer, std::atomic<std::uint64_t> Flags::* flag,
                             std::uint64_t least, int hops) {
  std::atomic<std::uint64_t>& awaited = flags(peer).*flag;
  await(
      peer, true, hops, least, [&] { return awaited.load(std::memory_order_seq_cst) >= least; },
      [&] { return awaited.load(std::memory_order_relaxed); });
  const auto call = static_cast<std::uint32_t>(call_->number);
  std::uint64_t entry = 0;
  read_entry(pad(peer), call, &entry);
  if (entry != entry_of(call, call_->digest)) check(peer, true, [] { return false; });
}

void Collectives::await_sent(const Round& plan) {
  for (const auto& [posted, count] : plan.posts) {
    const Link& link = *posted;
    const std::uint32_t least = count;
    await(
        link.peer(), false, 0, least, [&] { return link.sent() >= least; },
        [&] { return std::uint64_t{link.sent()}; });
  }
}

void Collectives::await_arrived(Link& link, std::uint32_t count) {
  const bool alone = placement_.members(placement_.host(link.peer())).size() == 1;
  await(
      link.peer(), false, alone ? 0 : 1, count, [&] { return link.arrived() >= count; },
      [&] { return std::uint64_t{link.arrived()}; });
}

bool Collectives::progress() {
  bool any = false;
  for (const auto& link : links_) {
    if (link != nullptr && link->progress()) any = true;
  }
  return any;
}

void Collectives::sleep_on_links(std::chrono::nanoseconds longest) {
  std::vector<pollfd> waiting;
  for (const auto& link : links_) {
    const short events = link == nullptr ? short{0} : link->events();
    if (events != 0) waiting.push_back({link->descriptor(), events, 0});
  }
  timespec limit{};
  limit.tv_nsec = static_cast<long>(longest.count());
  ppoll(waiting.data(), waiting.size(), &limit, nullptr);
}

// Waits until `ready()`, which the rank `peer` brings about: `here`, by a flag in shared memory, or
// over its link. `hops`: how many other ranks that one may wait for.
template <class Ready>
void Collectives::await(int peer, bool here, int hops, std::uint64_t least, Ready&& ready,
                        const std::function<std::uint64_t()>& observe) {
  if (ready()) return;
  const auto now = Clock::now();
  const auto spin_end = now + call_->spin;
  do {
    for (int i = 0; i < 16; ++i) {
      cpu_relax();
      if (ready()) return;
    }
    if (progress() && ready()) return;
    std::this_thread::yield();
  } while (Clock::now() < spin_end);
  const auto patience = call_->timeout + hops * std::chrono::nanoseconds(kHop);
  auto deadline = Clock::now() + patience;
  auto next_question = Clock::now() + std::chrono::milliseconds(50);
  for (;;) {
    check(peer, here, ready);
    if (here) {
      const bool moving = std::any_of(links_.begin(), links_.end(), [](const auto& link) {
        return link != nullptr && link->sent() < link->posted();
      });
      const auto slice = moving ? std::chrono::milliseconds(1) : Engine::kSlice;
      if (wait_until(pad(peer), Clock::now() + slice, std::chrono::nanoseconds(0), ready)) return;
    } else {
      sleep_on_links(Engine::kSlice);
    }
    if (progress()) deadline = Clock::now() + patience;
    if (ready()) return;
    const auto time = Clock::now();
    if (time >= next_question) {
      if ((*interrupted_)()) leave(Outcome::kInterrupted, {});
      next_question = time + std::chrono::milliseconds(50);
    }
    if (time >= deadline) {
      CollectiveReport report;
      report.kind = Failure::kTimeout;
      report.peer = report.culprit = peer;
      report.expected = least;
      report.observed = observe();
      leave(Outcome::kFailed, report);
    }
  }
}

// Leaves the call if it cannot be completed. A peer that did its part and then left has done it.
void Collectives::check(int peer, bool here, const std::function<bool()>& ready) {
  if (ending_.load()) leave(Outcome::kEnded, {});
  CollectiveReport report;
  const auto call = static_cast<std::uint32_t>(call_->number);
  for (const int member : members_) {
    std::uint64_t entry = 0;
    if (member == rank_ || !epoch_reached(read_entry(pad(member), call, &entry), call)) continue;
    if (entry == entry_of(call, call_->digest)) continue;
    report.kind = Failure::kMismatch;
    report.peer = member;
    const bool refused = static_cast<std::uint32_t>(entry) == kRefused;
    report.text = refused ? read_refusal(pad(member)) : "";
    leave(Outcome::kDisagrees, report);
  }
  if (engine_ != nullptr && (engine_->failed() || engine_->is_entered())) {
    leave(engine_->failed() ? Outcome::kEnded : Outcome::kDisagrees, report);
  }
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    report.peer = report.culprit = link->peer();
    report.text = link->text();
    if (link->state() == LinkState::kDisagrees || link->state() == LinkState::kRefused) {
      report.kind = Failure::kMismatch;
      leave(Outcome::kDisagrees, report);
    }
    const bool needed = link->arrived() < link->opened() || (!here && link->peer() == peer);
    if (link->state() == LinkState::kOpen || !needed || ready()) continue;
    report.kind = link->state() == LinkState::kClosed ? Failure::kPeerClosed : Failure::kPeerFailed;
    if (link->culprit() >= 0) report.culprit = link->culprit();
    leave(Outcome::kFailed, report);
  }
  if (!here) return;
  const bool has_ended = processes_ != nullptr && processes_->ended(peer);
  const auto state = static_cast<PadState>(pad(peer).state.load(std::memory_order_seq_cst));
  if ((state == PadState::kOpen && !has_ended) || ready()) return;
  report.peer = report.culprit = peer;
  report.text.clear();
  report.kind = state == PadState::kFailed   ? Failure::kPeerFailed
                : state == PadState::kClosed ? Failure::kPeerClosed
                                             : Failure::kPeerDied;
  if (state == PadState::kFailed) {
    report.culprit = static_cast<int>(pad(peer).culprit.load(std::memory_order_relaxed));
  }
  leave(Outcome::kFailed, report);
}

void Collectives::set_delay(std::chrono::nanoseconds longest, std::uint64_t seed) {
  delay_ = longest;
  delay_state_ = seed * 2 + 1;
}

// Random pauses, for tests of races.
void Collectives::pause() {
  if (delay_.count() == 0) return;
  delay_state_ = delay_state_ * 6364136223846793005u + 1442695040888963407u;
  const auto span = static_cast<std::uint64_t>(delay_.count());
  std::this_thread::sleep_for(std::chrono::nanoseconds((delay_state_ >> 33) % span));
}

}  // namespace flux::host
