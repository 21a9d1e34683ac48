// Arithmetic and comparison of floats: f32, f64, and one or two 16-bit floats in a register.
//
// With .ftz subnormal operands and results become zeros that keep the sign. With .sat a result is
// clamped to [0, 1], and NaN becomes 0; with .relu what is negative becomes 0.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace ptx_machine {
namespace {

float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}
double flushed(double x) { return x; }

template <class T>
T clamped(const Op& op, T x) {
  if (op.saturates) return x > 0 ? std::min(x, T{1}) : T{0};
  return op.relu && x <= 0 ? T{0} : x;
}

// -- what an instruction computes --------------------------------------------------------------------

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    return a - b;
  }
};
struct Mul {
  template <class T>
  T operator()(T a, T b) const {
    return a * b;
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    return a / b;
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
// One NaN gives the other operand, or NaN with .NaN; -0 is less than +0.
template <bool kNan, bool kMax>
struct Extreme {
  template <class T>
  T operator()(T a, T b) const {
    if (std::isnan(a) || std::isnan(b)) {
      if (kNan) return std::numeric_limits<T>::quiet_NaN();
      return std::isnan(a) ? b : a;
    }
    if (a == b) return std::signbit(a) == kMax ? b : a;
    return (a < b) == kMax ? b : a;
  }
};
// .xorsign.abs: of the magnitudes; the result is negative if one of the operands is, and not both.
template <bool kNan, bool kMax>
struct ExtremeMagnitude {
  template <class T>
  T operator()(T a, T b) const {
    const T found = Extreme<kNan, kMax>{}(std::fabs(a), std::fabs(b));
    if (std::isnan(found)) return found;
    return std::signbit(a) != std::signbit(b) ? -found : found;
  }
};
struct CopySign {  // of the first operand, to the second
  template <class T>
  T operator()(T a, T b) const {
    return std::copysign(b, a);
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    return -a;
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    return std::fabs(a);
  }
};
struct Sqrt {
  template <class T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Reciprocal {
  template <class T>
  T operator()(T a) const {
    return 1 / a;
  }
};
// The .approx functions are those of the host, which are more accurate than a device's.
struct ReciprocalSqrt {
  template <class T>
  T operator()(T a) const {
    return 1 / std::sqrt(a);
  }
};
// .approx.ftz.f64: of the upper half of a double, without subnormal numbers; the lower half is zeros.
template <class F>
struct OfUpperHalf {
  double operator()(double a) const {
    const double found = F{}(upper(a));
    return std::fpclassify(found) == FP_SUBNORMAL ? std::copysign(0.0, found) : upper(found);
  }
  static double upper(double a) {
    if (std::isnan(a)) return a;
    if (std::fpclassify(a) == FP_SUBNORMAL) return std::copysign(0.0, a);
    return std::bit_cast<double>(std::bit_cast<std::uint64_t>(a) >> 32 << 32);
  }
};
struct Exp2 {
  template <class T>
  T operator()(T a) const {
    return std::exp2(a);
  }
};
struct Log2 {
  template <class T>
  T operator()(T a) const {
    return std::log2(a);
  }
};
struct Sin {
  template <class T>
  T operator()(T a) const {
    return std::sin(a);
  }
};
struct Cos {
  template <class T>
  T operator()(T a) const {
    return std::cos(a);
  }
};
struct Tanh {
  template <class T>
  T operator()(T a) const {
    return std::tanh(a);
  }
};

template <class F, class T, int kOperands>
T call(const T* x) {
  if constexpr (kOperands == 1) return F{}(x[0]);
  if constexpr (kOperands == 2) return F{}(x[0], x[1]);
  if constexpr (kOperands == 3) return F{}(x[0], x[1], x[2]);
}

// -- f32 and f64 ---------------------------------------------------------------------------------------

template <class T, class F, int kOperands, bool kCareful>
Outcome compute(Context& c, const Op& op, Mask mask) {
  const Lanes* in[kOperands];
  for (int i = 0; i < kOperands; ++i) in[i] = &read(c, op, i, mask);
  Lanes& d = write(c, op, 0, mask);
  const RoundingScope scope(kCareful ? op.rounding : Rounding::kNearest);
  each(mask, [&](int l) {
    T x[kOperands];
    for (int i = 0; i < kOperands; ++i) {
      x[i] = get<T>((*in[i])[l]);
      if (kCareful && op.flushes) x[i] = flushed(x[i]);
    }
    T result = call<F, T, kOperands>(x);
    if constexpr (kCareful) {
      if (op.flushes) result = flushed(result);
      result = clamped(op, result);
    }
    d[l] = bits_of(result);
  });
  return Outcome::kNext;
}

// -- 16-bit floats -------------------------------------------------------------------------------------

template <bool kBf16>
struct Half {
  static constexpr std::uint16_t kSmallest = kBf16 ? 0x0080 : 0x0400;  // normal number

  static float widen(std::uint16_t h) { return kBf16 ? float_of_bf16(h) : float_of_half(h); }
  static std::uint16_t narrow(float f) { return kBf16 ? bf16_of_float(f) : half_of_float(f); }
  static std::uint16_t flushed(std::uint16_t h) {
    return (h & 0x7FFF) < kSmallest ? static_cast<std::uint16_t>(h & 0x8000) : h;
  }

  // A sum, product or quotient may be rounded to float first: it has more than twice the bits.
  // a b + c has not; where that matters it is rounded to odd in double, which keeps what is lost.
  static std::uint16_t fused(float a, float b, float c) {
    const float once = std::fma(a, b, c);
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(once);
    const bool is_tie = kBf16 ? (bits & 0xFFFF) == 0x8000 : (bits & 0x1FFF) == 0x1000;
    if (!is_tie && (kBf16 || std::fabs(once) >= 0x1p-14f)) return narrow(once);
    const double product = static_cast<double>(a) * b, addend = c;  // exact
    double sum = product + addend;
    if (!std::isfinite(sum)) return narrow(once);
    const double from_sum = sum - product;
    const double lost = (product - (sum - from_sum)) + (addend - from_sum);
    if (lost != 0 && (std::bit_cast<std::uint64_t>(sum) & 1) == 0) {
      sum = std::nextafter(sum, lost > 0 ? HUGE_VAL : -HUGE_VAL);
    }
    return kBf16 ? bf16_of_double(sum, Rounding::kNearest, Overflow::kInfinite)
                 : half_of_double(sum, Rounding::kNearest, Overflow::kInfinite);
  }
};

template <bool kBf16, int kCount, class F, int kOperands, bool kCareful>
Outcome compute_halves(Context& c, const Op& op, Mask mask) {
  using H = Half<kBf16>;
  const Lanes* in[kOperands];
  for (int i = 0; i < kOperands; ++i) in[i] = &read(c, op, i, mask);
  Lanes& d = write(c, op, 0, mask);
  each(mask, [&](int l) {
    std::uint64_t bits = 0;
    for (int part = 0; part < kCount; ++part) {
      float x[kOperands];
      for (int i = 0; i < kOperands; ++i) {
        auto half = static_cast<std::uint16_t>((*in[i])[l] >> (16 * part));
        if (kCareful && op.flushes) half = H::flushed(half);
        x[i] = H::widen(half);
      }
      std::uint16_t result = 0;
      if constexpr (std::is_same_v<F, Fma>) {
        result = H::fused(x[0], x[1], x[2]);
      } else {
        result = H::narrow(call<F, float, kOperands>(x));
      }
      if constexpr (kCareful) {
        if (op.flushes) result = H::flushed(result);
        if (op.saturates || op.relu) result = H::narrow(clamped(op, H::widen(result)));
      }
      bits |= std::uint64_t{result} << (16 * part);
    }
    d[l] = bits;
  });
  return Outcome::kNext;
}

// -- comparison ----------------------------------------------------------------------------------------

template <class T>
bool compare(Comparison how, T a, T b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  if (how == Comparison::kNumbers) return !unordered;
  if (how == Comparison::kNan) return unordered;
  if (unordered) return how >= Comparison::kEqU;
  switch (how) {
    case Comparison::kEq:
    case Comparison::kEqU:
      return a == b;
    case Comparison::kNe:
    case Comparison::kNeU:
      return a != b;
    case Comparison::kLt:
    case Comparison::kLtU:
      return a < b;
    case Comparison::kLe:
    case Comparison::kLeU:
      return a <= b;
    case Comparison::kGt:
    case Comparison::kGtU:
      return a > b;
    default:
      return a >= b;
  }
}

// The value of an operand's part as a double, which holds all of these types.
double part_of(const Op& op, std::uint64_t bits, int part) {
  const auto half = static_cast<std::uint16_t>(bits >> (16 * part));
  switch (op.type) {
    case Type::kF64:
      return get<double>(bits);
    case Type::kF32:
      return op.flushes ? flushed(get<float>(bits)) : get<float>(bits);
    case Type::kBf16:
    case Type::kBf16x2:
      return float_of_bf16(half);
    default:
      return float_of_half(op.flushes ? Half<false>::flushed(half) : half);
  }
}

// setp. For one number the second target is the opposite; for pairs it is that of the upper part.
Outcome compare_floats(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  const Lanes& b = read(c, op, 1, mask);
  const bool pair = op.type == Type::kF16x2 || op.type == Type::kBf16x2;
  Mask bits[2] = {};
  for (int part = 0; part < (pair ? 2 : 1); ++part) {
    each(mask, [&](int l) {
      const double x = part_of(op, a[l], part), y = part_of(op, b[l], part);
      bits[part] |= Mask{compare(op.comparison, x, y)} << l;
    });
  }
  if (!pair) bits[1] = ~bits[0];
  combine_predicates(c, op, mask, bits[0], bits[1]);
  return Outcome::kNext;
}

// testp: 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal, 5 subnormal.
template <class T>
Outcome test(Context& c, const Op& op, Mask mask) {
  const Lanes& a = read(c, op, 0, mask);
  Mask bits = 0;
  each(mask, [&](int l) {
    const T x = get<T>(a[l]);
    const int kind = std::fpclassify(x);
    const bool is[] = {
        static_cast<bool>(std::isfinite(x)),  kind == FP_INFINITE, kind != FP_NAN, kind == FP_NAN,
        kind == FP_NORMAL || kind == FP_ZERO, kind == FP_SUBNORMAL};
    bits |= Mask{is[op.number]} << l;
  });
  write_predicate(c, op.targets[0], mask, bits);
  return Outcome::kNext;
}

// -- choice of a handler -------------------------------------------------------------------------------

template <class F, int kOperands>
Handler of_singles(Type type, bool careful) {
  if (type == Type::kF32) {
    return careful ? compute<float, F, kOperands, true> : compute<float, F, kOperands, false>;
  }
  if (type == Type::kF64) {
    return careful ? compute<double, F, kOperands, true> : compute<double, F, kOperands, false>;
  }
  return nullptr;
}

template <class F, int kOperands>
Handler of_all(Type type, bool careful) {
  switch (type) {
    case Type::kF16:
      return careful ? compute_halves<false, 1, F, kOperands, true>
                     : compute_halves<false, 1, F, kOperands, false>;
    case Type::kBf16:
      return careful ? compute_halves<true, 1, F, kOperands, true>
                     : compute_halves<true, 1, F, kOperands, false>;
    case Type::kF16x2:
      return careful ? compute_halves<false, 2, F, kOperands, true>
                     : compute_halves<false, 2, F, kOperands, false>;
    case Type::kBf16x2:
      return careful ? compute_halves<true, 2, F, kOperands, true>
                     : compute_halves<true, 2, F, kOperands, false>;
    default:
      return of_singles<F, kOperands>(type, careful);
  }
}

struct Instruction {
  const char* name;
  const char* modifiers;  // that it may have, with a space on both sides
  Handler (*handler)(Type, bool careful);
};

constexpr const char* kArithmetic = " rn rz rm rp ftz sat ";
constexpr const char* kApproximate = " approx ftz ";
constexpr Instruction kInstructions[] = {
    {"add", kArithmetic, of_all<Add, 2>},
    {"sub", kArithmetic, of_all<Sub, 2>},
    {"mul", kArithmetic, of_all<Mul, 2>},
    {"fma", " rn rz rm rp ftz sat relu ", of_all<Fma, 3>},
    {"mad", kArithmetic, of_singles<Fma, 3>},
    {"div", " rn rz rm rp ftz approx full ", of_singles<Div, 2>},
    {"neg", " ftz ", of_all<Neg, 1>},
    {"abs", " ftz ", of_all<Abs, 1>},
    {"copysign", " ", of_singles<CopySign, 2>},
    {"sqrt", " rn rz rm rp ftz approx ", of_singles<Sqrt, 1>},
    {"rcp", " rn rz rm rp ftz approx ", of_singles<Reciprocal, 1>},
    {"rsqrt", kApproximate, of_singles<ReciprocalSqrt, 1>},
    {"lg2", kApproximate, of_singles<Log2, 1>},
    {"sin", kApproximate, of_singles<Sin, 1>},
    {"cos", kApproximate, of_singles<Cos, 1>},
    {"ex2", kApproximate, of_all<Exp2, 1>},
    {"tanh", " approx ", of_all<Tanh, 1>},
};

template <template <bool, bool> class F>
Handler extreme(Type type, bool nan, bool is_max, bool careful) {
  if (nan)
    return is_max ? of_all<F<true, true>, 2>(type, careful)
                  : of_all<F<true, false>, 2>(type, careful);
  return is_max ? of_all<F<false, true>, 2>(type, careful)
                : of_all<F<false, false>, 2>(type, careful);
}

bool decode_extreme(const Statement& s, Op& op, bool careful) {
  const bool of_magnitudes = has(s, "xorsign") && has(s, "abs") && op.type != Type::kF64;
  if (s.operands.size() != 3) return false;  // of three values: not on sm_90
  if (!has_only(s, of_magnitudes ? " ftz NaN xorsign abs " : " ftz NaN ")) return false;
  const bool is_max = s.opcode[0] == "max", nan = has(s, "NaN");
  op.handler = of_magnitudes ? extreme<ExtremeMagnitude>(op.type, nan, is_max, careful)
                             : extreme<Extreme>(op.type, nan, is_max, careful);
  return op.handler != nullptr;
}

bool decode_comparison(const Statement& s, Op& op) {
  if (s.opcode.size() < 3 || !read_comparison(s.opcode[1], op.comparison)) return false;
  const std::string allowed = " " + s.opcode[1] + " and or xor ftz ";
  op.number = has(s, "and") ? 1 : has(s, "or") ? 2 : has(s, "xor") ? 3 : 0;
  op.handler = compare_floats;
  return has_only(s, allowed.c_str());
}

bool decode_upper_half(const Statement& s, Op& op) {
  const bool rcp = s.opcode[0] == "rcp";
  op.flushes = false;  // the function does
  op.handler = rcp ? compute<double, OfUpperHalf<Reciprocal>, 1, false>
                   : compute<double, OfUpperHalf<ReciprocalSqrt>, 1, false>;
  return (rcp || s.opcode[0] == "rsqrt") && s.opcode.size() == 4 && has(s, "approx");
}

bool decode_test(const Statement& s, Op& op) {
  constexpr const char* kKinds[] = {"finite",     "infinite", "number",
                                    "notanumber", "normal",   "subnormal"};
  op.number = -1;
  for (int kind = 0; kind < 6; ++kind) {
    if (s.opcode.size() == 3 && s.opcode[1] == kKinds[kind]) op.number = kind;
  }
  op.handler = op.type == Type::kF32 ? test<float> : op.type == Type::kF64 ? test<double> : nullptr;
  return op.number >= 0 && op.handler != nullptr;
}

}  // namespace

bool decode_float(const Statement& s, Op& op) {
  if (!is_float(op.type)) return false;
  op.flushes = has(s, "ftz");
  op.saturates = has(s, "sat");
  op.relu = has(s, "relu");
  op.rounding = rounding_of(s);
  const std::string& name = s.opcode[0];
  const bool is_half = op.type != Type::kF32 && op.type != Type::kF64;
  if (is_half && op.rounding != Rounding::kNearest) return false;
  if (!is_half && op.relu) return false;
  if (op.type == Type::kF64 && op.flushes) return decode_upper_half(s, op);
  if (op.type == Type::kF64 && op.saturates) return false;
  const bool careful = op.flushes || op.saturates || op.relu || op.rounding != Rounding::kNearest;
  if (name == "setp") return decode_comparison(s, op);
  if (name == "testp") return decode_test(s, op);
  if (name == "min" || name == "max") return decode_extreme(s, op, careful);
  for (const Instruction& row : kInstructions) {
    if (name != row.name) continue;
    op.handler = row.handler(op.type, careful);
    return has_only(s, row.modifiers) && op.handler != nullptr;
  }
  return false;
}

}  // namespace ptx_machine
