// Races: what is noted about each access, its check against others, and messages.
#include "races.h"

#include <algorithm>
#include <bit>

namespace ptx_machine {
namespace {

const char* name_of(Scope scope) {
  constexpr const char* kNames[] = {".cta", ".cluster", ".gpu", ".sys"};
  return kNames[static_cast<int>(scope)];
}

std::string name_of(const Dim& d) {
  std::string text = "(";
  text += std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z);
  return text += ")";
}

}  // namespace

std::string place_of(const Allocations& memory, std::uint64_t address) {
  auto next = memory.upper_bound(address);
  if (next == memory.begin()) return "address " + std::to_string(address);
  --next;
  return std::to_string(address - next->first) + " bytes behind the start of " + next->second.name;
}

// An access that is being checked.
struct Races::Check {
  Context& c;
  const Op& op;
  int lane;
  const Request& request;
  WarpOrder& warp;
  Access access;
  bool reads, writes;
  std::uint64_t begin = 0;  // of the piece of global memory
  bool never_written = false;
  // Words of the memory that is checked, and where its first byte lies.
  const SyncPlaces* words = nullptr;
  std::uint64_t first = 0;
  // The last accesses that nothing was wrong with: other cells have the same ones, as a rule.
  Access passed_write{};
  std::array<Access, 2> passed_reads{};
};

Races::Races(GlobalOrder& global, const Program& program, const Launch& launch)
    : global_(global),
      program_(program),
      launch_(launch),
      order_(global.begin(program)),
      start_(global.at_start()) {}

Races::~Races() { global_.end(*order_, end_); }

void Races::start(Cluster& cluster, Block& block) {
  if (cluster.order == nullptr) {
    ++clusters_;
    cluster.order = std::make_shared<ClusterOrder>();
  }
  block.order = std::make_shared<BlockOrder>(block.shared.size());
  const Position position{launch_.device, order_->number, clusters_, ++blocks_};
  for (Warp& warp : block.warps) {
    warp.order = std::make_shared<WarpOrder>();
    warp.order->position = position;
    warp.order->agent = new_agent(warp, AgentInfo::Kind::kWarp);
    warp.order->common = start_;
  }
}

Agent Races::new_agent(const Warp& warp, AgentInfo::Kind kind) {
  return global_.new_agent(*order_, {kind, warp.order->position, warp.block->index, warp.index});
}

Agent Races::new_agent(const Block& block) {
  const Position& position = block.warps[0].order->position;
  return global_.new_agent(*order_, {AgentInfo::Kind::kMbarrier, position, block.index, 0});
}

void Races::acquire_ended(Context& c, Mask lanes) {
  start_ = join(start_, global_.at_start());
  c.warp->order->acquire(start_, lanes, c.warp->alive);
}

void Races::leave(const Warp& warp) {
  end_ = join(end_, warp.order->common);
  each(warp.order->has_extra, [&](int l) { end_ = join(end_, warp.order->extra[l]); });
}

bool Races::note(Context& c, const Op& op, int lane, const Request& request,
                 std::span<const std::uint64_t> places) {
  if (!launch_.races) return false;
  WarpOrder& warp = *c.warp->order;
  std::uint32_t what = static_cast<std::uint32_t>(&op - program_.ops.data()) & Access::kOp;
  if (request.order.strong) {
    what |= Access::kStrong | static_cast<std::uint32_t>(request.order.scope) << Access::kScope;
  }
  if (request.use == Use::kAtomic) what |= Access::kAtomic;
  if (request.async) what |= Access::kAsync;
  if (request.alias) what |= Access::kAlias;
  what |= request.swizzle << Access::kSwizzle;
  const auto width = static_cast<std::uint32_t>(std::bit_width(request.bytes) - 1);
  what |= std::min(width, 7u) << Access::kSize;
  Access access{warp.agent, warp.clock, Mask{1} << lane, what};
  if (request.completion.agent != kNobody) {
    access.agent = request.completion.agent;
    access.clock = request.completion.clock;
    if (request.completion.lanes != 0) access.lanes = request.completion.lanes;
    access.what |= Access::kLater;
  }
  Check check{
      c, op, lane, request, warp, access, request.use != Use::kWrite, request.use != Use::kRead};
  if (request.spot.block == nullptr) {
    touch_global(check, places);
    return check.never_written;
  }
  // Each cell of a tile is found in another line of the host's caches, or none.
  constexpr std::size_t kAhead = 8;
  Shadow& shadow = request.spot.block->order->shadow;
  check.words = &request.spot.block->order->places;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (i + kAhead < places.size()) shadow.expect(places[i + kAhead]);
    touch(check, shadow, places[i], places[i] + request.bytes);
  }
  return check.never_written;
}

