#include "tensor_map.h"

#include <cstring>

namespace ptx_machine {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kNotSupported = 801;
constexpr ElementType kElements[] = {
    {0, Type::kB8, 1},    // UINT8
    {1, Type::kB16, 2},   // UINT16
    {2, Type::kU32, 4},   // UINT32
    {3, Type::kS32, 4},   // INT32
    {4, Type::kU64, 8},   // UINT64
    {5, Type::kS64, 8},   // INT64
    {6, Type::kF16, 2},   // FLOAT16
    {7, Type::kF32, 4},   // FLOAT32
    {8, Type::kF64, 8},   // FLOAT64
    {9, Type::kBf16, 2},  // BFLOAT16
    {10, Type::kF32, 4},  // FLOAT32_FTZ
    {11, Type::kF32, 4},  // TFLOAT32
    {12, Type::kF32, 4},  // TFLOAT32_FTZ
};
constexpr int kFloatFtz = 10, kTfloat = 11, kTfloatFtz = 12;
// Three types of packed four and six bits are known to the driver only.
constexpr int kLastType = 15;
constexpr int kLastSwizzle = 6;  // 4 to 6: 128 bytes by chunks of 32 and 64 bytes

std::uint64_t checksum(const TensorMap& map) {
  std::uint64_t sum = 14695981039346656037u;  // FNV-1a
  const auto* at = reinterpret_cast<const std::uint8_t*>(&map);
  for (std::size_t i = 0; i < offsetof(TensorMap, check); ++i) {
    if (i != offsetof(TensorMap, of_driver)) sum = (sum ^ at[i]) * 1099511628211u;
  }
  return sum;
}

// What the documentation of cuTensorMapEncodeTiled demands. Strides need not be multiples of each other
// here: the documentation's code computes them so, but the driver does not seem to check it.
std::string reason_invalid(const void* map, const TensorMapRequest& r) {
  const auto text = [](auto value) { return std::to_string(value); };
  if (map == nullptr || reinterpret_cast<std::uintptr_t>(map) % 64 != 0) {
    return "the tensor map is not aligned to 64 bytes";
  }
  if (r.type < 0 || r.type > kLastType) return "type " + text(r.type);
  if (r.rank < 1 || r.rank > kMaxRank) return "rank " + text(r.rank);
  if (r.interleave < 0 || r.interleave > 2) return "interleave " + text(r.interleave);
  if (r.interleave != 0 && r.rank < 3) return "interleave with less than three dimensions";
  if (r.swizzle < 0 || r.swizzle > kLastSwizzle) return "swizzle " + text(r.swizzle);
  if (r.promotion < 0 || r.promotion > 3) return "L2 promotion " + text(r.promotion);
  if (r.fill < 0 || r.fill > 1) return "fill " + text(r.fill);
  if (r.address == nullptr || reinterpret_cast<std::uintptr_t>(r.address) % 16 != 0) {
    return "the global address is not aligned to 16 bytes";
  }
  for (unsigned i = 0; i < r.rank; ++i) {
    const std::string of = " of dimension " + text(i);
    if (r.sizes[i] == 0 || r.sizes[i] > std::uint64_t{1} << 32)
      return "size " + text(r.sizes[i]) + of;
    if (r.box[i] == 0 || r.box[i] > 256) return "box " + text(r.box[i]) + of;
    if (r.steps[i] == 0 || r.steps[i] > 8) return "element stride " + text(r.steps[i]) + of;
    if (i == 0) continue;
    const std::uint64_t stride = r.strides[i - 1];
    if (stride % 16 != 0 || stride >= std::uint64_t{1} << 40) return "stride " + text(stride) + of;
  }
  const ElementType* element = element_type(r.type);
  if (element == nullptr || r.interleave != 0) return "";
  const std::uint64_t row = std::uint64_t{r.box[0]} * element->bytes;
  if (row % 16 != 0) return "a row of the box has " + text(row) + " bytes, no multiple of 16";
  const std::uint64_t span = r.swizzle == 0 ? row : r.swizzle >= 3 ? 128 : 16u << r.swizzle;
  if (row > span) {
    return "a row of the box has " + text(row) + " bytes, more than the swizzle's " + text(span);
  }
  const bool real = element->type >= Type::kF16;
  if (r.fill == 1 && !real) return "NaN fill of a type that is not a floating-point one";
  return "";
}

std::string reason_unsupported(const TensorMapRequest& r) {
  if (element_type(r.type) == nullptr) return "type " + std::to_string(r.type);
  if (r.interleave != 0) return "interleave";
  if (r.swizzle > 3) return "swizzle " + std::to_string(r.swizzle);
  // Whether rows that are shorter than the swizzle lie next to each other is not documented.
  const std::uint64_t row = std::uint64_t{r.box[0]} * element_type(r.type)->bytes;
  if (r.swizzle != 0 && row != 16u << r.swizzle && r.rank > 1) {
    return "rows of the box that are shorter than the swizzle";
  }
  return "";
}

}  // namespace

const ElementType* element_type(int number) {
  for (const ElementType& element : kElements) {
    if (element.number == number) return &element;
  }
  return nullptr;
}

int encode_tiled(void* map, const TensorMapRequest& r, std::string* why) {
  *why = reason_invalid(map, r);
  if (!why->empty()) return kInvalidValue;
  *why = reason_unsupported(r);
  if (!why->empty()) return kNotSupported;
  TensorMap made;
  made.magic = TensorMap::kMagic;
  made.address = reinterpret_cast<std::uint64_t>(r.address);
  made.type = static_cast<std::uint8_t>(r.type);
  made.rank = static_cast<std::uint8_t>(r.rank);
  made.swizzle = static_cast<std::uint8_t>(r.swizzle);
  made.fills_nan = static_cast<std::uint8_t>(r.fill);
  for (unsigned i = 0; i < r.rank; ++i) {
    made.sizes[i] = r.sizes[i];
    made.strides[i] = i == 0 ? static_cast<std::uint64_t>(made.element_bytes()) : r.strides[i - 1];
    made.box[i] = static_cast<std::uint16_t>(r.box[i]);
    // Without interleave the innermost dimension is copied whole: the driver ignores its step.
    made.steps[i] = static_cast<std::uint8_t>(i == 0 ? 1 : r.steps[i]);
  }
  made.check = checksum(made);
  std::memcpy(map, &made, sizeof(made));
  return 0;
}

void seal_tensor_map(TensorMap* map) { map->check = checksum(*map); }

// TF32 keeps ten bits of the fraction: to nearest, ties away from zero, as cvt.rna.tf32 does.
void convert_elements(const TensorMap& map, std::uint8_t* data, std::uint64_t bytes) {
  if (map.type < kFloatFtz || map.type > kTfloatFtz) return;
  for (std::uint64_t i = 0; i + 4 <= bytes; i += 4) {
    std::uint32_t bits;
    std::memcpy(&bits, data + i, 4);
    const std::uint32_t exponent = bits >> 23 & 0xFF;
    if (exponent == 0 && map.type != kTfloat) bits &= 0x80000000;
    if (map.type != kFloatFtz && exponent != 0xFF) bits = (bits + 0x1000) & ~0x1FFFu;
    std::memcpy(data + i, &bits, 4);
  }
}

std::string read_tensor_map(const std::uint8_t* from, TensorMap* map) {
  std::memcpy(map, from, sizeof(*map));
  if (map->magic != TensorMap::kMagic) return "no tensor map has been encoded there";
  return map->check == checksum(*map) ? "" : "the tensor map has been changed since it was encoded";
}

}  // namespace ptx_machine
