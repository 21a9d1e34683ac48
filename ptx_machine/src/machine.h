// A machine that executes PTX: threads, warps and blocks of one kernel at a time, functionally.
//
// Every thread has its own program counter. Threads of a warp that are at the same statement are
// executed together, as a group; groups of one warp take turns. Statements that are .aligned or
// .sync wait until the threads that they name have met there.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "room.h"
#include "state.h"

namespace ptx_machine {

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

// Whether an operand is a register of 128 bits, or {low, high}: two words.
inline bool is_pair(const Operand& o) {
  return o.kind == Operand::Kind::kList && o.parts.size() == 2;
}

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
