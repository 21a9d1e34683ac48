// Accesses that are not ordered: what handlers tell about memory, and what is reported.
//
// The rules are those of order.h. For each byte the last write is kept, and the reads since then
// (shadow.h). An access is checked against them when it is executed, an asynchronous one when it is
// started. Reported are
//  * conflicts that nothing orders, unless both are strong, of the same bytes, and each is in the scope
//    of the other. Two plain writes of the same value are no conflict. A strong store is ordered before
//    what comes behind a strong load that has returned its value; what comes before the store is not
//  * accesses of the async proxy to what was written through the generic one, without a
//    fence.proxy.async between. Reads that a generic access made need no fence before an asynchronous
//    write. Uses of a tensor map that was changed, without a fence.proxy.tensormap between
//  * matrices of wgmma whose descriptor says another swizzle than the map by which they were loaded
//  * reads of shared memory that was never written, and of global memory that is said to be so: at once
//    if they are asynchronous or atomic. A load makes the register one that was never written. It is an
//    error where that is read: loops that load ahead load beyond the end too. ldmatrix may: rows beyond
//    the end of a matrix are multiplied by mma.sync, and their products are not stored
//
// Global memory is shared by the launches of a machine, and by the copies of streams. A launch starts
// behind what its stream comes behind (stream_order.cpp). What NICs, the host and other processes write
// is "outside": a strong load of a value that neither a kernel nor a stream of this machine has stored
// is ordered behind all that has ended and was told of.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "order.h"
#include "shadow.h"
#include "sync_place.h"

namespace ptx_machine {

// Who an agent is, for messages.
struct AgentInfo {
  enum class Kind : std::uint8_t {
    kWarp,
    kCopies,
    kBulkReads,
    kBulkWrites,
    kProducts,
    kMbarrier,
    kPuts,
    kStream  // copies, fills and words of a stream, and the ends of its launches
  };
  Kind kind = Kind::kWarp;
  Position position;
  Dim block;
  int warp = 0;
};

struct LaunchOrder;
struct AgentChunk {
  static constexpr std::uint32_t kAgents = 256;
  LaunchOrder* launch = nullptr;
  std::array<AgentInfo, kAgents> infos;
};

struct LaunchOrder {
  const Program* program = nullptr;
  std::uint32_t number = 0;
  // What knows this clock of this stream knows all that the launch did. 0: it runs.
  std::atomic<std::uint32_t> ended{0};
  Agent stream = kNobody;
  std::deque<AgentChunk> chunks;
  std::uint32_t next = 0, last = 0;  // agents that are left
};

// What a stream has done, and comes behind.
struct StreamOrder {
  // After a copy that may have raised signals: what these order.
  struct Past {
    std::uint32_t clock = 0;
    ViewPtr view;
  };
  static constexpr std::size_t kPast = 64;

  Agent agent = kNobody;
  std::uint32_t clock = 0;  // goes on with each copy, word and end of a launch
  ViewPtr view;
  std::deque<Past> past;
};

// An access of a copy engine that nothing orders behind another one.
struct CopyRace {
  bool writes;
  std::uint64_t at, bytes;
  Access other;
  bool other_writes;
};

// Global memory, as all launches of a machine see it.
class GlobalOrder {
 public:
  GlobalOrder();
  ~GlobalOrder();
  GlobalOrder(const GlobalOrder&) = delete;
  GlobalOrder& operator=(const GlobalOrder&) = delete;

  static constexpr std::uint64_t kPage = 4096;
  struct Page {
    Shadow shadow{kPage};
    SyncPlaces places;
  };
  struct Shard {
    std::mutex using_it;
    std::unordered_map<std::uint64_t, std::unique_ptr<Page>> pages;
  };
  Shard& shard(std::uint64_t page) { return shards_[page % kShards]; }

  std::shared_ptr<LaunchOrder> begin(const Program& program);
  // `known`: to its threads when they exited. What comes behind it on its stream knows it too.
  void end(LaunchOrder& launch, const ViewPtr& known);
  Agent new_agent(LaunchOrder& launch, const AgentInfo& info);
  const AgentChunk* chunk_of(Agent agent) const;
  const AgentInfo& info(Agent agent) const {
    return chunk_of(agent)->infos[agent % AgentChunk::kAgents];
  }

