// Strong accesses: the values that a word has had, which of them a load returns, and what that orders.
#include <algorithm>

#include "races.h"

namespace ptx_machine {

StrongAccess::StrongAccess(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                           std::uint64_t bytes, Use use, bool alias)
    : c_(c), op_(op), use_(use), lane_(lane), bytes_(bytes) {
  if (!find_spot(c, op, lane, space, address, &spot_)) return;
  GlobalOrder& global = c.races->global_;
  Races::Request request;
  request.spot = spot_;
  request.bytes = bytes;
  request.use = use;
  request.order = op.order;
  request.alias = alias;
  if (spot_.block != nullptr) {
    places_ = &spot_.block->order->places;
    c.races->note(c, op, lane, request);
    return;
  }
  GlobalOrder::Shard& shard = global.shard(spot_.at / GlobalOrder::kPage);
  lock_ = std::unique_lock(shard.using_it);
  auto& page = shard.pages[spot_.at / GlobalOrder::kPage];
  if (page == nullptr) page = std::make_unique<GlobalOrder::Page>();
  const std::uint64_t at = spot_.at % GlobalOrder::kPage;
  page->shadow.visit(at, at + bytes,
                     [&](const Cell& cell, std::uint64_t, std::uint32_t) { write_ = cell.write; });
  request.is_locked = true;
  c.races->note(c, op, lane, request);
  places_ = &page->places;
}

// A value that no kernel of this machine stored is from outside. Its view is kept as it is now: what
// happens outside before the value changes is not known by it.
void StrongAccess::settle(std::uint64_t value) {
  if (places_ == nullptr) return;
  SyncPlace& place = (*places_)[spot_.at];
  if (place.bytes == bytes_ && !place.values.empty() && place.values.back().value == value) return;
  GlobalOrder& global = c_.races->global_;
  place = {};
  place.bytes = bytes_;
  SyncValue outside;
  outside.value = value;
  if (spot_.block == nullptr) outside.views.fill(global.outside(write_));
  outside.number = global.next_value();
  place.values.push_back(std::move(outside));
  global.forget_values();
}

SyncValue& StrongAccess::choose(SyncPlace& place) const {
  const std::size_t count = place.values.size();
  const bool whole = op_.whole || c_.launch.vectors == Vectors::kWhole;
  const bool newest = whole && op_.targets.size() > 1;
  if (count == 1 || !c_.launch.races || c_.random == nullptr || newest) return place.values.back();
  if ((*c_.random)() % 4 != 0) return place.values.back();
  const auto knows = [&](const Access& a) {
    return c_.races->knows(c_, lane_, a) ||
           c_.warp->order->has_fenced(a, ProxyFence::kSequential, lane_);
  };
  std::uint64_t least = c_.races->global_.settled();
  for (const SyncPlace::Seen& one : place.seen) {
    if (one.number > least && knows(one.load)) least = one.number;
  }
  std::size_t oldest = count - 1;
  while (oldest > 0 && place.values[oldest].number > least &&
         !knows(place.values[oldest].store())) {
    --oldest;
  }
  return place.values[oldest + (*c_.random)() % (count - oldest)];
}

void SyncValue::add_reader(Agent reader, std::uint32_t at, Mask lane) {
  for (Access& one : readers) {
    if (one.agent != reader) continue;
    if ((one.lanes & lane) != 0) return;
    if (one.clock != at) continue;
    one.lanes |= lane;
    return;
  }
  if (readers.size() < kMostReaders) readers.push_back({reader, at, lane, 0});
}

void StrongAccess::note_seen(SyncPlace& place, const SyncValue& value) const {
  if (place.values.size() == 1) return;
  const WarpOrder& warp = *c_.warp->order;
  const SyncPlace::Seen now{{warp.agent, warp.clock, Mask{1} << lane_, 0}, value.number};
  for (SyncPlace::Seen& one : place.seen) {
    if (one.load.agent != now.load.agent || one.load.lanes != now.load.lanes) continue;
    one = now;
    return;
  }
  if (place.seen.size() < SyncPlace::kMostLoads) {
    place.seen.push_back(now);
  } else {  // too many to remember: only the newest value is left
    place.values.erase(place.values.begin(), place.values.end() - 1);
    place.seen.clear();
  }
}

std::uint64_t StrongAccess::loaded(std::uint64_t value) {
  settle(value);
  if (places_ == nullptr) return value;
  SyncPlace& place = (*places_)[spot_.at];
  SyncValue& found = use_ == Use::kRead ? choose(place) : place.values.back();
  WarpOrder& warp = *c_.warp->order;
  if (found.agent != kNobody) found.add_reader(warp.agent, warp.clock, Mask{1} << lane_);
  const Scope needed = found.agent == kNobody ? Scope::kSys : warp.position.to(found.position);
  warp.observe(found.views, needed, op_.order, Mask{1} << lane_, c_.warp->alive);
  value = found.value;
  vector_ = found.vector;
  note_seen(place, found);
  return value;
}

void StrongAccess::stored(std::uint64_t value) {
  if (places_ == nullptr) return;
  WarpOrder& warp = *c_.warp->order;
  SyncPlace& place = (*places_)[spot_.at];
  Scoped views = warp.released(op_.order, lane_, c_.warp->alive);
  const bool atomic = use_ == Use::kAtomic;
  if (place.bytes != bytes_) place = {};
  place.bytes = bytes_;
  // A release reaches on: through the same thread's later stores there, and through atomics.
  if (!place.values.empty()) {
    const SyncValue& before = place.values.back();
    if (atomic || (before.agent == warp.agent && before.lane == lane_)) {
      const Scope between =
          before.agent == kNobody ? Scope::kCta : warp.position.to(before.position);
      for (std::size_t s = 0; s < views.size(); ++s) {
        views[s] = join(views[s], before.views[std::max(s, static_cast<std::size_t>(between))]);
      }
    }
  }
  const std::uint64_t number = c_.races->global_.next_value();
  place.values.push_back({value,
                          std::move(views),
                          warp.position,
                          warp.agent,
                          lane_,
                          warp.clock,
                          number,
                          c_.vector,
                          {}});
  if (place.values.size() > SyncPlace::kKept) place.values.pop_front();
  std::erase_if(place.seen, [&](const SyncPlace::Seen& one) {
    return one.number <= place.values.front().number;
  });
  if (op_.order.releases) ++warp.clock;
}

}  // namespace ptx_machine
