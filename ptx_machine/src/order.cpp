#include "order.h"

#include <algorithm>

namespace ptx_machine {
namespace {

Known joined(const Known& a, const Known& b) {
  Known out{a.agent, std::max(a.base, b.base), std::max(a.high, b.high), 0};
  if (a.high > out.base) out.lanes |= a.lanes;
  if (b.high > out.base) out.lanes |= b.lanes;
  if (out.lanes == 0 || out.high <= out.base) out = {a.agent, out.base, out.base, 0};
  return out;
}

Clocks::const_iterator position_of(const Clocks& clocks, Agent agent) {
  return std::lower_bound(clocks.begin(), clocks.end(), agent,
                          [](const Known& k, Agent wanted) { return k.agent < wanted; });
}

const Known* find(const Clocks& clocks, Agent agent) {
  const auto at = position_of(clocks, agent);
  return at != clocks.end() && at->agent == agent ? &*at : nullptr;
}

bool contains(const Clocks& a, const Clocks& b) {
  if (b.size() > a.size()) return false;
  auto at = a.begin();
  for (const Known& k : b) {
    while (at != a.end() && at->agent < k.agent) ++at;
    if (at == a.end() || at->agent != k.agent || joined(*at, k) != *at) return false;
  }
  return true;
}

Clocks joined(const Clocks& a, const Clocks& b) {
  Clocks out;
  out.reserve(a.size() + b.size());
  auto i = a.begin(), j = b.begin();
  while (i != a.end() && j != b.end()) {
    if (i->agent == j->agent) {
      out.push_back(joined(*i++, *j++));
    } else {
      out.push_back(i->agent < j->agent ? *i++ : *j++);
    }
  }
  out.insert(out.end(), i, a.end());
  out.insert(out.end(), j, b.end());
  return out;
}

void add(Clocks& clocks, const Known& known) {
  if (known.agent == kNobody || (known.base == 0 && known.high == 0)) return;
  const auto at = clocks.begin() + (position_of(clocks, known.agent) - clocks.begin());
  if (at != clocks.end() && at->agent == known.agent) {
    *at = joined(*at, known);
  } else {
    clocks.insert(at, known);
  }
}

// Adds what lanes have waited for of their own copies.
void add(Clocks& clocks, const Groups& groups, Mask lanes) {
  if (groups.agent == kNobody) return;
  std::uint32_t least = ~0u, most = 0;
  each(lanes, [&](int l) {
    least = std::min(least, groups.done[l]);
    most = std::max(most, groups.done[l]);
  });
  Known known{groups.agent, 0, most, 0};
  each(lanes, [&](int l) {
    if (groups.done[l] == most) known.lanes |= Mask{1} << l;
  });
  add(clocks, known);
  if (least == most) return;
  each(lanes & ~known.lanes, [&](int l) {
    if (groups.done[l] > 0) add(clocks, {groups.agent, 0, groups.done[l], Mask{1} << l});
  });
}

bool knows(const Groups& groups, const Access& a, int lane) {
  return groups.agent == a.agent && a.lanes == Mask{1} << lane && a.clock <= groups.done[lane];
}

}  // namespace

bool covers(const Clocks& clocks, const Access& a) {
  const Known* known = find(clocks, a.agent);
  return known != nullptr && known->covers(a);
}

ViewPtr join(const ViewPtr& a, const ViewPtr& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  bool all = contains(a->known, b->known);
  for (std::size_t i = 0; i < kFences; ++i) all = all && contains(a->fenced[i], b->fenced[i]);
  if (all) return a;
  auto out = std::make_shared<View>();
  out->known = joined(a->known, b->known);
  for (std::size_t i = 0; i < kFences; ++i) out->fenced[i] = joined(a->fenced[i], b->fenced[i]);
  return out;
}

ViewPtr join(const ViewPtr& a, const Known& known) {
  if (known.agent == kNobody) return a;
  auto out = a == nullptr ? std::make_shared<View>() : std::make_shared<View>(*a);
  add(out->known, known);
  return out;
}

ViewPtr Sequential::meet(const View& before) {
  constexpr auto kAt = static_cast<std::size_t>(ProxyFence::kSequential);
  auto own = std::make_shared<View>();
  own->fenced[kAt] = joined(before.known, before.fenced[kAt]);
  const std::lock_guard<std::mutex> lock(meeting_);
  return met_ = join(met_, own);
}

void Sequential::clear() {
  const std::lock_guard<std::mutex> lock(meeting_);
  met_ = nullptr;
}

ViewPtr WarpOrder::view(Mask lanes, Mask alive) const {
  ViewPtr joint = common;
  each(lanes & has_extra, [&](int l) { joint = join(joint, extra[l]); });
  auto out = std::make_shared<View>(*joint);
  const bool all = (alive & ~lanes) == 0;
  add(out->known, all ? Known{agent, clock, clock, 0} : Known{agent, synced, clock, lanes});
  add(out->known, copies, lanes);
  add(out->known, bulk_reads, lanes);
  add(out->known, bulk_writes, lanes);
  return out;
}

void WarpOrder::acquire(const ViewPtr& view, Mask lanes, Mask alive) {
  if (view == nullptr) return;
  if ((alive & ~lanes) == 0) {
    common = join(common, view);
    return;
  }
  each(lanes, [&](int l) { extra[l] = join(extra[l], view); });
  has_extra |= lanes;
}

void WarpOrder::acquire(const Known& known, Mask lanes, Mask alive) {
  if (known.agent != kNobody) acquire(join(ViewPtr{}, known), lanes, alive);
}

void WarpOrder::meet(Mask lanes, Mask alive) {
  if ((alive & ~lanes) != 0) {
    const ViewPtr joint = view(lanes, alive);
    each(lanes, [&](int l) { extra[l] = joint; });
    has_extra |= lanes;
  } else {
    const bool has_groups = copies.agent != kNobody || bulk_reads.agent != kNobody;
    if (has_extra != 0 || has_groups) {
      acquire(view(lanes, alive), lanes, alive);
      for (ViewPtr& of_lane : extra) of_lane = nullptr;
      has_extra = 0;
    }
    synced = clock;
  }
  ++clock;
}

void WarpOrder::fence(Scope scope, Mask lanes, Mask alive, Sequential* sequential) {
  const auto widest = static_cast<std::size_t>(scope);
  if (seen != nullptr) {
    each(lanes, [&](int l) {
      for (std::size_t s = 0; s <= widest; ++s) {
        acquire((*seen)[l][s], Mask{1} << l, alive);
        (*seen)[l][s] = nullptr;
      }
    });
  }
  if (sequential != nullptr) acquire(sequential->meet(*view(lanes, alive)), lanes, alive);
  if (fences == nullptr) fences = std::make_unique<std::array<std::array<Fence, 4>, kLanes>>();
  each(lanes, [&](int l) {
    (*fences)[l][widest] = {
        common, extra[l], clock, synced, copies.done[l], bulk_reads.done[l], bulk_writes.done[l]};
  });
  ++clock;
}

bool WarpOrder::has_fenced_for_system(const Access& a) const {
  if (fences == nullptr) return false;
  bool all = true;
  each(a.lanes, [&](int l) {
    const Fence& fence = (*fences)[l][static_cast<std::size_t>(Scope::kSys)];
    all = all && fence.common != nullptr && fence.clock >= a.clock;
  });
  return all;
}

ViewPtr WarpOrder::view(const Fence& fence, int lane) const {
  auto out = std::make_shared<View>(*join(fence.common, fence.extra));
  const Mask own = Mask{1} << lane;
  add(out->known, {agent, fence.synced, fence.clock, own});
  add(out->known, {copies.agent, 0, fence.copies, own});
  add(out->known, {bulk_reads.agent, 0, fence.bulk_reads, own});
  add(out->known, {bulk_writes.agent, 0, fence.bulk_writes, own});
  return out;
}

void WarpOrder::fence_proxy(const std::vector<ProxyFence>& fences, Mask lanes, Mask alive) {
  const auto with = [&](const ViewPtr& before, const Known& own, Mask of) {
    auto out = std::make_shared<View>(*before);
    Clocks all = out->known;
    add(all, own);
    add(all, copies, of);
    add(all, bulk_reads, of);
    add(all, bulk_writes, of);
    for (const ProxyFence fence : fences) {
      Clocks& fenced = out->fenced[static_cast<std::size_t>(fence)];
      fenced = joined(fenced, all);
    }
    return out;
  };
  const bool all = (alive & ~lanes) == 0;
  if (all) {
    common = with(common, {agent, clock, clock, 0}, lanes);
    each(has_extra, [&](int l) { extra[l] = with(extra[l], {}, Mask{1} << l); });
  } else {
    each(lanes, [&](int l) {
      const Mask own = Mask{1} << l;
      extra[l] = with(join(common, extra[l]), {agent, synced, clock, own}, own);
    });
    has_extra |= lanes;
  }
  ++clock;
}

void WarpOrder::acquire_maps(Mask lanes, Mask alive) {
  const auto with = [](const ViewPtr& before) {
    auto out = std::make_shared<View>(*before);
    Clocks& known = out->fenced[static_cast<std::size_t>(ProxyFence::kMap)];
    known = joined(known, out->fenced[static_cast<std::size_t>(ProxyFence::kMapReleased)]);
    return out;
  };
  const bool all = (alive & ~lanes) == 0;
  if (all) common = with(common);
  each(all ? has_extra : lanes, [&](int l) { extra[l] = with(join(common, extra[l])); });
  if (!all) has_extra |= lanes;
}

Scoped WarpOrder::released(const MemoryOrder& order, int lane, Mask alive) const {
  Scoped views;
  const auto widest = static_cast<std::size_t>(order.scope);
  if (order.releases) {
    const ViewPtr own = view(Mask{1} << lane, alive);
    for (std::size_t s = 0; s <= widest; ++s) views[s] = own;
  } else if (fences != nullptr) {
    for (std::size_t s = 0; s <= widest; ++s) {  // the last fence that reaches so far
      const Fence* last = nullptr;
      for (std::size_t f = s; f < views.size(); ++f) {
        const Fence& fence = (*fences)[lane][f];
        if (fence.common != nullptr && (last == nullptr || fence.clock > last->clock))
          last = &fence;
      }
      if (last != nullptr) views[s] = view(*last, lane);
    }
  }
  return views;
}

void WarpOrder::observe(const Scoped& views, Scope needed, const MemoryOrder& order, Mask lanes,
                        Mask alive) {
  if (order.scope < needed) return;
  const auto s = static_cast<std::size_t>(needed);
  if (views[s] == nullptr) return;
  if (order.acquires) {
    acquire(views[s], lanes, alive);
    return;
  }
  if (seen == nullptr) seen = std::make_unique<std::array<Scoped, kLanes>>();
  each(lanes, [&](int l) { (*seen)[l][s] = join((*seen)[l][s], views[s]); });
}

bool WarpOrder::finds(const Access& a, const Clocks& clocks, Recent& in) const {
  const Known* known = find(clocks, a.agent);
  if (known == nullptr || !known->covers(a)) return false;
  in.keep(*known);
  return true;
}

void WarpOrder::remember_lane(int lane) {
  if (recent_lane == lane) return;
  recent_lane = lane;
  recent_extra = {};
  recent_extra_fenced = {};
}

bool WarpOrder::knows(const Access& a, int lane) {
  if (a.agent == agent && (a.lanes == Mask{1} << lane || a.clock <= synced)) return true;
  if (recent.covers(a)) return true;
  const bool more = (has_extra >> lane & 1) != 0;
  if (more) {
    remember_lane(lane);
    if (recent_extra.covers(a)) return true;
  }
  if (finds(a, common->known, recent)) return true;
  if (more && finds(a, extra[lane]->known, recent_extra)) return true;
  return ptx_machine::knows(copies, a, lane) || ptx_machine::knows(bulk_reads, a, lane) ||
         ptx_machine::knows(bulk_writes, a, lane);
}

bool WarpOrder::has_fenced(const Access& a, ProxyFence fence, int lane) {
  const auto f = static_cast<std::size_t>(fence);
  const bool more = (has_extra >> lane & 1) != 0;
  if (f >= kOftenAsked) {
    return covers(common->fenced[f], a) || (more && covers(extra[lane]->fenced[f], a));
  }
  if (recent_fenced[f].covers(a)) return true;
  if (more) {
    remember_lane(lane);
    if (recent_extra_fenced[f].covers(a)) return true;
  }
  return finds(a, common->fenced[f], recent_fenced[f]) ||
         (more && finds(a, extra[lane]->fenced[f], recent_extra_fenced[f]));
}

}  // namespace ptx_machine
