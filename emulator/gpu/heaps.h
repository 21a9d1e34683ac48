// NVSHMEM's symmetric heaps, where the ranks are in one process: a place in one of them names the same
// place in all of them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <vector>

struct Heaps {
  std::vector<std::uintptr_t> begins;  // by rank
  std::size_t bytes;
};
inline std::vector<Heaps> all_heaps;  // the newest last: memory is used again

inline void add_heaps(int ranks, const std::uintptr_t* begins, std::size_t bytes) {
  all_heaps.push_back({{begins, begins + ranks}, bytes});
}

// What `place` names at a rank.
template <class T>
T* at_rank(T* place, int rank) {
  const auto at = reinterpret_cast<std::uintptr_t>(place);
  for (auto heaps = all_heaps.rbegin(); heaps != all_heaps.rend(); ++heaps) {
    for (const std::uintptr_t begin : heaps->begins) {
      if (at < begin || at >= begin + heaps->bytes) continue;
      return reinterpret_cast<T*>(heaps->begins.at(rank) + (at - begin));
    }
  }
  std::abort();
}