  // Memory was freed, or is another's now.
  void forget(std::uint64_t begin, std::uint64_t end);
  // A NIC begins to write there, or has written.
  void put(std::uint64_t begin, std::uint64_t end, bool ended);
  bool is_stream(Agent agent) const {
    return agent > kOutside && info(agent).kind == AgentInfo::Kind::kStream;
  }

  // -- streams: of the one that the calling thread runs ------------------------------------------------

  static constexpr int kDirect = -1;  // for launches that the host makes without a stream
  // What the host has waited for so far.
  std::uint64_t submitted();
  void begin_item(int stream, std::uint64_t submitted);
  void await_stream(int stream);
  // A copy begins, or has ended; a fill has no source. `words`: each word of 4 bytes is written at once.
  // Throws PtxError for what nothing orders, if `races`.
  void copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes, bool words, bool ended,
            bool races, const Allocations& memory);
  void write_word(std::uint64_t word, std::uint32_t value);
  void see_word(std::uint64_t word, std::uint32_t value);
  // What the stream comes behind; and behind what it comes from now on.
  struct Reached {
    std::uint64_t generation;
    ViewPtr view;
  };
  Reached reached();
  void learn(const Reached& reached);
  // Forgets all accesses so far, unless kernels run.
  void forget_all();
  // Nothing has been written to this memory yet.
  void expect_writes(std::uint64_t begin, std::uint64_t end);
  // It is known anew as memory: what lay there before, but for the same, is not looked after any more.
  void forget_writes(std::uint64_t begin, std::uint64_t end);
  // Whether a view covers an access, or the end of its launch.
  bool knows(const ViewPtr& view, const Access& a) const;
  // Whether all of it has been written, as far as it is looked after.
  bool was_written(std::uint64_t begin, std::uint64_t end);
  void note_written(std::uint64_t begin, std::uint64_t end);

  // Held while the elements of a whole vector are accessed.
  std::mutex accessing_vector;
  // Numbers of values that strong accesses store.
  std::uint64_t next_value() { return ++values_; }
  // Whatever is loaded from now on, no value that has been replaced so far.
  void forget_values() { settled_ = values_.load(); }
  Sequential& sequential() { return sequential_; }
  std::uint64_t settled() const { return settled_; }

  // What an outside value orders, as of now: all that has ended.
  ViewPtr outside();
  // The same, for a value at a place that a stream may have copied there.
  ViewPtr outside(const Access& write);
  // What a launch of this stream knows that starts now.
  ViewPtr at_start();

 private:
  static constexpr std::uint64_t kShards = 64;
  static constexpr std::uint32_t kChunks = 1u << 20;

  // Memory of which it is known what was never written: a flag for each byte.
  struct Fresh {
    std::uint64_t end = 0;
    std::vector<bool> written;
  };
  using FreshMemory = std::map<std::uint64_t, Fresh>;
  FreshMemory::iterator fresh_at(std::uint64_t begin);

  // With the lock (starting_):
  void tell_host(const ViewPtr& view);
  StreamOrder& stream_order();
  StreamOrder& stream_order(int stream);
  // The next thing that a stream has done; what it knows with it.
  void advance(StreamOrder& stream, const ViewPtr& known);
  ViewPtr without_ended(const ViewPtr& view, const LaunchOrder& launch) const;
  void clear_if_all_is_known();
  void clear();
  std::optional<CopyRace> note_copy(const Access& access, const ViewPtr& view, std::uint64_t begin,
                                    std::uint64_t end, bool writes, bool fills);
  std::string describe(const CopyRace& race, const Allocations& memory) const;
  Page& page_of(Shard& shard, std::uint64_t page);

