// Memory of blocks, which other blocks use again. An allocator of the host gives large pieces back to its
// system, which makes and clears their pages anew: for registers alone that is 20 MB a block, and a third
// of the time of a short kernel.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace ptx_machine {

// A piece of memory that was given back, or a new one. Any thread may call these.
void* take_storage(std::size_t bytes);
void give_storage(void* piece, std::size_t bytes) noexcept;

// An allocator over them. Without kClear, elements that are made without a value have any.
template <class T, bool kClear>
struct Recycled {
  using value_type = T;
  static_assert(alignof(T) <= alignof(std::max_align_t));
  static_assert(std::is_trivially_copyable_v<T> || kClear);
  template <class U>
  struct rebind {
    using other = Recycled<U, kClear>;
  };

  Recycled() = default;
  template <class U>
  Recycled(const Recycled<U, kClear>&) {}

  T* allocate(std::size_t count) { return static_cast<T*>(take_storage(count * sizeof(T))); }
  void deallocate(T* piece, std::size_t count) noexcept { give_storage(piece, count * sizeof(T)); }

  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    if constexpr (sizeof...(Args) == 0 && !kClear) {
      ::new (static_cast<void*>(at)) U;
    } else {
      ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
    }
  }

  bool operator==(const Recycled&) const { return true; }
};

template <class T>
using Storage = std::vector<T, Recycled<T, true>>;
// The same; its elements have no value until they are written.
template <class T>
using RawStorage = std::vector<T, Recycled<T, false>>;

}  // namespace ptx_machine
