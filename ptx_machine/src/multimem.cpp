// multimem: one address that stands for the same offset of several allocations (NVLink SHARP).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include "machine.h"
#include "races.h"

namespace ptx_machine {
namespace {

enum Action { kAdd, kMin, kMax, kAnd, kOr, kXor };
enum Kind { kLoad, kStore, kReduce };

// Addresses of the members' memory that a multicast address stands for.
std::vector<std::uint8_t*> members_at(Context& c, const Op& op, int lane, std::uint64_t address,
                                      std::uint64_t bytes) {
  if (address % bytes != 0) {
    c.fail(op, lane,
           "address " + std::to_string(address) + " is not aligned to " + std::to_string(bytes) +
               " bytes");
  }
  auto found = c.memory->upper_bound(address);
  if (found == c.memory->begin() || (--found)->second.members.empty() ||
      address + bytes > found->second.end) {
    c.fail(op, lane,
           "access of " + std::to_string(bytes) + " bytes at an address that is not multicast");
  }
  std::vector<std::uint8_t*> members;
  for (const std::uint64_t member : found->second.members) {
    const std::uint64_t at_member = member + (address - found->first);
    members.push_back(at(c, op, lane, Space::kGlobal, at_member, bytes));
  }
  return members;
}

template <class T>
T combined(int action, T a, T b) {
  switch (action) {
    case kMin:
      return std::min(a, b);
    case kMax:
      return std::max(a, b);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (action == kAnd) return a & b;
    if (action == kOr) return a | b;
    if (action == kXor) return a ^ b;
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  } else {
    return a + b;
  }
}

// min and max of floats: one NaN gives the other operand, -0 is less than +0.
float extreme(int action, float a, float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) == (action == kMin) ? a : b;
  return action == kMin ? std::min(a, b) : std::max(a, b);
}

float widen(Type type, std::uint64_t bits, int part) {
  const auto half = static_cast<std::uint16_t>(bits >> (16 * part));
  return type == Type::kBf16 || type == Type::kBf16x2 ? float_of_bf16(half) : float_of_half(half);
}
std::uint64_t narrow(Type type, float value, int part) {
  const bool bf16 = type == Type::kBf16 || type == Type::kBf16x2;
  return std::uint64_t{bf16 ? bf16_of_float(value) : half_of_float(value)} << (16 * part);
}
int halves_of(Type type) {
  if (type == Type::kF16 || type == Type::kBf16) return 1;
  return type == Type::kF16x2 || type == Type::kBf16x2 ? 2 : 0;
}

std::uint64_t combined_bits(const Op& op, std::uint64_t a, std::uint64_t b) {
  const int halves = halves_of(op.type);
  std::uint64_t out = 0;
  for (int part = 0; part < halves; ++part) {
    const float x = widen(op.type, a, part), y = widen(op.type, b, part);
    out |= narrow(op.type, op.number == kAdd ? x + y : extreme(op.number, x, y), part);
  }
  if (halves != 0) return out;
  const auto as = [&](auto t) {
    using T = decltype(t);
    return bits_of(combined<T>(op.number, get<T>(a), get<T>(b)));
  };
  switch (op.type) {
    case Type::kF32:
      return as(float{});
    case Type::kF64:
      return as(double{});
    case Type::kS32:
      return as(std::int32_t{});
    case Type::kS64:
      return as(std::int64_t{});
    case Type::kB32:
    case Type::kU32:
      return as(std::uint32_t{});
    default:
      return as(std::uint64_t{});
  }
}

// Calls f with a reference to an element that other threads of the host may access.
template <class F>
void with_cell(std::uint8_t* where, int bytes, F&& f) {
  if (bytes == 2) return f(std::atomic_ref(*reinterpret_cast<std::uint16_t*>(where)));
  if (bytes == 4) return f(std::atomic_ref(*reinterpret_cast<std::uint32_t*>(where)));
  return f(std::atomic_ref(*reinterpret_cast<std::uint64_t*>(where)));
}

std::uint64_t load(std::uint8_t* from, int bytes) {
  std::uint64_t bits = 0;
  with_cell(from, bytes, [&](auto cell) { bits = cell.load(); });
  return bits;
}

// A sum in float over the members, rounded once: .acc::f32 of 16-bit floats.
std::uint64_t sum_in_float(const Op& op, const std::vector<std::uint8_t*>& members, int offset) {
  std::uint64_t out = 0;
  for (int part = 0; part < halves_of(op.type); ++part) {
    float sum = 0;
    for (std::size_t i = 0; i < members.size(); ++i) {
      const float x = widen(op.type, load(members[i] + offset, bytes_of(op.type)), part);
      sum = i == 0 ? x : sum + x;
    }
    out |= narrow(op.type, sum, part);
  }
  return out;
}

std::uint64_t address_of(const Op& op, const Lanes& base, int lane) {
  return base[lane] + static_cast<std::uint64_t>(op.values[0].offset);
}

// In the order of the members. Switches may sum in another order, and wider.
Outcome load_reduce(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type), count = static_cast<int>(op.targets.size());
  each(mask, [&](int l) {
    const auto members = members_at(c, op, l, address_of(op, base, l), bytes * count);
    for (int i = 0; i < count; ++i) {
      for (std::uint8_t* member : members) {
        if (!op.order.strong) {
          note_member(c, op, l, member + i * bytes, bytes, Use::kRead);
          continue;
        }
        const auto place = reinterpret_cast<std::uint64_t>(member + i * bytes);
        StrongAccess access(c, op, l, Space::kGlobal, place, bytes, Use::kRead, true);
        access.loaded(load(member + i * bytes, bytes));
      }
      std::uint64_t bits = 0;
      if (op.flag && op.number == kAdd) {
        bits = sum_in_float(op, members, i * bytes);
      } else {
        bits = load(members[0] + i * bytes, bytes);
        for (std::size_t m = 1; m < members.size(); ++m) {
          bits = combined_bits(op, bits, load(members[m] + i * bytes, bytes));
        }
      }
      write(c, op, i, Mask{1} << l)[l] = bits;
    }
  });
  return Outcome::kNext;
}

