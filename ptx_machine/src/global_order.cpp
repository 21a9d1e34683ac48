// Launches and global memory: what they share of races.h.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "races.h"

namespace ptx_machine {

GlobalOrder::GlobalOrder()
    : chunks_(static_cast<std::atomic<AgentChunk*>*>(
          std::calloc(kChunks, sizeof(std::atomic<AgentChunk*>)))) {
  if (chunks_ == nullptr) throw std::bad_alloc();
}

GlobalOrder::~GlobalOrder() { std::free(chunks_); }

std::shared_ptr<LaunchOrder> GlobalOrder::begin(const Program& program) {
  const std::lock_guard<std::mutex> lock(starting_);
  auto launch = std::make_shared<LaunchOrder>();
  launch->program = &program;
  launch->number = ++launches_;
  launched_.push_back(launch);
  ++running_;
  forget_values();
  return launch;
}

// Whatever starts later comes behind all that has ended: when nothing runs, nothing is left to know.
void GlobalOrder::end(LaunchOrder& launch, const ViewPtr& known) {
  const std::lock_guard<std::mutex> lock(starting_);
  launch.ended = ++ended_;
  known_to_ended_ = join(known_to_ended_, known);
  if (--running_ > 0) return;
  for (Shard& shard : shards_) {
    const std::lock_guard<std::mutex> using_it(shard.using_it);
    shard.pages.clear();
  }
  for (std::uint32_t i = 0; i < next_chunk_; ++i) chunks_[i] = nullptr;
  next_chunk_ = 1;
  launched_.clear();
  known_to_ended_ = nullptr;
}

Agent GlobalOrder::new_agent(LaunchOrder& launch, const AgentInfo& info) {
  if (launch.next == launch.last) {
    const std::uint32_t number = next_chunk_++;
    if (number >= kChunks) throw PtxError("too many warps at a time to find races among them");
    launch.chunks.emplace_back();
    launch.chunks.back().launch = &launch;
    launch.next = number * AgentChunk::kAgents;
    launch.last = launch.next + AgentChunk::kAgents;
    chunks_[number] = &launch.chunks.back();
  }
  launch.chunks.back().infos[launch.next % AgentChunk::kAgents] = info;
  return launch.next++;
}

const AgentChunk* GlobalOrder::chunk_of(Agent agent) const {
  return chunks_[agent / AgentChunk::kAgents].load();
}

void GlobalOrder::forget(std::uint64_t begin, std::uint64_t end) {
  if (running_ == 0) return;
  for (std::uint64_t page = begin / kPage; page * kPage < end; ++page) {
    Shard& one = shard(page);
    const std::lock_guard<std::mutex> lock(one.using_it);
    const auto found = one.pages.find(page);
    if (found == one.pages.end()) continue;
    const std::uint64_t first = std::max(begin, page * kPage) - page * kPage;
    const std::uint64_t last = std::min(end, (page + 1) * kPage) - page * kPage;
    Shadow& shadow = found->second->shadow;
    shadow.visit(first, last, [&](Cell& cell, std::uint64_t, std::uint32_t) {
      shadow.forget_reads(cell);
      cell.write = {};
    });
    std::erase_if(found->second->places,
                  [&](const auto& place) { return place.first >= begin && place.first < end; });
  }
}

void GlobalOrder::expect_writes(std::uint64_t begin, std::uint64_t end) {
  const std::lock_guard<std::mutex> lock(writing_);
  fresh_[begin] = {end, std::vector<bool>(end - begin)};
  has_fresh_ = true;
}

// The first that ends behind `begin`.
GlobalOrder::FreshMemory::iterator GlobalOrder::fresh_at(std::uint64_t begin) {
  auto next = fresh_.upper_bound(begin);
  if (next != fresh_.begin() && std::prev(next)->second.end > begin) --next;
  return next;
}

void GlobalOrder::forget_writes(std::uint64_t begin, std::uint64_t end) {
  if (!has_fresh_) return;
  const std::lock_guard<std::mutex> lock(writing_);
  auto next = fresh_at(begin);
  while (next != fresh_.end() && next->first < end) {
    const bool same = next->first == begin && next->second.end == end;
    next = same ? std::next(next) : fresh_.erase(next);
  }
  has_fresh_ = !fresh_.empty();
}

bool GlobalOrder::was_written(std::uint64_t begin, std::uint64_t end) {
  if (!has_fresh_) return true;
  const std::lock_guard<std::mutex> lock(writing_);
  const auto found = fresh_at(begin);  // an access lies in one allocation
  if (found == fresh_.end() || found->first > begin) return true;
  const auto first = found->second.written.begin() - static_cast<std::ptrdiff_t>(found->first);
  return std::all_of(first + static_cast<std::ptrdiff_t>(begin),
                     first + static_cast<std::ptrdiff_t>(end), [](bool b) { return b; });
}

void GlobalOrder::note_written(std::uint64_t begin, std::uint64_t end) {
  if (!has_fresh_) return;
  const std::lock_guard<std::mutex> lock(writing_);
  for (auto next = fresh_at(begin); next != fresh_.end() && next->first < end; ++next) {
    const std::uint64_t from = std::max(begin, next->first), to = std::min(end, next->second.end);
    for (std::uint64_t at = from; at < to; ++at) next->second.written[at - next->first] = true;
  }
}

void GlobalOrder::wrote(std::uint64_t begin, std::uint64_t end, bool words, bool finished) {
  if (finished) note_written(begin, end);
  // What was marked as under way is marked again, whatever has ended since.
  if (running_ == 0 && !finished) return;
  forget(begin, end);
  // Nobody knows of a copy that is under way.
  const std::uint32_t clock = finished ? ++outside_ : ~0u;
  const std::uint32_t what = words ? Access::kStrong : 0;
  for (std::uint64_t page = begin / kPage; page * kPage < end; ++page) {
    Shard& one = shard(page);
    const std::lock_guard<std::mutex> lock(one.using_it);
    if (running_ == 0 && !one.pages.contains(page)) continue;
    auto& found = one.pages[page];
    if (found == nullptr) found = std::make_unique<Page>();
    const std::uint64_t first = std::max(begin, page * kPage) - page * kPage;
    const std::uint64_t last = std::min(end, (page + 1) * kPage) - page * kPage;
    found->shadow.visit(first, last, [&](Cell& cell, std::uint64_t, std::uint32_t) {
      cell.write = {kOutside, clock, 1, what};
    });
    found->shadow.unite(first, last);
  }
}

ViewPtr GlobalOrder::outside() {
  const std::lock_guard<std::mutex> lock(starting_);
  auto view = std::make_shared<View>();
  const std::uint32_t clock = outside_;
  view->known = {{kOutside, clock, clock, 0}};
  view->ended = ended_;
  return join(view, known_to_ended_);
}

ViewPtr GlobalOrder::at_start() {
  auto view = std::make_shared<View>(*outside());
  view->fenced.fill(view->known);
  return view;
}

}  // namespace ptx_machine
