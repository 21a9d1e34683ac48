// Numbers of the kernels of the emulated device, and how they store them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "gpu/device.h"

namespace emulated {

inline float to_float(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e4m3: no infinities; exponent and mantissa all ones are NaN.
inline float to_float(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(1.0f + mantissa / 8.0f, exponent - 7);
  return (bits & 128) != 0 ? -size : size;
}

// A TMA tensor map, and the store of a box through it: what lies behind its end is left out, but a box
// must not begin in front of it.
struct TensorMap {
  std::uint16_t* base;
  int rows, columns;
  std::int64_t ld;

  template <class Put>
  void store(int row, int column, int box_rows, int box_columns, Put&& put) const {
    if (row < 0 || column < 0) {
      device().fail("a bulk store begins at row " + std::to_string(row) + ", column " +
                    std::to_string(column) + " of its tensor map: neither may be negative");
      return;
    }
    for (int r = row; r < std::min(rows, row + box_rows); ++r) {
      for (int c = column; c < std::min(columns, column + box_columns); ++c) {
        put(base + r * ld + c, r - row, c - column);
      }
    }
  }
};

}  // namespace emulated
