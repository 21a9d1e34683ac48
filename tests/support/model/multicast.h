// Multicast addresses (NVLink SHARP) of drivers that are not there: each stands for the same memory of
// several ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

// Of this library alone: what is inline and static is one for all libraries of a process.
namespace {

struct Multicast {
  std::uintptr_t base;
  std::size_t bytes;
  std::vector<std::uintptr_t> members;
};

std::vector<Multicast> multicasts;

// The addresses that `at` stands for.
template <class T>
std::vector<T*> everywhere(T* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  for (const Multicast& m : multicasts) {
    if (address < m.base || address >= m.base + m.bytes) continue;
    std::vector<T*> found;
    for (const std::uintptr_t member : m.members) {
      found.push_back(reinterpret_cast<T*>(member + (address - m.base)));
    }
    return found;
  }
  throw std::logic_error("no multicast address");
}

}  // namespace

// Whatever had an address there is gone: its memory is somebody else's now.
extern "C" void multicast_add(std::uintptr_t base, std::size_t bytes, const std::uintptr_t* members,
                              std::size_t count) {
  const auto overlaps = [=](const Multicast& old) {
    return old.base < base + bytes && base < old.base + old.bytes;
  };
  multicasts.erase(std::remove_if(multicasts.begin(), multicasts.end(), overlaps),
                   multicasts.end());
  multicasts.push_back({base, bytes, {members, members + count}});
}
