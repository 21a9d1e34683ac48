#include "resources.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "machine.h"

namespace ptx_machine {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMostOfThread = 255;
constexpr std::uint64_t kRegisterUnit = 256;  // what a warp is allotted is a multiple of this
constexpr std::uint64_t kWarpUnit = 4;        // a warp for each of four parts of a multiprocessor
constexpr std::uint64_t kSharedUnit = 128;    // bytes
// What ptxas uses beside the values of the PTX, as for parts of addresses.
constexpr std::uint64_t kBesides = 6;
constexpr std::uint64_t kLeastOfThread = 16;

std::uint64_t rounded_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// 132 of the 144 multiprocessors of a GH100 are in use, and which ones differs between GPUs. Assumed here:
// GPCs of 18 and of 16, as many as make 132. So clusters of 16 blocks that need a multiprocessor each run
// on 128 of them. That kernels of A100 have no clusters makes its GPCs (seven, of up to 16) of no account.
const std::vector<DeviceModel>& models() {
  static const std::vector<DeviceModel> all = [] {
    DeviceModel a100{"A100", 80, 108, {16, 16, 16, 16, 16, 14, 14}, 164 * kKiB, 163 * kKiB};
    DeviceModel h200{"H200", 90, 132, {18, 18, 16, 16, 16, 16, 16, 16}, 228 * kKiB, 227 * kKiB};
    return std::vector<DeviceModel>{a100, h200};
  }();
  return all;
}

// Sets of registers, by word of 64.
using Bits = std::vector<std::uint64_t>;

void set(Bits& bits, int index, bool on) {
  const std::uint64_t bit = std::uint64_t{1} << (index % 64);
  bits[index / 64] = on ? bits[index / 64] | bit : bits[index / 64] & ~bit;
}

bool is_in(const Bits& bits, int index) { return (bits[index / 64] >> (index % 64) & 1) != 0; }

class Liveness {
 public:
  explicit Liveness(const Program& program)
      : program_(program), words_((program.kernel->registers.size() + 63) / 64) {
    for (std::size_t i = 0; i < program.kernel->registers.size(); ++i) {
      wide_.resize(words_);
      if (bytes_of(program.kernel->registers[i].type) > 4) set(wide_, static_cast<int>(i), true);
    }
    before_.assign(program.ops.size() + 1, Bits(words_));
    find_free();
  }

  std::uint64_t most() {
    for (bool changed = true; changed;) {
      changed = false;
      for (int pc = static_cast<int>(program_.ops.size()) - 1; pc >= 0; --pc) changed |= visit(pc);
    }
    std::uint64_t most = 0;
    for (const Bits& alive : before_) most = std::max(most, count(alive));
    return most;
  }

 private:
  bool visit(int pc) {
    const Op& op = program_.ops[pc];
    const std::string& name = op.statement->opcode[0];
    const bool guarded = op.guard.kind == Value::Kind::kPredicate;
    const bool ends = name == "ret" || name == "exit", jumps = name == "bra";
    Bits alive(words_);
    if (!ends && !(jumps && !guarded)) merge(alive, before_[pc + 1]);
    if (ends && guarded) merge(alive, before_[pc + 1]);
    if (jumps) merge(alive, before_[op.label]);
    const auto mark = [&](const std::vector<Value>& values, bool on) {
      for (const Value& v : values) {
        if (v.kind != Value::Kind::kRegister || is_in(free_, v.index)) continue;
        set(alive, v.index, on);
      }
    };
    // What wgmma adds to is alive before it too; it is told by its type of statement.
    const bool adds = name == "wgmma";
    if (!guarded && !adds) mark(op.targets, false);
    if (adds) mark(op.targets, true);
    mark(op.values, true);
    if (alive == before_[pc]) return false;
    before_[pc] = std::move(alive);
    return true;
  }

