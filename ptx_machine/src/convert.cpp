// Conversions between types, and between generic addresses and those of a state space.
#include <algorithm>
#include <cmath>
#include <limits>

#include "formats.h"
#include "machine.h"

namespace ptx_machine {

std::int64_t integer(std::uint64_t bits, Type type) {
  switch (type) {
    case Type::kS8:
      return get<std::int8_t>(bits);
    case Type::kS16:
      return get<std::int16_t>(bits);
    case Type::kS32:
      return get<std::int32_t>(bits);
    case Type::kU8:
    case Type::kB8:
      return get<std::uint8_t>(bits);
    case Type::kU16:
    case Type::kB16:
      return get<std::uint16_t>(bits);
    case Type::kU32:
    case Type::kB32:
      return get<std::uint32_t>(bits);
    default:
      return get<std::int64_t>(bits);
  }
}

namespace {

// The value of a register as a double, which holds all values but those of 64-bit integers.
double wide(std::uint64_t bits, Type type) {
  switch (type) {
    case Type::kF16:
      return float_of_half(static_cast<std::uint16_t>(bits));
    case Type::kBf16:
      return float_of_bf16(static_cast<std::uint16_t>(bits));
    case Type::kF32:
      return get<float>(bits);
    default:
      return get<double>(bits);
  }
}

// The nearest integer of a type, as the bits of a register.
std::uint64_t clamped(std::int64_t value, Type from, Type to) {
  const int bytes = bytes_of(to);
  const bool is_huge = !is_signed(from) && value < 0;  // of u64, beyond those of s64
  if (is_signed(to)) {
    const std::int64_t high = std::numeric_limits<std::int64_t>::max() >> (64 - 8 * bytes);
    const std::int64_t found = is_huge ? high : std::clamp(value, -high - 1, high);
    return cut(static_cast<std::uint64_t>(found), bytes);
  }
  if (is_huge)
    return cut(bytes == 8 ? static_cast<std::uint64_t>(value) : ~std::uint64_t{0}, bytes);
  const std::uint64_t high = cut(~std::uint64_t{0}, bytes);
  return value < 0 ? 0 : std::min(static_cast<std::uint64_t>(value), high);
}

bool is_subnormal(double value) {
  return std::fabs(value) < std::numeric_limits<float>::min() && value != 0;
}

// A value as the bits of a float type. What is clamped stands before the rounding: 0 and 1 are
// values of all types.
std::uint64_t narrowed(const Op& op, double value, Type type) {
  if (op.saturates && !op.flag) value = value > 0 ? std::min(value, 1.0) : 0.0;
  if (op.relu && value <= 0) value = 0;
  const Overflow overflow = op.saturates && op.flag ? Overflow::kFinite : Overflow::kInfinite;
  const bool is_plain =
      op.rounding == Rounding::kNearest && overflow == Overflow::kInfinite && op.from == Type::kF32;
  switch (type) {
    case Type::kF16:
      if (is_plain) return half_of_float(static_cast<float>(value));
      return half_of_double(value, op.rounding, overflow);
    case Type::kBf16:
      if (is_plain) return bf16_of_float(static_cast<float>(value));
      return bf16_of_double(value, op.rounding, overflow);
    case Type::kF64:
      return bits_of(value);
    default:
      break;
  }
  const auto single = static_cast<float>(value);  // as the scope of the handler rounds
  return bits_of(op.flushes && is_subnormal(single) ? std::copysign(0.0f, single) : single);
}

// An integer as a double that rounds to 16-bit floats as the integer itself: bits that do not fit
// are kept in the last one.
double sticky(bool negative, std::uint64_t size) {
  int shift = 0;
  for (; size >> 53 != 0; ++shift) size = size >> 1 | (size & 1);
  const double value = std::ldexp(static_cast<double>(size), shift);
  return negative ? -value : value;
}

Outcome integer_to_integer(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::int64_t value = integer(a[l], op.from);
    d[l] = op.saturates ? clamped(value, op.from, op.type)
                        : cut(static_cast<std::uint64_t>(value), bytes);
  });
  return Outcome::kNext;
}

Outcome integer_to_float(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const bool is_unsigned = !is_signed(op.from);
  const RoundingScope scope(op.rounding);
  each(mask, [&](int l) {
    const std::int64_t value = integer(a[l], op.from);
    const auto bits = static_cast<std::uint64_t>(value);
    if (op.type == Type::kF64) {
      d[l] = bits_of(is_unsigned ? static_cast<double>(bits) : static_cast<double>(value));
    } else if (op.type == Type::kF32) {
      d[l] = bits_of(is_unsigned ? static_cast<float>(bits) : static_cast<float>(value));
    } else {
      const bool negative = !is_unsigned && value < 0;
      d[l] = narrowed(op, sticky(negative, negative ? 0 - bits : bits), op.type);
    }
  });
  return Outcome::kNext;
}

// The value of a source; with .ftz a subnormal float is zero.
double source_of(const Op& op, std::uint64_t bits) {
  const double value = wide(bits, op.from);
  if (op.flushes && op.from == Type::kF32 && is_subnormal(value)) return std::copysign(0.0, value);
  return value;
}