void Races::touch_global(Check& check, std::span<const std::uint64_t> places) {
  const Request& request = check.request;
  constexpr std::uint64_t kPage = GlobalOrder::kPage;
  std::unique_lock<std::mutex> lock;
  GlobalOrder::Page* page = nullptr;
  std::uint64_t number = 0;  // of the page
  for (const std::uint64_t begin : places) {
    const std::uint64_t end = begin + request.bytes;
    check.begin = begin;
    if (check.reads && !global_.was_written(begin, end)) {
      check.never_written = true;
      if (check.writes || request.async) {
        fail_unwritten(check, "global", begin, request.bytes);
      }
    }
    if (check.writes) global_.note_written(begin, end);
    for (std::uint64_t at = begin / kPage; at * kPage < end; ++at) {
      if (page == nullptr || at != number) {
        number = at;
        if (lock) lock.unlock();
        GlobalOrder::Shard& shard = global_.shard(number);
        if (!request.is_locked) lock = std::unique_lock(shard.using_it);
        auto& found = shard.pages[number];
        if (found == nullptr) found = std::make_unique<GlobalOrder::Page>();
        page = found.get();
        check.words = &page->places;
        check.first = number * kPage;
      }
      const std::uint64_t first = std::max(begin, at * kPage) - at * kPage;
      const std::uint64_t last = std::min(end, (at + 1) * kPage) - at * kPage;
      touch(check, page->shadow, first, last);
      if (!check.writes || request.is_locked || page->places.empty()) continue;
      for (std::uint64_t byte = begin; byte < end; ++byte) page->places.erase(byte);
    }
  }
}

void Races::fail_unwritten(const Check& check, const char* space, std::uint64_t at,
                           std::uint64_t bytes) const {
  const bool shared = check.request.spot.block != nullptr;
  check.c.fail(check.op, check.lane,
               std::string(space) + " memory that was never written is read, " +
                   std::to_string(bytes) + " bytes at " +
                   (shared ? "offset " + std::to_string(at) : place_of(*check.c.memory, at)));
}

void Races::touch(Check& check, Shadow& shadow, std::uint64_t begin, std::uint64_t end) {
  shadow.visit(begin, end, [&](Cell& cell, std::uint64_t at, std::uint32_t bytes) {
    touch_cell(check, shadow, cell, at, bytes);
  });
  if (check.writes) shadow.unite(begin, end);
}

void Races::touch_cell(Check& check, Shadow& shadow, Cell& cell, std::uint64_t at,
                       std::uint32_t bytes) {
  if (cell.write.agent != kNobody) {
    if (cell.write != check.passed_write) check_write(check, cell.write, at, bytes);
  } else if (check.reads && check.request.spot.block != nullptr) {
    check.never_written = true;
    if (!check.writes && !check.request.async) return;
    fail_unwritten(check, "shared", at, bytes);
  }
  if (!check.writes) {
    note_reader(check, shadow, cell);
    return;
  }
  for (std::size_t i = 0; i < cell.reads.size(); ++i) {
    const Access& read = cell.reads[i];
    if (read.agent == kNobody || read == check.passed_reads[i]) continue;
    if (is_ordered(check, read)) {
      check.passed_reads[i] = read;
    } else {
      check_against(check, read, false, at, bytes);
    }
  }
  if (cell.readers != 0) {
    const Readers& readers = shadow.readers(cell);
    for (std::size_t i = 0; i < readers.count; ++i) {
      if (!is_ordered(check, readers.reads[i])) {
        check_against(check, readers.reads[i], false, at, bytes);
      }
    }
  }
  cell.write = check.access;
  shadow.forget_reads(cell);
}