  std::array<Shard, kShards> shards_;
  std::mutex writing_;  // guards fresh_
  FreshMemory fresh_;
  std::atomic<bool> has_fresh_{false};
  std::atomic<AgentChunk*>* chunks_;  // by agent
  std::mutex starting_;
  std::atomic<std::uint32_t> next_chunk_{1};
  std::atomic<std::uint32_t> running_{0};
  std::uint32_t launches_ = 0;
  std::map<int, StreamOrder> streams_;
  std::shared_ptr<LaunchOrder> of_streams_;  // whose agents streams are
  ViewPtr host_, everything_;                // what the host has waited for; all that has ended
  std::vector<ViewPtr> submissions_;  // what the host knew, each time that it has learned more
  std::uint64_t first_submission_ = 0, generation_ = 0;
  int copying_ = 0;
  std::atomic<bool> is_clear_{true};  // nothing is kept about any memory
  std::atomic<std::uint32_t> outside_{1};
  std::atomic<std::uint64_t> values_{0}, settled_{0};
  Sequential sequential_;
  std::vector<std::shared_ptr<LaunchOrder>> launched_;
};

struct MbarrierOrder {
  Agent agent = kNobody;
  std::uint32_t phase = 0;
  std::uint32_t copies = 0;  // under way, that report their bytes to it
  ViewPtr gathered, done;    // by arrivals of this phase; of the phases before
};

struct BlockOrder {
  explicit BlockOrder(std::uint64_t shared_bytes) : shadow(shared_bytes) {}
  Shadow shadow;
  SyncPlaces places;
  std::array<ViewPtr, 16> gathered, done;  // barriers: of this phase, of the one before
  std::map<std::uint64_t, MbarrierOrder> mbarriers;
  // What performs wgmma for each warpgroup, by its number. Instead of lanes its accesses have warps.
  std::vector<Agent> products;
};

struct ClusterOrder {
  ViewPtr gathered, done;
};

// Memory that an access names: of a block, or global.
struct Spot {
  Block* block = nullptr;
  std::uint64_t at = 0;
  bool operator==(const Spot&) const = default;
};

// How asynchronous work ends: with clock `clock` of an agent.
struct Completion {
  Agent agent = kNobody;
  std::uint32_t clock = 0;
  Mask lanes = 0;  // of the agent; 0: the lane that starts it
};

enum class Use : std::uint8_t { kRead, kWrite, kAtomic };

// Of one launch.
class Races {
 public:
  Races(GlobalOrder& global, const Program& program, const Launch& launch);
  ~Races();
  Races(const Races&) = delete;
  Races& operator=(const Races&) = delete;

  void start(Cluster& cluster, Block& block);
  // Orders lanes behind all launches that have ended by now.
  void acquire_ended(Context& c, Mask lanes);
  // All threads of a warp have exited.
  void leave(const Warp& warp);

  struct Request {
    Spot spot;
    std::uint64_t bytes = 0;
    Use use = Use::kRead;
    MemoryOrder order;
    bool async = false;         // through the async proxy
    bool alias = false;         // by a multicast address
    bool constant = false;      // nothing may write it as long as the launch runs (.nc)
    bool is_locked = false;     // StrongAccess holds the lock of the page
    bool any_lane = false;      // by the warp as a whole
    bool same = false;          // writes what is there already
    bool by_nic = false;        // reads what is to be put
    bool is_map = false;        // reads a tensor map, as one
    bool is_matrix = false;     // reads it for wgmma
    std::uint32_t swizzle = 0;  // of the box that is written, or of the matrix: TensorMap::swizzle
    Completion completion;      // of what is performed later
  };
  // Checks and notes an access. Returns whether a load reads what was never written. Throws PtxError.
  bool note(Context& c, const Op& op, int lane, const Request& request) {
    return note(c, op, lane, request, {&request.spot.at, 1});
  }
  // The same for an access that has a piece of the request's size at each of these places.
  bool note(Context& c, const Op& op, int lane, const Request& request,
            std::span<const std::uint64_t> places);

  // Whether a thread is ordered behind an access.
  bool knows(Context& c, int lane, const Access& a) const;
  std::uint64_t new_vector() { return global_.next_value(); }
  std::unique_lock<std::mutex> hold_vector() { return std::unique_lock(global_.accessing_vector); }
  // fence.sc: see StrongAccess.
  void forget_values() { global_.forget_values(); }
  Sequential& sequential() { return global_.sequential(); }