// A value out of range becomes the nearest integer; NaN becomes 0.
Outcome float_to_integer(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const int bits = 8 * bytes_of(op.type);
  const bool with_sign = is_signed(op.type);
  const double low = with_sign ? -std::ldexp(1.0, bits - 1) : 0.0;
  const double high = std::ldexp(1.0, with_sign ? bits - 1 : bits);
  each(mask, [&](int l) {
    const double value = rounded(source_of(op, a[l]), static_cast<Rounding>(op.number));
    std::uint64_t out = 0;
    if (std::isnan(value))
      out = 0;
    else if (value < low)
      out = static_cast<std::uint64_t>(static_cast<std::int64_t>(low));
    else if (value >= high)
      out = with_sign ? (std::uint64_t{1} << (bits - 1)) - 1 : ~std::uint64_t{0};
    else if (with_sign)
      out = static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
    else
      out = static_cast<std::uint64_t>(value);
    d[l] = cut(out, bits / 8);
  });
  return Outcome::kNext;
}

// cvt.rni.f32.f32 and the like: to an integer.
Outcome float_to_whole(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const double value = source_of(op, a[l]);
    d[l] = narrowed(op, rounded(value, static_cast<Rounding>(op.number)), op.type);
  });
  return Outcome::kNext;
}

Outcome float_to_float(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const RoundingScope scope(op.type == Type::kF32 ? op.rounding : Rounding::kNearest);
  each(mask, [&](int l) { d[l] = narrowed(op, source_of(op, a[l]), op.type); });
  return Outcome::kNext;
}

Outcome float_to_tf32(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const Overflow overflow = op.saturates ? Overflow::kFinite : Overflow::kInfinite;
  each(mask, [&](int l) {
    const float value = get<float>(a[l]);
    d[l] = tf32_of_float(op.relu && value <= 0 ? 0.0f : value, op.rounding, overflow);
  });
  return Outcome::kNext;
}

// cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half.
Outcome two_floats(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  if (op.rounding == Rounding::kNearest && !op.saturates && !op.relu) {
    const auto narrow = op.type == Type::kBf16x2 ? bf16_of_float : half_of_float;
    each(mask, [&](int l) {
      d[l] = std::uint64_t{narrow(get<float>(a[l]))} << 16 | narrow(get<float>(b[l]));
    });
    return Outcome::kNext;
  }
  const Type half = op.type == Type::kBf16x2 ? Type::kBf16 : Type::kF16;
  each(mask, [&](int l) {
    d[l] = narrowed(op, get<float>(a[l]), half) << 16 | narrowed(op, get<float>(b[l]), half);
  });
  return Outcome::kNext;
}

// cvt.rn.satfinite.e4m3x2.f32 d, a, b, or .f16x2 d, a: the upper byte is that of a, or of its upper
// half. op.number: 0 e4m3, 1 e5m2.
Outcome to_bytes(Context& c, const Op& op, Mask mask) {
  const bool pair = op.from == Type::kF16x2;
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, pair ? 0 : 1, mask);
  Lanes& d = write(c, op, 0, mask);
  const auto narrow = [&](float value) -> std::uint64_t {
    if (op.relu && value <= 0) value = 0;
    return op.number == 0 ? e4m3_of_float(value) : e5m2_of_float(value);
  };
  const auto half = [](std::uint64_t bits) {
    return float_of_half(static_cast<std::uint16_t>(bits));
  };
  each(mask, [&](int l) {
    const float high = pair ? half(a[l] >> 16) : get<float>(a[l]);
    const float low = pair ? half(a[l]) : get<float>(b[l]);
    d[l] = narrow(high) << 8 | narrow(low);
  });
  return Outcome::kNext;
}

// cvt.rn.f16x2.e4m3x2: exact.
Outcome from_bytes(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const auto widen = [&](std::uint64_t bits) -> std::uint64_t {
    const auto byte = static_cast<std::uint8_t>(bits);
    const float value = op.number == 0 ? float_of_e4m3(byte) : float_of_e5m2(byte);
    return half_of_float(op.relu && value <= 0 ? 0.0f : value);
  };
  each(mask, [&](int l) { d[l] = widen(a[l] >> 8) << 16 | widen(a[l]); });
  return Outcome::kNext;
}

// cvt.pack.sat.type.s32{.b32} d, a, b{, c}: b is the lowest part, then a; c follows above them.
Outcome pack(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  const Lanes* above = op.values.size() > 2 ? &read(c, op, 2, mask) : nullptr;
  Lanes& d = write(c, op, 0, mask);
  const int bits = 8 * bytes_of(op.type);
  each(mask, [&](int l) {
    const std::uint64_t upper = above == nullptr ? 0 : (*above)[l] << 2 * bits;
    const std::uint64_t high = clamped(get<std::int32_t>(a[l]), Type::kS32, op.type);
    const std::uint64_t low = clamped(get<std::int32_t>(b[l]), Type::kS32, op.type);
    d[l] = cut(upper | high << bits | low, 4);
  });
  return Outcome::kNext;
}