void Races::check_write(Check& check, const Access& write, std::uint64_t at, std::uint32_t bytes) {
  const bool passes = is_ordered(check, write) && !fence_between(check, write);
  if (!passes) check_against(check, write, true, at, bytes);
  if (check.request.by_nic && !is_out_of_caches(check, write)) {
    report(check, write, true, at, bytes,
           "a fence of scope .sys by the thread that wrote, as a NIC takes no part in the order of "
           "threads");
  }
  if (check.request.constant && !was_before(write)) {
    report(check, write, true, at, bytes,
           "a load without .nc, as this memory is written while the kernel runs");
  }
  if (check.request.is_matrix && write.swizzle() != 0 && write.swizzle() != check.request.swizzle) {
    const auto name = [](std::uint32_t s) { return s == 0 ? "none" : std::to_string(16 << s); };
    check.c.fail(check.op, check.lane,
                 "the swizzle of a matrix descriptor is " + name(check.request.swizzle) +
                     ", that of " + describe(check, write, true) + " is " + name(write.swizzle()));
  }
  if (passes) check.passed_write = write;
}

// Notes a read in the place of an earlier one of the same agent, if that need not be remembered beside
// it: what comes behind this one comes behind it.
bool Races::replaces(const Check& check, Access& before) {
  const Access& now = check.access;
  if (before.agent != now.agent) return false;
  if (before.clock == now.clock && (before.what & ~Access::kOp) == (now.what & ~Access::kOp)) {
    before.lanes |= now.lanes;
    before.what = now.what;
    return true;
  }
  if ((before.lanes & ~now.lanes) != 0 || before.clock > now.clock) return false;
  before = now;
  return true;
}

void Races::note_reader(const Check& check, Shadow& shadow, Cell& cell) {
  for (Access& read : cell.reads) {
    if (read.agent == kNobody) {
      read = check.access;
      return;
    }
    if (replaces(check, read)) return;
  }
  Readers& readers = shadow.readers(cell);
  const auto end = readers.reads.begin() + static_cast<std::ptrdiff_t>(readers.count);
  for (auto one = readers.reads.begin(); one != end; ++one) {
    if (replaces(check, *one)) return;
  }
  if (readers.count < Readers::kMost) {
    readers.reads[readers.count++] = check.access;
    return;
  }
  // No room: this one takes the place of a read that it is ordered behind.
  const auto found = std::find_if(readers.reads.begin(), end,
                                  [&](const Access& one) { return is_ordered(check, one); });
  const auto other = readers.reads.begin() + check.warp.clock % Readers::kMost;
  *(found != end ? found : other) = check.access;
}

// Whether a NIC sees a write that is ordered before the put: the thread that wrote has fenced since. Of
// writes from other blocks that is not known here, and what orders them has such a fence.
bool Races::is_out_of_caches(const Check& check, const Access& write) const {
  for (const Warp& warp : check.c.warp->block->warps) {
    if (warp.order->agent == write.agent) return warp.order->has_fenced_for_system(write);
  }
  return true;
}

bool Races::has_ended(WarpOrder& warp, int lane, const Access& other) const {
  if (other.agent == kOutside) return false;
  const LaunchOrder& launch = *global_.chunk_of(other.agent)->launch;
  const std::uint32_t ended = launch.ended;
  return ended != 0 && warp.knows({launch.stream, ended, ~Mask{0}, 0}, lane);
}

bool Races::knows(Context& c, int lane, const Access& a) const {
  WarpOrder& warp = *c.warp->order;
  return warp.knows(a, lane) || has_ended(warp, lane, a);
}

bool Races::is_ordered(const Check& check, const Access& other) {
  WarpOrder& warp = check.warp;
  if (other.agent == warp.agent && warp.knows(other, check.lane)) return true;
  if (warp.recent.covers(other)) return true;
  // Of a launch that has ended one clock is looked up, which is the same for all of it.
  if (has_ended(warp, check.lane, other) || warp.knows(other, check.lane)) return true;
  if (check.request.any_lane) {
    if (other.agent == warp.agent) return true;
    bool found = false;
    each(warp.has_extra, [&](int l) { found = found || warp.knows(other, l); });
    if (found) return true;
  }
  return false;
}

