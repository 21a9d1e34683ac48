// Integers of more than one register: sums with a carry. Sums of products of bytes, products of 24 bits.
// Rarer fields of bits.
#include <bit>
#include <type_traits>

#include "machine.h"

namespace ptx_machine {
namespace {

enum Part { kWhole, kLow, kHigh };  // of the first two operands: their sum; parts of their product

// The condition code of PTX has one bit of each thread. A difference is the sum with the complement and 1,
// so the bit is one where nothing is borrowed. PTX calls it the borrow, which is the same for subc behind
// sub; the division of CUDA's own library adds it behind a difference.
Mask read_carry(Context& c, const Op& op, Mask mask) {
  const Mask missing = mask & ~c.warp->carry_written;
  if (missing != 0)
    c.fail(op, std::countr_zero(missing), "the carry is read but was never written");
  return c.warp->carry;
}

template <class T, int kPart>
T first_term(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  if constexpr (kPart == kWhole) return a;
  const Wide product = static_cast<Wide>(a) * static_cast<Wide>(b);
  return static_cast<T>(kPart == kHigh ? product >> (8 * sizeof(T)) : product);
}

// add, sub, mad with .cc (op.number: writes the carry), and addc, subc, madc (op.flag: reads it).
template <class T, int kPart, bool kSubtracts>
Outcome add_with_carry(Context& c, const Op& op, Mask mask) {
  using Bits = std::make_unsigned_t<T>;
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  const Lanes& e = read(c, op, kPart == kWhole ? 1 : 2, mask);
  const Mask before = op.flag ? read_carry(c, op, mask) : 0;
  Lanes& d = write(c, op, 0, mask);
  Mask after = 0;
  each(mask, [&](int l) {
    const Bits x = static_cast<Bits>(first_term<T, kPart>(get<T>(a[l]), get<T>(b[l])));
    const Bits y = static_cast<Bits>(kSubtracts ? ~get<Bits>(e[l]) : get<Bits>(e[l]));
    const Bits carry = op.flag ? before >> l & 1 : kSubtracts;
    const unsigned __int128 wide = static_cast<unsigned __int128>(x) + y + carry;
    d[l] = bits_of(static_cast<Bits>(wide));
    after |= Mask{(wide >> (8 * sizeof(T)) & 1) != 0} << l;
  });
  if (op.number != 0) {
    c.warp->carry = (c.warp->carry & ~mask) | after;
    c.warp->carry_written |= mask;
  }
  return Outcome::kNext;
}

template <int kPart, bool kSubtracts>
Handler of_type(Type type) {
  switch (type) {
    case Type::kU32:
      return add_with_carry<std::uint32_t, kPart, kSubtracts>;
    case Type::kS32:
      return add_with_carry<std::int32_t, kPart, kSubtracts>;
    case Type::kU64:
      return add_with_carry<std::uint64_t, kPart, kSubtracts>;
    case Type::kS64:
      return add_with_carry<std::int64_t, kPart, kSubtracts>;
    default:
      return nullptr;
  }
}

// Names: {"addc", "cc", "u32"}, {"mad", "lo", "cc", "s64"}.
bool decode_carry(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  const bool writes = has(s, "cc"), product = name.starts_with("mad");
  op.flag = name == "addc" || name == "subc" || name == "madc";
  if (!op.flag && !(writes && (name == "add" || name == "sub" || name == "mad"))) return false;
  op.number = writes;
  const bool low = has(s, "lo"), high = has(s, "hi");
  if (s.opcode.size() != 2u + writes + product || product != (low || high)) return false;
  if (name.starts_with("sub")) op.handler = of_type<kWhole, true>(op.type);
  if (name.starts_with("add")) op.handler = of_type<kWhole, false>(op.type);
  if (product) op.handler = low ? of_type<kLow, false>(op.type) : of_type<kHigh, false>(op.type);
  return op.handler != nullptr;
}

std::int64_t part_of(std::uint64_t bits, int number, int bytes, bool is_signed) {
  const int shift = 64 - 8 * bytes;
  const std::uint64_t raised = bits >> (8 * bytes * number) << shift;
  return is_signed ? static_cast<std::int64_t>(raised) >> shift
                   : static_cast<std::int64_t>(raised >> shift);
}

// dp4a: four bytes of each; dp2a: two halves of the first, and two bytes of the second from op.position.
Outcome dot(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask), &e = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  const int bytes = 4 / op.number;
  const bool signs = is_signed(op.from), other_signs = is_signed(op.type);
  each(mask, [&](int l) {
    std::uint64_t sum = e[l];
    for (int i = 0; i < op.number; ++i) {
      sum += static_cast<std::uint64_t>(part_of(a[l], i, bytes, signs) *
                                        part_of(b[l], op.position + i, 1, other_signs));
    }
    d[l] = cut(sum, 4);
  });
  return Outcome::kNext;
}

bool decode_dot(const Statement& s, Op& op) {
  const bool four = s.opcode[0] == "dp4a", two = s.opcode[0] == "dp2a";
  if (s.opcode.size() != (two ? 4 : 3) || (!four && !two)) return false;
  if (two && s.opcode[1] != "lo" && s.opcode[1] != "hi") return false;
  op.number = four ? 4 : 2;
  op.position = two && s.opcode[1] == "hi" ? 2 : 0;
  op.from = type_of(s.opcode[s.opcode.size() - 2]);
  op.handler = dot;
  const auto known = [](Type type) { return type == Type::kU32 || type == Type::kS32; };
  return known(op.from) && known(op.type);
}

// mul24, mad24: of the low 24 bits. The product has 48 bits: .lo takes its lowest 32, .hi (op.flag) its
// highest.
template <bool kAdds>
Outcome multiply_24(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  const Lanes& e = kAdds ? read(c, op, 2, mask) : a;
  Lanes& d = write(c, op, 0, mask);
  const auto low = [&](std::uint64_t bits) { return part_of(bits, 0, 3, is_signed(op.type)); };
  each(mask, [&](int l) {
    const std::int64_t product = low(a[l]) * low(b[l]) >> (op.flag ? 16 : 0);
    d[l] = cut(static_cast<std::uint64_t>(product) + (kAdds ? e[l] : 0), 4);
  });
  return Outcome::kNext;
}

bool decode_24(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name != "mul24" && name != "mad24") return false;
  op.flag = has(s, "hi");
  op.handler = name == "mad24" ? multiply_24<true> : multiply_24<false>;
  const bool known = op.type == Type::kU32 || op.type == Type::kS32;
  return s.opcode.size() == 3 && (op.flag || has(s, "lo")) && known;
}

