#include "reduction.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "machine.h"

namespace ptx_machine {
namespace {

template <class T, class F>
void combine(std::uint8_t* target, const std::uint8_t* by, F&& f) {
  T value;
  std::memcpy(&value, by, sizeof(T));
  const std::atomic_ref<T> cell(*reinterpret_cast<T*>(target));
  T old = cell.load();
  while (!cell.compare_exchange_weak(old, f(old, value))) {
  }
}

template <class T, Action kAction>
void reduce(std::uint8_t* target, const std::uint8_t* by) {
  combine<T>(target, by, [](T a, T b) { return changed<T>(kAction, a, b, T{}); });
}

// Rounding the sum in float once more is exact: float has more than twice the bits.
template <bool kBf16, Action kAction>
void reduce_half(std::uint8_t* target, const std::uint8_t* by) {
  combine<std::uint16_t>(target, by, [](std::uint16_t a, std::uint16_t b) {
    const auto widen = [](std::uint16_t h) { return kBf16 ? float_of_bf16(h) : float_of_half(h); };
    const float x = widen(a), y = widen(b);
    const float z = kAction == kAdd ? x + y : kAction == kMin ? std::fmin(x, y) : std::fmax(x, y);
    return kBf16 ? bf16_of_float(z) : half_of_float(z);
  });
}

template <class T>
Reducer of_integer(Action action) {
  if (action == kAdd) return reduce<T, kAdd>;
  if (action == kMin) return reduce<T, kMin>;
  if (action == kMax) return reduce<T, kMax>;
  return nullptr;
}

template <class T>
Reducer of_bits(Action action) {
  if (action == kAnd) return reduce<T, kAnd>;
  if (action == kOr) return reduce<T, kOr>;
  if (action == kXor) return reduce<T, kXor>;
  return nullptr;
}

template <bool kBf16>
Reducer of_half(Action action) {
  if (action == kAdd) return reduce_half<kBf16, kAdd>;
  if (action == kMin) return reduce_half<kBf16, kMin>;
  if (action == kMax) return reduce_half<kBf16, kMax>;
  return nullptr;
}

}  // namespace

int action_of(const Statement& s) {
  constexpr const char* kActions[] = {"add", "exch", "cas", "min", "max",
                                      "and", "or",   "xor", "inc", "dec"};
  int found = -1;
  for (int i = 0; i < 10; ++i) {
    if (has(s, kActions[i])) found = i;
  }
  return found;
}

Reducer reducer_of(Action action, Type type) {
  switch (type) {
    case Type::kB32:
      return of_bits<std::uint32_t>(action);
    case Type::kB64:
      return of_bits<std::uint64_t>(action);
    case Type::kU32:
      if (action == kIncrement) return reduce<std::uint32_t, kIncrement>;
      if (action == kDecrement) return reduce<std::uint32_t, kDecrement>;
      return of_integer<std::uint32_t>(action);
    case Type::kS32:
      return of_integer<std::int32_t>(action);
    case Type::kU64:
      return of_integer<std::uint64_t>(action);
    case Type::kS64:
      return of_integer<std::int64_t>(action);
    case Type::kF16:
      return of_half<false>(action);
    case Type::kBf16:
      return of_half<true>(action);
    case Type::kF32:
      return action == kAdd ? reduce<float, kAdd> : nullptr;
    case Type::kF64:
      return action == kAdd ? reduce<double, kAdd> : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace ptx_machine
