// What atom, red and the reductions of bulk copies do with a value in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "module.h"

namespace ptx_machine {

enum Action { kAdd, kExchange, kSwapIf, kMin, kMax, kAnd, kOr, kXor, kIncrement, kDecrement };

// Returns the action among the modifiers of a statement, or -1.
int action_of(const Statement& s);

template <class T>
T changed(Action action, T old, T by, T with) {
  switch (action) {
    case kAdd:
      return static_cast<T>(old + by);
    case kExchange:
      return by;
    case kSwapIf:
      return old == by ? with : old;
    case kMin:
      return std::min(old, by);
    case kMax:
      return std::max(old, by);
    default:
      break;
  }
  if constexpr (std::is_unsigned_v<T>) {
    if (action == kAnd) return old & by;
    if (action == kOr) return old | by;
    if (action == kXor) return old ^ by;
    if (action == kIncrement) return old >= by ? 0 : old + 1;
    if (action == kDecrement) return old == 0 || old > by ? by : old - 1;
  }
  return old;
}

// Combines an element of memory with another one, as one atomic step.
using Reducer = void (*)(std::uint8_t* target, const std::uint8_t* by);
// Returns the reducer of cp.reduce.async.bulk and red.async, or null where PTX has none.
Reducer reducer_of(Action action, Type type);

}  // namespace ptx_machine
