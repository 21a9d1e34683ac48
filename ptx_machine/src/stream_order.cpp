// What streams order: launches, copies, words that are written and waited for, events, the host.
//
// A stream is an agent whose clock goes on with each thing that it has done. Knowing a clock of it is
// knowing all accesses of its copies and launches up to there. So the end of a launch orders what comes
// behind it on its stream, and what an event, a word or the host puts behind that; nothing else. When the
// host has waited for all that was done, nothing is left to know, and all accesses are forgotten.
#include <algorithm>

#include "races.h"

namespace ptx_machine {
namespace {

thread_local int current = GlobalOrder::kDirect;  // the stream that the thread runs

// Of a copy engine, which writes words whole, or of a write of a stream.
constexpr std::uint32_t kWords = Access::kStrong |
                                 static_cast<std::uint32_t>(Scope::kSys) << Access::kScope |
                                 2u << Access::kSize;

bool both_strong(const Access& a, const Access& b) {
  return a.has(Access::kStrong) && b.has(Access::kStrong);
}

void note_reader(Shadow& shadow, Cell& cell, const Access& access) {
  for (Access& read : cell.reads) {
    if (read.agent != kNobody && read.agent != access.agent) continue;
    read = access;
    return;
  }
  Readers& readers = shadow.readers(cell);
  for (std::size_t i = 0; i < readers.count; ++i) {
    if (readers.reads[i].agent != access.agent) continue;
    readers.reads[i] = access;
    return;
  }
  if (readers.count < Readers::kMost) readers.reads[readers.count++] = access;
}

}  // namespace

StreamOrder& GlobalOrder::stream_order() { return stream_order(current); }

StreamOrder& GlobalOrder::stream_order(int stream) {
  StreamOrder& order = streams_[stream];
  if (order.agent != kNobody) return order;
  if (of_streams_ == nullptr) {
    of_streams_ = std::make_shared<LaunchOrder>();
    launched_.push_back(of_streams_);
  }
  order.agent = new_agent(*of_streams_, {AgentInfo::Kind::kStream, Position{}, Dim{}, stream});
  is_clear_ = false;
  return order;
}

void GlobalOrder::advance(StreamOrder& stream, const ViewPtr& known) {
  ++stream.clock;
  stream.view = join(join(stream.view, known), Known{stream.agent, stream.clock, stream.clock, 0});
  everything_ = join(everything_, stream.view);
}

// What a view says beyond launches whose ends it knows, and beyond one that ends now.
ViewPtr GlobalOrder::without_ended(const ViewPtr& view, const LaunchOrder& launch) const {
  if (view == nullptr) return nullptr;
  auto out = std::make_shared<View>();
  for (const Known& k : view->known) {
    if (k.agent > kOutside) {
      const LaunchOrder& of = *chunk_of(k.agent)->launch;
      const std::uint32_t ended = of.ended;
      if (&of == &launch) continue;
      if (ended != 0 && covers(view->known, {of.stream, ended, ~Mask{0}, 0})) continue;
    }
    out->known.push_back(k);
  }
  return out;
}

void GlobalOrder::end(LaunchOrder& launch, const ViewPtr& known) {
  const std::lock_guard<std::mutex> lock(starting_);
  StreamOrder& stream = stream_order();
  launch.stream = stream.agent;
  launch.ended = stream.clock + 1;
  advance(stream, without_ended(known, launch));
  if (current == kDirect) tell_host(stream.view);
  --running_;
  clear_if_all_is_known();
}

void GlobalOrder::tell_host(const ViewPtr& view) {
  const ViewPtr before = host_;
  host_ = join(host_, view);
  if (host_ != before) submissions_.push_back(host_);
}

std::uint64_t GlobalOrder::submitted() {
  const std::lock_guard<std::mutex> lock(starting_);
  return first_submission_ + submissions_.size();
}

void GlobalOrder::begin_item(int stream, std::uint64_t submitted) {
  current = stream;
  const std::lock_guard<std::mutex> lock(starting_);
  if (submitted <= first_submission_) return;
  StreamOrder& order = stream_order();
  order.view = join(order.view, submissions_[submitted - first_submission_ - 1]);
}

void GlobalOrder::await_stream(int stream) {
  const std::lock_guard<std::mutex> lock(starting_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  tell_host(found->second.view);
  clear_if_all_is_known();
}

void GlobalOrder::clear_if_all_is_known() {
  if (running_ != 0 || copying_ != 0 || is_clear_) return;
  for (const auto& [number, stream] : streams_) {
    if (stream.clock == 0) continue;
    const Access last{stream.agent, stream.clock, ~Mask{0}, 0};
    if (host_ == nullptr || !covers(host_->known, last)) return;
  }
  clear();
}

void GlobalOrder::clear() {
  for (Shard& shard : shards_) {
    const std::lock_guard<std::mutex> using_it(shard.using_it);
    shard.pages.clear();
  }
  for (std::uint32_t i = 0; i < next_chunk_; ++i) chunks_[i] = nullptr;
  next_chunk_ = 1;
  launched_.clear();
  sequential_.clear();
  of_streams_ = nullptr;
  streams_.clear();
  host_ = everything_ = nullptr;
  first_submission_ += submissions_.size();
  submissions_.clear();
  ++generation_;
  is_clear_ = true;
}

void GlobalOrder::forget_all() {
  const std::lock_guard<std::mutex> lock(starting_);
  if (running_ == 0 && copying_ == 0) clear();
}

// -- what a stream knows -------------------------------------------------------------------------------

GlobalOrder::Reached GlobalOrder::reached() {
  const std::lock_guard<std::mutex> lock(starting_);
  return {generation_, stream_order().view};
}

void GlobalOrder::learn(const Reached& reached) {
  const std::lock_guard<std::mutex> lock(starting_);
  if (reached.generation != generation_) return;  // all of that is known to everything
  StreamOrder& stream = stream_order();
  stream.view = join(stream.view, reached.view);
}

ViewPtr GlobalOrder::at_start() {
  const std::lock_guard<std::mutex> lock(starting_);
  const std::uint32_t clock = outside_;
  const ViewPtr before = current == kDirect ? host_ : stream_order().view;
  auto view = std::make_shared<View>(*join(before, {kOutside, clock, clock, 0}));
  view->fenced.fill(view->known);
  return view;
}

ViewPtr GlobalOrder::outside() {
  const std::lock_guard<std::mutex> lock(starting_);
  const std::uint32_t clock = outside_;
  return join(everything_, {kOutside, clock, clock, 0});
}

ViewPtr GlobalOrder::outside(const Access& write) {
  if (is_stream(write.agent)) {
    const std::lock_guard<std::mutex> lock(starting_);
    for (const auto& [number, stream] : streams_) {
      if (stream.agent != write.agent) continue;
      for (const StreamOrder::Past& past : stream.past) {
        if (past.clock == write.clock) return past.view;
      }
    }
  }
  return outside();
}

bool GlobalOrder::knows(const ViewPtr& view, const Access& a) const {
  if (a.agent == kOutside) return a.clock <= outside_;
  if (view == nullptr) return false;
  if (covers(view->known, a)) return true;
  const LaunchOrder& launch = *chunk_of(a.agent)->launch;
  const std::uint32_t ended = launch.ended;
  return ended != 0 && covers(view->known, {launch.stream, ended, ~Mask{0}, 0});
}

// -- words ---------------------------------------------------------------------------------------------

// A release of scope .sys: of what the stream has done and comes behind.
void GlobalOrder::write_word(std::uint64_t word, std::uint32_t value) {
  Access access{kNobody, 0, 1, kWords};
  ViewPtr view;
  {
    const std::lock_guard<std::mutex> lock(starting_);
    StreamOrder& stream = stream_order();
    advance(stream, nullptr);
    access.agent = stream.agent;
    access.clock = stream.clock;
    view = stream.view;
    ++copying_;
  }
  {
    Shard& one = shard(word / kPage);
    const std::lock_guard<std::mutex> lock(one.using_it);
    Page& page = page_of(one, word / kPage);
    __atomic_store_n(reinterpret_cast<std::uint32_t*>(word), value, __ATOMIC_RELEASE);
    page.shadow.visit(word % kPage, word % kPage + 4,
                      [&](Cell& cell, std::uint64_t, std::uint32_t) { cell.write = access; });
    SyncPlace& place = page.places[word];
    place = {};
    place.bytes = 4;
    SyncValue written;
    written.value = value;
    written.views.fill(view);
    written.number = next_value();
    place.values.push_back(std::move(written));
  }
  note_written(word, word + 4);
  forget_values();
  const std::lock_guard<std::mutex> lock(starting_);
  --copying_;
}

// An acquire of scope .sys.
void GlobalOrder::see_word(std::uint64_t word, std::uint32_t value) {
  std::optional<ViewPtr> released;
  Access write;
  const std::uint64_t generation = reached().generation;
  {
    Shard& one = shard(word / kPage);
    const std::lock_guard<std::mutex> lock(one.using_it);
    Page& page = page_of(one, word / kPage);
    const auto place = page.places.find(word);
    if (place != page.places.end() && place->second.bytes == 4) {
      const auto& values = place->second.values;
      const auto same = std::find_if(values.rbegin(), values.rend(),
                                     [&](const SyncValue& one) { return one.value == value; });
      if (same != values.rend()) released = same->views[static_cast<std::size_t>(Scope::kSys)];
    }
    page.shadow.visit(word % kPage, word % kPage + 4,
                      [&](Cell& cell, std::uint64_t, std::uint32_t) { write = cell.write; });
  }
  const ViewPtr view = released ? *released : outside(write);
  learn({generation, view});
}

// -- copies --------------------------------------------------------------------------------------------

void GlobalOrder::copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes, bool words,
                       bool ended, bool races, const Allocations& memory) {
  Access access{kNobody, 0, 1, words ? kWords : 0};
  ViewPtr view;
  {
    const std::lock_guard<std::mutex> lock(starting_);
    StreamOrder& stream = stream_order();
    access.agent = stream.agent;
    access.clock = stream.clock + 1;
    view = stream.view;
    copying_ += ended ? -1 : 1;
    if (ended) advance(stream, nullptr);
    // A word that is seen before the copy has ended is a signal of what came before the copy.
    if (!ended && words) stream.past.push_back({access.clock, view});
    if (stream.past.size() > StreamOrder::kPast) stream.past.pop_front();
  }
  if (ended) {
    note_written(to, to + bytes);
    const std::lock_guard<std::mutex> lock(starting_);
    // Without streams it is over when its call returns, so that the host has waited for it.
    if (current == kDirect) tell_host(stream_order().view);
    clear_if_all_is_known();
    return;
  }
  forget_values();
  std::optional<CopyRace> race;
  if (from != 0) race = note_copy(access, view, from, from + bytes, false, false);
  if (const auto other = note_copy(access, view, to, to + bytes, true, from == 0); !race)
    race = other;
  if (race && races) throw PtxError(describe(*race, memory));
}

// Returns the first access of a range that the copy does not come behind.
std::optional<CopyRace> GlobalOrder::note_copy(const Access& access, const ViewPtr& view,
                                               std::uint64_t begin, std::uint64_t end, bool writes,
                                               bool fills) {
  std::optional<CopyRace> race;
  Access passed;  // the last one that nothing was wrong with
  const auto check = [&](const Access& other, bool other_writes, std::uint64_t at,
                         std::uint32_t bytes) {
    if (race || other.agent == kNobody || other == passed) return;
    // Words that are polled may be copied meanwhile, and filled: a rank that gives up raises all.
    const bool word = end - begin == 4 || (fills && bytes == 4) || !is_stream(other.agent);
    if (both_strong(access, other) && word) return;
    if (knows(view, other)) {
      passed = other;
    } else {
      race = CopyRace{writes, at, bytes, other, other_writes};
    }
  };
  for (std::uint64_t page = begin / kPage; page * kPage < end; ++page) {
    Shard& one = shard(page);
    const std::lock_guard<std::mutex> lock(one.using_it);
    Page& found = page_of(one, page);
    Shadow& shadow = found.shadow;
    const std::uint64_t first = std::max(begin, page * kPage) - page * kPage;
    const std::uint64_t last = std::min(end, (page + 1) * kPage) - page * kPage;
    shadow.visit(first, last, [&](Cell& cell, std::uint64_t at, std::uint32_t bytes) {
      check(cell.write, true, page * kPage + at, bytes);
      if (!writes) return note_reader(shadow, cell, access);
      for (const Access& read : cell.reads) check(read, false, page * kPage + at, bytes);
      if (cell.readers != 0) {
        const Readers& readers = shadow.readers(cell);
        for (std::size_t i = 0; i < readers.count; ++i) {
          check(readers.reads[i], false, page * kPage + at, bytes);
        }
      }
      cell.write = access;
      shadow.forget_reads(cell);
    });
    if (!writes) continue;
    shadow.unite(first, last);
    std::erase_if(found.places,
                  [&](const auto& place) { return place.first >= begin && place.first < end; });
  }
  return race;
}

std::string GlobalOrder::describe(const CopyRace& race, const Allocations& memory) const {
  std::string text = "race: this ";
  text += race.writes ? "write" : "read";
  text += " by a copy engine of " + std::to_string(race.bytes) + " bytes at " +
          place_of(memory, race.at) + " and ";
  if (race.other.agent == kOutside || is_stream(race.other.agent)) {
    text += race.other_writes ? "a write by another copy" : "a read by another copy";
  } else {
    const AgentInfo& info = this->info(race.other.agent);
    const Program& program = *chunk_of(race.other.agent)->launch->program;
    const Statement& statement = *program.ops[race.other.what & Access::kOp].statement;
    const int thread = info.warp * kLanes + std::countr_zero(race.other.lanes);
    text += race.other_writes ? "the write by thread " : "the read by thread ";
    text += std::to_string(thread) + " of a launch (" +
            program.module->describe(*program.kernel, statement) + ")";
  }
  return text + " have no order; missing is an event, or a wait for a signal, in front of the copy";
}

}  // namespace ptx_machine