Outcome to_window(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const std::uint64_t window = op.space == Space::kShared ? kSharedWindow : 0;
  each(mask, [&](int l) { d[l] = op.flag ? a[l] - window : a[l] + window; });
  return Outcome::kNext;
}

bool decode_window(const Statement& s, Op& op) {
  op.flag = has(s, "to");  // cvta.to.shared: from a generic address
  op.space = space_of(s);
  op.handler = to_window;
  return true;
}

// -- decoding ----------------------------------------------------------------------------------------

bool decode_pack(const Statement& s, Op& op) {
  const auto& names = s.opcode;
  const bool halves = names.size() == 5 && (names[3] == "u16" || names[3] == "s16");
  const bool bytes =
      names.size() == 6 && (names[3] == "u8" || names[3] == "s8") && names[5] == "b32";
  if (names[2] != "sat" || names[4] != "s32" || !(halves || bytes)) return false;
  op.type = type_of(names[3]);
  op.handler = pack;
  return s.operands.size() == (bytes ? 4u : 3u);
}

// Between pairs of e4m3 or e5m2 and floats; and to tf32.
bool decode_narrow(const Statement& s, Op& op) {
  const std::string &to = s.opcode[s.opcode.size() - 2], &from = s.opcode.back();
  const auto is_pair = [](const std::string& name) { return name == "e4m3x2" || name == "e5m2x2"; };
  op.from = type_of(from);
  op.number = (is_pair(to) ? to : from) == "e5m2x2";
  if (to == "tf32" && from == "f32") {
    op.handler = float_to_tf32;
    if (has(s, "rna")) return has_only(s, " rna satfinite tf32 ");
    return (has(s, "rn") || has(s, "rz")) && has_only(s, " rn rz satfinite relu tf32 ");
  }
  if (is_pair(to) && has(s, "rn") && has(s, "satfinite")) {
    op.handler = to_bytes;
    return has_only(s, " rn satfinite relu e4m3x2 e5m2x2 ") &&
           ((op.from == Type::kF32 && s.operands.size() == 3) ||
            (op.from == Type::kF16x2 && s.operands.size() == 2));
  }
  op.handler = from_bytes;
  return is_pair(from) && to == "f16x2" && has(s, "rn") && has_only(s, " rn relu e4m3x2 e5m2x2 ");
}

// f16, bf16, or two of them, of f32: op.flag says that .sat is .satfinite.
bool decode_halves(const Statement& s, Op& op) {
  const bool pair = op.type == Type::kF16x2 || op.type == Type::kBf16x2;
  op.flag = has(s, "satfinite");
  if (op.rounding == Rounding::kDown || op.rounding == Rounding::kUp) {
    if (pair) return false;
  }
  if (pair && (op.from != Type::kF32 || s.operands.size() != 3 || has(s, "sat"))) return false;
  op.handler = pair ? two_floats : float_to_float;
  return has_only(s, " rn rz rm rp ftz sat satfinite relu ") &&
         (has(s, "rn") || has(s, "rz") || has(s, "rm") || has(s, "rp"));
}

}  // namespace

bool decode_convert(const Statement& s, Op& op) {
  if (s.opcode[0] == "cvta") return decode_window(s, op);
  if (s.opcode[0] != "cvt" || s.opcode.size() < 3) return false;
  if (s.opcode[1] == "pack") return s.opcode.size() > 4 && decode_pack(s, op);
  op.from = type_of(s.opcode.back());
  op.type = type_of(s.opcode[s.opcode.size() - 2]);
  op.rounding = rounding_of(s);
  op.flushes = has(s, "ftz");
  op.relu = has(s, "relu");
  op.saturates = has(s, "sat") || has(s, "satfinite");
  if (op.from == Type::kNone || op.type == Type::kNone) return decode_narrow(s, op);
  const bool from_float = is_float(op.from), to_float = is_float(op.type);
  const bool to_half = op.type == Type::kF16 || op.type == Type::kBf16 || op.type == Type::kF16x2 ||
                       op.type == Type::kBf16x2;
  constexpr const char* kIntegers[] = {"rni", "rzi", "rmi", "rpi"};
  bool to_whole = false;
  for (int mode = 0; mode < 4; ++mode) {
    if (!has(s, kIntegers[mode])) continue;
    op.number = mode;
    to_whole = true;
  }
  if (from_float && to_half && !to_whole) {
    if (op.from != op.type) return decode_halves(s, op);
    op.handler = float_to_float;
    return has_only(s, " sat ");
  }
  if (!has_only(s, from_float || to_float ? " rn rz rm rp rni rzi rmi rpi ftz sat " : " sat ")) {
    return false;
  }
  if (from_float && !to_float) {
    op.handler = float_to_integer;
    return to_whole;
  }
  if (!from_float && to_float) {
    op.handler = integer_to_float;
    return !to_whole && !op.saturates;
  }
  op.handler = !to_float ? integer_to_integer : to_whole ? float_to_whole : float_to_float;
  return true;
}

}  // namespace ptx_machine
