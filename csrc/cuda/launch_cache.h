// What launches of a kernel have in common is made once: tensor maps cost microseconds each, and a
// layer calls with the same pointers and sizes again and again. Host code without CUDA, so that tests
// check on any machine what makes two launches the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <type_traits>
#include <unordered_map>

#include "core/tile_map.h"
#include "cuda/abi.h"

namespace flux {

// Two launches with equal keys differ in FluxGemmArgs.sync alone. All other bytes count, so a field
// that is added counts by itself; padding is set to zero where there is any.
struct LaunchKey {
  std::array<unsigned char, sizeof(FluxGemmArgs)> bytes;
  std::array<std::int32_t, 2 * kMaxRuns> sequence;  // what FluxOrder.sequence points to

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
  constexpr std::size_t kRanges =
      offsetof(FluxGemmArgs, order) + offsetof(FluxOrder, column_ranges);
  clear(kRanges + sizeof(args.order.column_ranges), kSequence + sizeof(args.order.sequence));
  if (args.order.sequence != nullptr) {
    const int ranges = args.order.column_ranges;
    const int count =
        ranges > 0 ? 2 * min_of(ranges, kMaxRuns) : min_of(args.order.world, kMaxRuns);
    for (int i = 0; i < count; ++i)
      key.sequence[i] = args.order.sequence[i] + 1;  // 0: there is none
  }
  return key;
}

// The latest values by key; when all places are taken, what was not used for the longest time goes.
// Layers that share an op differ in their weight alone, so there are more places than a model has layers.
template <class Value, std::size_t kPlaces = 512, class Key = LaunchKey>
class LaunchCache {
 public:
  // A copy, which the caller may change.
  std::optional<Value> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(guard_);
    const auto entry = entries_.find(key);
    if (entry == entries_.end()) return std::nullopt;
    entry->second.used = ++clock_;
    return entry->second.value;
  }

  void keep(const Key& key, const Value& value) {
    const std::lock_guard<std::mutex> lock(guard_);
    if (entries_.count(key) != 0) return;  // made by two threads at once
    if (entries_.size() >= kPlaces) {
      entries_.erase(std::min_element(entries_.begin(), entries_.end(), [](auto& a, auto& b) {
        return a.second.used < b.second.used;
      }));
    }
    entries_.emplace(key, Entry{value, ++clock_});
  }

 private:
  static_assert(std::has_unique_object_representations_v<Key>, "equal keys have equal bytes");

  struct Entry {
    Value value;
    std::uint64_t used;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const {
      const auto* bytes = reinterpret_cast<const char*>(&key);
      return std::hash<std::string_view>{}({bytes, sizeof key});
    }
  };
  struct Equal {
    bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
  };

  std::mutex guard_;
  std::uint64_t clock_ = 0;
  std::unordered_map<Key, Entry, Hash, Equal> entries_;
};

}  // namespace flux