  Agent new_agent(const Warp& warp, AgentInfo::Kind kind);
  Agent new_agent(const Block& block);

 private:
  friend class StrongAccess;
  struct Check;
  [[noreturn]] void fail_unwritten(const Check& check, const char* space, std::uint64_t at,
                                   std::uint64_t bytes) const;
  // Whether the thread comes behind a load that has returned the value of a strong store.
  bool has_been_seen(const Check& check, const Access& store, std::uint64_t at);
  void touch_global(Check& check, std::span<const std::uint64_t> places);
  void touch(Check& check, Shadow& shadow, std::uint64_t begin, std::uint64_t end);
  void touch_cell(Check& check, Shadow& shadow, Cell& cell, std::uint64_t at, std::uint32_t bytes);
  void note_reader(const Check& check, Shadow& shadow, Cell& cell);
  bool replaces(const Check& check, Access& before);
  void check_write(Check& check, const Access& write, std::uint64_t at, std::uint32_t bytes);
  bool is_ordered(const Check& check, const Access& other);
  std::optional<ProxyFence> fence_between(const Check& check, const Access& other);
  bool is_fenced(const Check& check, const Access& other, ProxyFence fence);
  bool is_out_of_caches(const Check& check, const Access& write) const;
  bool is_outside(const Access& a) const {
    return a.agent == kOutside || global_.is_stream(a.agent);
  }
  bool has_ended(WarpOrder& warp, int lane, const Access& other) const;
  // Whether a write was there before the launch, or before griddepcontrol.wait.
  bool was_before(const Access& write) const { return global_.knows(start_, write); }
  void check_against(const Check& check, const Access& other, bool other_writes, std::uint64_t at,
                     std::uint32_t bytes);
  [[noreturn]] void report(const Check& check, const Access& other, bool other_writes,
                           std::uint64_t at, std::uint32_t bytes, const std::string& missing);
  std::string describe(const Check& check, const Access& a, bool writes) const;
  std::string missing(const Check& check, const Access& other, bool other_writes) const;

  GlobalOrder& global_;
  const Program& program_;
  const Launch& launch_;
  std::shared_ptr<LaunchOrder> order_;
  ViewPtr start_, end_;  // known to all threads when they start; to those that have exited
  std::uint32_t clusters_ = 0, blocks_ = 0;
};

// -- for handlers -------------------------------------------------------------------------------------

// Where an address lies; false for memory of a thread's own, and parameters.
inline bool find_spot(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                      Spot* spot) {
  const bool generic = space == Space::kGeneric;
  if (space == Space::kShared || space == Space::kCluster ||
      (generic && address >= kSharedWindow)) {
    *spot = {c.warp->block, address & 0xFFFFFFFF};
    if (spot->at > kOffsetMask) {
      const Place place = shared_place(c, op, lane, space, address);
      *spot = {place.block, place.offset};
    }
    return true;
  }
  if (space != Space::kGlobal && !generic) return false;
  if (address >= kParamWindow) return false;
  *spot = {nullptr, address};
  return true;
}

// Returns whether some of it was never written.
bool note_read(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
               std::uint64_t bytes, bool constant = false);
// Makes a register that was loaded from there one that was never written.
void unwrite(Context& c, const Op& op, int target, Mask lanes);
void note_write(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                std::uint64_t bytes, bool same = false);

// A strong access of one element, from its check to what its value orders. Other launches do not access
// the element in between.
//
// With a seed, a load may return an older value: coherence and causality alone say which are too old. A
// value is, if the thread knows of the store of the next one, or of a load of a later one. Streams and the
// host are not followed so closely: when a launch begins, when a value from outside is seen, and at
// fence.sc, all values that have been replaced become too old for everybody.
class StrongAccess {
 public:
  StrongAccess(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
               std::uint64_t bytes, Use use, bool alias = false);
  // Memory has this value before a store.
  void settle(std::uint64_t value);
  // Memory has this value. Returns what the load does: it, or an older one. Before stored(), of an atomic.
  std::uint64_t loaded(std::uint64_t value);
  void stored(std::uint64_t value);
  // Of a value that was loaded: the number of the vector that it was stored with; 0: none.
  std::uint64_t vector() const { return vector_; }

