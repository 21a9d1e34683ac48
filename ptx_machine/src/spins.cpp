#include "spins.h"

#include <algorithm>

#include "races.h"

namespace ptx_machine {
namespace {

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

std::uint64_t hash_of(std::uint64_t place, std::uint64_t value) {
  return mixed(mixed(place) ^ value);
}

bool polls(const Op& op) {
  const std::string& name = op.statement->opcode[0];
  if (name == "mbarrier") return op.statement->opcode[1] == "test_wait";
  const bool loads = name == "ld" || name == "atom";
  return loads && op.space != Space::kParam && op.space != Space::kLocal;
}

}  // namespace

Spin& Spins::spin_of(Warp& warp) const {
  if (warp.spin == nullptr) warp.spin = std::make_shared<Spin>();
  Spin& spin = *warp.spin;
  if (spin.watch != watches_) {
    spin = {};
    spin.watch = watches_;
    for (Group& group : warp.groups) group.polled = nullptr;
  }
  return spin;
}

// Adds the targets of a statement to the hashes of lanes, or takes them out.
void Spins::fold(Context& c, const Op& op, Mask mask) {
  Spin& spin = spin_of(*c.warp);
  for (const Value& v : op.targets) {
    if (v.kind == Value::Kind::kRegister) {
      const Lanes& all = c.warp->registers[v.index];
      each(mask, [&](int l) { spin.state[l] ^= hash_of(2 * v.index, all[l]); });
    } else if (v.kind == Value::Kind::kPredicate) {
      const Mask bits = c.warp->predicates[v.index];
      each(mask, [&](int l) { spin.state[l] ^= hash_of(2 * v.index + 1, bits >> l & 1); });
    }
  }
}

void Spins::after(Context& c, const Op& op, Mask mask) {
  fold(c, op, mask);
  // A loop may look at other words, too: the one that it acquires is what it waits for.
  const Op*& polled = c.group->polled;
  if (polls(op) && (polled == nullptr || op.order.acquires || !polled->order.acquires))
    polled = &op;
}

void Spins::loop(Warp& warp, int from, Mask mask) {
  Spin& spin = spin_of(warp);
  std::uint64_t now = warp.carry & mask;
  each(mask, [&](int l) { now += mixed(spin.state[l] + static_cast<std::uint64_t>(l)); });
  const auto same = std::find_if(spin.loops.begin(), spin.loops.end(), [&](const Spin::Loop& one) {
    return one.from == from && one.mask == mask;
  });
  if (same == spin.loops.end()) {
    spin.loops.push_back({from, mask, now});
    return;
  }
  if (same->seen == now) {
    spin.recurring |= mask;
  } else if (++same->times == same->power) {
    same->seen = now;
    same->times = 0;
    same->power *= 2;
  }
}

bool Spins::is_idle(const Warp& warp) const {
  const bool watched = warp.spin != nullptr && warp.spin->watch == watches_;
  const Mask recurring = watched ? warp.spin->recurring : 0;
  return std::all_of(warp.groups.begin(), warp.groups.end(), [&](const Group& group) {
    return group.waits || (group.mask & ~recurring) == 0;
  });
}

// -- reports -------------------------------------------------------------------------------------------

namespace {

// The sign of a comparison of setp, or of its opposite.
const char* sign_of(const std::string& name, bool holds) {
  if (name == "eq") return holds ? "==" : "!=";
  if (name == "ne") return holds ? "!=" : "==";
  if (name == "lt" || name == "lo") return holds ? "<" : ">=";
  if (name == "le" || name == "ls") return holds ? "<=" : ">";
  if (name == "gt" || name == "hi") return holds ? ">" : "<=";
  if (name == "ge" || name == "hs") return holds ? ">=" : "<";
  return nullptr;
}

bool is_register(const Value& v, int index) {
  return v.kind == Value::Kind::kRegister && v.index == index;
}

std::string number(const Warp& warp, const Value& v, int lane, Type type) {
  if (v.kind == Value::Kind::kConstant) return std::to_string(integer((*v.constant)[lane], type));
  if (v.kind != Value::Kind::kRegister || (warp.written[v.index] >> lane & 1) == 0) return "?";
  return std::to_string(integer(warp.registers[v.index][lane], type));
}

// What the comparison behind a load asks of the value, as text; empty: that is not found.
std::string expectation(const Context& c, const Warp& warp, int lane, const Op& load) {
  constexpr int kFar = 64;
  const std::vector<Op>& ops = c.program.ops;
  const int first = static_cast<int>(&load - ops.data());
  if (load.targets.empty() || load.targets[0].kind != Value::Kind::kRegister) return "";
  int value = load.targets[0].index, predicate = -1;
  std::string text = "value";
  std::string comparison, other;
  for (int i = first + 1; i < std::min(first + kFar, static_cast<int>(ops.size())); ++i) {
    const Op& op = ops[i];
    const std::string& name = op.statement->opcode[0];
    if (predicate >= 0) {
      if (name != "bra" || op.guard.kind != Value::Kind::kPredicate) continue;
      if (op.guard.index != predicate) continue;
      const bool goes_back = op.label <= first;
      const char* sign = sign_of(comparison, goes_back == op.guard.negated);
      return sign == nullptr ? "" : text + " " + sign + " " + other;
    }
    if (op.values.empty() || !is_register(op.values[0], value)) continue;
    if (name == "setp" && op.values.size() == 2) {
      predicate = op.targets[0].index;
      comparison = op.statement->opcode[1];
      other = number(warp, op.values[1], lane, op.type);
    } else if ((name == "sub" || name == "add" || name == "and") && op.values.size() == 2) {
      const char* sign = name == "sub" ? " - " : name == "add" ? " + " : " & ";
      text = "(" + text + sign + number(warp, op.values[1], lane, op.type) + ")";
      value = op.targets[0].index;
    } else if (name == "mov" || name == "cvt") {
      value = op.targets[0].index;
    }
  }
  return "";
}

}  // namespace

std::string describe_poll(const Context& c, const Warp& warp, const Group& group, const Op& load) {
  const int lane = std::countr_zero(group.mask);
  if (load.values.empty()) return "";
  const Value& base = load.values[0];
  std::uint64_t address = static_cast<std::uint64_t>(base.offset);
  if (base.kind == Value::Kind::kRegister) {
    address += warp.registers[base.index][lane];
  } else if (base.kind == Value::Kind::kConstant) {
    address = (*base.constant)[lane];
  }
  const auto bytes = static_cast<std::uint64_t>(bytes_of(load.type));
  const bool shared = load.space == Space::kShared || load.space == Space::kCluster ||
                      (load.space == Space::kGeneric && address >= kSharedWindow);
  std::uint64_t seen = 0;
  std::string text = "a change of " + std::to_string(bytes) + " bytes at ";
  const std::uint8_t* from = nullptr;
  if (shared) {
    const std::uint64_t offset = address & kOffsetMask;
    text += "offset " + std::to_string(offset) + " of shared memory";
    const bool own = (address & 0xFFFFFFFF) <= kOffsetMask;
    if (own && offset + bytes <= warp.block->shared.size())
      from = warp.block->shared.data() + offset;
  } else {
    text += place_of(*c.memory, address);
    if (outside_global(*c.memory, address, bytes).empty())
      from = reinterpret_cast<const std::uint8_t*>(address);
  }
  if (from != nullptr) {
    std::memcpy(&seen, from, std::min<std::uint64_t>(bytes, sizeof(seen)));
    text += ", seen: " + std::to_string(seen);
  }
  const std::string expected = expectation(c, warp, lane, load);
  return expected.empty() ? text : text + ", expected: " + expected;
}

}  // namespace ptx_machine
