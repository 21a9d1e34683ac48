#include "cpu/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// One binary serves every x86-64: the loops are compiled for AVX-512, AVX2 and the baseline, and
// the loader picks one version. ThreadSanitizer cannot run the loader's resolvers, so it gets the
// baseline.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define FLUX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FLUX_CLONES
#endif

namespace flux::host {
namespace {

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float bits_to_float(std::uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline std::uint32_t float_to_bits(float f) {
  std::uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline double load(double v) { return v; }
inline float load(float v) { return v; }
inline float load(BF16 v) { return bits_to_float(static_cast<std::uint32_t>(v.bits) << 16); }

// Branch-free so that it vectorises. Subnormal halves are exact multiples of 2^-24. Other values
// need their exponent increased by 127 - 15. Infinities and NaN need this increase twice.
inline float load(F16 v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t body = v.bits & 0x7fffu;
  const std::uint32_t normal = (body << 13) + (112u << 23) + (body >= 0x7c00u ? 112u << 23 : 0u);
  const std::uint32_t tiny = float_to_bits(static_cast<float>(static_cast<int>(body)) * 0x1p-24f);
  return bits_to_float(sign | (body < 0x0400u ? tiny : normal));
}

inline void store(double* out, double v) { *out = v; }
inline void store(float* out, float v) { *out = v; }

// Round to nearest even; a NaN keeps its sign and stays a (quiet) NaN.
inline void store(BF16* out, float v) {
  const std::uint32_t u = float_to_bits(v);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (u >> 16) | 0x0040u;
  out->bits = static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Round to nearest even. Adding 0.5 aligns a value that becomes a subnormal half with the low bits
// of a float, so that the hardware does the rounding.
inline void store(F16* out, float v) {
  const std::uint32_t u = float_to_bits(v);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t body = u & 0x7fffffffu;
  const std::uint32_t normal = (body - (112u << 23) + 0x0fffu + ((body >> 13) & 1u)) >> 13;
  const std::uint32_t tiny = float_to_bits(bits_to_float(body) + 0.5f) - float_to_bits(0.5f);
  std::uint32_t half = body < (113u << 23) ? tiny : normal;
  half = body >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
  half = body > 0x7f800000u ? 0x7e00u : half;
  out->bits = static_cast<std::uint16_t>(sign | half);
}

constexpr std::size_t kBlock = 2048;  // elements; the running sum stays in the L1 cache

template <class T, class Acc>
inline __attribute__((always_inline)) void reduce_as(const ReduceArgs& a) {
  Acc sum[kBlock];
  const Acc scale = static_cast<Acc>(a.scale);
  const T* bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out);
  // A block never crosses the end of a row, so its bias is one contiguous vector.
  for (std::size_t row = 0; row < a.count; row += a.columns) {
    for (std::size_t col = 0; col < a.columns; col += kBlock) {
      const std::size_t n = std::min(kBlock, a.columns - col);
      const std::size_t at = row + col;
      const T* first = static_cast<const T*>(a.sources[0]) + at;
      for (std::size_t i = 0; i < n; ++i) sum[i] = load(first[i]);
      for (int s = 1; s < a.source_count; ++s) {
        const T* next = static_cast<const T*>(a.sources[s]) + at;
        for (std::size_t i = 0; i < n; ++i) sum[i] += load(next[i]);
      }
      if (a.scale != 1.0) {
        for (std::size_t i = 0; i < n; ++i) sum[i] *= scale;
      }
      if (bias != nullptr) {
        for (std::size_t i = 0; i < n; ++i) sum[i] += load(bias[col + i]);
      }
      for (std::size_t i = 0; i < n; ++i) store(out + at + i, sum[i]);
    }
  }
}

// Unsigned arithmetic wraps around, and gives signed and unsigned sums the same bits.
template <class T>
inline __attribute__((always_inline)) void add_integers(const ReduceArgs& a) {
  T sum[kBlock];
  for (std::size_t at = 0; at < a.count; at += kBlock) {
    const std::size_t n = std::min(kBlock, a.count - at);
    std::memcpy(sum, static_cast<const T*>(a.sources[0]) + at, n * sizeof(T));
    for (int s = 1; s < a.source_count; ++s) {
      const T* next = static_cast<const T*>(a.sources[s]) + at;
      for (std::size_t i = 0; i < n; ++i) sum[i] = static_cast<T>(sum[i] + next[i]);
    }
    std::memcpy(static_cast<T*>(a.out) + at, sum, n * sizeof(T));
  }
}

FLUX_CLONES void reduce_f64(const ReduceArgs& a) { reduce_as<double, double>(a); }
FLUX_CLONES void reduce_f32(const ReduceArgs& a) { reduce_as<float, float>(a); }
FLUX_CLONES void reduce_bf16(const ReduceArgs& a) { reduce_as<BF16, float>(a); }
FLUX_CLONES void reduce_f16(const ReduceArgs& a) { reduce_as<F16, float>(a); }
FLUX_CLONES void reduce_i8(const ReduceArgs& a) { add_integers<std::uint8_t>(a); }
FLUX_CLONES void reduce_i32(const ReduceArgs& a) { add_integers<std::uint32_t>(a); }
FLUX_CLONES void reduce_i64(const ReduceArgs& a) { add_integers<std::uint64_t>(a); }

}  // namespace

void reduce(const ReduceArgs& args) {
  switch (args.dtype) {
    case DType::kF64:
      return reduce_f64(args);
    case DType::kF32:
      return reduce_f32(args);
    case DType::kBF16:
      return reduce_bf16(args);
    case DType::kF16:
      return reduce_f16(args);
    case DType::kI8:
      return reduce_i8(args);
    case DType::kI32:
      return reduce_i32(args);
    case DType::kI64:
      return reduce_i64(args);
  }
}

}  // namespace flux::host
