// One warp's share of wgmma.mma_async: 16 rows of D = A B + D.
//
// Layouts: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": register fragments, matrix
// descriptors, strides and canonical layouts.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "elements.h"
#include "races.h"
#include "wgmma.h"

namespace ptx_machine {
namespace {

constexpr int kRows = 16;
constexpr int kMostColumns = 256;
constexpr int kMostDepth = 32;
constexpr int kChunk = 16;  // bytes that lie together in every layout

// A matrix descriptor. Addresses and offsets are in bytes.
struct Descriptor {
  explicit Descriptor(std::uint64_t bits)
      : start(field(bits, 0, 14) << 4),
        leading(field(bits, 16, 14) << 4),
        stride(field(bits, 32, 14) << 4),
        base_offset(field(bits, 49, 3)) {
    // 0: no swizzle, 1: 128 bytes, 2: 64 bytes, 3: 32 bytes.
    const std::uint32_t mode = field(bits, 62, 2);
    width = mode == 0 ? 1 : 16 >> mode;
    swizzle = mode == 0 ? 0 : 4 - mode;
  }
  static std::uint32_t field(std::uint64_t bits, int begin, int count) {
    return static_cast<std::uint32_t>(bits >> begin & ((std::uint64_t{1} << count) - 1));
  }

  // Address of 16 bytes that lie `offset` bytes behind the start, in the layout without a swizzle.
  // The swizzle permutes chunks in rows of 128 bytes (64, 32) by the number of the row: bits 4 to 6
  // of the address (4 to 5, 4) are combined with bits 7 to 9 (7 to 8, 7). The base offset is the
  // number of the row of 128 bytes at which the pattern begins, as the ISA defines it; kernels of
  // CUTLASS have their tiles aligned and pass 0, so that only this case is known from practice.
  std::uint32_t address(std::uint32_t offset) const {
    const std::uint32_t plain = start + offset;
    return plain ^ ((((plain >> 7) - base_offset) & (width - 1)) << 4);
  }

