#include "cpu/collectives.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>

namespace flux::host {
namespace {

constexpr std::size_t kAlign = 64;
// Least bytes of a lane's part of a sum: less is one message, not one for each lane.
constexpr std::size_t kLeastPart = 8 << 10;
// Bytes from which an AllReduce is a ReduceScatter and an AllGather, at twice the latency: over three
// hosts and more it sends fewer bytes then, over two hosts of one rank each it sums fewer.
constexpr std::size_t kTwoPhases = 64 << 10;
constexpr std::size_t kTwoPhasesOfTwo = 2 << 20;
// Time to tell peers why this rank leaves.
constexpr std::chrono::milliseconds kTell{100};

std::size_t round_up(std::size_t bytes, std::size_t unit = kAlign) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::size_t Collectives::data_bytes(std::size_t slot_bytes, bool shares) {
  return sizeof(Flags) + (shares ? 4 * slot_bytes : 0);
}

int Collectives::handler(int host, int lane) const {
  const auto& members = placement_.members(host);
  return members[lane % static_cast<int>(members.size())];
}

std::vector<int> Collectives::partners(const Placement& placement, int rank) {
  std::size_t lanes = 0;
  for (int host = 0; host < placement.hosts(); ++host) {
    lanes = std::max(lanes, placement.members(host).size());
  }
  std::set<int> list;
  const auto& own = placement.members(placement.host(rank));
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    if (own[lane % own.size()] != rank) continue;
    for (int host = 0; host < placement.hosts(); ++host) {
      const auto& members = placement.members(host);
      if (host != placement.host(rank)) list.insert(members[lane % members.size()]);
    }
  }
  return {list.begin(), list.end()};
}

Collectives::Collectives(int rank, std::vector<int> host_of, std::vector<SignalPad*> pads,
                         std::vector<char*> data, const std::vector<int>& descriptors,
                         std::shared_ptr<Processes> processes, std::shared_ptr<void> memory,
                         std::size_t slot_bytes)
    : rank_(rank),
      pid_(getpid()),
      placement_(std::move(host_of)),
      members_(placement_.members(placement_.host(rank))),
      shares_(members_.size() > 1),
      pads_(std::move(pads)),
      data_(std::move(data)),
      processes_(std::move(processes)),
      memory_(std::move(memory)),
      slot_bytes_(slot_bytes) {
  for (const int descriptor : descriptors) {
    const int peer = static_cast<int>(links_.size());
    links_.push_back(descriptor < 0 ? nullptr : std::make_unique<Link>(descriptor, peer));
  }
  for (int host = 0; host < placement_.hosts(); ++host) {
    lanes_ = std::max(lanes_, static_cast<int>(placement_.members(host).size()));
  }
  if (slot_bytes_ < kAlign * static_cast<std::size_t>(world())) {
    throw std::invalid_argument("slots of " + std::to_string(slot_bytes_) +
                                " bytes are too small for " + std::to_string(world()) + " ranks");
  }
  if (placement_.hosts() > 1 && shares_) sums_.resize(2 * slot_bytes_);
}

Collectives::~Collectives() {
  // A forked child has a copy of this object but not the thread, and destroying it would wait.
  if (getpid() != pid_) static_cast<void>(mover_.release());
  close(PadState::kClosed, -1);
}

void Collectives::close(PadState state, int culprit) {
  if (getpid() != pid_) return;  // a forked child must not speak for its parent
  end_call();
  std::shared_ptr<void> memory;
  const std::lock_guard<std::mutex> lock(busy_);
  if (closed_) return;
  closed_ = true;
  mover_.reset();
  pad(rank_).culprit.store(static_cast<std::uint32_t>(culprit), std::memory_order_relaxed);
  pad(rank_).state.store(static_cast<std::uint32_t>(state), std::memory_order_seq_cst);
  notify(pad(rank_));
  const bool failed = state == PadState::kFailed;
  const auto until = (std::chrono::steady_clock::now() + kTell).time_since_epoch();
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    link->tell(failed ? FrameKind::kFailed : FrameKind::kClosed,
               static_cast<std::uint32_t>(culprit < 0 ? rank_ : culprit), "",
               until / std::chrono::nanoseconds(1));
  }
  for (const auto& link : links_) {
    if (link != nullptr) link->close();
  }
  if (processes_ != nullptr) processes_->close();
  memory.swap(memory_);
}

std::uint64_t Collectives::bytes_sent() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link == nullptr ? 0 : link->bytes_sent();
  return sum;
}