  // Values that instructions read from constant memory or make anew: parameters, constants, special
  // registers, and what is one of them converted.
  void find_free() {
    free_.resize(words_);
    std::vector<int> definitions(program_.kernel->registers.size());
    for (const Op& op : program_.ops) {
      for (const Value& v : op.targets) {
        if (v.kind == Value::Kind::kRegister) ++definitions[v.index];
      }
    }
    for (const Op& op : program_.ops) {
      const std::string& name = op.statement->opcode[0];
      const bool is_copy = name == "mov" || name == "cvta" || name == "cvt";
      const bool is_param = name == "ld" && has(*op.statement, "param");
      if (op.guard.kind != Value::Kind::kNone || (!is_copy && !is_param)) continue;
      const bool sources = std::all_of(op.values.begin(), op.values.end(), [&](const Value& v) {
        return v.kind != Value::Kind::kPredicate &&
               (v.kind != Value::Kind::kRegister || is_in(free_, v.index));
      });
      for (const Value& v : op.targets) {
        const bool once = v.kind == Value::Kind::kRegister && definitions[v.index] == 1;
        if (sources && once) set(free_, v.index, true);
      }
    }
  }

  static void merge(Bits& into, const Bits& from) {
    for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
  }

  std::uint64_t count(const Bits& alive) const {
    std::uint64_t found = 0;
    for (std::size_t i = 0; i < alive.size(); ++i) {
      found +=
          static_cast<std::uint64_t>(std::popcount(alive[i]) + std::popcount(alive[i] & wide_[i]));
    }
    return found;
  }

  const Program& program_;
  std::size_t words_;
  Bits free_;                 // registers that take no room
  Bits wide_;                 // registers of 64 bits, which count twice
  std::vector<Bits> before_;  // what is alive before a statement
};

}  // namespace

const DeviceModel& model_named(const std::string& name) {
  for (const DeviceModel& model : models()) {
    if (name == model.name) return model;
  }
  throw PtxError("no device is called " + name + "; there are A100 and H200");
}

std::vector<int> groups_of(const DeviceModel& model, int count) {
  if (count == model.multiprocessors) return model.groups;
  const int largest = *std::max_element(model.groups.begin(), model.groups.end());
  std::vector<int> groups(count / largest, largest);
  if (count % largest != 0) groups.push_back(count % largest);
  return groups;
}

std::uint64_t most_registers(const Kernel& kernel, std::uint64_t launched) {
  if (kernel.max_registers > 0) return static_cast<std::uint64_t>(kernel.max_registers);
  const auto threads =
      kernel.max_threads > 0 ? static_cast<std::uint64_t>(kernel.max_threads) : launched;
  const auto blocks = static_cast<std::uint64_t>(std::max(1, kernel.min_blocks));
  const std::uint64_t fair = (64 * kKiB) / (rounded_up(threads, kWarpUnit * kLanes) * blocks);
  return std::min(kMostOfThread, fair) / 8 * 8;
}

std::uint64_t live_registers(const Program& program) { return Liveness(program).most(); }

std::uint64_t registers_of_thread(const Program& program, std::uint64_t threads) {
  const std::uint64_t most = most_registers(*program.kernel, threads);
  if (program.hands_registers) return most;
  const std::uint64_t needed = program.live + kBesides;
  return std::min(most, std::max(kLeastOfThread, rounded_up(needed, 8)));
}

Footprint footprint(const DeviceModel& model, const Program& program, std::uint64_t threads,
                    std::uint64_t dynamic_shared) {
  const std::uint64_t warps = (threads + kLanes - 1) / kLanes;
  const std::uint64_t of_warp =
      rounded_up(registers_of_thread(program, threads) * kLanes, kRegisterUnit);
  return {warps * kLanes, rounded_up(warps, kWarpUnit) * of_warp,
          rounded_up(program.shared_bytes + dynamic_shared, kSharedUnit) + model.reserved};
}

int blocks_that_fit(const DeviceModel& model, const Footprint& block) {
  return static_cast<int>(
      std::min({model.blocks, model.threads / block.threads, model.registers / block.registers,
                model.shared / block.shared}));
}

std::string too_large(const DeviceModel& model, const Footprint& block) {
  if (blocks_that_fit(model, block) > 0) return "";
  return "a block needs " + describe(block) + "; a multiprocessor of " + model.name + " has " +
         std::to_string(model.registers) + " registers and " + std::to_string(model.shared) +
         " bytes of shared memory";
}

std::string describe(const Footprint& block) {
  return std::to_string(block.threads) + " threads, " + std::to_string(block.registers) +
         " registers and " + std::to_string(block.shared) + " bytes of shared memory";
}

}  // namespace ptx_machine
