// A machine that executes PTX: threads, warps and blocks of one kernel at a time, functionally.
//
// Every thread has its own program counter. Threads of a warp that are at the same statement are
// executed together, as a group; groups of one warp take turns. Statements that are .aligned or
// .sync wait until the threads that they name have met there.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "formats.h"
#include "module.h"
#include "room.h"
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

struct Allocation {
  std::uint64_t end;
  std::string name;
  std::vector<std::uint64_t> members;  // of multicast memory: addresses of what it stands for
  bool is_freed = false;               // known no more, but for messages
};
using Allocations = std::map<std::uint64_t, Allocation>;  // of global memory, by address

// Several threads may use it at a time: kernels of different streams run side by side.
class Machine {
 public:
  Machine();
  // Makes an allocation of global memory known, in place of those that it overlaps. Accesses outside
  // of allocations are errors; so are reads of what was never written, if nothing is `written` yet.
  void add_memory(std::uint64_t address, std::uint64_t bytes, std::string name,
                  bool written = true);
  // It is freed: accesses from now on are errors that name it.
  void remove_memory(std::uint64_t address);
  // Makes an address stand for the same offset of several allocations, for multimem only.
  void add_multicast(std::uint64_t address, std::uint64_t bytes,
                     std::vector<std::uint64_t> members);
  // What is known now. Kernels look it up again and again, so it is never changed while one has it.
  std::shared_ptr<const Allocations> memory() const;

  // Runs a kernel to its end. Throws PtxError.
  Counters launch(const std::shared_ptr<const Module>& module, const std::string& kernel,
                  const Launch& launch);
  // Decodes a kernel, once. Throws PtxError.
  const Program& program(const std::shared_ptr<const Module>& module, const std::string& kernel);

  // Modules that were launched from; they are kept.
  std::size_t modules();
  // Gives the variables of a module the values that they have when it is loaded.
  void reset(const std::shared_ptr<const Module>& module);

  Room& room() { return *room_; }

  // What orders accesses of its launches to global memory.
  GlobalOrder& order() const { return *order_; }

 private:
  // A module that was launched from. It is kept, because programs refer to it.
  struct Loaded {
    std::shared_ptr<const Module> module;
    std::map<std::string, std::vector<std::uint8_t>> variables;
    std::map<std::string, Program> programs;  // by kernel
  };
  Loaded& load(const std::shared_ptr<const Module>& module);
  const Program& program(Loaded& loaded, const Kernel& kernel);

  void add(std::uint64_t address, Allocation allocation);
  // The map to change and to put in place of memory_; call it under changing_. It is memory_ itself
  // if no kernel looks at that, so that a module of thousands of variables is loaded in linear time.
  std::shared_ptr<Allocations> changeable();

  mutable std::mutex changing_;  // guards memory_, but not what it points to
  std::shared_ptr<const Allocations> memory_ = std::make_shared<Allocations>();
  std::deque<std::uint64_t> freed_;  // the last ones, by address
  std::mutex loading_;               // guards loaded_; programs stay where they are
  std::map<const Module*, Loaded> loaded_;
  std::shared_ptr<GlobalOrder> order_;
  std::unique_ptr<Room> room_ = std::make_unique<Room>();
};

// What a handler sees: the warp that executes, and what it shares with others.
struct Context {
  const Allocations* memory;
  const Program& program;
  const Launch& launch;
  Counters& counters;
  Warp* warp = nullptr;
  Group* group = nullptr;
  Mask taken = 0;
  bool slept = false;      // the statement was nanosleep
  bool unchanged = false;  // the statement has stored what was there already
  bool outside = false;    // a statement waits for another launch
  std::array<Lanes, 8> scratch;
  Dim cluster{};                      // in blocks
  bool explicit_cluster = false;      // the launch or the kernel says how large
  Engine* engine = nullptr;           // performs what is asynchronous
  std::mt19937_64* random = nullptr;  // null without a seed
  Races* races = nullptr;             // finds accesses that are not ordered
  int multiprocessors = 1;
  int most_warps = 1;           // of a multiprocessor
  std::uint64_t bytes = 0;      // that the statement copies, where it does not say how many
  std::uint64_t releasing = 0;  // blocks that have released the next launch, or have ended
  std::uint64_t workspace = 0;  // of a grid whose blocks meet (Program::has_workspace)
  // The host's, when clocks were stopped; 0: they run.
  std::uint64_t stopped_at = 0, stopped_statements = 0;
  std::uint64_t vector = 0;  // number of the vector that is stored

