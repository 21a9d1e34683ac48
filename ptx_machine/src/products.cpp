// movmatrix, and mma.sync of doubles, of bits and of sparse matrices. Layouts: PTX ISA, "Matrix Fragments for
// mma".
#include <bit>
#include <cmath>

#include "elements.h"
#include "uncommon.h"

namespace ptx_machine {
namespace {

constexpr Mask kWhole = ~Mask{0};

// Lane l holds two elements of row l / 4: of the transposed matrix afterwards.
Outcome transpose(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const Lanes a = read(c, op, 0, mask);
  Lanes& d = write(c, op, 0, mask);
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint64_t bits = 0;
    for (int part = 0; part < 2; ++part) {
      const int row = 2 * (lane % 4) + part, column = lane / 4;
      const std::uint64_t half = a[4 * row + column / 2] >> (16 * (column % 2)) & 0xFFFF;
      bits |= half << (16 * part);
    }
    d[lane] = bits;
  }
  return Outcome::kNext;
}

// -- doubles and bits: a register of A holds row lane / 4 + 8 (r % 2), and place lane % 4 + 4 (r / 2) along K;
// with eight rows of A place lane % 4 + 4 r. One of B holds column lane / 4, and place lane % 4 + 4 r.

struct Shape {
  int rows;     // of A
  int depth;    // places along K
  bool is_f64;  // else 32 bits in each place
  bool is_xor;  // else and
};

Shape shape_of(const Op& op) {
  return {op.number & 0xFF, op.number >> 8, op.type == Type::kF64, op.flag};
}

template <class T>
Outcome multiply_places(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const Shape shape = shape_of(op);
  const int high = shape.rows / 8;  // registers of a column of places
  const int registers_a = high * shape.depth / 4, registers_b = shape.depth / 4;
  std::uint64_t a[16][16] = {}, b[16][8] = {};  // [place][row], [place][column]
  for (int r = 0; r < registers_a; ++r) {
    const Lanes& lanes = read(c, op, r, kWhole);
    for (int l = 0; l < kLanes; ++l) a[l % 4 + 4 * (r / high)][l / 4 + 8 * (r % high)] = lanes[l];
  }
  for (int r = 0; r < registers_b; ++r) {
    const Lanes& lanes = read(c, op, registers_a + r, kWhole);
    for (int l = 0; l < kLanes; ++l) b[l % 4 + 4 * r][l / 4] = lanes[l];
  }
  Lanes results[4];
  for (int r = 0; r < 2 * high; ++r) results[r] = read(c, op, registers_a + registers_b + r, mask);
  for (int r = 0; r < 2 * high; ++r) {
    for (int l = 0; l < kLanes; ++l) {
      const int row = l / 4 + 8 * (r / 2), column = 2 * (l % 4) + r % 2;
      T sum = get<T>(results[r][l]);
      for (int k = 0; k < shape.depth; ++k) {
        const std::uint64_t x = a[k][row], y = b[k][column];
        if constexpr (std::is_same_v<T, double>) {
          sum = std::fma(get<double>(x), get<double>(y), sum);
        } else {
          const auto bits = static_cast<std::uint32_t>(shape.is_xor ? x ^ y : x & y);
          sum += std::popcount(bits);
        }
      }
      results[r][l] = bits_of(sum);
    }
  }
  for (int r = 0; r < 2 * high; ++r) write(c, op, r, mask) = results[r];
  return Outcome::kNext;
}

// mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64, and ...m16n8k256.row.col.s32.b1.b1.s32.xor.popc
bool decode_places(const Statement& s, Op& op) {
  const std::vector<std::string>& names = s.opcode;
  if (names.size() < 10 || names[1] != "sync" || names[2] != "aligned") return false;
  if (names[4] != "row" || names[5] != "col") return false;
  constexpr struct {
    const char* name;
    int rows, depth;
    bool is_f64;
  } kShapes[] = {{"m8n8k4", 8, 4, true},     {"m16n8k4", 16, 4, true},  {"m16n8k8", 16, 8, true},
                 {"m16n8k16", 16, 16, true}, {"m8n8k128", 8, 4, false}, {"m16n8k128", 16, 4, false},
                 {"m16n8k256", 16, 8, false}};
  const bool is_f64 = names[6] == "f64";
  op.number = 0;
  for (const auto& shape : kShapes) {
    if (names[3] == shape.name && shape.is_f64 == is_f64) op.number = shape.rows | shape.depth << 8;
  }
  if (op.number == 0) return false;
  if (is_f64) {
    op.type = Type::kF64;
    op.handler = multiply_places<double>;
    return names.size() == 10 && names[7] == "f64" && names[8] == "f64" && names[9] == "f64";
  }
  op.type = Type::kS32;
  op.flag = names.size() == 12 && names[10] == "xor";
  op.handler = multiply_places<std::int32_t>;
  return names.size() == 12 && names[6] == "s32" && names[7] == "b1" && names[8] == "b1" &&
         names[9] == "s32" && (op.flag || names[10] == "and") && names[11] == "popc";
}

// -- sparse A ------------------------------------------------------------------------------------------
//
// Of four elements along K two are kept, and of tf32 one of two. Four bits say which: two numbers of two
// bits, or 4 (the first) and 14 (the second). A word of them holds 16 bits of row lane / 4, and 16 of the row
// eight below; words of lanes next to each other are of 16 (tf32: 8) elements each.

template <class T, Format kFormat>
void read_sparse(Context& c, const Op& op, int depth, T (*a)[16], const Lanes& words,
                 int selector) {
  constexpr int kBytes = bytes_of(kFormat), kElements = 4 / kBytes;
  constexpr bool kWide = kBytes == 4;
  const int kept = depth / 2, registers = kept * kBytes / 8;
  T packed[32][16];
  for (int r = 0; r < registers; ++r) {
    const Lanes& lanes = read(c, op, r, kWhole);
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint8_t bytes[4];
      std::memcpy(bytes, &lanes[lane], 4);
      const int row = lane / 4 + 8 * (r % 2), k = kElements * (lane % 4 + r / 2 * 4);
      for (int i = 0; i < kElements; ++i) packed[k + i][row] = element<kFormat>(bytes + i * kBytes);
    }
  }
  const int span = kWide ? 8 : 16;        // elements of a word
  const int lanes_of_row = depth / span;  // that hold words
  const int group = kWide ? 2 : 4;        // elements that four bits are of
  for (int row = 0; row < 16; ++row) {
    for (int first = 0; first < depth; first += group) {
      const int lane = row % 8 * 4 + selector * lanes_of_row + first / span;
      const auto bits =
          static_cast<unsigned>(words[lane] >> (16 * (row / 8)) >> (4 * (first % span / group))) &
          15;
      if constexpr (kWide) {
        if (bits != 4 && bits != 14)
          c.fail(op, lane, "metadata of a sparse matrix that keep none of two");
        a[first + (bits == 14 ? 1 : 0)][row] = packed[first / 2][row];
      } else {
        const unsigned low = bits & 3, high = bits >> 2;
        if (low >= high) c.fail(op, lane, "metadata of a sparse matrix out of order");
        a[first + low][row] = packed[first / 2][row];
        a[first + high][row] = packed[first / 2 + 1][row];
      }
    }
  }
}