  std::uint32_t start, leading, stride, base_offset;
  std::uint32_t width;    // chunks in a row of the swizzle's pattern; 1 without one
  std::uint32_t swizzle;  // as in TensorMap
};

// Where a chunk of 16 bytes of a matrix lies: `row` counts along M or N, `column` along K, in
// elements; the chunk runs along K, or along M or N if that is the major one. `elements` of them
// are 16 bytes.
std::uint32_t offset_of(const Descriptor& d, bool is_mn_major, int elements, int row, int column) {
  const auto r = static_cast<std::uint32_t>(row), c = static_cast<std::uint32_t>(column);
  const auto e = static_cast<std::uint32_t>(elements);
  if (!is_mn_major) {
    const std::uint32_t inside = r % 8 * d.width * kChunk + r / 8 * d.stride;
    return inside + c / e * (d.width == 1 ? d.leading : kChunk);
  }
  const std::uint32_t chunk = r / e;
  if (d.width == 1) return chunk * d.stride + c % 8 * kChunk + c / 8 * d.leading;
  return chunk % d.width * kChunk + chunk / d.width * d.leading + c % 8 * d.width * kChunk +
         c / 8 * d.stride;
}

// Reads rows [first, first + rows) of a matrix: out[k * rows + row]. Eight rows at a time: they are
// written side by side.
template <Format kFormat, class T>
void read_tile(Context& c, const Op& op, std::uint64_t bits, bool is_mn_major, int first, int rows,
               int depth, T* out) {
  const Descriptor descriptor(bits);
  const std::vector<std::uint8_t>& shared = c.warp->block->shared;
  constexpr int kBytes = bytes_of(kFormat), kElements = kChunk / kBytes;
  const auto chunk = [&](int row, int column) {
    const std::uint32_t address =
        descriptor.address(offset_of(descriptor, is_mn_major, kElements, first + row, column));
    if (address + kChunk > shared.size()) {
      c.fail(op, 0,
             "a matrix descriptor leads to address " + std::to_string(address) +
                 " of shared memory, which has " + std::to_string(shared.size()));
    }
    return shared.data() + address;
  };
  if (is_mn_major) {  // of 16-bit types only, with eight elements in a chunk
    for (int column = 0; column < depth; ++column) {
      for (int row = 0; row < rows; row += kElements) {
        const std::uint8_t* from = chunk(row, column);
        T* to = out + column * rows + row;
        for (int i = 0; i < kElements; ++i) to[i] = element<kFormat>(from + i * kBytes);
      }
    }
    return;
  }
  for (int row = 0; row < rows; row += 8) {
    for (int column = 0; column < depth; column += kElements) {
      T values[8][kElements];
      for (int r = 0; r < 8; ++r) {
        const std::uint8_t* from = chunk(row + r, column);
        for (int i = 0; i < kElements; ++i) values[r][i] = element<kFormat>(from + i * kBytes);
      }
      T* to = out + column * rows + row;
      for (int i = 0; i < kElements; ++i) {
        for (int r = 0; r < 8; ++r) to[i * rows + r] = values[r][i];
      }
    }
  }
}

// Notes the chunks that read_tile reads.
void note_tile(Context& c, const Product& product, std::uint64_t bits, bool is_mn_major, int bytes,
               int first, int rows, int depth) {
  const Descriptor descriptor(bits);
  const int elements = kChunk / bytes;
  const int step_rows = is_mn_major ? elements : 1, step_columns = is_mn_major ? 1 : elements;
  const std::size_t size = c.warp->block->shared.size();
  std::array<std::uint64_t, kMostColumns * 32 / kChunk> chunks;
  std::size_t count = 0;
  for (int row = 0; row < rows; row += step_rows) {
    for (int column = 0; column < depth; column += step_columns) {
      const std::uint32_t address =
          descriptor.address(offset_of(descriptor, is_mn_major, elements, first + row, column));
      if (address + kChunk <= size) chunks[count++] = address;
    }
  }
  note_product(c, *product.op, std::span(chunks).first(count), product.number, descriptor.swizzle);
}

// A in registers: four of them, whatever the type. Register r holds row lane / 4 + 8 (r % 2).
template <Format kFormat, class T>
void read_fragment(Context& c, const Op& op, T* out) {
  constexpr int kBytes = bytes_of(kFormat), kElements = 4 / kBytes;
  for (int r = 0; r < 4; ++r) {
    const Lanes& lanes = read(c, op, r, ~Mask{0});
    for (int lane = 0; lane < kLanes; ++lane) {
      std::uint8_t bytes[4];
      std::memcpy(bytes, &lanes[lane], 4);
      const int row = lane / 4 + 8 * (r % 2), column = kElements * (lane % 4 + r / 2 * 4);
      for (int i = 0; i < kElements; ++i) {
        out[(column + i) * kRows + row] = element<kFormat>(bytes + i * kBytes);
      }
    }
  }
}

// d[row][n] += a[k][row] b[k][n], in the order of k. The block of D stays in registers of the host.
template <class T>
[[gnu::always_inline]] inline void accumulate_blocks(const T* a, const T* b, T* d, int n,
                                                     int depth) {
  constexpr int kRowsAtOnce = 4, kColumns = 8;
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    for (int column = 0; column < n; column += kColumns) {
      T sum[kRowsAtOnce][kColumns];
      for (int i = 0; i < kRowsAtOnce; ++i) {
        for (int j = 0; j < kColumns; ++j) sum[i][j] = d[(row + i) * n + column + j];
      }
      for (int k = 0; k < depth; ++k) {
        const T* left = a + k * kRows + row;
        const T* right = b + k * n + column;
        for (int i = 0; i < kRowsAtOnce; ++i) {
          for (int j = 0; j < kColumns; ++j) sum[i][j] += left[i] * right[j];
        }
      }
      for (int i = 0; i < kRowsAtOnce; ++i) {
        for (int j = 0; j < kColumns; ++j) d[(row + i) * n + column + j] = sum[i][j];
      }
    }
  }
}

// The same for float8, of whose sums tensor cores keep 13 bits of fraction: what is added at once, D
// among it, is aligned to the largest of the terms, and bits below are cut off. `d` is kColumns
// elements of a row; `a` and `b` point to its first factors.
template <int kColumns>
[[gnu::always_inline]] inline void accumulate_cut_columns(const float* a, const float* b, float* d,
                                                          int n, int depth) {
  constexpr int kFraction = 13, kInfinite = 255;
  const auto magnitude = [](float x) { return std::bit_cast<std::int32_t>(x) & 0x7fffffff; };
  float terms[kMostDepth + 1][kColumns], plain[kColumns];
  std::int32_t most[kColumns];
  for (int j = 0; j < kColumns; ++j) {
    terms[depth][j] = plain[j] = d[j];
    most[j] = magnitude(d[j]);
  }
  for (int k = 0; k < depth; ++k) {
    for (int j = 0; j < kColumns; ++j) {
      const float term = a[k * kRows] * b[k * n + j];
      terms[k][j] = term;
      most[j] = std::max(most[j], magnitude(term));
      plain[j] += term;
    }
  }
  float unit[kColumns], scale[kColumns];
  bool are_finite = true;
  for (int j = 0; j < kColumns; ++j) {
    const int of_unit = std::clamp(most[j] >> 23, kFraction + 1, kInfinite - 1) - kFraction;
    unit[j] = std::bit_cast<float>(of_unit << 23);
    scale[j] = std::bit_cast<float>((kInfinite - 1 - of_unit) << 23);
    are_finite &= std::isfinite(plain[j]);
  }
  std::int32_t sum[kColumns] = {};
  if (are_finite) {
    for (int k = 0; k <= depth; ++k) {
      for (int j = 0; j < kColumns; ++j) {
        sum[j] += static_cast<std::int32_t>(terms[k][j] * scale[j]);
      }
    }
    for (int j = 0; j < kColumns; ++j) d[j] = static_cast<float>(sum[j]) * unit[j];
    return;
  }
  for (int j = 0; j < kColumns; ++j) {  // rare; no integer holds an infinite term
    const bool is_finite = std::isfinite(plain[j]);
    for (int k = 0; is_finite && k <= depth; ++k) {
      sum[j] += static_cast<std::int32_t>(terms[k][j] * scale[j]);
    }
    d[j] = is_finite ? static_cast<float>(sum[j]) * unit[j] : plain[j];
  }
}

// Two vectors of the host side by side: each waits for its own last sum.
[[gnu::always_inline]] inline void accumulate_cut_blocks(const float* a, const float* b, float* d,
                                                         int n, int depth) {
  constexpr int kWide = 16, kNarrow = 8;
  for (int row = 0; row < kRows; ++row) {
    int column = 0;
    for (; column + kWide <= n; column += kWide) {
      accumulate_cut_columns<kWide>(a + row, b + column, d + row * n + column, n, depth);
    }
    if (column < n) {
      accumulate_cut_columns<kNarrow>(a + row, b + column, d + row * n + column, n, depth);
    }
  }
}

// Compiled for wider vectors of the host, too. Their sums are the same.
#if defined(__x86_64__) && defined(__linux__)
#define PTX_MACHINE_WIDER [[gnu::target_clones("avx2", "default")]]
#else
#define PTX_MACHINE_WIDER
#endif
PTX_MACHINE_WIDER void accumulate(const float* a, const float* b, float* d, int n, int depth) {
  accumulate_blocks(a, b, d, n, depth);
}
PTX_MACHINE_WIDER void accumulate(const std::int32_t* a, const std::int32_t* b, std::int32_t* d,
                                  int n, int depth) {
  accumulate_blocks(a, b, d, n, depth);
}
PTX_MACHINE_WIDER void accumulate_cut(const float* a, const float* b, float* d, int n, int depth) {
  accumulate_cut_blocks(a, b, d, n, depth);
}
#undef PTX_MACHINE_WIDER

// Calls f(register, lane, part, index in d) for each element that the warp holds of D. A register
// holds one element, or two of f16.
template <int kParts, class F>
void each_accumulator(int n, F&& f) {
  for (int element = 0; element < n / 2; ++element) {  // of a lane
    const int row = element / 2 % 2 * 8, column = element / 4 * 8 + element % 2;
    for (int lane = 0, at = row * n + column; lane < kLanes; lane += 4, at += n) {
      for (int i = 0; i < 4; ++i) f(element / kParts, lane + i, element % kParts, at + 2 * i);
    }
  }
}

template <class T>
struct Tiles {
  T a[kMostDepth * kRows];
  T b[kMostDepth * kMostColumns];
  T d[kRows * kMostColumns];
};

// Not inlined: the compiler would look the thread's memory up for each element.
template <class T>
[[gnu::noinline]] Tiles<T>& tiles_of_thread() {
  thread_local Tiles<T> tiles;
  return tiles;
}

template <class T>
void multiply(Context& c, const Product& product, Tiles<T>& tiles) {
  const Op& op = *product.op;
  const MatrixOp& m = *op.matrix;
  with_format<T>(m.a, [&](auto format) {
    if (m.from_registers) return read_fragment<format()>(c, op, tiles.a);
    const int first = c.warp->index % 4 * kRows;
    read_tile<format()>(c, op, product.a, m.is_m_major, first, kRows, m.k, tiles.a);
  });
  with_format<T>(m.b, [&](auto format) {
    read_tile<format()>(c, op, product.b, m.is_n_major, 0, m.n, m.k, tiles.b);
  });
  if (m.negates) {
    for (int i = 0; i < m.k * kRows; ++i) tiles.a[i] = -tiles.a[i];
  }
  if constexpr (std::is_same_v<T, float>) {
    if (bytes_of(m.a) == 1) return accumulate_cut(tiles.a, tiles.b, tiles.d, m.n, m.k);
  }
  accumulate(tiles.a, tiles.b, tiles.d, m.n, m.k);
}

// Sums in float, of e4m3 and e5m2 cut to fewer bits. Of other types hardware may cut some, too. D of
// f16 is rounded once, at the end.
template <bool kHalf>
void multiply_floats(Context& c, const Product& product) {
  Tiles<float>& tiles = tiles_of_thread<float>();
  constexpr int kParts = kHalf ? 2 : 1;
  const int n = product.op->matrix->n;
  RawStorage<Lanes>& registers = c.warp->registers;
  const std::vector<Value>& targets = product.op->targets;
  if (product.adds) {
    each_accumulator<kParts>(n, [&](int r, int lane, int part, int at) {
      const std::uint64_t bits = registers[targets[r].index][lane];
      tiles.d[at] =
          kHalf ? float_of_half(static_cast<std::uint16_t>(bits >> 16 * part)) : get<float>(bits);
    });
  } else {
    std::fill_n(tiles.d, kRows * n, 0.0f);
  }
  multiply(c, product, tiles);
  each_accumulator<kParts>(n, [&](int r, int lane, int part, int at) {
    std::uint64_t& bits = registers[targets[r].index][lane];
    if constexpr (kHalf) {
      const std::uint64_t before = part == 0 ? 0 : bits;
      bits = before | std::uint64_t{half_of_float(tiles.d[at])} << 16 * part;
    } else {
      bits = bits_of(tiles.d[at]);
    }
  });
}

// The products of at most 32 pairs of bytes never overflow; their sum with D wraps around, or
// becomes the nearest number with .satfinite.
void multiply_integers(Context& c, const Product& product) {
  Tiles<std::int32_t>& tiles = tiles_of_thread<std::int32_t>();
  const MatrixOp& m = *product.op->matrix;
  std::fill_n(tiles.d, kRows * m.n, 0);
  multiply(c, product, tiles);
  each_accumulator<1>(m.n, [&](int r, int lane, int, int at) {
    std::uint64_t& bits = c.warp->registers[product.op->targets[r].index][lane];
    std::int64_t sum = tiles.d[at];
    if (product.adds) sum += get<std::int32_t>(bits);
    using Limits = std::numeric_limits<std::int32_t>;
    if (m.saturates) sum = std::clamp<std::int64_t>(sum, Limits::min(), Limits::max());
    bits = cut(static_cast<std::uint64_t>(sum), 4);
  });
}

}  // namespace

void note_operands(Context& c, const Product& product) {
  const MatrixOp& m = *product.op->matrix;
  if (!m.from_registers) {
    note_tile(c, product, product.a, m.is_m_major, bytes_of(m.a), c.warp->index % 4 * kRows, kRows,
              m.k);
  }
  note_tile(c, product, product.b, m.is_n_major, bytes_of(m.b), 0, m.n, m.k);
}

void perform(Context& c, const Product& product) {
  switch (product.op->matrix->d) {
    case Type::kS32:
      return multiply_integers(c, product);
    case Type::kF16:
      return multiply_floats<true>(c, product);
    default:
      return multiply_floats<false>(c, product);
  }
}

}  // namespace ptx_machine