  std::uint64_t statements() const {
    return stopped_at != 0 ? stopped_statements : counters.statements;
  }

  [[noreturn]] void fail(const Op& op, const std::string& why) const;
  [[noreturn]] void fail(const Op& op, int lane, const std::string& why) const;
  int thread_of(int lane) const { return warp->index * kLanes + lane; }
};

// Decodes a kernel. Throws PtxError for an instruction that is not known.
Program decode(const Module& module, const Kernel& kernel,
               const std::map<std::string, std::uint64_t>& addresses);

// -- operands, for handlers -------------------------------------------------------------------------

// Returns operand `number` for the lanes of a mask. A register that was never written is an error.
const Lanes& read(Context& c, const Op& op, int number, Mask mask);
Mask read_predicate(Context& c, const Op& op, const Value& value, Mask mask);
inline Lanes& write(Context& c, const Op& op, int number, Mask mask) {
  const Value& v = op.targets[number];
  if (v.kind != Value::Kind::kRegister) return c.scratch[7];  // the sink _
  c.warp->written[v.index] |= mask;
  return c.warp->registers[v.index];
}
inline void write_predicate(Context& c, const Value& v, Mask mask, Mask bits) {
  if (v.kind != Value::Kind::kPredicate) return;
  Mask& p = c.warp->predicates[v.index];
  p = (p & ~mask) | (bits & mask);
  c.warp->predicates_written[v.index] |= mask;
}

