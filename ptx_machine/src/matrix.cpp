// ldmatrix, stmatrix and mma.sync. Layouts of fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16".
#include "elements.h"
#include "races.h"

namespace ptx_machine {
namespace {

constexpr Mask kWhole = ~Mask{0};

// Matrix i has its eight rows of 16 bytes at the addresses of lanes 8i to 8i + 7. Lane l holds
// elements 2(l % 4) and 2(l % 4) + 1 of row l / 4, or of that column with .trans.
Outcome move_matrices(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const bool loads = op.written == 1;
  const Lanes base = read(c, op, 0, mask);
  for (int matrix = 0; matrix < op.number; ++matrix) {
    std::uint8_t* rows[8];
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * matrix + row;
      const auto address = base[lane] + static_cast<std::uint64_t>(op.values[0].offset);
      rows[row] = at(c, op, lane, Space::kShared, address, 16);
      if (loads) {
        note_read(c, op, lane, Space::kShared, address, 16);
      } else {
        note_write(c, op, lane, Space::kShared, address, 16);
      }
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

// -- mma.sync ----------------------------------------------------------------------------------------

constexpr int kRows = 16, kColumns = 8, kMostDepth = 32;

// Register r of A holds row lane / 4 + 8 (r % 2), and of B column lane / 4. Each register holds four
// bytes along K; the four lanes of a row hold the next ones, and then the next registers do.
template <Format kFormat, class T>
void read_operand(Context& c, const Op& op, int first, int registers, bool is_a, T (*out)[kRows]) {
  constexpr int kBytes = bytes_of(kFormat), kElements = 4 / kBytes;
  for (int r = 0; r < registers; ++r) {
    const Lanes& lanes = read(c, op, first + r, kWhole);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint8_t bytes[4];
      std::memcpy(bytes, &lanes[lane], 4);
      const int row = lane / 4 + (is_a ? 8 * (r % 2) : 0);
      const int k = kElements * (lane % 4 + (is_a ? r / 2 : r) * 4);
      for (int i = 0; i < kElements; ++i) out[k + i][row] = element<kFormat>(bytes + i * kBytes);
    }
  }
}

// A row of B has eight elements side by side, so that the compiler vectorises the inner loop.
template <class T>
void accumulate(const T (*a)[kRows], const T (*b)[kRows], int depth, T (*d)[kColumns]) {
  for (int row = 0; row < kRows; ++row) {
    T sums[kColumns];
    for (int column = 0; column < kColumns; ++column) sums[column] = d[row][column];
    for (int k = 0; k < depth; ++k) {
      const T left = a[k][row];
      for (int column = 0; column < kColumns; ++column) sums[column] += left * b[k][column];
    }
    for (int column = 0; column < kColumns; ++column) d[row][column] = sums[column];
  }
}

// Calls f(register, lane, part, row, column) for each element of D: one in a register, or two of f16.
template <class F>
void each_element(bool half, F&& f) {
  for (int i = 0; i < 4; ++i) {  // of a lane
    for (int lane = 0; lane < kLanes; ++lane) {
      f(half ? i / 2 : i, lane, half ? i % 2 : 0, lane / 4 + i / 2 * 8, 2 * (lane % 4) + i % 2);
    }
  }
}

// D = A B + C of 16 x K, K x 8 and 16 x 8, summed in the order of k: in float, or in integers that
// wrap around, or with .satfinite (op.flag) become the nearest one at the end.
template <class T>
Outcome multiply(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const int depth = op.number, bytes = bytes_of(op.format_a);
  const int registers_a = depth * bytes / 8, registers_b = depth * bytes / 16;
  const bool half = op.type == Type::kF16;
  T a[kMostDepth][kRows], b[kMostDepth][kRows];
  with_format<T>(op.format_a,
                 [&](auto format) { read_operand<format()>(c, op, 0, registers_a, true, a); });
  with_format<T>(op.format_b, [&](auto format) {
    read_operand<format()>(c, op, registers_a, registers_b, false, b);
  });
  const Lanes* before[4];
  for (int r = 0; r < (half ? 2 : 4); ++r) {
    before[r] = &read(c, op, registers_a + registers_b + r, mask);
  }
  T d[kRows][kColumns] = {};
  each_element(half, [&](int r, int lane, int part, int row, int column) {
    const std::uint64_t bits = (*before[r])[lane] >> (16 * part);
    if constexpr (std::is_same_v<T, float>) d[row][column] = sum_of<T>(bits, half);
  });
  accumulate(a, b, depth, d);
  Lanes results[4] = {};
  each_element(half, [&](int r, int lane, int part, int row, int column) {
    const T value = d[row][column];
    if constexpr (std::is_same_v<T, float>) {
      results[r][lane] |= bits_of_sum(value, half, false) << (16 * part);
    } else {
      const std::int64_t total = std::int64_t{value} + get<std::int32_t>((*before[r])[lane]);
      results[r][lane] = bits_of_sum(total, false, op.flag);
    }
  });
  for (int r = 0; r < (half ? 2 : 4); ++r) write(c, op, r, mask) = results[r];
  return Outcome::kNext;
}

bool is_known(const Op& op) {
  const auto is_float_byte = [](Format f) { return f == Format::kE4m3 || f == Format::kE5m2; };
  const auto is_integer = [](Format f) { return f == Format::kS8 || f == Format::kU8; };
  const Format a = op.format_a, b = op.format_b;
  const int row = op.number * bytes_of(a);  // bytes of A along K
  if (op.type == Type::kS32) return is_integer(a) && is_integer(b) && (row == 16 || row == 32);
  if (op.flag) return false;
  if (is_float_byte(a)) return is_float_byte(b) && row == 32 && op.type == Type::kF32;
  if (a != b || (row != 16 && row != 32)) return false;
  if (a == Format::kF16) return op.type == Type::kF32 || op.type == Type::kF16;
  return (a == Format::kBf16 || a == Format::kTf32) && op.type == Type::kF32;
}

// mma.sync.aligned.shape.row.col{.satfinite}.dtype.atype.btype.ctype; CUTLASS has .satfinite behind the
// types, which ptxas takes too.
bool decode_multiply(const Statement& s, Op& op) {
  std::vector<std::string> names = s.opcode;
  op.flag = names.size() == 11 && (names[6] == "satfinite" || names[10] == "satfinite");
  if (op.flag) std::erase(names, "satfinite");
  if (names.size() != 10) return false;
  if (names[1] != "sync" || names[2] != "aligned" || names[4] != "row" || names[5] != "col") {
    return false;
  }
  constexpr struct {
    const char* name;
    int depth;
  } kShapes[] = {{"m16n8k4", 4}, {"m16n8k8", 8}, {"m16n8k16", 16}, {"m16n8k32", 32}};
  for (const auto& shape : kShapes) {
    if (names[3] == shape.name) op.number = shape.depth;
  }
  const std::size_t types = names.size() - 4;
  op.type = type_of(names[types]);
  op.format_a = format_of(names[types + 1]);
  op.format_b = format_of(names[types + 2]);
  op.handler = op.type == Type::kS32 ? multiply<std::int32_t> : multiply<float>;
  return op.number > 0 && names[types] == names[types + 3] && op.format_a != Format::kNone &&
         op.format_b != Format::kNone && is_known(op);
}

}  // namespace

bool decode_matrix(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "ldmatrix" || name == "stmatrix") return decode_move(s, op);
  if (name == "mma") return decode_multiply(s, op);
  return false;
}

}  // namespace ptx_machine
