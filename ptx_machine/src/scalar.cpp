// Arithmetic of integers, logic, comparison and data movement between registers.
#include <algorithm>
#include <functional>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace ptx_machine {
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

// Overflow of a signed sum wraps around, as on the device.
template <class T>
using Wrapping = std::make_unsigned_t<T>;

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
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
    if (b == 0) return static_cast<T>(-1);
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return Sub{}(T{0}, a);
    }
    return static_cast<T>(a / b);
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
    return std::min(a, b);
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return std::max(a, b);
  }
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
    return Sub{}(T{0}, a);
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return a < 0 ? Sub{}(T{0}, a) : a;
  }
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
struct AddDistance {  // |a - b| + c
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add{}(a < b ? Sub{}(b, a) : Sub{}(a, b), c);
  }
};
struct AddSaturating {  // of s32
  template <class T>
  T operator()(T a, T b) const {
    using Limits = std::numeric_limits<T>;
    return static_cast<T>(std::clamp<std::int64_t>(
        static_cast<std::int64_t>(a) + static_cast<std::int64_t>(b), Limits::min(), Limits::max()));
  }
};
struct SubSaturating {
  template <class T>
  T operator()(T a, T b) const {
    using Limits = std::numeric_limits<T>;
    return static_cast<T>(std::clamp<std::int64_t>(
        static_cast<std::int64_t>(a) - static_cast<std::int64_t>(b), Limits::min(), Limits::max()));
  }
};
template <class T>
T reversed(T a) {
  T out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) out |= ((a >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return out;
}
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
  combine_predicates(c, op, mask, bits, ~bits);
  return Outcome::kNext;
}

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

// mov.b128: each side is two registers.
Outcome move_pair(Context& c, const Op& op, Mask mask) {
  const Lanes low = read(c, op, 0, mask), high = read(c, op, 1, mask);
  Lanes &to_low = write(c, op, 0, mask), &to_high = write(c, op, 1, mask);
  each(mask, [&](int l) {
    to_low[l] = low[l];
    to_high[l] = high[l];
  });
  return Outcome::kNext;
}

