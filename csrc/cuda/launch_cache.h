// What launches of a kernel have in common is made once: tensor maps cost microseconds each, and a
// layer calls with the same pointers and sizes again and again. Host code without CUDA, so that tests
// check on any machine what makes two launches the same.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/tile_map.h"
#include "cuda/abi.h"

namespace flux {

// Two launches with equal keys differ in FluxGemmArgs.sync alone. All other bytes count, so a field
// that is added counts by itself; padding is set to zero where there is any.
struct LaunchKey {
  std::array<unsigned char, sizeof(FluxGemmArgs)> bytes;
  std::array<std::int32_t, kMaxRuns> sequence;  // what FluxOrder.sequence points to

  bool operator==(const LaunchKey& other) const {
    return bytes == other.bytes && sequence == other.sequence;
  }
};

inline LaunchKey launch_key(const FluxGemmArgs& args) {
  static_assert(std::is_trivially_copyable_v<FluxGemmArgs>);
  LaunchKey key{};
  auto* bytes = key.bytes.data();
  std::memcpy(bytes, &args, sizeof args);
  const auto clear = [bytes](std::size_t begin, std::size_t end) {
    std::memset(bytes + begin, 0, end - begin);
  };
  constexpr std::size_t kSync = offsetof(FluxGemmArgs, sync);
  constexpr std::size_t kSequence = offsetof(FluxGemmArgs, order) + offsetof(FluxOrder, sequence);
  clear(kSync, kSync + sizeof(FluxSync));
  clear(kSequence, kSequence + sizeof(args.order.sequence));
  clear(offsetof(FluxGemmArgs, guard_rows) + sizeof(args.guard_rows),
        offsetof(FluxGemmArgs, flags));
  if (args.order.sequence != nullptr) {
    const int count = min_of(args.order.world, kMaxRuns);
    for (int i = 0; i < count; ++i)
      key.sequence[i] = args.order.sequence[i] + 1;  // 0: there is none
  }
  return key;
}

// The latest values by key; when all places are taken, what was not used for the longest time goes.
template <class Value, std::size_t kPlaces = 16>
class LaunchCache {
 public:
  // A copy, which the caller may change.
  std::optional<Value> find(const LaunchKey& key) {
    const std::lock_guard<std::mutex> lock(guard_);
    for (Entry& entry : entries_) {
      if (!(entry.key == key)) continue;
      entry.used = ++clock_;
      return entry.value;
    }
    return std::nullopt;
  }

  void keep(const LaunchKey& key, const Value& value) {
    const std::lock_guard<std::mutex> lock(guard_);
    Entry* place = nullptr;
    for (Entry& entry : entries_) {
      if (entry.key == key) return;  // made by two threads at once
      if (place == nullptr || entry.used < place->used) place = &entry;
    }
    if (entries_.size() < kPlaces) place = &entries_.emplace_back();
    *place = Entry{key, value, ++clock_};
  }

 private:
  struct Entry {
    LaunchKey key;
    Value value;
    std::uint64_t used;
  };

  std::mutex guard_;
  std::uint64_t clock_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace flux
