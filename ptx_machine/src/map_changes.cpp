// Changes of tensor maps in memory: tensormap.replace, and copies behind a fence of the tensormap proxy.
//
// A map that a kernel changes is one that was encoded before: others have no layout that it could rely on.
#include "races.h"
#include "tensor_map.h"
#include "uncommon.h"

namespace ptx_machine {
namespace {

enum Field {
  kGlobalAddress,
  kRank,
  kBoxDim,
  kGlobalDim,
  kGlobalStride,
  kElementStride,
  kElementType,
  kInterleave,
  kSwizzle,
  kFill
};
constexpr const char* kFields[] = {
    "global_address", "rank",     "box_dim",           "global_dim",   "global_stride",
    "element_stride", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode"};

bool has_number(int field) { return field >= kBoxDim && field <= kElementStride; }

// Types have other numbers here than CUtensorMapDataType has: .f32.ftz, .f64 and .bf16 are 8, 9 and 10.
std::uint8_t type_number(std::uint64_t value) {
  if (value == 8) return 10;
  if (value == 9) return 8;
  if (value == 10) return 9;
  return static_cast<std::uint8_t>(value);
}

// Returns what is wrong with the new value; empty: nothing.
std::string change(TensorMap& map, int field, std::uint64_t number, std::uint64_t value) {
  const auto text = [](std::uint64_t v) { return std::to_string(v); };
  if (has_number(field) && number >= kMaxRank) return "dimension " + text(number);
  switch (field) {
    case kGlobalAddress:
      map.address = value;
      return value % 16 == 0 ? "" : "a global address that is not aligned to 16 bytes";
    case kRank:
      map.rank = static_cast<std::uint8_t>(value + 1);
      return value < kMaxRank ? "" : "rank " + text(value + 1);
    case kBoxDim:
      map.box[number] = static_cast<std::uint16_t>(value);
      return value >= 1 && value <= 256 ? "" : "box " + text(value);
    case kGlobalDim:
      map.sizes[number] = value;
      return value >= 1 ? "" : "size 0";
    case kGlobalStride:
      if (number + 1 >= kMaxRank) return "stride of dimension " + text(number);
      map.strides[number + 1] = value;
      return value % 16 == 0 ? "" : "stride " + text(value);
    case kElementStride:
      map.steps[number] = static_cast<std::uint8_t>(value);
      return value >= 1 && value <= 8 ? "" : "element stride " + text(value);
    case kElementType:
      map.type = type_number(value);
      return element_type(map.type) != nullptr ? "" : "type " + text(value);
    case kInterleave:
      return value == 0 ? "" : "interleave " + text(value);
    case kSwizzle:
      map.swizzle = static_cast<std::uint8_t>(value);
      return value <= 3 ? "" : "swizzle " + text(value);
    default:
      map.fills_nan = static_cast<std::uint8_t>(value);
      return value <= 1 ? "" : "fill " + text(value);
  }
}

std::uint8_t* half_of_map(Context& c, const Op& op, int lane, std::uint64_t address, int half) {
  return at(c, op, lane, op.space, address + 64 * half, 64);
}

// [map] {, dimension}, value
Outcome replace(Context& c, const Op& op, Mask mask) {
  const Lanes base = read(c, op, 0, mask);
  const bool numbered = has_number(op.number);
  const Lanes numbers = numbered ? read(c, op, 1, mask) : Lanes{};
  const Lanes values = read(c, op, numbered ? 2 : 1, mask);
  each(mask, [&](int l) {
    const std::uint64_t address = address_of(op, 0, base, l);
    std::uint8_t bytes[sizeof(TensorMap)];
    for (int half = 0; half < 2; ++half) {
      std::memcpy(bytes + 64 * half, half_of_map(c, op, l, address, half), 64);
    }
    TensorMap map;
    std::string problem = read_tensor_map(bytes, &map);
    if (problem.empty()) problem = change(map, op.number, numbers[l], values[l]);
    if (!problem.empty()) c.fail(op, l, "tensormap.replace: " + problem);
    seal_tensor_map(&map);
    note_read(c, op, l, op.space, address, sizeof(map));
    note_write(c, op, l, op.space, address, sizeof(map));
    const auto* changed = reinterpret_cast<const std::uint8_t*>(&map);
    for (int half = 0; half < 2; ++half) {
      std::memcpy(half_of_map(c, op, l, address, half), changed + 64 * half, 64);
    }
  });
  return Outcome::kNext;
}

// tensormap.cp_fenceproxy: the warp copies a map from shared to global memory, and releases it.
Outcome copy_map(Context& c, const Op& op, Mask mask) {
  if ((c.warp->alive & ~mask) != 0) return Outcome::kWait;
  const Lanes target = read(c, op, 0, mask), source = read(c, op, 1, mask);
  const int l = std::countr_zero(mask);
  const std::uint64_t to = address_of(op, 0, target, l), from = address_of(op, 1, source, l);
  std::uint8_t* places[2];
  for (int half = 0; half < 2; ++half) {
    places[half] = at(c, op, l, Space::kGlobal, to + 64 * half, 64);
    note_read(c, op, l, Space::kShared, from + 64 * half, 64);
    note_write(c, op, l, Space::kGlobal, to + 64 * half, 64);
    std::memcpy(places[half], at(c, op, l, Space::kShared, from + 64 * half, 64), 64);
  }
  c.warp->order->fence_proxy({ProxyFence::kMapReleased}, mask, c.warp->alive);
  c.warp->order->fence(op.order.scope, mask, c.warp->alive);
  return Outcome::kYield;
}

}  // namespace

bool decode_tensor_map(const Statement& s, Op& op) {
  if (s.opcode[0] != "tensormap" || s.opcode.size() < 3) return false;
  op.written = 0;
  op.space = space_of(s);
  op.order = memory_order_of(s);
  if (s.opcode[1] == "cp_fenceproxy") {
    op.handler = copy_map;
    return s.operands.size() == 3 &&
           has_no_other(s, {"cp_fenceproxy", "global", "shared::cta", "tensormap::generic",
                            "release", "cta", "cluster", "gpu", "sys", "sync", "aligned"});
  }
  if (s.opcode[1] != "replace" || s.opcode[2] != "tile" || s.opcode.size() < 6) return false;
  op.number = -1;
  for (int i = 0; i <= kFill; ++i) {
    if (s.opcode[3] == kFields[i]) op.number = i;
  }
  op.handler = replace;
  return op.number >= 0 && s.operands.size() == (has_number(op.number) ? 3u : 2u) &&
         has_no_other(s, {"replace", "tile", s.opcode[3].c_str(), "global", "shared::cta", "b1024",
                          "b32", "b64"});
}

}  // namespace ptx_machine
