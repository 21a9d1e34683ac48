// What is ordered before what, by clocks.
//
// PTX orders memory by causality: an access is ordered behind another one if a chain of program order
// and synchronisation (barriers, release and acquire, waits for asynchronous work) leads from one to the
// other. A program without races, whose weak accesses are all ordered so, behaves as if memory were
// sequentially consistent. So a race is an error at once, whatever value was read; only strong accesses
// may meet unordered.
//
// An agent is what performs accesses: a warp, or something asynchronous that a warp has started. Each has
// a clock, and an access is (agent, lanes, clock). A warp's clock goes on with each release. A view says up
// to which clock accesses of other agents are known; it is what a release publishes and an acquire takes.
// Asynchronous work gets clocks that its completion announces: the phase of an mbarrier, the number
// of a group. It is noted when it is started, because from then on it may be performed at any time.
//
// Clocks of the lanes of one agent are kept as two numbers, one for the lanes of a mask and one for the
// others. What that cannot hold is rounded up: a race may be missed, but none is made up.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "machine.h"

namespace ptx_machine {

using Agent = std::uint32_t;
constexpr Agent kNobody = 0;
// NICs, as far as the machine is told of them. Streams are agents, too: StreamOrder.
constexpr Agent kOutside = 1;

// An access as memory remembers it.
struct Access {
  static constexpr std::uint32_t kOp = (1u << 20) - 1;  // the number of the statement
  static constexpr std::uint32_t kStrong = 1u << 20, kAtomic = 1u << 21;
  static constexpr std::uint32_t kAsync = 1u << 22;  // through the async proxy
  static constexpr std::uint32_t kLater = 1u << 23;  // was started then, and is performed later
  static constexpr int kScope = 24, kSize = 26;      // two bits, three bits: log2 of the bytes
  static constexpr std::uint32_t kAlias = 1u << 29;  // by a multicast address
  static constexpr int kSwizzle = 30;  // two bits, as in TensorMap: of a box that is loaded

  Agent agent = kNobody;
  std::uint32_t clock = 0;
  Mask lanes = 0;
  std::uint32_t what = 0;

  bool has(std::uint32_t flag) const { return (what & flag) != 0; }
  Scope scope() const { return static_cast<Scope>(what >> kScope & 3); }
  std::uint32_t size() const { return 1u << (what >> kSize & 7); }
  std::uint32_t swizzle() const { return what >> kSwizzle; }
  bool operator==(const Access&) const = default;
};

// What is known of an agent: accesses up to clock `high` of the lanes in the mask, up to `base` of others.
struct Known {
  Agent agent = kNobody;
  std::uint32_t base = 0, high = 0;
  Mask lanes = 0;

  bool covers(const Access& a) const {
    return a.clock <= base || (a.clock <= high && (a.lanes & ~lanes) == 0);
  }
  bool operator==(const Known&) const = default;
};
using Clocks = std::vector<Known>;  // by agent

bool covers(const Clocks& clocks, const Access& a);

// Proxy fences: .async of global and of shared memory, .alias; .tensormap, which takes two: a release
// behind the change of a map, and an acquire before its use. kSequential stands for fence.sc.
enum class ProxyFence : std::uint8_t {
  kAsyncGlobal,
  kAsyncShared,
  kAlias,
  kMap,
  kMapReleased,
  kSequential
};
constexpr std::size_t kFences = 6;
constexpr std::size_t kOftenAsked = 3;  // the first of them

struct View;
using ViewPtr = std::shared_ptr<const View>;
struct View {
  Clocks known;
  // What proxy fences have made known beyond the proxy that accessed it. What pairs of fence.sc have
  // made known besides: strong loads return nothing older. The order of a pair is chance, so what has
  // no other order is still a race.
  std::array<Clocks, kFences> fenced;
};

// What was done before any fence.sc so far. Each of them is ordered behind all that came before it.
class Sequential {
 public:
  // Adds what a thread knows at its fence. Returns a view of what all have added.
  ViewPtr meet(const View& before);
  void clear();