template <Kind kKind>
Outcome change(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type), count = static_cast<int>(op.values.size()) - 1;
  c.vector = 0;
  each(mask, [&](int l) {
    const auto members = members_at(c, op, l, address_of(op, base, l), bytes * count);
    for (int i = 0; i < count; ++i) {
      const std::uint64_t bits = read(c, op, 1 + i, Mask{1} << l)[l];
      for (std::uint8_t* member : members) {
        const Use use = kKind == kStore ? Use::kWrite : Use::kAtomic;
        const auto place = reinterpret_cast<std::uint64_t>(member + i * bytes);
        std::optional<StrongAccess> access;
        if (op.order.strong) {
          access.emplace(c, op, l, Space::kGlobal, place, bytes, use, true);
        } else {
          note_member(c, op, l, member + i * bytes, bytes, use);
        }
        const std::uint64_t before = access ? load(member + i * bytes, bytes) : 0;
        with_cell(member + i * bytes, bytes, [&](auto cell) {
          using T = typename decltype(cell)::value_type;
          if constexpr (kKind == kStore) return cell.store(static_cast<T>(bits));
          T old = cell.load();
          while (!cell.compare_exchange_weak(old, static_cast<T>(combined_bits(op, old, bits)))) {
          }
        });
        if (!access) continue;
        access->settle(before);
        access->stored(kKind == kStore ? cut(bits, bytes) : combined_bits(op, before, bits));
      }
    }
  });
  return Outcome::kNext;
}

// A scope stands behind an order; .weak has none.
bool has_order(const Statement& s) {
  const bool ordered = has(s, "relaxed") || has(s, "acquire") || has(s, "release");
  const bool scoped = has(s, "cta") || has(s, "cluster") || has(s, "gpu") || has(s, "sys");
  return !(has(s, "weak") && ordered) && (!scoped || ordered);
}

// PTX ISA, multimem: which vectors and operations a type has.
bool has_vector(Type type, int count) {
  if (halves_of(type) == 1) return count == 2 || count == 4 || count == 8;
  if (halves_of(type) == 2 || type == Type::kF32) return count == 1 || count == 2 || count == 4;
  return count == 1;
}

bool has_action(Type type, int action, Kind kind) {
  const bool is_bits = type == Type::kB32 || type == Type::kB64;
  if (action == kAnd || action == kOr || action == kXor) return is_bits;
  if (is_bits) return false;
  if (action == kAdd) return type != Type::kS64;
  return is_float(type) ? halves_of(type) > 0 && kind == kLoad : true;
}

bool is_element(Type type) {
  return bytes_of(type) == 4 || bytes_of(type) == 8 || halves_of(type) == 1;
}

}  // namespace

bool decode_multimem(const Statement& s, Op& op) {
  if (s.opcode[0] != "multimem" || s.opcode.size() < 3) return false;
  const std::string& what = s.opcode[1];
  const Kind kind = what == "ld_reduce" ? kLoad : what == "st" ? kStore : kReduce;
  if (kind == kReduce && what != "red") return false;
  std::string allowed = " " + what + " global relaxed cta cluster gpu sys v2 v4 v8 ";
  allowed += kind == kLoad    ? "acquire weak acc::f32 "
             : kind == kStore ? "release weak "
                              : "release ";
  if (kind != kStore) allowed += "add min max and or xor ";
  if (!has_only(s, allowed.c_str()) || !has_order(s) || !is_element(op.type)) return false;
  const int count = has(s, "v2") ? 2 : has(s, "v4") ? 4 : has(s, "v8") ? 8 : 1;
  const std::size_t list = kind == kLoad ? 0 : 1;
  if (s.operands.size() != 2) return false;
  const Operand& values = s.operands[list];
  const bool is_list = values.kind == Operand::Kind::kList;
  if (is_list != (count > 1) || (is_list && values.parts.size() != std::size_t(count)))
    return false;
  if (!has_vector(op.type, count)) return false;
  op.written = kind == kLoad ? 1 : 0;
  op.order = memory_order_of(s);
  if (kind == kReduce) op.order.strong = true;
  op.flag = has(s, "acc::f32");
  if (op.flag && (halves_of(op.type) == 0 || !has(s, "add"))) return false;
  constexpr const char* kActions[] = {"add", "min", "max", "and", "or", "xor"};
  op.number = -1;
  for (int i = 0; i < 6; ++i) {
    if (has(s, kActions[i])) op.number = i;
  }
  if (kind != kStore && (op.number < 0 || !has_action(op.type, op.number, kind))) return false;
  op.handler = kind == kLoad ? load_reduce : kind == kStore ? change<kStore> : change<kReduce>;
  return true;
}

}  // namespace ptx_machine
