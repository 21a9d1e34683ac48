// NVSHMEM's symmetric heaps, where the ranks are in one process: a place in one of them names the same
// place in all of them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

struct Heaps {
  std::vector<std::uintptr_t> begins;  // by rank
  std::size_t bytes;
};
inline std::vector<Heaps> all_heaps;  // the newest last: memory is used again
inline std::mutex listing_heaps;      // threads of streams and of puts look for places meanwhile

inline void add_heaps(int ranks, const std::uintptr_t* begins, std::size_t bytes) {
  const std::lock_guard<std::mutex> hold(listing_heaps);
  all_heaps.push_back({{begins, begins + ranks}, bytes});
}

inline bool has_heaps() {
  const std::lock_guard<std::mutex> hold(listing_heaps);
  return !all_heaps.empty();
}

// What `place` names at a rank; null: it is in no heap, or there is no such rank.
inline std::uintptr_t find_at_rank(std::uintptr_t place, int rank) {
  const std::lock_guard<std::mutex> hold(listing_heaps);
  for (auto heaps = all_heaps.rbegin(); heaps != all_heaps.rend(); ++heaps) {
    for (const std::uintptr_t begin : heaps->begins) {
      if (place < begin || place >= begin + heaps->bytes) continue;
      if (rank < 0 || rank >= static_cast<int>(heaps->begins.size())) return 0;
      return heaps->begins[static_cast<std::size_t>(rank)] + (place - begin);
    }
  }
  return 0;
}

// The same, of a place that is in a heap.
template <class T>
T* at_rank(T* place, int rank) {
  const std::uintptr_t found = find_at_rank(reinterpret_cast<std::uintptr_t>(place), rank);
  if (found == 0) std::abort();
  return reinterpret_cast<T*>(found);
}
