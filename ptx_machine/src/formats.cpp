#include "formats.h"

#include <bit>
#include <cfenv>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx_machine {
namespace {

constexpr std::uint8_t kNanByte = 0x7F;  // of e4m3 and e5m2, as cvt writes it

// A binary format with an implicit leading one and subnormal numbers.
struct Layout {
  int fraction;         // bits
  int lowest;           // exponent of the smallest normal number
  double largest;       // finite
  bool has_infinities;  // e4m3 has none
};
constexpr Layout kHalf{10, -14, 65504, true};
constexpr Layout kBfloat{7, -126, 0x1.FEp127, true};
constexpr Layout kTf32{10, -126, 0x1.FFCp127, true};
constexpr Layout kE4m3{3, -6, 448, false};
constexpr Layout kE5m2{2, -14, 57344, true};

// Returns the value of a format that a finite value is rounded to, or infinity. The quotient by a
// power of two is exact, so that there is one rounding.
double rounded_to(const Layout& layout, double value, Rounding mode, Overflow overflow) {
  if (std::isinf(value)) {
    return overflow == Overflow::kFinite ? std::copysign(layout.largest, value) : value;
  }
  if (value == 0) return value;
  const int exponent = std::max(std::ilogb(value), layout.lowest);
  const double step = std::ldexp(1.0, exponent - layout.fraction);
  const double found = std::copysign(rounded(value / step, mode) * step, value);
  if (std::fabs(found) <= layout.largest) return found;
  const bool to_largest = overflow == Overflow::kFinite || mode == Rounding::kZero ||
                          (mode == Rounding::kDown && value > 0) ||
                          (mode == Rounding::kUp && value < 0);
  return std::copysign(to_largest ? layout.largest : std::numeric_limits<double>::infinity(),
                       value);
}

// Returns the bits of a value that a format with at most 16 bits holds.
std::uint16_t packed(const Layout& layout, double value, int sign_bit) {
  const auto sign = static_cast<unsigned>(std::signbit(value)) << sign_bit;
  const double size = std::fabs(value);
  const unsigned infinite = ((1u << sign_bit) - 1) >> layout.fraction << layout.fraction;
  if (std::isinf(size)) return static_cast<std::uint16_t>(sign | infinite);
  const double smallest = std::ldexp(1.0, layout.lowest);
  if (size < smallest) {
    const double steps = std::ldexp(size, layout.fraction - layout.lowest);
    return static_cast<std::uint16_t>(sign | static_cast<unsigned>(steps));
  }
  const int exponent = std::ilogb(size);
  const auto digits = static_cast<unsigned>(std::ldexp(size, layout.fraction - exponent));
  const auto biased = static_cast<unsigned>(exponent - layout.lowest + 1);
  const unsigned fraction = digits & ((1u << layout.fraction) - 1);
  return static_cast<std::uint16_t>(sign | biased << layout.fraction | fraction);
}

float unpacked(const Layout& layout, std::uint8_t bits) {
  const int exponent = (bits & 0x7F) >> layout.fraction;
  const int fraction = bits & ((1 << layout.fraction) - 1);
  const int last = 0x7F >> layout.fraction;
  float size = 0;
  if (layout.has_infinities && exponent == last) {
    size = fraction == 0 ? std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  } else if (!layout.has_infinities && (bits & 0x7F) == 0x7F) {
    size = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    size = std::ldexp(static_cast<float>(fraction), layout.lowest - layout.fraction);
  } else {
    size = std::ldexp(static_cast<float>(fraction + (1 << layout.fraction)),
                      layout.lowest + exponent - 1 - layout.fraction);
  }
  return (bits & 0x80) != 0 ? -size : size;
}

std::array<float, 256> table_of(const Layout& layout) {
  std::array<float, 256> table;
  for (int bits = 0; bits < 256; ++bits) table[bits] = unpacked(layout, static_cast<uint8_t>(bits));
  return table;
}

std::uint8_t byte_of(const Layout& layout, float value) {
  if (std::isnan(value)) return kNanByte;
  const double found = rounded_to(layout, value, Rounding::kNearest, Overflow::kFinite);
  return static_cast<std::uint8_t>(packed(layout, found, 7));
}

}  // namespace

Format format_of(const std::string& name) {
  if (name == "f16") return Format::kF16;
  if (name == "bf16") return Format::kBf16;
  if (name == "tf32") return Format::kTf32;
  if (name == "e4m3") return Format::kE4m3;
  if (name == "e5m2") return Format::kE5m2;
  if (name == "s8") return Format::kS8;
  if (name == "u8") return Format::kU8;
  return Format::kNone;
}

double rounded(double value, Rounding mode) {
  switch (mode) {
    case Rounding::kZero:
      return std::trunc(value);
    case Rounding::kDown:
      return std::floor(value);
    case Rounding::kUp:
      return std::ceil(value);
    case Rounding::kAway:
      return std::round(value);
    default:
      return std::nearbyint(value);
  }
}

// What is computed between the two calls stays there: its operands are loaded from memory that the
// first call may change, and its results are stored where the second may read them.
RoundingScope::RoundingScope(Rounding mode) : changed_(mode != Rounding::kNearest) {
  if (!changed_) return;
  std::fesetround(mode == Rounding::kZero   ? FE_TOWARDZERO
                  : mode == Rounding::kDown ? FE_DOWNWARD
                                            : FE_UPWARD);
}
RoundingScope::~RoundingScope() {
  if (changed_) std::fesetround(FE_TONEAREST);
}

std::uint16_t half_of_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  if (std::isnan(value)) return 0x7FFF;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7C00;
  if (size < 0x1p-14f) {  // subnormal, in steps of 2^-24; the addition rounds
    return sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(size, 24)));
  }
  const std::uint32_t nearest = (bits & 0x7FFFFFFF) + 0xFFF + (bits >> 13 & 1);
  return sign | static_cast<std::uint16_t>((nearest >> 13) - (112u << 10));
}

std::uint16_t bf16_of_float(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

const std::array<float, 256> kE4m3Values = table_of(kE4m3);
const std::array<float, 256> kE5m2Values = table_of(kE5m2);
std::uint8_t e4m3_of_float(float value) { return byte_of(kE4m3, value); }
std::uint8_t e5m2_of_float(float value) { return byte_of(kE5m2, value); }

std::uint16_t half_of_double(double value, Rounding mode, Overflow overflow) {
  if (std::isnan(value)) return 0x7FFF;
  return packed(kHalf, rounded_to(kHalf, value, mode, overflow), 15);
}

std::uint16_t bf16_of_double(double value, Rounding mode, Overflow overflow) {
  if (std::isnan(value)) return 0x7FFF;
  return packed(kBfloat, rounded_to(kBfloat, value, mode, overflow), 15);
}

std::uint32_t tf32_of_float(float value, Rounding mode, Overflow overflow) {
  if (std::isnan(value)) return 0x7FFFFFFF;
  const double found = rounded_to(kTf32, value, mode, overflow);
  return std::bit_cast<std::uint32_t>(static_cast<float>(found));
}

}  // namespace ptx_machine
