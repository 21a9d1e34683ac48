// What a function that the machine performs itself was called with.
#pragma once

#include "machine.h"

namespace ptx_machine {

template <class T>
T load_for_call(Context& c, const Op& op, int lane, std::uint64_t address) {
  T value;
  std::memcpy(&value, at(c, op, lane, Space::kGeneric, address, sizeof(T)), sizeof(T));
  return value;
}

// A variable of the call, which lies in local memory. Results come first, then the name, which has
// no value, then the arguments.
template <class T>
T argument_of_call(Context& c, const Op& op, int lane, int number) {
  return load_for_call<T>(c, op, lane, read(c, op, number, Mask{1} << lane)[lane]);
}

}  // namespace ptx_machine