void Collectives::refuse(std::uint64_t number, const std::string& why) {
  const std::lock_guard<std::mutex> lock(busy_);
  if (closed_) return;
  publish_refusal(pad(rank_), static_cast<std::uint32_t>(2 * number), why);
  const auto until = (std::chrono::steady_clock::now() + kTell).time_since_epoch();
  for (const auto& link : links_) {
    if (link == nullptr) continue;
    link->begin(2 * number, kRefused);
    link->tell(FrameKind::kRefusal, 0, why, until / std::chrono::nanoseconds(1));
  }
}

Outcome Collectives::run(const CollectiveCall& call, const std::function<bool()>& interrupted,
                         Engine* engine) {
  const std::lock_guard<std::mutex> lock(busy_);
  report_ = {};
  if (ending_.load() || closed_) return Outcome::kEnded;
  if (call.block_columns != 0 && (call.kind != Collective::kAllReduce || call.in == call.out)) {
    throw std::invalid_argument("blocks of columns are of an AllReduce into other memory");
  }
  interrupted_ = &interrupted;
  engine_ = engine;
  const std::size_t bytes = call.offsets.back();
  const int hosts = placement_.hosts();
  const bool twice = call.kind == Collective::kAllReduce &&
                     ((hosts > 2 && bytes >= kTwoPhases) ||
                      (hosts == 2 && lanes_ == 1 && bytes >= kTwoPhasesOfTwo && !call.produce));
  CollectiveCall phase = call;
  call_ = &phase;
  phase.number = 2 * call.number;
  char* const vector = call.block_columns == 0 ? call.out : const_cast<char*>(call.in);
  if (twice) {
    // Whole rows, so that none is produced for two owners.
    const bool whole = call.produce && call.block_columns == 0;
    const std::size_t row = whole ? call.columns * size_of(call.dtype) : kAlign;
    const std::size_t each = round_up((bytes + world() - 1) / world(), row);
    for (int rank = 0; rank <= world(); ++rank) {
      phase.offsets[static_cast<std::size_t>(rank)] =
          std::min(bytes, each * static_cast<std::size_t>(rank));
    }
    phase.kind = Collective::kReduceScatter;
    phase.round_bytes = round_up((call.round_bytes + world() - 1) / world(), row);
    phase.out = vector + phase.offsets[static_cast<std::size_t>(rank_)];
  }
  try {
    run_rounds();
    if (twice) {
      phase.kind = Collective::kAllGather;
      phase.number = 2 * call.number + 1;
      phase.in = phase.out;
      phase.out = vector;
      phase.produce = nullptr;
      phase.meanwhile = nullptr;
      run_rounds();
      if (vector != call.out) {
        phase.out = call.out;
        to_rows(vector, 0, bytes);
      }
    }
  } catch (const Left& left) {
    abandon();
    return left.outcome;
  } catch (...) {  // what produce or consume threw
    abandon();
    throw;
  }
  return Outcome::kDone;
}

// AllGather: a part of the own part.
const char* Collectives::own_part(const Part& part) const {
  return call_->in + (part.at - call_->offsets[rank_]);
}

char* Collectives::in_slot(int rank, std::size_t round) const {
  return data_[rank] + sizeof(Flags) + (rotation_ + round) % 2 * slot_bytes_;
}

char* Collectives::out_slot(int rank, std::size_t round) const {
  return data_[rank] + sizeof(Flags) + (2 + (rotation_ + round) % 2) * slot_bytes_;
}

void Collectives::abandon() {
  for (const auto& link : links_) {
    if (link != nullptr) link->abandon();
  }
}

std::size_t Collectives::received_each() const {
  return shares_ ? slot_bytes_ : round_up(per_owner_);
}

// Where a round of what a host sends arrives, if it is summed.
char* Collectives::received(int host, std::size_t round) {
  const std::size_t index = shares_ ? parity(round) : round % ahead_;
  return received_.get() + (static_cast<std::size_t>(host) * ahead_ + index) * received_each();
}

// Chooses how many rounds there are, how large they are, and how far A may be ahead of B.
void Collectives::cut() {
  std::size_t longest = call_->offsets.back(), most = slot_bytes_;
  const std::size_t asked = call_->round_bytes;
  if (call_->kind != Collective::kAllReduce) {
    longest = 0;
    for (int rank = 0; rank < world(); ++rank) {
      longest = std::max(longest, call_->offsets[rank + 1] - call_->offsets[rank]);
    }
    most = slot_bytes_ / static_cast<std::size_t>(world()) / kAlign * kAlign;
  }
  // Equal on all ranks, also where only some of them share memory.
  per_owner_ = asked == 0 ? most : std::min(asked, lanes_ > 1 ? most : longest);
  count_ = std::max<std::size_t>(1, (longest + per_owner_ - 1) / per_owner_);
  ahead_ = 2;
  if (!shares_) {
    const bool all = asked > 0 || call_->kind == Collective::kAllGather;
    ahead_ = std::min(count_, all ? count_ : 2 * slot_bytes_ / received_each());
  }
  rounds_.assign(ahead_, Round{});
  const std::size_t room = static_cast<std::size_t>(placement_.hosts()) * ahead_ * received_each();
  if (placement_.hosts() > 1 && call_->kind != Collective::kAllGather && room > received_bytes_) {
    received_.reset();  // never both at a time
    received_bytes_ = 0;
    received_.reset(new char[room]);
    received_bytes_ = room;
  }
}

