#include "storage.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>

namespace ptx_machine {
namespace {

constexpr std::size_t kMostKept = std::size_t{256} << 20;  // bytes that nobody uses

struct Pool {
  std::mutex using_it;
  std::unordered_map<std::size_t, std::vector<void*>> pieces;  // by size
  std::size_t kept = 0;                                        // bytes
};

// Never destroyed: threads may give memory back while the process ends.
Pool& pool() {
  static Pool* const one = new Pool;
  return *one;
}

}  // namespace

void* take_storage(std::size_t bytes) {
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.using_it);
    const auto found = p.pieces.find(bytes);
    if (found != p.pieces.end() && !found->second.empty()) {
      void* const piece = found->second.back();
      found->second.pop_back();
      p.kept -= bytes;
      return piece;
    }
  }
  void* const piece = std::malloc(bytes);
  if (piece == nullptr && bytes != 0) throw std::bad_alloc();
  return piece;
}

void give_storage(void* piece, std::size_t bytes) noexcept {
  Pool& p = pool();
  const std::lock_guard<std::mutex> lock(p.using_it);
  if (bytes > kMostKept) return std::free(piece);
  if (p.kept + bytes > kMostKept) {  // sizes of kernels that are not run any more, among others
    for (auto& [size, pieces] : p.pieces) {
      for (void* const one : pieces) std::free(one);
    }
    p.pieces.clear();
    p.kept = 0;
  }
  try {
    p.pieces[bytes].push_back(piece);
    p.kept += bytes;
  } catch (const std::bad_alloc&) {
    std::free(piece);
  }
}

}  // namespace ptx_machine
