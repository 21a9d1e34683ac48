// wmma: fragments of matrices that a warp loads, multiplies and stores. PTX does not say which lane holds
// which element, so the layout is the machine's own.
#include <array>

#include "elements.h"
#include "races.h"

namespace ptx_machine {
namespace {

constexpr int kMost = 512;  // elements of a fragment

struct Shape {
  const char* name;
  int rows, columns, depth;
};
constexpr Shape kShapes[] = {{"m16n16k16", 16, 16, 16},
                             {"m8n32k16", 8, 32, 16},
                             {"m32n8k16", 32, 8, 16},
                             {"m16n16k8", 16, 16, 8}};

// A matrix in registers of 32 bits: a lane holds elements that follow each other, by rows. Where there is
// room for more, as in inputs of f16, lanes hold the same elements again.
struct Fragment {
  int rows = 0, columns = 0;
  int bytes = 0;  // of an element
  int registers = 0;

  // Calls f(register, shift, lane, element) for everything that lanes hold.
  template <class F>
  void each(F&& f) const {
    const int together = 4 / bytes, held = registers * together;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < held; ++i) {
        f(i / together, 8 * bytes * (i % together), lane, (lane * held + i) % (rows * columns));
      }
    }
  }
};

// Returns a matrix (a, b, c or d) in registers.
Fragment fragment_of(char part, const Shape& shape, int bytes, bool is_f16) {
  Fragment found{part == 'b' ? shape.depth : shape.rows, part == 'a' ? shape.depth : shape.columns,
                 bytes, 0};
  const bool input = part == 'a' || part == 'b';
  found.registers = input && is_f16 ? 8 : found.rows * found.columns * bytes / 128;
  return found;
}
Fragment fragment_of(char part, const Shape& shape, Format format) {
  return fragment_of(part, shape, bytes_of(format), format == Format::kF16);
}
Fragment fragment_of(char part, const Shape& shape, Type type) {
  return fragment_of(part, shape, bytes_of(type), type == Type::kF16);
}

// Whether inputs of this format, or sums of this type, have a shape.
bool fits(const Shape& shape, Format format) {
  switch (format) {
    case Format::kTf32:
      return shape.depth == 8;
    case Format::kF16:
    case Format::kBf16:
    case Format::kS8:
    case Format::kU8:
      return shape.depth == 16;
    default:
      return false;
  }
}
bool fits(const Shape& shape, Type type) {
  return type == Type::kF32 || (shape.depth == 16 && (type == Type::kF16 || type == Type::kS32));
}

const Shape* shape_of(const std::string& name) {
  for (const Shape& shape : kShapes) {
    if (name == shape.name) return &shape;
  }
  return nullptr;
}

// Of a load or store: op.number is the shape, op.position the matrix.
Fragment fragment_of(const Op& op) {
  const Shape& shape = kShapes[op.number];
  const char part = static_cast<char>(op.position);
  return op.format_a == Format::kNone ? fragment_of(part, shape, op.type)
                                      : fragment_of(part, shape, op.format_a);
}

// -- loads and stores ----------------------------------------------------------------------------------

// Fails unless all lanes have the same value of an operand; returns it.
std::uint64_t common(Context& c, const Op& op, const Lanes& lanes, const char* what) {
  for (int lane = 1; lane < kLanes; ++lane) {
    if (lanes[lane] != lanes[0])
      c.fail(op, lane, std::string("lanes of a warp have not the same ") + what);
  }
  return lanes[0];
}

// The matrix lies by columns with op.flag.
Outcome move_fragment(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const bool loads = op.written == 1;
  const Fragment held = fragment_of(op);
  const std::uint64_t begin = common(c, op, read(c, op, 0, mask), "address") +
                              static_cast<std::uint64_t>(op.values[0].offset);
  const std::size_t last = loads ? 1 : 1 + held.registers;
  std::uint64_t stride = op.flag ? held.rows : held.columns;
  if (op.values.size() > last)
    stride = cut(common(c, op, read(c, op, static_cast<int>(last), mask), "stride"), 4);
  if (begin % 32 != 0)
    c.fail(op, 0, "address " + std::to_string(begin) + " is not aligned to 32 bytes");
  if (stride * held.bytes % 16 != 0)
    c.fail(op, 0, "a stride of " + std::to_string(stride) + " is not a multiple of 16 bytes");
  std::array<const Lanes*, 8> sources{};
  for (int r = 0; !loads && r < held.registers; ++r) sources[r] = &read(c, op, 1 + r, mask);
  std::array<Lanes, 8> results{};
  held.each([&](int r, int shift, int lane, int number) {
    const std::uint64_t row = number / held.columns, column = number % held.columns;
    const std::uint64_t place = op.flag ? column * stride + row : row * stride + column;
    const std::uint64_t address = begin + held.bytes * place;
    std::uint8_t* element = at(c, op, lane, op.space, address, held.bytes);
    std::uint64_t bits = 0;
    if (loads) {
      note_read(c, op, lane, op.space, address, held.bytes);
      std::memcpy(&bits, element, held.bytes);
      results[r][lane] |= bits << shift;
    } else {
      note_write(c, op, lane, op.space, address, held.bytes);
      bits = (*sources[r])[lane] >> shift;
      std::memcpy(element, &bits, held.bytes);
    }
  });
  for (int r = 0; loads && r < held.registers; ++r) write(c, op, r, mask) = results[r];
  return Outcome::kNext;
}