Outcome select(Context& c, const Op& op, Mask mask) {
  // What a lane does not choose need not have been written: nvcc turns branches into selections.
  const Mask which = read_predicate(c, op, op.values[2], mask);
  const Lanes& a = read(c, op, 0, mask & which);
  const Lanes& b = read(c, op, 1, mask & ~which);
  Lanes& d = write(c, op, 0, mask);
  const int bytes = bytes_of(op.type);
  each(mask, [&](int l) { d[l] = cut(which >> l & 1 ? a[l] : b[l], bytes); });
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
Handler of_integers(Type type) {
  return by_integer(type, [](auto t) -> Handler { return binary<decltype(t), F>; });
}
template <class F>
Handler of_bits(Type type, F) {  // one operand, as unsigned
  return by_integer(type,
                    [](auto t) -> Handler { return unary<std::make_unsigned_t<decltype(t)>, F>; });
}
template <class F>
Handler of_signed(Type type) {
  return by_integer(type, [](auto t) -> Handler { return unary<decltype(t), F>; });
}

template <class F>
Handler comparison(Type type) {
  return by_integer(type, [](auto t) -> Handler { return compare<decltype(t), F>; });
}

Handler comparison(const std::string& name, Type type) {
  if (name == "eq") return comparison<std::equal_to<>>(type);
  if (name == "ne") return comparison<std::not_equal_to<>>(type);
  if (name == "lt" || name == "lo") return comparison<std::less<>>(type);
  if (name == "le" || name == "ls") return comparison<std::less_equal<>>(type);
  if (name == "gt" || name == "hi") return comparison<std::greater<>>(type);
  if (name == "ge" || name == "hs") return comparison<std::greater_equal<>>(type);
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
  if (!adds) return high ? of_integers<MulHigh>(type) : of_integers<Mul>(type);
  return by_integer(type, [&](auto t) -> Handler {
    return high ? ternary<decltype(t), MulHighAdd> : ternary<decltype(t), MulAdd>;
  });
}

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

struct Modifiers {
  const char* name;
  const char* all;  // with a space on both sides of each
};
constexpr Modifiers kModifiers[] = {
    {"add", " sat "},
    {"sub", " sat "},
    {"mul", " lo hi wide "},
    {"mad", " lo hi wide "},
};

bool has_known_modifiers(const Statement& s) {
  if (s.opcode[0] == "setp") {
    return s.opcode.size() > 2 && has_only(s, (" " + s.opcode[1] + " and or xor ").c_str());
  }
  for (const Modifiers& row : kModifiers) {
    if (s.opcode[0] == row.name) return has_only(s, row.all);
  }
  return has_only(s, " ");
}

Handler sum(const std::string& name, Type type, bool saturates) {
  if (saturates && type != Type::kS32) return nullptr;
  if (name == "add") return saturates ? of_integers<AddSaturating>(type) : of_integers<Add>(type);
  return saturates ? of_integers<SubSaturating>(type) : of_integers<Sub>(type);
}

Handler shift_of(const std::string& name, Type type) {
  const bool left = name == "shl";
  return by_integer(type, [&](auto t) -> Handler {
    return left ? shift<decltype(t), true> : shift<decltype(t), false>;
  });
}

Handler arithmetic(const Statement& s, Type type) {
  const std::string& name = s.opcode[0];
  if (name == "add" || name == "sub") return sum(name, type, has(s, "sat"));
  if (name == "mul") return multiplication(s, type, false);
  if (name == "mad") return multiplication(s, type, true);
  if (name == "min") return of_integers<Min>(type);
  if (name == "max") return of_integers<Max>(type);
  if (name == "rem") return of_integers<Rem>(type);
  if (name == "div") return of_integers<Div>(type);
  if (name == "neg") return of_signed<Neg>(type);
  if (name == "abs") return of_signed<Abs>(type);
  if (name == "popc") return of_bits(type, [](auto a) { return std::popcount(a); });
  if (name == "clz") return of_bits(type, [](auto a) { return std::countl_zero(a); });
  if (name == "brev") return of_bits(type, [](auto a) { return reversed(a); });
  if (name == "cnot") return of_bits(type, [](auto a) { return a == 0; });
  if (name == "sad") {
    return by_integer(type, [](auto t) -> Handler { return ternary<decltype(t), AddDistance>; });
  }
  if (name == "shl" || name == "shr") return shift_of(name, type);
  return nullptr;
}

}  // namespace

bool decode_scalar(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  const Type type = op.type;
  if (!has_known_modifiers(s)) return false;
  if (name == "selp") op.handler = select;
  if (name == "mov" && type == Type::kB128 && !(is_pair(s.operands[0]) && is_pair(s.operands[1]))) {
    return false;
  }
  if (name == "mov") {
    op.handler = type == Type::kPred ? move_predicate : type == Type::kB128 ? move_pair : move;
  }
  if (op.handler != nullptr) return true;
  if (is_float(type)) return false;
  if (is_logic(name, type, op)) return op.handler != nullptr;
  if (name == "setp") {
    op.handler = comparison(s.opcode[1], type);
    op.number = has(s, "and") ? 1 : has(s, "or") ? 2 : has(s, "xor") ? 3 : 0;
  }
  if (op.handler == nullptr) op.handler = arithmetic(s, type);
  return op.handler != nullptr;
}

bool read_comparison(const std::string& name, Comparison& found) {
  constexpr const char* kNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "num",
                                    "equ", "neu", "ltu", "leu", "gtu", "geu", "nan"};
  for (int i = 0; i < 14; ++i) {
    if (name != kNames[i]) continue;
    found = static_cast<Comparison>(i);
    return true;
  }
  return false;
}

void combine_predicates(Context& c, const Op& op, Mask mask, Mask first, Mask second) {
  if (op.number != 0) {
    const Mask other = read_predicate(c, op, op.values[2], mask);
    const auto combine = [&](Mask m) {
      return op.number == 1 ? m & other : op.number == 2 ? m | other : m ^ other;
    };
    first = combine(first);
    second = combine(second);
  }
  write_predicate(c, op.targets[0], mask, first);
  if (op.targets.size() > 1) write_predicate(c, op.targets[1], mask, second);
}

}  // namespace ptx_machine
