// Elements of matrices, for instructions that multiply them.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace ptx_machine {

// Whether all lanes of a warp execute a statement: others come later. Fails if some have ended.
inline bool is_whole_warp(Context& c, const Op& op, Mask mask) {
  if (mask == ~Mask{0}) return true;
  if ((c.warp->alive & ~mask) == 0) {
    c.fail(op, std::countr_zero(mask), "not all lanes of the warp take part");
  }
  return false;
}

// An element of a format as a number of the type that products are computed in.
template <Format kFormat>
auto element(const std::uint8_t* bytes) {
  if constexpr (kFormat == Format::kF16 || kFormat == Format::kBf16) {
    std::uint16_t bits;
    std::memcpy(&bits, bytes, 2);
    return kFormat == Format::kF16 ? float_of_half(bits) : float_of_bf16(bits);
  } else if constexpr (kFormat == Format::kTf32) {
    std::uint32_t bits;
    std::memcpy(&bits, bytes, 4);
    return cut_to_tf32(bits);
  } else if constexpr (kFormat == Format::kE4m3) {
    return float_of_e4m3(*bytes);
  } else if constexpr (kFormat == Format::kE5m2) {
    return float_of_e5m2(*bytes);
  } else if constexpr (kFormat == Format::kS8) {
    return std::int32_t{static_cast<std::int8_t>(*bytes)};
  } else {
    return std::int32_t{*bytes};
  }
}

// A sum in a register, in float or as an integer: of f16, or of 32 bits.
template <class T>
T sum_of(std::uint64_t bits, bool is_f16) {
  if constexpr (std::is_same_v<T, float>) {
    return is_f16 ? float_of_half(static_cast<std::uint16_t>(bits)) : get<float>(bits);
  } else {
    return get<std::int32_t>(bits);
  }
}
// The reverse. An integer wraps around, or becomes the nearest one.
template <class Sum>
std::uint64_t bits_of_sum(Sum sum, bool is_f16, bool saturates) {
  if constexpr (std::is_same_v<Sum, float>) {
    return is_f16 ? half_of_float(sum) : bits_of(sum);
  } else {
    using Limits = std::numeric_limits<std::int32_t>;
    return bits_of(static_cast<std::int32_t>(
        saturates ? std::clamp<Sum>(sum, Limits::min(), Limits::max()) : sum));
  }
}

// Calls f with a format that is a constant of the compiler. T: float, or int for s8 and u8.
template <class T, class F>
void with_format(Format format, F&& f) {
  if constexpr (std::is_integral_v<T>) {
    if (format == Format::kS8) return f(std::integral_constant<Format, Format::kS8>{});
    return f(std::integral_constant<Format, Format::kU8>{});
  } else {
    switch (format) {
      case Format::kF16:
        return f(std::integral_constant<Format, Format::kF16>{});
      case Format::kBf16:
        return f(std::integral_constant<Format, Format::kBf16>{});
      case Format::kE4m3:
        return f(std::integral_constant<Format, Format::kE4m3>{});
      case Format::kE5m2:
        return f(std::integral_constant<Format, Format::kE5m2>{});
      default:
        return f(std::integral_constant<Format, Format::kTf32>{});
    }
  }
}

}  // namespace ptx_machine
