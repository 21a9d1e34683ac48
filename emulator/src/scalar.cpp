// Arithmetic, logic, comparison and data movement between registers.
#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>

#include "machine.h"

namespace emulator {
namespace {

template <class T, class F>
Outcome unary(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = bits_of(static_cast<T>(F{}(get<T>(a[l])))); });
  return Outcome::kNext;
}

template <class T, class F>
Outcome binary(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) { d[l] = bits_of(static_cast<T>(F{}(get<T>(a[l]), get<T>(b[l])))); });
  return Outcome::kNext;
}

template <class T, class F>
Outcome ternary(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  const Lanes& e = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    d[l] = bits_of(static_cast<T>(F{}(get<T>(a[l]), get<T>(b[l]), get<T>(e[l]))));
  });
  return Outcome::kNext;
}

// Sixteen-bit floats, one or two in a register: computed in float and rounded once.
template <bool kBf16, int kCount, class F>
Outcome halves(Context& c, const Op& op, Mask mask) {
  const auto widen = [](std::uint16_t h) { return kBf16 ? float_of_bf16(h) : float_of_half(h); };
  const auto narrow = [](float f) { return kBf16 ? bf16_of_float(f) : half_of_float(f); };
  const auto count = static_cast<int>(op.values.size());
  const Lanes* in[3] = {};
  for (int i = 0; i < count; ++i) in[i] = &read(c, op, i, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    std::uint64_t bits = 0;
    for (int part = 0; part < kCount; ++part) {
      float x[3] = {};
      for (int i = 0; i < count; ++i) {
        x[i] = widen(static_cast<std::uint16_t>((*in[i])[l] >> (16 * part)));
      }
      bits |= std::uint64_t{narrow(F{}(x[0], x[1], x[2]))} << (16 * part);
    }
    d[l] = bits;
  });
  return Outcome::kNext;
}

// Overflow of a signed sum wraps around, as on the device.
template <class T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
  float operator()(float a, float b, float) const { return a + b; }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
  }
  float operator()(float a, float b, float) const { return a - b; }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return a * b;
    else
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  float operator()(float a, float b, float) const { return a * b; }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) const {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
  }
};
// Division by zero gives all ones, and the remainder then is the dividend, as GPUs do it.
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return a / b;
    } else {
      if (b == 0) return static_cast<T>(-1);
      if constexpr (std::is_signed_v<T>) {
        if (b == -1) return Sub{}(T{0}, a);
      }
      return static_cast<T>(a / b);
    }
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return 0;
    }
    return static_cast<T>(a % b);
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return std::fmin(a, b);
    else
      return std::min(a, b);
  }
  float operator()(float a, float b, float) const { return std::fmin(a, b); }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>)
      return std::fmax(a, b);
    else
      return std::max(a, b);
  }
  float operator()(float a, float b, float) const { return std::fmax(a, b); }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>)
      return -a;
    else
      return Sub{}(T{0}, a);
  }
  float operator()(float a, float, float) const { return -a; }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_floating_point_v<T>)
      return std::fabs(a);
    else
      return a < 0 ? Sub{}(T{0}, a) : a;
  }
  float operator()(float a, float, float) const { return std::fabs(a); }
};
struct MulAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add{}(Mul{}(a, b), c);
  }
};
struct MulHighAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add{}(MulHigh{}(a, b), c);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
template <class T>
T reversed(T a) {
  T out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) out |= ((a >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return out;
}
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
// A shift by the width or more gives zero, or the sign.
template <class T, bool kLeft>
Outcome shift(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  Lanes& d = write(c, op, 0, mask);
  constexpr std::uint32_t kWidth = 8 * sizeof(T);
  each(mask, [&](int l) {
    const auto by = get<std::uint32_t>(b[l]);
    const T value = get<T>(a[l]);
    T out = by < kWidth ? 0 : (!kLeft && std::is_signed_v<T> && value < 0 ? T(-1) : T(0));
    if (by < kWidth) {
      out = kLeft ? static_cast<T>(static_cast<std::uint64_t>(value) << by)
                  : static_cast<T>(value >> by);
    }
    d[l] = bits_of(out);
  });
  return Outcome::kNext;
}

template <class T, class Wide, bool kAdds>
Outcome multiply_wide(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  const Lanes* e = kAdds ? &read(c, op, 2, mask) : nullptr;
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const auto product = Mul{}(static_cast<Wide>(get<T>(a[l])), static_cast<Wide>(get<T>(b[l])));
    d[l] = bits_of(kAdds ? Add{}(product, get<Wide>((*e)[l])) : product);
  });
  return Outcome::kNext;
}