// Whether B of a round would not wait.
bool Collectives::is_ready(std::size_t round) {
  const Round& plan = plan_of(round);
  const auto reached = [](const Frames& frames, std::uint32_t (Link::*count)() const) {
    return std::all_of(frames.begin(), frames.end(),
                       [&](const auto& frame) { return (frame.first->*count)() >= frame.second; });
  };
  return reached(plan.needs, &Link::arrived) && reached(plan.posts, &Link::sent);
}

void Collectives::run_rounds() {
  publish_entry(pad(rank_), static_cast<std::uint32_t>(call_->number), call_->digest);
  for (const auto& link : links_) {
    if (link != nullptr) link->begin(call_->number, call_->digest);
  }
  cut();
  std::size_t entered = 0;
  bool waits = false;
  // An AllReduce needs nothing but the round itself for its sum.
  const bool early = !shares_ && call_->kind == Collective::kAllReduce;
  const std::size_t own = call_->offsets[rank_], own_end = call_->offsets[rank_ + 1];
  for (std::size_t round = 0; round < count_; ++round) {
    while (entered < std::min(count_, round + ahead_) &&
           !(early && entered > round && is_ready(round))) {
      step_in(entered++);
    }
    if (round == 0) consume(own, own_end);
    // At once: nobody waits for a part of it.
    const bool sums_own = !shares_ && call_->kind == Collective::kReduceScatter;
    if (round == 0 && sums_own) produce(own, own_end);
    if (entered == count_ && !waits) {
      waits = true;
      if (call_->meanwhile) compute(call_->meanwhile);
    }
    step_sum(round);
    step_out(round);
    if (count_ == 1) {
      consume(0, own);
      consume(own_end, call_->offsets.back());
    } else {
      for (const Part& part : plan_of(round).parts) {
        if (part.index != rank_) consume(part.at, part.at + part.bytes);
      }
    }
  }
  for (const Round& plan : rounds_) await_sent(plan);
  rotation_ += count_;
}

// The parts of a round: lanes of an AllReduce, owners of the others. Parts without bytes are left
// out, except in the first round: every link has a frame in every call, by which ranks compare it.
void Collectives::plan_round(std::size_t round, Round* plan) {
  plan->parts.clear();
  plan->needs.clear();
  plan->posts.clear();
  if (call_->kind == Collective::kAllReduce) {
    const std::size_t begin = round * per_owner_;
    const std::size_t bytes = std::min(per_owner_, call_->offsets.back() - begin);
    const std::size_t lanes = static_cast<std::size_t>(lanes_);
    const std::size_t each = std::max(kLeastPart, round_up((bytes + lanes - 1) / lanes));
    for (std::size_t lane = 0; lane == 0 || lane * each < bytes; ++lane) {
      plan->parts.push_back({begin + lane * each, std::min(each, bytes - lane * each), lane * each,
                             static_cast<int>(lane)});
    }
    return;
  }
  // From the next rank on, so that not all ranks send to the same one first.
  for (int step = 1; step <= world(); ++step) {
    const int owner = (rank_ + step) % world();
    const std::size_t end = call_->offsets[owner + 1];
    const std::size_t at = std::min(end, call_->offsets[owner] + round * per_owner_);
    const std::size_t bytes = std::min(per_owner_, end - at);
    if (bytes > 0 || round == 0) {
      plan->parts.push_back({at, bytes, static_cast<std::size_t>(owner) * per_owner_, owner});
    }
  }
}

