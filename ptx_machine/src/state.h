// What a kernel is while it runs: a launch, decoded statements, warps, blocks, clusters.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats.h"
#include "module.h"
#include "storage.h"

namespace ptx_machine {

using Mask = std::uint32_t;  // lanes of a warp
constexpr int kLanes = 32;
using Lanes = std::array<std::uint64_t, kLanes>;

// Generic addresses of memory that is not global. Global addresses are those of this process.
constexpr std::uint64_t kSharedWindow = std::uint64_t{1} << 62;
constexpr std::uint64_t kLocalWindow = std::uint64_t{1} << 61;
constexpr std::uint64_t kParamWindow = std::uint64_t{1} << 60;

template <class F>
void each(Mask mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

struct Dim {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint64_t count() const { return std::uint64_t{x} * y * z; }
};

struct Events;  // what warps did: trace.h

// How strong loads and stores of vectors are performed. PTX takes their elements as accesses of their own;
// protocols that send data and flags together rely on aligned vectors being whole.
enum class Vectors : std::uint8_t {
  kApart,
  kWhole,
  kReported
};  // a load that mixes stores is an error

struct Launch {
  Dim grid;
  Dim block;
  std::optional<Dim> cluster;  // in blocks; without: what the kernel asks for, or one block
  std::vector<std::uint8_t> params;
  std::uint64_t dynamic_shared = 0;              // bytes
  std::uint64_t seed = 0;                        // decides the order of warps and of their groups
  std::uint64_t max_statements = 1'000'000'000;  // of all warps; then the launch fails
  bool races = true;         // they are errors, and reads of shared memory that was never written
  std::uint32_t device = 0;  // launches of one device are in the scope .gpu of each other
  bool real_time = false;    // %globaltimer is the host's; else it counts statements
  bool stops_clock = false;  // clocks stand still while threads are found to poll for nothing
  Events* events = nullptr;  // records what is executed, if it is given
  // Bulk reductions of global memory are atomic among devices. PTX: in the scope .gpu only.
  bool peer_reductions = false;
  Vectors vectors = Vectors::kApart;
  // Programmatic dependent launch: whether the launch before it on the stream has ended, which
  // griddepcontrol.wait waits for; and what all blocks do with griddepcontrol.launch_dependents. Empty:
  // launches run one after the other.
  std::function<bool()> predecessor_ended;
  // Lets other streams act until the next turn of this one; false: streams take no turns.
  std::function<bool()> yield_turn;
  std::function<void()> release_next;
  const std::atomic<bool>* stop = nullptr;  // the device has failed: the kernel ends with an error
};

// What the warps of one number have made of one statement of a kernel.
struct Tally {
  std::uint64_t executed = 0;  // by warps, or parts of them
  std::uint64_t threads = 0;
  std::uint64_t tries = 0;  // that had to wait
  std::uint64_t bytes = 0;  // of copies whose size the statement does not say
};

struct Counters {
  std::uint64_t statements = 0;           // of warps
  std::uint64_t instructions = 0;         // of threads
  std::uint64_t blocks = 0;               // that have run
  std::vector<std::vector<Tally>> warps;  // by number of a warp in its block, by statement

  // Adds those of another launch of the same kernel.
  Counters& operator+=(const Counters& other);
};

// Of setp. Those that end in U are true for operands one of which is NaN.
enum class Comparison : std::uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kNumbers,
  kEqU,
  kNeU,
  kLtU,
  kLeU,
  kGtU,
  kGeU,
  kNan
};

// Of threads that an access or a fence orders.
enum class Scope : std::uint8_t { kCta, kCluster, kGpu, kSys };

// How a statement takes part in the order of memory: memory_order.cpp.
struct MemoryOrder {
  bool strong = false;  // relaxed, volatile, or more
  bool acquires = false, releases = false;
  Scope scope = Scope::kSys;
};

struct Block;
struct Cluster;
struct Warp;
struct Context;
struct Op;
class Engine;
struct MatrixOp;      // a decoded statement of wgmma: wgmma.h
struct WarpMatrices;  // what wgmma has in flight in a warp
struct WarpgroupLog;
struct Spin;          // what is known of its loops: spins.h
struct WarpOrder;     // what is ordered before what a warp does: order.h
struct BlockOrder;    // races.h
struct ClusterOrder;  // races.h
class GlobalOrder;
class Races;

enum class Outcome : std::uint8_t {
  kNext,
  kJump,   // lanes in Context::taken go to Op::label
  kWait,   // not executed: try again when something has changed
  kYield,  // executed; it is the turn of others
  kExit
};
using Handler = Outcome (*)(Context&, const Op&, Mask);

// A decoded operand.
struct Value {
  enum class Kind : std::uint8_t { kNone, kRegister, kPredicate, kConstant, kSpecial };
  Kind kind = Kind::kNone;
  bool negated = false;
  int index = -1;
  std::int64_t offset = 0;  // of an address
  std::unique_ptr<Lanes> constant;
  void (*special)(const Context&, Lanes&) = nullptr;
};

// A decoded statement.
struct Op {
  Handler handler = nullptr;
  const Statement* statement = nullptr;
  Value guard;              // the predicate of @p, if there is one
  Type type = Type::kNone;  // of the operation
  Type from = Type::kNone;  // of the source, where it differs
  Space space = Space::kGeneric;
  int number = 0;     // what the handler makes of it: lanes of a vector, a width, ...
  int position = -1;  // a second one of these
  int label = -1;
  bool flag = false;
  MemoryOrder order;
  std::vector<Value> targets;
  std::vector<Value> values;
  int written = 1;                         // how many of the statement's operands are targets
  std::shared_ptr<const MatrixOp> matrix;  // of wgmma
  Format format_a = Format::kNone, format_b = Format::kNone;  // of mma.sync
  // Of arithmetic and conversion:
  Rounding rounding = Rounding::kNearest;
  Comparison comparison = Comparison::kEq;
  bool flushes = false;    // .ftz
  bool saturates = false;  // .sat or .satfinite
  bool relu = false;
  bool acts = false;  // others can see what it does: it is not one of those that threads wait with
  bool changes = false;     // it changes memory, unless its handler says Context::unchanged
  bool whole = false;       // of .b128: its two words are one access
  bool propagates = false;  // its results are no more written than its operands (Unwritten)
};

// An operand of a statement that only computes is a register that these lanes never wrote. Compilers
// compute with such values where the result is not used: CUTLASS's epilogues do so for elements outside
// of a matrix. So the results count as never written, too, until something else reads them.
struct Unwritten {
  Mask lanes;
};

struct Program {
  const Module* module = nullptr;
  const Kernel* kernel = nullptr;
  std::uint64_t shared_bytes = 0;  // in front of dynamic shared memory, its alignment included
  std::vector<Op> ops;
  std::uint64_t live = 0;        // most 32-bit values that are alive at once
  bool hands_registers = false;  // it has setmaxnreg
  bool has_workspace = false;    // it asks for the memory that blocks of a grid meet at
};

// Threads of a warp at the same statement.
struct Group {
  Mask mask = 0;
  int pc = 0;
  int barrier = -1;            // that it has arrived at
  std::uint64_t phase = 0;     // of the barrier, when it arrived
  bool waits = false;          // its last statement was not executed, as something is missing
  const Op* polled = nullptr;  // what it loaded last, while it is watched (spins.h)
};

struct Copy {                // cp.async of one thread
  std::uint64_t target = 0;  // in shared memory
  std::uint64_t source = 0;
  std::uint32_t bytes = 0;
  std::uint32_t filled = 0;  // bytes that come from the source; the others are zero
  std::uint64_t number = 0;  // among the copies of its thread
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  Mask alive = 0;
  std::vector<Group> groups;
  RawStorage<Lanes> registers;
  std::vector<Mask> written;  // of registers
  std::vector<Mask> predicates;
  std::vector<Mask> predicates_written;
  Mask carry = 0, carry_written = 0;  // the condition code that add.cc and the like leave
  std::vector<std::uint8_t> local;    // of all lanes
  std::array<std::vector<Copy>, kLanes> copies;                   // not committed
  std::array<std::deque<std::vector<Copy>>, kLanes> copy_groups;  // committed, oldest first
  std::array<std::uint64_t, kLanes> copies_started{};             // in all
  std::array<std::uint64_t, kLanes> bulk_groups{};                // of bulk copies, committed
  Mask at_cluster_barrier = 0;      // lanes that have arrived and not waited
  Mask cluster_barrier_phase = 0;   // parity of the phase that they arrived in
  int stalled = 0;                  // rounds for which it gets no turn
  int refused_waits = 0;            // mbarrier.try_wait that returned false, since one was true
  std::uint64_t max_registers = 0;  // of a thread: setmaxnreg
  std::shared_ptr<WarpMatrices> matrices;  // if it has executed wgmma
  std::shared_ptr<WarpOrder> order;
  std::shared_ptr<Spin> spin;
  Tally* tallies = nullptr;  // by statement
};

struct Barrier {
  std::uint32_t arrived = 0;
  std::uint64_t phase = 0;
  bool all = true, any = false;
  std::uint32_t count = 0;
  bool last_all = true, last_any = false;  // of the phase before
  std::uint32_t last_count = 0;
};

struct Block {
  Dim index;
  std::vector<std::uint8_t> shared;
  std::array<Barrier, 16> barriers;
  std::vector<Warp> warps;
  std::uint32_t running = 0;                              // warps with threads
  std::shared_ptr<std::vector<WarpgroupLog>> warpgroups;  // if one has executed wgmma
  Cluster* cluster = nullptr;
  std::uint32_t rank = 0;    // in the cluster
  std::uint32_t number = 0;  // in the order of their start
  bool released = false;     // griddepcontrol.launch_dependents
  int multiprocessor = 0;
  // Objects in shared memory, by offset, as they were last written: memory that differs has been
  // overwritten (mbarrier.cpp).
  std::map<std::uint64_t, std::uint64_t> mbarriers;
  std::uint64_t free_registers = 0;  // given back by setmaxnreg.dec
  std::shared_ptr<BlockOrder> order;
};

// Blocks that run together and see the shared memory of each other. It ends as a whole.
struct Cluster {
  Dim index;
  std::vector<std::unique_ptr<Block>> blocks;  // by rank
  // barrier.cluster: it completes when all threads that have not exited have arrived.
  std::uint64_t threads = 0, arrived = 0;
  bool phase = false;         // parity
  std::uint32_t running = 0;  // blocks with threads
  std::shared_ptr<ClusterOrder> order;
};

}  // namespace ptx_machine