template <class T, class F>
Outcome compare(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  Mask bits = 0;
  each(mask, [&](int l) { bits |= Mask{F{}(get<T>(a[l]), get<T>(b[l]))} << l; });
  Mask inverse = ~bits;
  if (op.number != 0) {  // combined with a predicate: setp.lt.and
    const Mask other = read_predicate(c, op, op.values[2], mask);
    const auto combine = [&](Mask m) {
      return op.number == 1 ? m & other : op.number == 2 ? m | other : m ^ other;
    };
    bits = combine(bits);
    inverse = combine(inverse);
  }
  write_predicate(c, op.targets[0], mask, bits);
  if (op.targets.size() > 1) write_predicate(c, op.targets[1], mask, inverse);
  return Outcome::kNext;
}

template <class F, bool kUnordered>
struct Ordered {
  template <class T>
  bool operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a) || std::isnan(b)) return kUnordered;
    }
    return F{}(a, b);
  }
};
struct Always {
  template <class T>
  bool operator()(T, T) const {
    return true;
  }
};

Outcome predicates(Context& c, const Op& op, Mask mask) {
  const Mask a = read_predicate(c, op, op.values[0], mask);
  const Mask b = op.values.size() > 1 ? read_predicate(c, op, op.values[1], mask) : 0;
  const Mask out = op.number == 0 ? a & b : op.number == 1 ? a | b : op.number == 2 ? a ^ b : ~a;
  write_predicate(c, op.targets[0], mask, out);
  return Outcome::kNext;
}

Outcome move_predicate(Context& c, const Op& op, Mask mask) {
  const Value& v = op.values[0];
  Mask bits = 0;
  if (v.kind == Value::Kind::kConstant)
    bits = (*v.constant)[0] != 0 ? ~Mask{0} : 0;
  else
    bits = read_predicate(c, op, v, mask);
  write_predicate(c, op.targets[0], mask, bits);
  return Outcome::kNext;
}

// mov of one value, or between a register and the parts of it.
Outcome move(Context& c, const Op& op, Mask mask) {
  const int bytes = bytes_of(op.type);
  const auto ins = static_cast<int>(op.values.size()), outs = static_cast<int>(op.targets.size());
  if (outs == 1) {
    Lanes gathered{};
    const int part = bytes / ins;
    for (int i = 0; i < ins; ++i) {
      const Lanes& a = read(c, op, i, mask);
      each(mask, [&](int l) { gathered[l] |= cut(a[l], part) << (8 * part * i); });
    }
    Lanes& d = write(c, op, 0, mask);
    each(mask, [&](int l) { d[l] = gathered[l]; });
    return Outcome::kNext;
  }
  const Lanes a = read(c, op, 0, mask);
  const int part = bytes / outs;
  for (int i = 0; i < outs; ++i) {
    Lanes& d = write(c, op, i, mask);
    each(mask, [&](int l) { d[l] = cut(a[l] >> (8 * part * i), part); });
  }
  return Outcome::kNext;
}

Outcome select(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  const Mask which = read_predicate(c, op, op.values[2], mask);
  Lanes& d = write(c, op, 0, mask);
  const int bytes = bytes_of(op.type);
  each(mask, [&](int l) { d[l] = cut(which >> l & 1 ? a[l] : b[l], bytes); });
  return Outcome::kNext;
}

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