template <class T>
T get(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
std::uint64_t bits_of(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

// Returns the lowest bytes of a value, the others zero.
inline std::uint64_t cut(std::uint64_t bits, int bytes) {
  return bytes >= 8 ? bits : bits & ((std::uint64_t{1} << 8 * bytes) - 1);
}
// Returns the integer that a register holds as a value of this type.
std::int64_t integer(std::uint64_t bits, Type type);

// Returns what is wrong with [address, address + bytes): it must lie in one allocation. Empty: nothing.
std::string outside_global(const Allocations& memory, std::uint64_t address, std::uint64_t bytes);
// Where the bytes of an address lie: there, or at each member of multicast memory.
std::vector<std::uint64_t> places_of(const Allocations& memory, std::uint64_t address);
// Host address of `bytes` bytes at a generic address, for a lane. Throws PtxError.
std::uint8_t* at(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                 std::uint64_t bytes);

// Returns the address that operand `number`, [register + offset], names for a lane.
inline std::uint64_t address_of(const Op& op, int number, const Lanes& base, int lane) {
  return base[lane] + static_cast<std::uint64_t>(op.values[number].offset);
}

// -- clusters ---------------------------------------------------------------------------------------

// A shared::cluster address has 32 bits: an offset, and above it a rank in the cluster plus one. Zero
// stands for the block of the thread, so that a shared::cta address is one too.
constexpr int kRankShift = 24;
constexpr std::uint64_t kOffsetMask = (std::uint64_t{1} << kRankShift) - 1;

// A place in the shared memory of a block of the cluster.
struct Place {
  Block* block = nullptr;
  std::uint64_t offset = 0;
};

// Returns where an address lies that must be one of shared memory: of the thread's own block (kShared),
// or of any block of its cluster that has not ended (kCluster, kGeneric). Throws PtxError.
Place shared_place(Context& c, const Op& op, int lane, Space space, std::uint64_t address);
// The same for `bytes` bytes, which must lie in shared memory and be aligned to `align`.
Place shared_range(Context& c, const Op& op, int lane, Space space, std::uint64_t address,
                   std::uint64_t bytes, std::uint64_t align);

// Whether all lanes that a statement names, and that still run, are there. Others come later.
bool have_met(Context& c, const Op& op, Mask mask, Mask named);
// Takes lanes that exit out of the barrier of their cluster.
void leave_cluster(Warp& warp, Mask mask);
// Performs the copies (cp.async) of a lane that were started before the one of this number.
void perform_copies(const Context& c, Warp& warp, int lane, std::uint64_t before);

// -- half precision ---------------------------------------------------------------------------------

inline float float_of_half(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t size = std::uint32_t{bits & 0x7FFFu} << 13;
  // The exponent is 112 too small; a product with 2^112 is exact, also of subnormal numbers.
  const float value = std::bit_cast<float>(size) * 0x1p112f;
  const std::uint32_t special = size >= 0x0F800000 ? 0x7F800000 : 0;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | special | sign);
}
std::uint16_t half_of_float(float value);  // to nearest, ties to even
inline float float_of_bf16(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}
std::uint16_t bf16_of_float(float value);

// -- families of instructions. Each returns whether it knows the statement, and then fills the op. ----

using Decoder = bool (*)(const Statement&, Op&);
bool decode_scalar(const Statement& s, Op& op);
bool decode_bits(const Statement& s, Op& op);
bool decode_float(const Statement& s, Op& op);
bool decode_convert(const Statement& s, Op& op);
bool decode_memory(const Statement& s, Op& op);
bool decode_warp(const Statement& s, Op& op);
bool decode_matrix(const Statement& s, Op& op);
bool decode_cluster(const Statement& s, Op& op);
bool decode_mbarrier(const Statement& s, Op& op);
bool decode_bulk(const Statement& s, Op& op);
bool decode_tensor(const Statement& s, Op& op);

// Whether a statement has no modifiers but these.
bool has_no_other(const Statement& s, std::initializer_list<const char*> known);
bool decode_wgmma(const Statement& s, Op& op);
bool decode_wmma(const Statement& s, Op& op);
bool decode_multimem(const Statement& s, Op& op);
bool decode_fence(const Statement& s, Op& op);
bool decode_call(const Statement& s, Op& op);
bool decode_extended(const Statement& s, Op& op);

// Whether others can see what a statement does. Threads that only wait execute none of these.
bool acts(const Statement& s);
// Whether it may change memory, a thread's own included.
bool changes(const Statement& s);
// "12 bytes behind the start of NAME".
std::string place_of(const Allocations& memory, std::uint64_t address);
// Returns a line for each group of threads: where it is, and what it waits for. Warps, and blocks, of which
// the same is true share a line.
std::string describe_standing(const Context& c,
                              const std::vector<std::unique_ptr<Cluster>>& clusters);

// Checks what a statement does to registers that wgmma has in use. For warps with `matrices`.
void check_matrix_registers(Context& c, const Op& op);
// Checks that a warp that ends has executed what its warpgroup has. For blocks with `warpgroups`.
void leave_warpgroup(Context& c, const Warp& warp);

// How a load, a store or an atomic takes part in the order of memory.
MemoryOrder memory_order_of(const Statement& s);
// Whether a statement has a modifier.
bool has(const Statement& s, const char* modifier);
// Whether all its modifiers but types are in a list, which has a space on both sides of each.
bool has_only(const Statement& s, const char* modifiers);
// .rn, .rz, .rm, .rp or .rna; without them to nearest.
Rounding rounding_of(const Statement& s);
// The comparison that a modifier of setp names.
bool read_comparison(const std::string& name, Comparison& found);
// Writes both targets of setp, combined with its third operand if op.number says so (and, or, xor).
void combine_predicates(Context& c, const Op& op, Mask mask, Mask first, Mask second);
// The state space that a statement names, or kGeneric.
Space space_of(const Statement& s);
// The last modifier that is a type, or kNone.
Type last_type(const Statement& s);

}  // namespace ptx_machine