 private:
  std::mutex meeting_;
  ViewPtr met_;
};

ViewPtr join(const ViewPtr& a, const ViewPtr& b);
ViewPtr join(const ViewPtr& a, const Known& known);

// Something asynchronous that single threads start and wait for: groups of copies.
struct Groups {
  Agent agent = kNobody;
  std::array<std::uint32_t, kLanes> committed{};
  std::array<std::uint32_t, kLanes> done{};  // groups that the lane has waited for
  std::uint32_t of(int lane) const { return committed[lane] + 1; }
};

// By the scope that is needed to reach from one thread to another.
using Scoped = std::array<ViewPtr, 4>;

// Where a thread is.
struct Position {
  std::uint32_t device = 0, launch = 0, cluster = 0, block = 0;
  // The narrowest scope that has both.
  Scope to(const Position& other) const {
    if (device != other.device) return Scope::kSys;
    if (launch != other.launch || cluster != other.cluster) return Scope::kGpu;
    return block != other.block ? Scope::kCluster : Scope::kCta;
  }
};

// What was found in views lately. It stays true: what a thread knows, it never forgets.
struct Recent {
  std::array<Known, 8> found;

  bool covers(const Access& a) const {
    const Known& k = found[a.agent % found.size()];
    return k.agent == a.agent && k.covers(a);
  }
  void keep(const Known& k) { found[k.agent % found.size()] = k; }
};

// What a warp knows.
struct WarpOrder {
  Agent agent = kNobody;
  Position position;
  std::uint32_t clock = 1;
  std::uint32_t synced = 0;  // the lanes know each other's accesses up to this clock
  ViewPtr common;            // known to all lanes
  std::array<ViewPtr, kLanes> extra;
  Mask has_extra = 0;
  Groups copies, bulk_reads, bulk_writes;
  Agent puts = kNobody;  // to other ranks (put.cpp)
  // As of fences, by their scope: what a relaxed store behind them releases.
  struct Fence {
    ViewPtr common, extra;
    std::uint32_t clock = 0, synced = 0, copies = 0, bulk_reads = 0, bulk_writes = 0;
  };
  std::unique_ptr<std::array<std::array<Fence, 4>, kLanes>> fences;
  // Views that relaxed loads have seen: what a fence behind them acquires.
  std::unique_ptr<std::array<Scoped, kLanes>> seen;
  // Registers that were last loaded from memory that was never written, by number.
  std::map<int, const Op*> loaded_nothing;
  // Of common, and of the extra view of one lane: in general, and behind fences.
  Recent recent, recent_extra;
  std::array<Recent, kOftenAsked> recent_fenced, recent_extra_fenced;
  int recent_lane = -1;

  // What these lanes know, and their own accesses so far.
  ViewPtr view(Mask lanes, Mask alive) const;
  void acquire(const ViewPtr& view, Mask lanes, Mask alive);
  void acquire(const Known& known, Mask lanes, Mask alive);
  // The lanes take what the others of them know (bar.warp.sync, and barriers of all threads).
  void meet(Mask lanes, Mask alive);
  // Of a fence.sc with what meets the others.
  void fence(Scope scope, Mask lanes, Mask alive, Sequential* sequential = nullptr);
  void fence_proxy(const std::vector<ProxyFence>& fences, Mask lanes, Mask alive);
  // fence.proxy.tensormap::generic.acquire: maps are read as they were released.
  void acquire_maps(Mask lanes, Mask alive);
  // What a store by a lane releases, for each scope that a reader may need.
  Scoped released(const MemoryOrder& order, int lane, Mask alive) const;
  void observe(const Scoped& views, Scope needed, const MemoryOrder& order, Mask lanes, Mask alive);

  // Whether each lane that made an access of this warp has fenced since, for the whole system.
  bool has_fenced_for_system(const Access& a) const;

  bool knows(const Access& a, int lane);
  // Whether a proxy fence has made an access known beyond its proxy.
  bool has_fenced(const Access& a, ProxyFence fence, int lane);

 private:
  ViewPtr view(const Fence& fence, int lane) const;
  bool finds(const Access& a, const Clocks& clocks, Recent& in) const;
  void remember_lane(int lane);
};

}  // namespace ptx_machine
