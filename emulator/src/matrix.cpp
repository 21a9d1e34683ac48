// ldmatrix, stmatrix and mma.sync. Layouts of fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16".
#include "machine.h"

namespace emulator {
namespace {

constexpr Mask kWhole = ~Mask{0};

bool is_whole(Context& c, const Op& op, Mask mask) {
  if (mask == kWhole) return true;
  if ((c.warp->alive & ~mask) == 0) {
    c.fail(op, std::countr_zero(mask), "not all lanes of the warp take part");
  }
  return false;
}

// Matrix i has its eight rows of 16 bytes at the addresses of lanes 8i to 8i + 7. Lane l holds
// elements 2(l % 4) and 2(l % 4) + 1 of row l / 4, or of that column with .trans.
Outcome move_matrices(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  const bool loads = op.written == 1;
  const Lanes base = read(c, op, 0, mask);
  for (int matrix = 0; matrix < op.number; ++matrix) {
    std::uint8_t* rows[8];
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const auto address = base[lane] + static_cast<std::uint64_t>(op.values[0].offset);
      rows[row] = at(c, op, lane, Space::kShared, address, 16);
    }
    const Lanes* source = loads ? nullptr : &read(c, op, 1 + matrix, mask);
    Lanes* target = loads ? &write(c, op, matrix, mask) : nullptr;
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint64_t bits = 0;
      for (int part = 0; part < 2; ++part) {
        const int major = lane / 4, minor = 2 * (lane % 4) + part;
        std::uint8_t* element = op.flag ? rows[minor] + 2 * major : rows[major] + 2 * minor;
        std::uint16_t half = 0;
        if (loads) {
          std::memcpy(&half, element, 2);
          bits |= std::uint64_t{half} << (16 * part);
        } else {
          half = static_cast<std::uint16_t>((*source)[lane] >> (16 * part));
          std::memcpy(element, &half, 2);
        }
      }
      if (loads) (*target)[lane] = bits;
    }
  }
  return Outcome::kNext;
}

bool decode_move(const Statement& s, Op& op) {
  op.number = has(s, "x4") ? 4 : has(s, "x2") ? 2 : has(s, "x1") ? 1 : 0;
  op.flag = has(s, "trans");
  op.written = s.opcode[0] == "ldmatrix" ? 1 : 0;
  op.handler = move_matrices;
  return op.number > 0 && has(s, "m8n8") && has(s, "b16");
}

// D = A B + C of 16 x K, K x 8 and 16 x 8, summed in float in the order of k. K is 8 or 16.
Outcome multiply(Context& c, const Op& op, Mask mask) {
  if (!is_whole(c, op, mask)) return Outcome::kWait;
  const int depth = op.number, registers_a = depth / 4, registers_b = depth / 8;
  const auto widen = [&](std::uint64_t bits, int part) {
    const auto half = static_cast<std::uint16_t>(bits >> (16 * part));
    return op.flag ? float_of_bf16(half) : float_of_half(half);
  };
  float a[16][16], b[16][8];
  for (int r = 0; r < registers_a; ++r) {
    const Lanes& lanes = read(c, op, r, mask);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4 + (r % 2) * 8, column = 2 * (lane % 4) + r / 2 * 8;
      for (int part = 0; part < 2; ++part) a[row][column + part] = widen(lanes[lane], part);
    }
  }
  for (int r = 0; r < registers_b; ++r) {
    const Lanes& lanes = read(c, op, registers_a + r, mask);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = 2 * (lane % 4) + r * 8, column = lane / 4;
      for (int part = 0; part < 2; ++part) b[row + part][column] = widen(lanes[lane], part);
    }
  }
  for (int r = 0; r < 4; ++r) {
    const Lanes before = read(c, op, registers_a + registers_b + r, mask);
    Lanes& d = write(c, op, r, mask);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int row = lane / 4 + r / 2 * 8, column = 2 * (lane % 4) + r % 2;
      float sum = get<float>(before[lane]);
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      d[lane] = bits_of(sum);
    }
  }
  return Outcome::kNext;
}

bool decode_multiply(const Statement& s, Op& op) {
  const auto count = s.opcode.size();
  if (count < 9 || !has(s, "row") || !has(s, "col")) return false;
  op.number = has(s, "m16n8k16") ? 16 : has(s, "m16n8k8") ? 8 : 0;
  op.flag = s.opcode[count - 3] == "bf16";
  op.type = Type::kF32;
  op.handler = multiply;
  return op.number > 0 && (op.flag || s.opcode[count - 3] == "f16") &&
         s.opcode[count - 3] == s.opcode[count - 2] && s.opcode[count - 4] == "f32" &&
         s.opcode[count - 1] == "f32";
}

}  // namespace

bool decode_matrix(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "ldmatrix" || name == "stmatrix") return decode_move(s, op);
  if (name == "mma") return decode_multiply(s, op);
  return false;
}

}  // namespace emulator