template <class T>
Outcome multiply_sparse(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const int depth = op.number, bytes = bytes_of(op.format_a);
  const int registers_a = depth * bytes / 16, registers_b = depth * bytes / 16;
  const bool half = op.type == Type::kF16;
  const int registers_d = half ? 2 : 4;
  const Lanes words = read(c, op, registers_a + registers_b + registers_d, kWhole);
  const int selector =
      static_cast<int>(read(c, op, registers_a + registers_b + registers_d + 1, kWhole)[0]);
  const int lanes_of_row = depth / (bytes == 4 ? 8 : 16);
  if (selector < 0 || (selector + 1) * lanes_of_row > 4) {
    c.fail(op, 0, "a sparsity selector of " + std::to_string(selector));
  }
  T a[64][16] = {}, b[64][8];
  with_format<T>(op.format_a,
                 [&](auto format) { read_sparse<T, format()>(c, op, depth, a, words, selector); });
  with_format<T>(op.format_b, [&](auto format) {
    constexpr int kBytes = bytes_of(format()), kElements = 4 / kBytes;
    for (int r = 0; r < registers_b; ++r) {
      const Lanes& lanes = read(c, op, registers_a + r, kWhole);
      for (int lane = 0; lane < kLanes; ++lane) {
        std::uint8_t part[4];
        std::memcpy(part, &lanes[lane], 4);
        const int k = kElements * (lane % 4 + r * 4);
        for (int i = 0; i < kElements; ++i)
          b[k + i][lane / 4] = element<format()>(part + i * kBytes);
      }
    }
  });
  const Lanes* before[4];
  for (int r = 0; r < registers_d; ++r)
    before[r] = &read(c, op, registers_a + registers_b + r, mask);
  Lanes results[4] = {};
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = half ? i / 2 : i, shift = half ? 16 * (i % 2) : 0;
      const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
      const std::uint64_t bits = (*before[r])[lane] >> shift;
      if constexpr (std::is_same_v<T, float>) {
        float sum = sum_of<float>(bits, half);
        for (int k = 0; k < depth; ++k) sum += a[k][row] * b[k][column];
        results[r][lane] |= bits_of_sum(sum, half, false) << shift;
      } else {
        std::int64_t sum = get<std::int32_t>(bits);
        for (int k = 0; k < depth; ++k) sum += std::int64_t{a[k][row]} * b[k][column];
        results[r][lane] = bits_of_sum(sum, false, op.flag);
      }
    }
  }
  for (int r = 0; r < registers_d; ++r) write(c, op, r, mask) = results[r];
  return Outcome::kNext;
}