// A write through one proxy reaches another only behind a fence: the async proxy, and another address of
// the same memory.
std::optional<ProxyFence> Races::fence_between(const Check& check, const Access& other) {
  const Request& request = check.request;
  if (request.async && !other.has(Access::kAsync)) {
    const bool shared = request.spot.block != nullptr;
    const ProxyFence needed = shared ? ProxyFence::kAsyncShared : ProxyFence::kAsyncGlobal;
    if (!is_fenced(check, other, needed)) return needed;
  }
  if (request.is_map && !is_fenced(check, other, ProxyFence::kMap)) return ProxyFence::kMap;
  // Signals are strong on both sides, and seen without one.
  const bool signals = request.order.strong && !request.async && other.has(Access::kStrong);
  if (request.alias != other.has(Access::kAlias) && !signals &&
      !is_fenced(check, other, ProxyFence::kAlias)) {
    return ProxyFence::kAlias;
  }
  return std::nullopt;
}

bool Races::is_fenced(const Check& check, const Access& other, ProxyFence fence) {
  if (has_ended(check.warp, check.lane, other)) return true;
  if (check.warp.has_fenced(other, fence, check.lane)) return true;
  if (check.request.any_lane) {
    bool found = false;
    each(check.warp.has_extra,
         [&](int l) { found = found || check.warp.has_fenced(other, fence, l); });
    if (found) return true;
  }
  return false;
}

// PTX ISA, causality order: a store precedes in it what a load precedes that precedes it in observation
// order. Both are strong and in each other's scope: otherwise the load was a race.
bool Races::has_been_seen(const Check& check, const Access& store, std::uint64_t at) {
  if (!store.has(Access::kStrong) || store.has(Access::kAsync) || store.has(Access::kLater)) {
    return false;
  }
  if (check.request.async || check.request.alias != store.has(Access::kAlias)) return false;
  const auto word = check.words->find((check.first + at) / store.size() * store.size());
  if (word == check.words->end() || word->second.values.empty()) return false;
  const SyncValue& newest = word->second.values.back();
  const Access stored = newest.store();
  if (stored.agent != store.agent || stored.clock != store.clock || stored.lanes != store.lanes) {
    return false;
  }
  for (const Access& load : newest.readers) {
    bool known = false;
    each(load.lanes, [&](int l) {
      known = known || is_ordered(check, {load.agent, load.clock, Mask{1} << l, 0});
    });
    if (known) return true;
  }
  return false;
}

void Races::check_against(const Check& check, const Access& other, bool other_writes,
                          std::uint64_t at, std::uint32_t bytes) {
  if (is_ordered(check, other)) {
    const ProxyFence fence = fence_between(check, other).value_or(ProxyFence::kAsyncGlobal);
    const char* missing =
        fence == ProxyFence::kAlias
            ? "a fence.proxy.alias between them, as they use different addresses"
        : fence == ProxyFence::kMap
            ? "a fence.proxy.tensormap::generic.release behind the change and one with .acquire "
              "before the copy"
            : "a fence.proxy.async between them";
    report(check, other, other_writes, at, bytes, missing);
  }
  const Request& request = check.request;
  const bool both_strong = request.order.strong && other.has(Access::kStrong);
  // Words that the host fills, signals of a call that it gives up among them, may be polled meanwhile, and
  // codes of 64 bits, as two words of which the second does not change.
  const bool outside = is_outside(other);
  const bool polled = request.bytes == 4 || request.bytes == 8;
  if (both_strong && outside && polled && request.use != Use::kAtomic) return;
  std::string wanted;
  if (both_strong && !outside) {
    const Scope needed = check.warp.position.to(global_.info(other.agent).position);
    if (other.size() != check.access.size()) {
      wanted = "an order, as strong accesses of different sizes have none of their own";
    } else if (request.order.scope < needed || other.scope() < needed) {
      wanted = std::string("the scope ") + name_of(needed) + " at both";
    } else {
      return;
    }
  }
  if (other_writes && has_been_seen(check, other, at)) return;
  if (!wanted.empty()) report(check, other, other_writes, at, bytes, wanted);
  if (request.same && other_writes && check.writes && !other.has(Access::kLater)) return;
  report(check, other, other_writes, at, bytes, missing(check, other, other_writes));
}

