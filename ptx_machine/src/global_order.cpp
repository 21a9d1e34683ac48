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
  launch->stream = stream_order().agent;
  launched_.push_back(launch);
  ++running_;
  forget_values();
  return launch;
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
  if (is_clear_) return;
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

GlobalOrder::Page& GlobalOrder::page_of(Shard& shard, std::uint64_t page) {
  std::unique_ptr<Page>& found = shard.pages[page];
  if (found == nullptr) found = std::make_unique<Page>();
  return *found;
}

void GlobalOrder::put(std::uint64_t begin, std::uint64_t end, bool ended) {
  is_clear_ = false;
  if (ended) note_written(begin, end);
  forget(begin, end);
  // Nobody knows of a put that is under way.
  const std::uint32_t clock = ended ? ++outside_ : ~0u;
  for (std::uint64_t page = begin / kPage; page * kPage < end; ++page) {
    Shard& one = shard(page);
    const std::lock_guard<std::mutex> lock(one.using_it);
    Shadow& shadow = page_of(one, page).shadow;
    const std::uint64_t first = std::max(begin, page * kPage) - page * kPage;
    const std::uint64_t last = std::min(end, (page + 1) * kPage) - page * kPage;
    shadow.visit(first, last, [&](Cell& cell, std::uint64_t, std::uint32_t) {
      cell.write = {kOutside, clock, 1, 0};
    });
    shadow.unite(first, last);
  }
}

}  // namespace ptx_machine
