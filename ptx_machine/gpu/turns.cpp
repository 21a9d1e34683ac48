// See turns.h.
#include "turns.h"

#include <iterator>

namespace emulated {
namespace {

thread_local int mine = -1;  // the stream that this thread runs

}  // namespace

// Never destroyed: threads of streams use it until the process ends.
Turns& turns() {
  static auto* const one = new Turns;
  return *one;
}

void Turns::take(std::uint64_t seed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  seed_ = seed;
  batches_ = digest_ = 0;
  held_ = true;
}

void Turns::join(int stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (on()) ready_.insert(stream);
}

void Turns::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!on() || !held_ || ready_.empty()) return;
  held_ = false;
  random_.seed(seed_ + ++batches_);
  choose();
}

void Turns::choose() {
  current_ = -1;
  if (ready_.empty()) {
    held_ = true;  // what the host submits next waits for the host
    return;
  }
  const auto index = random_() % ready_.size();
  current_ = *std::next(ready_.begin(), static_cast<std::ptrdiff_t>(index));
  digest_ = (digest_ ^ index) * 0x100000001B3;  // FNV
  changed_.notify_all();
}

void Turns::enter(int stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!on()) return;
  mine = stream;
  ready_.insert(stream);
  changed_.wait(lock, [&] { return current_ == stream || !on(); });
}

bool Turns::yield() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!on() || mine < 0) return false;
  choose();
  changed_.wait(lock, [&] { return current_ == mine || !on(); });
  return true;
}

void Turns::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mine < 0) return;
  ready_.erase(mine);
  mine = -1;
  if (on()) choose();
}

std::uint64_t Turns::digest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return digest_;
}

}  // namespace emulated
