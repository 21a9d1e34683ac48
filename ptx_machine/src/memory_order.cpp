// What statements do to the order of memory: fences, barriers, waits (races.h).
#include "races.h"

namespace ptx_machine {
namespace {

Mask bit(int lane) { return Mask{1} << lane; }

Groups& with_agent(Context& c, Groups& groups, AgentInfo::Kind kind) {
  if (groups.agent == kNobody) groups.agent = c.races->new_agent(*c.warp, kind);
  return groups;
}

constexpr int kWarpgroup = 4;  // warps

// What performs the products of a warp's warpgroup.
Agent products_of(Context& c) {
  Block& block = *c.warp->block;
  std::vector<Agent>& products = block.order->products;
  products.resize((block.warps.size() + kWarpgroup - 1) / kWarpgroup, kNobody);
  const int number = c.warp->index / kWarpgroup;
  if (products[number] == kNobody) {
    const Warp& first = block.warps[number * kWarpgroup];
    products[number] = c.races->new_agent(first, AgentInfo::Kind::kProducts);
  }
  return products[number];
}

}  // namespace

// -- loads and stores ----------------------------------------------------------------------------------

bool note_read(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
               std::uint64_t bytes, bool constant) {
  Races::Request request;
  if (!find_spot(c, op, lane, space, address, &request.spot)) return false;
  request.bytes = bytes;
  request.constant = constant && request.spot.block == nullptr;
  return c.races->note(c, op, lane, request);
}

void unwrite(Context& c, const Op& op, int target, Mask lanes) {
  const Value& v = op.targets[target];
  if (v.kind != Value::Kind::kRegister) return;
  c.warp->written[v.index] &= ~lanes;
  c.warp->order->loaded_nothing[v.index] = &op;
}

void note_write(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                std::uint64_t bytes, bool same) {
  Races::Request request;
  if (!find_spot(c, op, lane, space, address, &request.spot)) return;
  request.bytes = bytes;
  request.use = Use::kWrite;
  request.same = same;
  c.races->note(c, op, lane, request);
}

void note_member(Context& c, const Op& op, int lane, const std::uint8_t* member,
                 std::uint64_t bytes, Use use) {
  Races::Request request;
  request.spot = {nullptr, reinterpret_cast<std::uint64_t>(member)};
  request.bytes = bytes;
  request.use = use;
  request.order = op.order;
  request.alias = true;
  c.races->note(c, op, lane, request);
}

// -- cp.async: in the generic proxy, for its thread alone until a wait ---------------------------------

void note_copy(Context& c, const Op& op, int lane, std::uint64_t target, std::uint64_t bytes,
               std::uint64_t source, std::uint64_t read) {
  Groups& groups = with_agent(c, c.warp->order->copies, AgentInfo::Kind::kCopies);
  Races::Request request;
  request.completion = {groups.agent, groups.of(lane)};
  if (read != 0) {
    request.spot = {nullptr, source};
    request.bytes = read;
    c.races->note(c, op, lane, request);
  }
  request.spot = {c.warp->block, target & kOffsetMask};
  request.bytes = bytes;
  request.use = Use::kWrite;
  c.races->note(c, op, lane, request);
}

void commit_copies(Context& c, int lane) { ++c.warp->order->copies.committed[lane]; }

void await_copies_of(Context& c, int lane, std::uint64_t left, bool all) {
  Groups& groups = c.warp->order->copies;
  if (all) ++groups.committed[lane];  // what is not committed is waited for too
  const std::uint32_t committed = groups.committed[lane];
  if (committed > left) {
    groups.done[lane] = std::max(groups.done[lane], committed - static_cast<std::uint32_t>(left));
  }
}

// -- barriers ------------------------------------------------------------------------------------------

void arrive_at_barrier(Context& c, std::size_t number, Mask mask) {
  WarpOrder& warp = *c.warp->order;
  ViewPtr& gathered = c.warp->block->order->gathered[number];
  gathered = join(gathered, warp.view(mask, c.warp->alive));
  ++warp.clock;
}

void complete_barrier(Block& block, std::size_t number) {
  BlockOrder& order = *block.order;
  order.done[number] = std::move(order.gathered[number]);
  order.gathered[number] = nullptr;
}

void leave_barrier(Context& c, std::size_t number, Mask mask) {
  WarpOrder& warp = *c.warp->order;
  warp.acquire(c.warp->block->order->done[number], mask, c.warp->alive);
  for (ViewPtr& of_lane : warp.extra) of_lane = nullptr;
  warp.has_extra = 0;
  warp.synced = warp.clock - 1;  // it has waited since it arrived
}

void meet_in_warp(Context& c, Mask mask) { c.warp->order->meet(mask, c.warp->alive); }

// barrier.cluster.arrive: .relaxed releases only what a fence before it has.
void arrive_in_order(Context& c, const Op& op, Cluster& cluster, Mask mask) {
  WarpOrder& warp = *c.warp->order;
  ViewPtr& gathered = cluster.order->gathered;
  if (op.order.releases) {
    gathered = join(gathered, warp.view(mask, c.warp->alive));
    ++warp.clock;
    return;
  }
  MemoryOrder relaxed = op.order;
  relaxed.scope = Scope::kCluster;
  each(mask, [&](int l) {
    const auto s = static_cast<std::size_t>(Scope::kCluster);
    gathered = join(gathered, warp.released(relaxed, l, c.warp->alive)[s]);
  });
}

void complete_in_order(Cluster& cluster) {
  cluster.order->done = std::move(cluster.order->gathered);
  cluster.order->gathered = nullptr;
}

void wait_in_order(Context& c, const Cluster& cluster, Mask mask) {
  c.warp->order->acquire(cluster.order->done, mask, c.warp->alive);
}

// -- mbarriers -----------------------------------------------------------------------------------------
//
// Scopes are not looked at: nvcc and CUTLASS use the default, .cta, for arrivals from other blocks too.

void begin_mbarrier(Context& c, const Op& op, int lane, const Spot& spot) {
  Races::Request request;
  request.spot = spot;
  request.bytes = 8;
  request.use = Use::kWrite;
  c.races->note(c, op, lane, request);
  MbarrierOrder& order = spot.block->order->mbarriers[spot.at];
  order = {};
  order.agent = c.races->new_agent(*spot.block);
}

void touch_mbarrier(Context& c, const Op& op, int lane, const Spot& spot, Use use) {
  Races::Request request;
  request.spot = spot;
  request.bytes = 8;
  request.use = use;
  request.order.strong = true;
  c.races->note(c, op, lane, request);
}

void arrive_at_mbarrier(Context& c, const Op& op, int lane, const Spot& spot) {
  touch_mbarrier(c, op, lane, spot, Use::kAtomic);
  WarpOrder& warp = *c.warp->order;
  ViewPtr& gathered = spot.block->order->mbarriers[spot.at].gathered;
  gathered = join(gathered, warp.released(op.order, lane, c.warp->alive)[0]);
  if (op.order.releases) ++warp.clock;
}

void arrive_with_copies(const Warp& warp, int lane, std::uint32_t group, const Spot& spot) {
  ViewPtr& gathered = spot.block->order->mbarriers[spot.at].gathered;
  gathered = join(gathered, Known{warp.order->copies.agent, 0, group, bit(lane)});
}

void complete_phase(const Spot& spot) {
  MbarrierOrder& order = spot.block->order->mbarriers[spot.at];
  ++order.phase;
  order.done =
      join(join(order.done, order.gathered), Known{order.agent, order.phase, order.phase, 0});
  order.gathered = nullptr;
}

void pass_mbarrier(Context& c, const Op& op, Mask lanes, const Spot& spot) {
  Scoped views;
  views.fill(spot.block->order->mbarriers[spot.at].done);
  c.warp->order->observe(views, Scope::kCta, op.order, lanes, c.warp->alive);
}

void count_copies(const Spot& mbarrier, int by) {
  std::uint32_t& copies = mbarrier.block->order->mbarriers[mbarrier.at].copies;
  if (by > 0 || copies > 0) copies += static_cast<std::uint32_t>(by);  // none: initialised since
}

std::uint32_t copies_under_way(const Spot& mbarrier) {
  return mbarrier.block->order->mbarriers[mbarrier.at].copies;
}

// -- the async proxy -----------------------------------------------------------------------------------

Completion completion_of(const Spot& mbarrier) {
  const MbarrierOrder& order = mbarrier.block->order->mbarriers[mbarrier.at];
  return {order.agent, order.phase + 1};
}

Completion bulk_reads(Context& c, int lane) {
  Groups& groups = with_agent(c, c.warp->order->bulk_reads, AgentInfo::Kind::kBulkReads);
  return {groups.agent, static_cast<std::uint32_t>(c.warp->bulk_groups[lane]) + 1};
}

Completion bulk_writes(Context& c, int lane) {
  Groups& groups = with_agent(c, c.warp->order->bulk_writes, AgentInfo::Kind::kBulkWrites);
  return {groups.agent, static_cast<std::uint32_t>(c.warp->bulk_groups[lane]) + 1};
}

void await_bulk(Context& c, int lane, std::uint64_t before, bool only_reads) {
  WarpOrder& warp = *c.warp->order;
  const auto done = static_cast<std::uint32_t>(before);
  warp.bulk_reads.done[lane] = std::max(warp.bulk_reads.done[lane], done);
  if (!only_reads) warp.bulk_writes.done[lane] = std::max(warp.bulk_writes.done[lane], done);
}

void note_async(Context& c, const Op& op, int lane, const Spot& spot, std::uint64_t bytes, Use use,
                const Completion& completion) {
  note_async(c, op, lane, spot.block, {&spot.at, 1}, bytes, use, completion);
}

void note_async(Context& c, const Op& op, int lane, Block* block,
                std::span<const std::uint64_t> places, std::uint64_t bytes, Use use,
                const Completion& completion, bool alias, std::uint32_t swizzle) {
  Races::Request request;
  request.swizzle = swizzle;
  request.spot = {block, 0};
  request.bytes = bytes;
  request.use = use;
  request.async = true;
  request.alias = alias;
  request.completion = completion;
  // Reductions are atomic, element by element: of global memory in the scope .gpu (PTX ISA,
  // cp.reduce.async.bulk), where the device does not do more.
  request.order.strong = use == Use::kAtomic;
  if (block == nullptr && !c.launch.peer_reductions) request.order.scope = Scope::kGpu;
  c.races->note(c, op, lane, request, places);
}

void note_stored(Context& c, const Op& op, int lane, std::span<const std::uint64_t> places,
                 std::uint64_t bytes, Use use, const Completion& completion) {
  if (places.empty()) return;
  const std::size_t members = places_of(*c.memory, places[0]).size();
  for (std::size_t member = 0; member < members; ++member) {
    std::vector<std::uint64_t> of_member;
    for (const std::uint64_t place : places) {
      const std::vector<std::uint64_t> all = places_of(*c.memory, place);
      if (member < all.size()) of_member.push_back(all[member]);
    }
    const bool alias = of_member[0] != places[0];
    note_async(c, op, lane, nullptr, of_member, bytes, use, completion, alias);
  }
}

void note_map(Context& c, const Op& op, int lane, std::uint64_t address, std::uint64_t bytes) {
  Races::Request request;
  if (!find_spot(c, op, lane, Space::kGeneric, address, &request.spot)) return;
  request.bytes = bytes;
  request.is_map = true;
  c.races->note(c, op, lane, request);
}

void note_sent(Context& c, const Op& op, int lane, const Spot& spot, std::uint64_t bytes, Use use,
               const Completion& completion) {
  Races::Request request;
  request.spot = spot;
  request.bytes = bytes;
  request.use = use;
  request.completion = completion;
  request.order.strong = use == Use::kAtomic;
  c.races->note(c, op, lane, request);
}

void note_product(Context& c, const Op& op, std::span<const std::uint64_t> chunks,
                  std::uint64_t number, std::uint32_t swizzle) {
  Races::Request request;
  request.is_matrix = true;
  request.swizzle = swizzle;
  request.spot = {c.warp->block, 0};
  request.bytes = 16;
  request.async = request.any_lane = true;
  request.completion = {products_of(c), static_cast<std::uint32_t>(number)};
  request.completion.lanes = Mask{1} << c.warp->index % kWarpgroup;
  c.races->note(c, op, 0, request, chunks);
}

void await_products(Context& c, std::uint64_t number) {
  const auto clock = static_cast<std::uint32_t>(number);
  c.warp->order->acquire(Known{products_of(c), clock, clock, 0}, c.warp->alive, c.warp->alive);
}

// -- puts ----------------------------------------------------------------------------------------------

void note_put(Context& c, const Op& op, int lane, std::uint64_t from, std::uint64_t to,
              std::uint64_t bytes) {
  WarpOrder& warp = *c.warp->order;
  if (warp.puts == kNobody) warp.puts = c.races->new_agent(*c.warp, AgentInfo::Kind::kPuts);
  Races::Request request;
  request.bytes = bytes;
  request.completion = {warp.puts, 1};  // which nothing in this launch announces
  request.spot = {nullptr, from};
  request.by_nic = true;
  if (c.races->note(c, op, lane, request)) c.fail(op, lane, "a put of what was never written");
  if (to == 0) return;
  request.spot = {nullptr, to};
  request.use = Use::kWrite;
  request.by_nic = false;
  c.races->note(c, op, lane, request);
}

// -- fences --------------------------------------------------------------------------------------------

namespace {

Outcome fence(Context& c, const Op& op, Mask mask) {
  Sequential* all = op.number != 0 && c.launch.races ? &c.races->sequential() : nullptr;
  c.warp->order->fence(op.order.scope, mask, c.warp->alive, all);
  return Outcome::kYield;
}

// op.number: bits of ProxyFence.
Outcome fence_proxy(Context& c, const Op& op, Mask mask) {
  std::vector<ProxyFence> fences;
  for (std::size_t i = 0; i < kFences; ++i) {
    if ((op.number >> i & 1) != 0) fences.push_back(static_cast<ProxyFence>(i));
  }
  c.warp->order->fence_proxy(fences, mask, c.warp->alive);
  return Outcome::kYield;
}

// fence.proxy.tensormap::generic, which is a fence of its scope too: .acquire (op.flag) or .release.
Outcome fence_maps(Context& c, const Op& op, Mask mask) {
  WarpOrder& warp = *c.warp->order;
  if (!op.flag) warp.fence_proxy({ProxyFence::kMapReleased}, mask, c.warp->alive);
  warp.fence(op.order.scope, mask, c.warp->alive);
  if (op.flag) warp.acquire_maps(mask, c.warp->alive);
  return Outcome::kYield;
}

bool decode_proxy(const Statement& s, Op& op) {
  const auto bit = [](ProxyFence fence) { return 1 << static_cast<int>(fence); };
  op.handler = fence_proxy;
  if (has(s, "alias")) {
    op.number = bit(ProxyFence::kAlias);
    return has_no_other(s, {"proxy", "alias"});
  }
  if (has(s, "tensormap::generic")) {
    op.handler = fence_maps;
    op.flag = has(s, "acquire");
    op.order.scope = has(s, "cta")       ? Scope::kCta
                     : has(s, "cluster") ? Scope::kCluster
                     : has(s, "gpu")     ? Scope::kGpu
                                         : Scope::kSys;
    return op.flag != has(s, "release") &&
           has_no_other(s, {"proxy", "tensormap::generic", "acquire", "release", "cta", "cluster",
                            "gpu", "sys"});
  }
  const bool global = has(s, "global");
  const bool shared = has(s, "shared::cta") || has(s, "shared::cluster");
  op.number = (shared ? 0 : bit(ProxyFence::kAsyncGlobal)) |
              (global && !shared ? 0 : bit(ProxyFence::kAsyncShared));
  return has(s, "async") &&
         has_no_other(s, {"proxy", "async", "global", "shared::cta", "shared::cluster"});
}

}  // namespace

MemoryOrder memory_order_of(const Statement& s) {
  MemoryOrder order;
  const bool atomic = s.opcode[0] == "atom" || s.opcode[0] == "red";
  order.acquires = has(s, "acquire") || has(s, "acq_rel");
  order.releases = has(s, "release") || has(s, "acq_rel");
  order.strong = atomic || order.acquires || order.releases || has(s, "relaxed") ||
                 has(s, "volatile") || has(s, "mmio");
  const bool wide = has(s, "sys") || has(s, "volatile") || has(s, "mmio");
  order.scope = has(s, "cta")       ? Scope::kCta
                : has(s, "cluster") ? Scope::kCluster
                : wide              ? Scope::kSys
                                    : Scope::kGpu;
  return order;
}

// Fences.
bool decode_fence(const Statement& s, Op& op) {
  op.written = 0;
  op.handler = fence;
  if (s.opcode[0] == "membar") {  // .proxy forms are not known
    op.order.scope = has(s, "cta") ? Scope::kCta : has(s, "gl") ? Scope::kGpu : Scope::kSys;
    op.number = 1;  // it is fence.sc
    return s.opcode.size() == 2 && has_no_other(s, {"cta", "gl", "sys"});
  }
  if (s.opcode[0] != "fence") return false;
  if (has(s, "mbarrier_init")) {  // orders initialisations alone; here: all that is before it
    op.order.scope = Scope::kCluster;
    return s.opcode.size() == 4 && has_no_other(s, {"mbarrier_init", "release", "cluster"});
  }
  if (has(s, "proxy")) return decode_proxy(s, op);
  op.number = has(s, "sc") ? 1 : 0;
  op.order.scope = has(s, "cta")       ? Scope::kCta
                   : has(s, "cluster") ? Scope::kCluster
                   : has(s, "gpu")     ? Scope::kGpu
                                       : Scope::kSys;
  return (has(s, "cta") || has(s, "cluster") || has(s, "gpu") || has(s, "sys")) &&
         has_no_other(s, {"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys",
                          // Of one space alone; here it orders all.
                          "sync_restrict::shared::cluster", "sync_restrict::shared::cta"});
}

}  // namespace ptx_machine
