// Tensor maps of the machine: what cuTensorMapEncodeTiled writes and TMA instructions read. NVIDIA's
// layout of the 128 bytes is not documented; this one is our own.
#pragma once

#include <cstdint>
#include <string>

#include "module.h"

namespace ptx_machine {

constexpr int kMaxRank = 5;

// CUtensorMapDataType, as far as the machine knows it.
struct ElementType {
  int number;
  Type type;  // of reductions; kB8 has none
  int bytes;
};
// Returns null for a type that the machine does not know.
const ElementType* element_type(int number);

struct TensorMap {
  static constexpr std::uint64_t kMagic = 0x50414D4558554C46;
  std::uint64_t magic = 0;
  std::uint8_t type = 0;
  std::uint8_t rank = 0;
  std::uint8_t of_driver =
      0x20;                  // CUTLASS clears a bit for older drivers, the 21st of the second word
  std::uint8_t swizzle = 0;  // CUtensorMapSwizzle: 0 none, 1: 32 bytes, 2: 64, 3: 128
  std::uint8_t fills_nan = 0;
  std::uint8_t unused[3] = {};
  std::uint64_t address = 0;
  std::uint64_t sizes[kMaxRank] = {};    // in elements, innermost first
  std::uint64_t strides[kMaxRank] = {};  // bytes between elements of a dimension
  std::uint16_t box[kMaxRank] = {};
  std::uint8_t steps[kMaxRank] = {};  // elementStrides: every how many elements of a box are copied
  std::uint8_t unused_too = 0;
  std::uint64_t check = 0;  // of what is before, but for the driver's bits

  int element_bytes() const { return element_type(type)->bytes; }
  // Elements that a dimension of the box has in shared memory.
  std::uint64_t count(int dimension) const {
    return dimension == 0 ? box[0] : (box[dimension] + steps[dimension] - 1u) / steps[dimension];
  }
  std::uint64_t row_bytes() const { return count(0) * element_bytes(); }
  std::uint64_t rows() const {
    std::uint64_t rows = 1;
    for (int i = 1; i < rank; ++i) rows *= count(i);
    return rows;
  }
  std::uint64_t bytes() const { return rows() * row_bytes(); }
  // Where the byte at an offset of shared memory lies instead: the number of a 16-byte chunk changes by
  // bits of the address, 7 and up for each of the swizzles.
  std::uint64_t swizzled(std::uint64_t offset) const {
    const std::uint64_t mask = swizzle == 0 ? 0 : (std::uint64_t{1} << swizzle) - 1;
    return offset ^ ((offset >> 7 & mask) << 4);
  }
};
static_assert(sizeof(TensorMap) == 128);

// The arguments of cuTensorMapEncodeTiled, but the map.
struct TensorMapRequest {
  int type;
  unsigned rank;
  const void* address;
  const std::uint64_t* sizes;
  const std::uint64_t* strides;  // rank - 1
  const unsigned* box;
  const unsigned* steps;
  int interleave, swizzle, promotion, fill;
};

// Returns a value of CUresult: 1 (invalid value) for what the driver refuses as well, 801 (not supported)
// for what only the machine does. `why` says it in words.
int encode_tiled(void* map, const TensorMapRequest& request, std::string* why);

// Makes a map that a kernel has changed one that is encoded.
void seal_tensor_map(TensorMap* map);
// What a copy makes of elements of a type that has fewer bits, or no subnormal numbers, in place.
void convert_elements(const TensorMap& map, std::uint8_t* data, std::uint64_t bytes);

// Reads an encoded map. Returns what is wrong with it; empty: nothing.
std::string read_tensor_map(const std::uint8_t* from, TensorMap* map);

}  // namespace ptx_machine
