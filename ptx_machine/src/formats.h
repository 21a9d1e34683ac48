// Number formats: conversion of small floats, and rounding to any of them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>

namespace ptx_machine {

enum class Format : std::uint8_t { kNone, kF16, kBf16, kTf32, kE4m3, kE5m2, kS8, kU8 };

// Returns the format of a type's name, such as "e4m3", or kNone.
Format format_of(const std::string& name);
// Bytes of an element in memory. tf32 lies in memory as float.
constexpr int bytes_of(Format format) {
  return format == Format::kF16 || format == Format::kBf16 ? 2 : format == Format::kTf32 ? 4 : 1;
}

enum class Rounding : std::uint8_t { kNearest, kZero, kDown, kUp, kAway };  // kAway: ties only

// Returns a value rounded to an integer.
double rounded(double value, Rounding mode);

// Sets how the arithmetic of this thread of the host rounds, until the end of the scope.
class RoundingScope {
 public:
  explicit RoundingScope(Rounding mode);
  ~RoundingScope();
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  bool changed_;
};

extern const std::array<float, 256> kE4m3Values, kE5m2Values;
inline float float_of_e4m3(std::uint8_t bits) { return kE4m3Values[bits]; }
inline float float_of_e5m2(std::uint8_t bits) { return kE5m2Values[bits]; }
// The nearest value, ties to even. What is too large becomes the largest finite value.
std::uint8_t e4m3_of_float(float value);
std::uint8_t e5m2_of_float(float value);

// What becomes of values that are too large for a 16-bit float.
enum class Overflow : std::uint8_t { kInfinite, kFinite };

// A value as the bits of f16 or bf16, rounded once.
std::uint16_t half_of_double(double value, Rounding mode, Overflow overflow);
std::uint16_t bf16_of_double(double value, Rounding mode, Overflow overflow);
// Bits of a float whose lower 13 bits of fraction are zero.
std::uint32_t tf32_of_float(float value, Rounding mode, Overflow overflow);
// What matrix instructions read: they ignore the lower bits of a float.
inline float cut_to_tf32(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xFFFFE000); }

}  // namespace ptx_machine