 private:
  Context& c_;
  const Op& op_;
  Use use_;
  int lane_;
  std::uint64_t bytes_;
  Spot spot_;
  SyncPlaces* places_ = nullptr;
  Access write_;  // the last one before this access
  std::uint64_t vector_ = 0;
  std::unique_lock<std::mutex> lock_;

  SyncValue& choose(SyncPlace& place) const;
  void note_seen(SyncPlace& place, const SyncValue& value) const;
};

// multimem: a weak access to one of the members.
void note_member(Context& c, const Op& op, int lane, const std::uint8_t* member,
                 std::uint64_t bytes, Use use);

// cp.async of a lane: what it reads and writes until its group has been waited for.
void note_copy(Context& c, const Op& op, int lane, std::uint64_t target, std::uint64_t bytes,
               std::uint64_t source, std::uint64_t read);
void commit_copies(Context& c, int lane);
void await_copies_of(Context& c, int lane, std::uint64_t left, bool all);

void arrive_at_barrier(Context& c, std::size_t number, Mask mask);
void complete_barrier(Block& block, std::size_t number);
void leave_barrier(Context& c, std::size_t number, Mask mask);
void arrive_in_order(Context& c, const Op& op, Cluster& cluster, Mask mask);
void complete_in_order(Cluster& cluster);
void wait_in_order(Context& c, const Cluster& cluster, Mask mask);
void meet_in_warp(Context& c, Mask mask);

void begin_mbarrier(Context& c, const Op& op, int lane, const Spot& spot);
void touch_mbarrier(Context& c, const Op& op, int lane, const Spot& spot, Use use);
void arrive_at_mbarrier(Context& c, const Op& op, int lane, const Spot& spot);
void arrive_with_copies(const Warp& warp, int lane, std::uint32_t group, const Spot& spot);
void complete_phase(const Spot& spot);
void pass_mbarrier(Context& c, const Op& op, Mask lanes, const Spot& spot);

// A copy that reports to it begins (1), or has written (-1).
void count_copies(const Spot& mbarrier, int by);
std::uint32_t copies_under_way(const Spot& mbarrier);

Completion completion_of(const Spot& mbarrier);
Completion bulk_reads(Context& c, int lane);
Completion bulk_writes(Context& c, int lane);
void await_bulk(Context& c, int lane, std::uint64_t before, bool only_reads);
void note_async(Context& c, const Op& op, int lane, const Spot& spot, std::uint64_t bytes, Use use,
                const Completion& completion);
// The same at each of several places of a block's shared memory, or of global memory (null).
void note_async(Context& c, const Op& op, int lane, Block* block,
                std::span<const std::uint64_t> places, std::uint64_t bytes, Use use,
                const Completion& completion, bool alias = false, std::uint32_t swizzle = 0);
// A tensor map, which the lane's copy reads through a proxy of its own.
void note_map(Context& c, const Op& op, int lane, std::uint64_t address, std::uint64_t bytes);
// The same of global memory by a multicast address: at the same places of each member.
void note_stored(Context& c, const Op& op, int lane, std::span<const std::uint64_t> places,
                 std::uint64_t bytes, Use use, const Completion& completion);
// st.async and red.async: in the generic proxy.
void note_sent(Context& c, const Op& op, int lane, const Spot& spot, std::uint64_t bytes, Use use,
               const Completion& completion);
// wgmma: chunks of 16 bytes of a matrix, read by product `number` of the warp, whose descriptor says this
// swizzle; and a wait for products of the warpgroup.
void note_product(Context& c, const Op& op, std::span<const std::uint64_t> chunks,
                  std::uint64_t number, std::uint32_t swizzle);
void await_products(Context& c, std::uint64_t number);

// A put: its source, and its destination, or 0 if that is not memory of this machine.
void note_put(Context& c, const Op& op, int lane, std::uint64_t from, std::uint64_t to,
              std::uint64_t bytes);

}  // namespace ptx_machine