void Collectives::step_in(std::size_t round) {
  Round& plan = plan_of(round);
  if (round >= ahead_) await_sent(plan);
  plan_round(round, &plan);
  const Collective kind = call_->kind;
  // Ranks that share memory publish a round as a whole: a part of the only one is of no use.
  const bool whole = kind == Collective::kAllReduce || (shares_ && count_ == 1);
  if (whole) {
    const std::size_t begin = round * per_owner_, end = call_->offsets.back();
    produce(begin, count_ == 1 ? end : std::min(begin + per_owner_, end));
  }
  const auto produce_part = [&](const Part& part) {
    if (!whole) produce(part.at, part.at + part.bytes);
  };
  const int host = placement_.host(rank_), hosts = placement_.hosts();
  if (shares_) {
    for (const int peer : members_) {
      if (peer == rank_ || round == 0) continue;
      await_flag(peer, round == 1 ? &Flags::in : &Flags::done, token(round == 1 ? 0 : round - 2),
                 0);
    }
    char* slot = in_slot(rank_, round);
    for (const Part& part : plan.parts) {
      if (kind != Collective::kAllGather) {
        produce_part(part);
        std::memcpy(slot + part.in_slot, call_->in + part.at, part.bytes);
      } else if (part.index == rank_ && part.bytes > 0) {
        std::memcpy(slot, own_part(part), part.bytes);
      }
    }
    raise(flags(rank_).in, round);
  }
  if (hosts == 1) {
    if (shares_) await_inputs(round);
    return;
  }
  char* own_sums = sums_.data() + parity(round) * slot_bytes_;
  const auto send = [&](int to, const char* source, std::size_t bytes) {
    Link& link = *links_[to];
    link.post(source, bytes);
    plan.posts.emplace_back(&link, link.posted());
  };
  const auto receive = [&](int from, char* target, std::size_t bytes) {
    Link& link = *links_[from];
    link.open(target, bytes);
    plan.needs.emplace_back(&link, link.opened());
  };
  if (shares_) await_inputs(round);
  const int lane = placement_.lane(rank_);
  // The sum of this host's ranks.
  const auto summed = [&](const Part& part) -> const char* {
    if (!shares_) {
      produce_part(part);
      return call_->in + part.at;
    }
    sum_of_host(part, round, own_sums + part.in_slot);
    return own_sums + part.in_slot;
  };
  for (const Part& part : plan.parts) {
    if (kind == Collective::kAllReduce) {
      if (handler(host, part.index) != rank_) continue;
      const char* source = summed(part);
      for (int other = 0; other < hosts; ++other) {
        if (other == host) continue;
        const int peer = handler(other, part.index);
        send(peer, source, part.bytes);
        receive(peer, received(other, round) + part.in_slot, part.bytes);
      }
    } else if (kind == Collective::kReduceScatter) {
      if (part.index == rank_) {
        for (int other = 0; other < hosts; ++other) {
          if (other != host) receive(handler(other, lane), received(other, round), part.bytes);
        }
      } else if (is_remote(part.index) && handler(host, placement_.lane(part.index)) == rank_) {
        send(part.index, summed(part), part.bytes);
        if (call_->produce) progress();  // before the next part is computed
      }
    } else if (part.index == rank_) {
      for (int other = 0; other < hosts; ++other) {
        if (other == host) continue;
        send(handler(other, lane), own_part(part), part.bytes);
      }
    } else if (is_remote(part.index) && handler(host, placement_.lane(part.index)) == rank_) {
      receive(part.index, shares_ ? out_slot(rank_, round) + part.in_slot : call_->out + part.at,
              part.bytes);
    }
  }
  pause();
  progress();
}

void Collectives::step_out(std::size_t round) {
  const Round& plan = plan_of(round);
  const Collective kind = call_->kind;
  if (kind == Collective::kAllGather) {
    for (const Part& part : plan.parts) {
      if (part.index == rank_ && part.bytes > 0 && own_part(part) != call_->out + part.at) {
        std::memcpy(call_->out + part.at, own_part(part), part.bytes);
      }
    }
  }
  if (!shares_) return;
  const int host = placement_.host(rank_);
  // Flags of all peers are awaited also where nothing is copied: slots are used again after that.
  for (const int peer : members_) {
    if (peer != rank_) await_flag(peer, &Flags::out, token(round), placement_.hosts() > 1 ? 2 : 1);
  }
  for (const Part& part : plan.parts) {
    const char* from = nullptr;
    if (kind == Collective::kAllReduce) {
      from = out_slot(handler(host, part.index), round) + part.in_slot;
    } else if (kind == Collective::kAllGather && part.index != rank_) {
      from = is_remote(part.index)
                 ? out_slot(handler(host, placement_.lane(part.index)), round) + part.in_slot
                 : in_slot(part.index, round);
    }
    if (from == nullptr) continue;
    if (kind == Collective::kAllReduce) {
      to_rows(from, part.at, part.bytes);
    } else {
      std::memcpy(call_->out + part.at, from, part.bytes);
    }
  }
  raise(flags(rank_).done, round);
}

}  // namespace flux::host
