// Conversions between types, and between generic addresses and those of a state space.
#include <cmath>

#include "formats.h"
#include "machine.h"

namespace emulator {

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

std::uint64_t narrowed(float value, Type type) {
  if (type == Type::kF16) return half_of_float(value);
  if (type == Type::kBf16) return bf16_of_float(value);
  return bits_of(value);
}

Outcome integer_to_integer(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const int bytes = bytes_of(op.type);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = cut(static_cast<std::uint64_t>(integer(a[l], op.from)), bytes); });
  return Outcome::kNext;
}

Outcome integer_to_float(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  const bool is_unsigned = !is_signed(op.from);
  each(mask, [&](int l) {
    const std::int64_t value = integer(a[l], op.from);
    const auto bits = static_cast<std::uint64_t>(value);
    if (op.type == Type::kF64) {
      d[l] = bits_of(is_unsigned ? static_cast<double>(bits) : static_cast<double>(value));
    } else {
      d[l] = narrowed(is_unsigned ? static_cast<float>(bits) : static_cast<float>(value), op.type);
    }
  });
  return Outcome::kNext;
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
    const double value = rounded(wide(a[l], op.from), static_cast<Rounding>(op.number));
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

Outcome float_to_float(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    double value = wide(a[l], op.from);
    if (op.flag) value = rounded(value, static_cast<Rounding>(op.number));  // to an integer
    d[l] = op.type == Type::kF64 ? bits_of(value) : narrowed(static_cast<float>(value), op.type);
  });
  return Outcome::kNext;
}

// cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half.
Outcome two_floats(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  const Type half = op.type == Type::kBf16x2 ? Type::kBf16 : Type::kF16;
  each(mask, [&](int l) {
    d[l] = narrowed(get<float>(a[l]), half) << 16 | narrowed(get<float>(b[l]), half);
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

}  // namespace

bool decode_convert(const Statement& s, Op& op) {
  if (s.opcode[0] == "cvta") return decode_window(s, op);
  if (s.opcode[0] != "cvt" || s.opcode.size() < 3 || has(s, "sat") || has(s, "relu")) return false;
  op.from = type_of(s.opcode.back());
  op.type = type_of(s.opcode[s.opcode.size() - 2]);
  if (op.from == Type::kNone || op.type == Type::kNone) return false;
  const bool from_float = is_float(op.from), to_float = is_float(op.type);
  if (op.type == Type::kBf16x2 || op.type == Type::kF16x2) {
    if (op.from != Type::kF32 || !has(s, "rn")) return false;
    op.handler = two_floats;
    return true;
  }
  constexpr const char* kIntegers[] = {"rni", "rzi", "rmi", "rpi"};
  for (int mode = 0; mode < 4; ++mode) {
    if (!has(s, kIntegers[mode])) continue;
    op.number = mode;
    op.flag = true;
  }
  if (!op.flag && (has(s, "rz") || has(s, "rm") || has(s, "rp"))) return false;
  op.handler = from_float ? (to_float ? float_to_float : float_to_integer)
                          : (to_float ? integer_to_float : integer_to_integer);
  return true;
}

}  // namespace emulator