std::string Races::missing(const Check& check, const Access& other, bool other_writes) const {
  if (is_outside(other)) {
    return other_writes ? "an acquire of the signal that announces it"
                        : "an acquire of a signal behind it, or an order of streams";
  }
  const AgentInfo& info = global_.info(other.agent);
  switch (info.kind) {
    case AgentInfo::Kind::kCopies:
      return "cp.async.wait_group by the thread that copies, and for other threads a barrier "
             "behind it";
    case AgentInfo::Kind::kBulkReads:
      return "cp.async.bulk.wait_group.read by the thread that copies, and for other threads "
             "synchronisation behind it";
    case AgentInfo::Kind::kBulkWrites:
      return "cp.async.bulk.wait_group (without .read) by the thread that copies, and for other "
             "threads synchronisation behind it";
    case AgentInfo::Kind::kProducts:
      return "wgmma.wait_group, and for other threads synchronisation behind it";
    case AgentInfo::Kind::kPuts:
      return "an acquire of the word that the put raises, or of one that its owner raises later";
    case AgentInfo::Kind::kMbarrier:
      return "a wait for the phase of the mbarrier that counts its bytes";
    default:
      break;
  }
  const Scope needed = check.warp.position.to(info.position);
  if (needed == Scope::kCta) {
    if (other.agent == check.warp.agent) return "a bar.warp.sync (__syncwarp) of both lanes";
    return "a barrier of both warps (bar.sync), or a release and an acquire";
  }
  if (needed == Scope::kCluster) {
    return "barrier.cluster, or a release and an acquire of scope .cluster";
  }
  return std::string("a release and an acquire (or fences) of scope ") + name_of(needed);
}

std::string Races::describe(const Check& check, const Access& a, bool writes) const {
  const char* what = a.has(Access::kAtomic) ? "atomic" : writes ? "write" : "read";
  if (is_outside(a)) {
    return writes ? "a write by the host or a copy engine" : "a read by a copy engine";
  }
  const AgentInfo& info = global_.info(a.agent);
  const Program& program = *global_.chunk_of(a.agent)->launch->program;
  std::string text = "the ";
  if (a.has(Access::kLater)) text += "asynchronous ";
  text += what;
  text += " by ";
  if (info.kind == AgentInfo::Kind::kProducts) {
    text += "warp " + std::to_string(info.warp + std::countr_zero(a.lanes));
  } else if (info.kind == AgentInfo::Kind::kMbarrier) {
    text += "a copy to the block";
  } else {
    // Of the lanes of its own warp, another one.
    const Mask own = a.agent == check.warp.agent ? Mask{1} << check.lane : 0;
    const Mask others = (a.lanes & ~own) != 0 ? a.lanes & ~own : a.lanes;
    const int thread = info.warp * kLanes + std::countr_zero(others);
    text += "thread " + std::to_string(thread);
  }
  text += " of block " + name_of(info.block);
  const Statement& statement = *program.ops[a.what & Access::kOp].statement;
  if (info.position.launch != order_->number) text += " of another launch";
  return text + " (" + program.module->describe(*program.kernel, statement) + ")";
}

void Races::report(const Check& check, const Access& other, bool other_writes, std::uint64_t at,
                   std::uint32_t bytes, const std::string& missing) {
  const Spot& spot = check.request.spot;
  std::string where;
  if (spot.block != nullptr) {
    where = "offset " + std::to_string(at) + " of shared memory";
    if (spot.block != check.c.warp->block) where += " of block " + name_of(spot.block->index);
  } else {
    const std::uint64_t page = check.begin / GlobalOrder::kPage * GlobalOrder::kPage;
    const std::uint64_t address = at < check.begin % GlobalOrder::kPage
                                      ? page + GlobalOrder::kPage + at
                                      : page + at;  // of the page behind it
    where = place_of(*check.c.memory, address);
  }
  const char* what = check.access.has(Access::kAtomic) ? "atomic" : check.writes ? "write" : "read";
  check.c.fail(check.op, check.lane,
               "race: this " +
                   std::string(check.access.has(Access::kLater) ? "asynchronous " : "") + what +
                   " of " + std::to_string(bytes) + " bytes at " + where + " and " +
                   describe(check, other, other_writes) + " have no order; missing is " + missing);
}

}  // namespace ptx_machine
