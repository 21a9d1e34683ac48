// The engine's interface for the threads that serve peers on other hosts (flux/transport/network.py).
#include "cpu/engine.h"

namespace flux::host {

bool Engine::gone() const { return failed() || stop_.load(std::memory_order_relaxed); }

// Waits without a deadline. The threads that wait for the network's tiles have a deadline. When it
// passes, the call fails, and this wait ends too.
template <class Ready>
void Engine::await_unless_gone(SignalPad& awaited, Ready&& ready) {
  const auto over = [&] { return gone() || ready(); };
  while (!wait_until(awaited, Clock::now() + kSlice, std::chrono::nanoseconds(0), over)) {
  }
}

bool Engine::await_parcel(int peer, int signal, std::uint32_t epoch) {
  await_unless_gone(pad(peer), [&] { return signal_reached(pad(peer), signal, epoch); });
  return !gone();
}

bool Engine::await_agreement(std::uint32_t epoch) {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    std::uint64_t entry = 0;
    await_unless_gone(pad(peer),
                      [&] { return epoch_reached(read_entry(pad(peer), epoch, &entry), epoch); });
    if (entry != entry_of(epoch, digest_)) return false;
  }
  return true;
}

void Engine::announce(int signal, std::uint32_t epoch) {
  if (stop_.load(std::memory_order_relaxed)) return;
  raise_signal(pad(rank_), signal, epoch);
}

void Engine::peer_entered(int peer, std::uint32_t epoch, std::uint32_t digest) {
  publish_entry(pad(peer), epoch, digest);
}

void Engine::peer_refused(int peer, std::uint32_t epoch, const std::string& why) {
  publish_refusal(pad(peer), epoch, why);
}

void Engine::peer_left(int peer, PadState state, int culprit) {
  pad(peer).culprit.store(static_cast<std::uint32_t>(culprit), std::memory_order_relaxed);
  pad(peer).state.store(static_cast<std::uint32_t>(state), std::memory_order_seq_cst);
  notify(pad(peer));
  notify(pad(rank_));
}

}  // namespace flux::host