Outcome permute(Context& c, const Op& op, Mask mask) {
  const Lanes &a = read(c, op, 0, mask), &b = read(c, op, 1, mask), &s = read(c, op, 2, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    const std::uint64_t bytes = (a[l] & 0xFFFFFFFF) | b[l] << 32;
    std::uint64_t out = 0;
    for (int i = 0; i < 4; ++i) {
      const auto pick = s[l] >> (4 * i) & 0xF;
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

// -- choice of a handler -----------------------------------------------------------------------------

// Calls f with a value of the C++ type of `type`; bits count as unsigned.
template <class F>
Handler by_integer(Type type, F&& f) {
  switch (type) {
    case Type::kB16:
    case Type::kU16:
      return f(std::uint16_t{});
    case Type::kB32:
    case Type::kU32:
      return f(std::uint32_t{});
    case Type::kB64:
    case Type::kU64:
      return f(std::uint64_t{});
    case Type::kS16:
      return f(std::int16_t{});
    case Type::kS32:
      return f(std::int32_t{});
    case Type::kS64:
      return f(std::int64_t{});
    default:
      return nullptr;
  }
}
template <class F>
Handler by_float(Type type, F&& f) {
  if (type == Type::kF32) return f(float{});
  if (type == Type::kF64) return f(double{});
  return nullptr;
}

template <class F>
Handler of_halves(Type type) {
  switch (type) {
    case Type::kF16:
      return halves<false, 1, F>;
    case Type::kBf16:
      return halves<true, 1, F>;
    case Type::kF16x2:
      return halves<false, 2, F>;
    case Type::kBf16x2:
      return halves<true, 2, F>;
    default:
      return nullptr;
  }
}

template <class F>
Handler arithmetic(Type type) {
  const auto pick = [](auto t) -> Handler { return binary<decltype(t), F>; };
  if (const Handler h = by_integer(type, pick)) return h;
  if (const Handler h = by_float(type, pick)) return h;
  if constexpr (std::is_invocable_v<F, float, float, float>) return of_halves<F>(type);
  return nullptr;
}
template <class F>
Handler of_integers(Type type) {
  return by_integer(type, [](auto t) -> Handler { return binary<decltype(t), F>; });
}
template <class F>
Handler of_bits(Type type, F) {  // one operand, as unsigned
  return by_integer(type,
                    [](auto t) -> Handler { return unary<std::make_unsigned_t<decltype(t)>, F>; });
}
template <class F>
Handler of_one_float(Type type, F) {
  return by_float(type, [](auto t) -> Handler { return unary<decltype(t), F>; });
}
template <class F>
Handler of_one(Type type) {
  const auto pick = [](auto t) -> Handler { return unary<decltype(t), F>; };
  if (const Handler h = by_integer(type, pick)) return h;
  if (const Handler h = by_float(type, pick)) return h;
  return of_halves<F>(type);
}

template <class F, bool kUnordered = false>
Handler comparison(Type type) {
  const auto pick = [](auto t) -> Handler { return compare<decltype(t), Ordered<F, kUnordered>>; };
  if (const Handler h = by_integer(type, pick)) return h;
  return by_float(type, pick);
}

Handler comparison(const std::string& name, Type type) {
  if (name == "eq") return comparison<std::equal_to<>>(type);
  if (name == "ne") return comparison<std::not_equal_to<>>(type);
  if (name == "lt" || name == "lo") return comparison<std::less<>>(type);
  if (name == "le" || name == "ls") return comparison<std::less_equal<>>(type);
  if (name == "gt" || name == "hi") return comparison<std::greater<>>(type);
  if (name == "ge" || name == "hs") return comparison<std::greater_equal<>>(type);
  if (name == "equ") return comparison<std::equal_to<>, true>(type);
  if (name == "neu") return comparison<std::not_equal_to<>, true>(type);
  if (name == "ltu") return comparison<std::less<>, true>(type);
  if (name == "leu") return comparison<std::less_equal<>, true>(type);
  if (name == "gtu") return comparison<std::greater<>, true>(type);
  if (name == "geu") return comparison<std::greater_equal<>, true>(type);
  if (name == "num") return comparison<Always, false>(type);
  return nullptr;
}

Handler multiplication(const Statement& s, Type type, bool adds) {
  if (has(s, "wide")) {
    switch (type) {
      case Type::kU16:
        return adds ? multiply_wide<std::uint16_t, std::uint32_t, true>
                    : multiply_wide<std::uint16_t, std::uint32_t, false>;
      case Type::kS16:
        return adds ? multiply_wide<std::int16_t, std::int32_t, true>
                    : multiply_wide<std::int16_t, std::int32_t, false>;
      case Type::kU32:
        return adds ? multiply_wide<std::uint32_t, std::uint64_t, true>
                    : multiply_wide<std::uint32_t, std::uint64_t, false>;
      case Type::kS32:
        return adds ? multiply_wide<std::int32_t, std::int64_t, true>
                    : multiply_wide<std::int32_t, std::int64_t, false>;
      default:
        return nullptr;
    }
  }
  const bool high = has(s, "hi");
  if (!adds) return high ? of_integers<MulHigh>(type) : arithmetic<Mul>(type);
  return by_integer(type, [&](auto t) -> Handler {
    return high ? ternary<decltype(t), MulHighAdd> : ternary<decltype(t), MulAdd>;
  });
}

struct FmaHalves {
  float operator()(float a, float b, float c) const { return std::fma(a, b, c); }
};

bool is_logic(const std::string& name, Type type, Op& op) {
  const int number = name == "and"   ? 0
                     : name == "or"  ? 1
                     : name == "xor" ? 2
                     : name == "not" ? 3
                                     : -1;
  if (number < 0) return false;
  if (type == Type::kPred) {
    op.number = number;
    op.handler = predicates;
  } else {
    op.handler = number == 0   ? of_integers<And>(type)
                 : number == 1 ? of_integers<Or>(type)
                 : number == 2 ? of_integers<Xor>(type)
                               : of_bits(type, [](auto a) { return ~a; });
  }
  return true;
}

}  // namespace

bool decode_scalar(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  const Type type = op.type;
  if (has(s, "sat") || has(s, "rz") || has(s, "rm") || has(s, "rp")) return false;
  if (is_logic(name, type, op)) return op.handler != nullptr;
  if (name == "add") op.handler = arithmetic<Add>(type);
  if (name == "sub") op.handler = arithmetic<Sub>(type);
  if (name == "mul") op.handler = multiplication(s, type, false);
  if (name == "mad") op.handler = multiplication(s, type, true);
  if (name == "min") op.handler = arithmetic<Min>(type);
  if (name == "max") op.handler = arithmetic<Max>(type);
  if (name == "rem") op.handler = of_integers<Rem>(type);
  if (name == "div") op.handler = arithmetic<Div>(type);
  if (name == "neg") op.handler = of_one<Neg>(type);
  if (name == "abs") op.handler = of_one<Abs>(type);
  if (name == "popc") op.handler = of_bits(type, [](auto a) { return std::popcount(a); });
  if (name == "clz") op.handler = of_bits(type, [](auto a) { return std::countl_zero(a); });
  if (name == "brev") op.handler = of_bits(type, [](auto a) { return reversed(a); });
  if (name == "ex2") op.handler = of_one_float(type, [](auto a) { return std::exp2(a); });
  if (name == "lg2") op.handler = of_one_float(type, [](auto a) { return std::log2(a); });
  if (name == "rcp") op.handler = of_one_float(type, [](auto a) { return 1 / a; });
  if (name == "sqrt") op.handler = of_one_float(type, [](auto a) { return std::sqrt(a); });
  if (name == "rsqrt") op.handler = of_one_float(type, [](auto a) { return 1 / std::sqrt(a); });
  if (name == "tanh") op.handler = of_one_float(type, [](auto a) { return std::tanh(a); });
  if (name == "sin") op.handler = of_one_float(type, [](auto a) { return std::sin(a); });
  if (name == "cos") op.handler = of_one_float(type, [](auto a) { return std::cos(a); });
  if (name == "selp") op.handler = select;
  if (name == "mov") op.handler = type == Type::kPred ? move_predicate : move;
  if (name == "prmt") op.handler = permute;
  if (name == "lop3") op.handler = look_up;
  if (name == "fma") {
    op.handler = by_float(type, [](auto t) -> Handler { return ternary<decltype(t), Fma>; });
    if (op.handler == nullptr) op.handler = of_halves<FmaHalves>(type);
  }
  if (name == "shl") {
    op.handler = by_integer(type, [](auto t) -> Handler { return shift<decltype(t), true>; });
  }
  if (name == "shr") {
    op.handler = by_integer(type, [](auto t) -> Handler { return shift<decltype(t), false>; });
  }
  if (name == "shf") {
    const bool left = has(s, "l"), wrap = has(s, "wrap");
    op.handler = left ? (wrap ? funnel<true, true> : funnel<true, false>)
                      : (wrap ? funnel<false, true> : funnel<false, false>);
  }
  if (name == "bfi") {
    op.handler = type == Type::kB32   ? insert_field<std::uint32_t>
                 : type == Type::kB64 ? insert_field<std::uint64_t>
                                      : nullptr;
  }
  if (name == "bfe") {
    op.handler = by_integer(type, [](auto t) -> Handler { return extract_field<decltype(t)>; });
  }
  if (name == "setp") {
    op.handler = comparison(s.opcode[1], type);
    op.number = has(s, "and") ? 1 : has(s, "or") ? 2 : has(s, "xor") ? 3 : 0;
  }
  return op.handler != nullptr;
}

}  // namespace emulator