// wmma.load.a.sync.aligned.row.m16n16k16.shared.f16, wmma.store.d...
bool decode_move(const Statement& s, Op& op) {
  const bool loads = s.opcode[1] == "load";
  op.space = space_of(s);
  if (s.opcode.size() != (op.space == Space::kGeneric ? 8u : 9u)) return false;
  const std::string& part = s.opcode[2];
  const Shape* shape = shape_of(s.opcode[6]);
  if (shape == nullptr || part.size() != 1) return false;
  if (!(loads ? part == "a" || part == "b" || part == "c" : part == "d")) return false;
  const Format format = format_of(s.opcode.back());
  const bool input = part == "a" || part == "b";
  if (!(input ? fits(*shape, format) : fits(*shape, op.type))) return false;
  op.number = static_cast<int>(shape - kShapes);
  op.position = part[0];
  op.format_a = input ? format : Format::kNone;
  const Fragment held = fragment_of(op);
  op.flag = s.opcode[5] == "col";
  op.written = loads ? 1 : 0;
  op.handler = move_fragment;
  const std::size_t list = loads ? 0 : 1;
  return (op.flag || s.opcode[5] == "row") && s.operands.size() >= 2 &&
         s.operands[list].parts.size() == static_cast<std::size_t>(held.registers);
}

// -- products ------------------------------------------------------------------------------------------

template <Format kFormat, class T>
void read_elements(Context& c, const Op& op, int first, const Fragment& held, T* out) {
  std::array<const Lanes*, 8> lanes{};
  for (int r = 0; r < held.registers; ++r) lanes[r] = &read(c, op, first + r, ~Mask{0});
  held.each([&](int r, int shift, int lane, int number) {
    const auto bits = static_cast<std::uint32_t>((*lanes[r])[lane] >> shift);
    std::uint8_t bytes[4];
    std::memcpy(bytes, &bits, 4);
    out[number] = element<kFormat>(bytes);
  });
}

// D = A B + C, summed in the order of k: in float, or in integers that wrap around, or with .satfinite
// (op.flag) become the nearest one at the end. op.number: of the shape; op.from: the type of C.
template <class T>
Outcome multiply(Context& c, const Op& op, Mask mask) {
  if (!is_whole_warp(c, op, mask)) return Outcome::kWait;
  const Shape& shape = kShapes[op.number];
  const Fragment in_a = fragment_of('a', shape, op.format_a);
  const Fragment in_b = fragment_of('b', shape, op.format_b);
  std::array<T, kMost> a{}, b{};
  with_format<T>(op.format_a,
                 [&](auto format) { read_elements<format()>(c, op, 0, in_a, a.data()); });
  with_format<T>(op.format_b, [&](auto format) {
    read_elements<format()>(c, op, in_a.registers, in_b, b.data());
  });
  using Sum = std::conditional_t<std::is_same_v<T, float>, float, std::int64_t>;
  std::array<Sum, kMost> sums{};
  const int first = in_a.registers + in_b.registers;
  fragment_of('c', shape, op.from).each([&](int r, int shift, int lane, int number) {
    const std::uint64_t bits = read(c, op, first + r, mask)[lane] >> shift;
    sums[number] = sum_of<T>(bits, op.from == Type::kF16);
  });
  for (int row = 0; row < shape.rows; ++row) {
    for (int k = 0; k < shape.depth; ++k) {
      const T left = a[row * shape.depth + k];
      for (int column = 0; column < shape.columns; ++column)
        sums[row * shape.columns + column] += left * b[k * shape.columns + column];
    }
  }
  std::array<Lanes, 8> results{};
  const Fragment out = fragment_of('d', shape, op.type);
  out.each([&](int r, int shift, int lane, int number) {
    results[r][lane] |= bits_of_sum(sums[number], op.type == Type::kF16, op.flag) << shift;
  });
  for (int r = 0; r < out.registers; ++r) write(c, op, r, mask) = results[r];
  return Outcome::kNext;
}

// wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16 names the types of D and C, with inputs of f16; else
// all four are named: .s32.s8.s8.s32{.satfinite}. How inputs lay in memory says nothing about registers.
bool decode_multiply(const Statement& s, Op& op) {
  std::vector<std::string> names = s.opcode;
  op.flag = names.back() == "satfinite";
  if (op.flag) names.pop_back();
  if (names.size() != 9 && names.size() != 11) return false;
  const auto is_layout = [](const std::string& name) { return name == "row" || name == "col"; };
  const Shape* shape = shape_of(names[6]);
  if (shape == nullptr || !is_layout(names[4]) || !is_layout(names[5])) return false;
  const bool named = names.size() == 11;
  op.number = static_cast<int>(shape - kShapes);
  op.type = type_of(names[7]);
  op.from = type_of(names.back());
  op.format_a = named ? format_of(names[8]) : Format::kF16;
  op.format_b = named ? format_of(names[9]) : Format::kF16;
  const bool integers = op.type == Type::kS32;
  op.handler = integers ? multiply<std::int32_t> : multiply<float>;
  const auto is_integer = [](Format f) { return f == Format::kS8 || f == Format::kU8; };
  const bool fit = fits(*shape, op.format_a) && fits(*shape, op.format_b) &&
                   fits(*shape, op.type) && fits(*shape, op.from);
  if (!fit || op.format_a != op.format_b || is_integer(op.format_a) != integers) return false;
  if (named && op.format_a == Format::kF16) return false;
  if (op.format_a != Format::kF16 && op.type != op.from) return false;
  const bool halves = op.type == Type::kF16 || op.from == Type::kF16;
  return !(halves && named) && !(op.flag && !integers);
}

}  // namespace

bool decode_wmma(const Statement& s, Op& op) {
  if (s.opcode[0] != "wmma" || s.opcode.size() < 8 || !has(s, "sync") || !has(s, "aligned"))
    return false;
  const std::string& what = s.opcode[1];
  if (what == "mma") return decode_multiply(s, op);
  return (what == "load" || what == "store") && decode_move(s, op);
}

}  // namespace ptx_machine