// -- bits ----------------------------------------------------------------------------------------------

// bfind: the highest bit that is one, or of a negative number zero; with .shiftamt (op.flag) how far it is
// from the top.
template <class T>
Outcome find_bit(Context& c, const Op& op, Mask mask) {
  using Bits = std::make_unsigned_t<T>;
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const T value = get<T>(a[l]);
    const auto bits = static_cast<Bits>(std::is_signed_v<T> && value < 0 ? ~value : value);
    const int above = std::countl_zero(bits), last = 8 * sizeof(T) - 1;
    d[l] = bits == 0 ? 0xFFFFFFFF : static_cast<std::uint64_t>(op.flag ? above : last - above);
  });
  return Outcome::kNext;
}

Handler find_bit_of(Type type) {
  switch (type) {
    case Type::kU32:
      return find_bit<std::uint32_t>;
    case Type::kS32:
      return find_bit<std::int32_t>;
    case Type::kU64:
      return find_bit<std::uint64_t>;
    case Type::kS64:
      return find_bit<std::int64_t>;
    default:
      return nullptr;
  }
}

// bmsk: as many ones as the second operand says, from the bit that the first one says. With .clamp
// (op.flag) numbers above 31 are out of reach, with .wrap they are taken modulo 32.
Outcome make_mask(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const auto begin = get<std::uint32_t>(a[l]), count = get<std::uint32_t>(b[l]);
    std::uint64_t ones = (std::uint64_t{1} << (count & 31)) - 1;
    if (op.flag && count >= 32) ones = 0xFFFFFFFF;
    d[l] = op.flag && begin >= 32 ? 0 : cut(ones << (begin & 31), 4);
  });
  return Outcome::kNext;
}

// szext: as many of the lowest bits as the second operand says, extended by their sign or zeros.
Outcome extend(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const auto given = get<std::uint32_t>(b[l]);
    const std::uint32_t count = op.flag && given >= 32 ? 32 : given & 31;
    const std::uint64_t kept = (std::uint64_t{1} << count) - 1;
    const bool negative = op.type == Type::kS32 && count > 0 && (a[l] >> (count - 1) & 1) != 0;
    d[l] = cut((a[l] & kept) | (negative ? ~kept : 0), 4);
  });
  return Outcome::kNext;
}

// fns: the bit from which, counted from a base up or down, so many bits are one.
Outcome find_nth(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask), &n = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const auto bits = get<std::uint32_t>(a[l]);
    const std::int64_t offset = get<std::int32_t>(n[l]);
    std::int64_t left = offset < 0 ? -offset : offset, at = get<std::uint32_t>(b[l]);
    const auto is_one = [&] { return at >= 0 && at < 32 && (bits >> at & 1) != 0; };
    if (left == 0) left = is_one() ? 1 : 33;  // the base itself, or none
    while (at >= 0 && at < 32 && (left -= is_one()) > 0) at += offset < 0 ? -1 : 1;
    d[l] = left == 0 ? static_cast<std::uint64_t>(at) : 0xFFFFFFFF;
  });
  return Outcome::kNext;
}

bool decode_fields(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "bfind") {
    op.flag = has(s, "shiftamt");
    op.handler = find_bit_of(op.type);
    return s.opcode.size() == 2u + op.flag && op.handler != nullptr;
  }
  if (name == "fns") {
    op.handler = find_nth;
    return s.opcode.size() == 2 && op.type == Type::kB32;
  }
  if (name != "bmsk" && name != "szext") return false;
  op.flag = has(s, "clamp");
  op.handler = name == "bmsk" ? make_mask : extend;
  const bool known =
      name == "bmsk" ? op.type == Type::kB32 : op.type == Type::kU32 || op.type == Type::kS32;
  return s.opcode.size() == 3 && (op.flag || has(s, "wrap")) && known;
}

}  // namespace

bool decode_extended(const Statement& s, Op& op) {
  return decode_carry(s, op) || decode_dot(s, op) || decode_24(s, op) || decode_fields(s, op);
}

}  // namespace ptx_machine