// mma.sp{::ordered_metadata}.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 d, a, b, c, metadata, selector
bool decode_sparse(const Statement& s, Op& op) {
  std::vector<std::string> names = s.opcode;
  op.flag = std::erase(names, "satfinite") != 0;
  if (names.size() != 11 || names[2] != "sync" || names[3] != "aligned") return false;
  if (names[5] != "row" || names[6] != "col" || names[7] != names[10]) return false;
  op.number = names[4] == "m16n8k8"    ? 8
              : names[4] == "m16n8k16" ? 16
              : names[4] == "m16n8k32" ? 32
              : names[4] == "m16n8k64" ? 64
                                       : 0;
  op.type = type_of(names[7]);
  op.format_a = format_of(names[8]);
  op.format_b = format_of(names[9]);
  if (op.number == 0 || op.format_a == Format::kNone || op.format_b == Format::kNone) return false;
  const int row = op.number * bytes_of(op.format_a);  // bytes of dense A along K
  if (row != 32 && row != 64) return false;
  const bool integers = op.format_a == Format::kS8 || op.format_a == Format::kU8;
  op.handler = integers ? multiply_sparse<std::int32_t> : multiply_sparse<float>;
  if (integers) {
    return op.type == Type::kS32 && (op.format_b == Format::kS8 || op.format_b == Format::kU8);
  }
  if (op.flag || (op.type != Type::kF32 && op.type != Type::kF16)) return false;
  if (bytes_of(op.format_a) == 1) {
    return bytes_of(op.format_b) == 1 && row == 64 && op.format_b != Format::kS8 &&
           op.format_b != Format::kU8;
  }
  return op.format_a == op.format_b && (op.type == Type::kF32 || op.format_a == Format::kF16);
}

}  // namespace

bool decode_products(const Statement& s, Op& op) {
  const std::string& name = s.opcode[0];
  if (name == "movmatrix") {
    op.handler = transpose;
    return has_no_other(s, {"sync", "aligned", "m8n8", "trans", "b16"}) && s.opcode.size() == 6;
  }
  if (name != "mma") return false;
  if (s.opcode.size() > 1 && s.opcode[1].starts_with("sp")) return decode_sparse(s, op);
  return decode_places(s, op);
}

}  // namespace ptx_machine
