// Fields of bits, bytes, and shifts of two registers.
#include <algorithm>
#include <type_traits>

#include "machine.h"

namespace ptx_machine {
namespace {

struct Lop3 {  // unused bits of the table are zero
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                           std::uint32_t table) const {
    std::uint32_t out = 0;
    for (int entry = 0; entry < 8; ++entry) {
      if ((table >> entry & 1) == 0) continue;
      out |= (entry & 4 ? a : ~a) & (entry & 2 ? b : ~b) & (entry & 1 ? c : ~c);
    }
    return out;
  }
};
template <class T>
Outcome insert_field(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  const Lanes &p = read(c, op, 2, mask), &n = read(c, op, 3, mask);
  Lanes& d = write(c, op, 0, mask);
  constexpr std::uint32_t kWidth = 8 * sizeof(T);
  each(mask, [&](int l) {
    const std::uint32_t begin = p[l] & 0xFF, count = n[l] & 0xFF;
    T out = get<T>(b[l]);
    for (std::uint32_t i = 0; i < count && begin + i < kWidth; ++i) {
      const T bit = T{1} << (begin + i);
      out = (get<T>(a[l]) >> i & 1) != 0 ? out | bit : out & ~bit;
    }
    d[l] = bits_of(out);
  });
  return Outcome::kNext;
}

template <class T>
Outcome extract_field(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &p = read(c, op, 1, mask), &n = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  constexpr std::uint32_t kLast = 8 * sizeof(T) - 1;
  using Bits = std::make_unsigned_t<T>;
  each(mask, [&](int l) {
    const std::uint32_t begin = p[l] & 0xFF, count = n[l] & 0xFF;
    const Bits value = get<Bits>(a[l]);
    const bool sign =
        std::is_signed_v<T> && count != 0 && (value >> std::min(begin + count - 1, kLast) & 1) != 0;
    Bits out = 0;
    for (std::uint32_t i = 0; i <= kLast; ++i) {
      const bool bit = i < count && begin + i <= kLast ? (value >> (begin + i) & 1) != 0 : sign;
      out |= static_cast<Bits>(bit) << i;
    }
    d[l] = bits_of(out);
  });
  return Outcome::kNext;
}

// The bytes that the modes of prmt pick, by the lowest two bits of the third operand, as it names them
// without a mode.
struct PermuteMode {
  const char* name;
  std::uint32_t picks[4];
};
constexpr PermuteMode kPermuteModes[] = {
    {"f4e", {0x3210, 0x4321, 0x5432, 0x6543}}, {"b4e", {0x5670, 0x6701, 0x7012, 0x0123}},
    {"rc8", {0x0000, 0x1111, 0x2222, 0x3333}}, {"ecl", {0x3210, 0x3211, 0x3222, 0x3333}},
    {"ecr", {0x0000, 0x1110, 0x2210, 0x3210}}, {"rc16", {0x1010, 0x3232, 0x1010, 0x3232}},
};

Outcome permute(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask), &s = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::uint64_t bytes = (a[l] & 0xFFFFFFFF) | b[l] << 32;
    const std::uint64_t picks = op.number < 0 ? s[l] : kPermuteModes[op.number].picks[s[l] & 3];
    std::uint64_t out = 0;
    for (int i = 0; i < 4; ++i) {
      const auto pick = picks >> (4 * i) & 0xF;
      auto byte = bytes >> (8 * (pick & 7)) & 0xFF;
      if ((pick & 8) != 0) byte = byte & 0x80 ? 0xFF : 0;
      out |= byte << (8 * i);
    }
    d[l] = out;
  });
  return Outcome::kNext;
}

Outcome look_up(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  const Lanes &e = read(c, op, 2, mask), &t = read(c, op, 3, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    d[l] = Lop3{}(get<std::uint32_t>(a[l]), get<std::uint32_t>(b[l]), get<std::uint32_t>(e[l]),
                  get<std::uint32_t>(t[l]));
  });
  return Outcome::kNext;
}

// lop3.and and .or: the second target is whether the result is not zero, combined with a predicate.
Outcome look_up_and_test(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask);
  const Lanes &e = read(c, op, 2, mask), &t = read(c, op, 3, mask);
  const Mask other = read_predicate(c, op, op.values[4], mask);
  Mask bits = 0;
  Lanes results;
  each(mask, [&](int l) {
    results[l] = Lop3{}(get<std::uint32_t>(a[l]), get<std::uint32_t>(b[l]),
                        get<std::uint32_t>(e[l]), get<std::uint32_t>(t[l]));
    bits |= Mask{results[l] != 0} << l;
  });
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = results[l]; });
  write_predicate(c, op.targets[1], mask, op.flag ? bits & other : bits | other);
  return Outcome::kNext;
}

bool decode_look_up(const Statement& s, Op& op) {
  op.handler = look_up;
  if (s.operands.size() == 5) return s.operands[0].second < 0 && has_only(s, " ");
  op.flag = has(s, "and");
  op.handler = look_up_and_test;
  return s.operands.size() == 6 && s.opcode.size() == 3 && (op.flag || has(s, "or")) &&
         s.operands[0].second >= 0;
}

template <bool kLeft, bool kWrap>
Outcome funnel(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask), &s = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::uint64_t both = (b[l] & 0xFFFFFFFF) << 32 | (a[l] & 0xFFFFFFFF);
    const std::uint64_t by = kWrap ? s[l] & 31 : std::min<std::uint64_t>(s[l] & 0xFFFFFFFF, 32);
    d[l] = (kLeft ? both << by >> 32 : both >> by) & 0xFFFFFFFF;
  });
  return Outcome::kNext;
}

Handler funnel_of(const Statement& s) {
  const bool left = has(s, "l"), wrap = has(s, "wrap");
  if (left) return wrap ? funnel<true, true> : funnel<true, false>;
  return wrap ? funnel<false, true> : funnel<false, false>;
}

Handler extraction(Type type) {
  switch (type) {
    case Type::kU32:
      return extract_field<std::uint32_t>;
    case Type::kS32:
      return extract_field<std::int32_t>;
    case Type::kU64:
      return extract_field<std::uint64_t>;
    case Type::kS64:
      return extract_field<std::int64_t>;
    default:
      return nullptr;
  }
}

bool decode_permute(const Statement& s, Op& op) {
  op.number = -1;
  op.handler = permute;
  if (s.opcode.size() == 2) return true;
  for (int mode = 0; mode < 6; ++mode) {
    if (s.opcode.size() == 3 && s.opcode[2] == kPermuteModes[mode].name) op.number = mode;
  }
  return op.number >= 0;
}

Handler insertion(Type type) {
  if (type == Type::kB32) return insert_field<std::uint32_t>;
  return type == Type::kB64 ? insert_field<std::uint64_t> : nullptr;
}

}  // namespace

bool decode_bits(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "lop3") return decode_look_up(s, op);
  if (name == "prmt") return decode_permute(s, op);
  if (!has_only(s, name == "shf" ? " l r clamp wrap " : " ")) return false;
  if (name == "shf") op.handler = funnel_of(s);
  if (name == "bfi") op.handler = insertion(op.type);
  if (name == "bfe") op.handler = extraction(op.type);
  return op.handler != nullptr;
}

}  // namespace ptx_machine
