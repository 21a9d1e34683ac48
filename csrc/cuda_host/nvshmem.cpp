#include "cuda_host/nvshmem.h"

#include "cuda/abi.h"

namespace flux::host {

namespace {

std::uint64_t* pointer(Address word) { return reinterpret_cast<std::uint64_t*>(word); }
void* handle(Stream stream) { return reinterpret_cast<void*>(stream); }

void check(int result, const char* what) {
  if (result == 0) return;
  throw std::runtime_error(std::string(what) + " by NVSHMEM failed with " + std::to_string(result));
}

}  // namespace

NvshmemRemote::NvshmemRemote(std::shared_ptr<Driver> driver, NvshmemPeers peers)
    : driver_(std::move(driver)), peers_(std::move(peers)) {
  if (peers_.put == nullptr || peers_.raise == nullptr || peers_.relay == nullptr ||
      peers_.node_sum == nullptr) {
    throw std::invalid_argument("an NvshmemRemote needs the functions of NVSHMEM");
  }
}

void NvshmemRemote::raise(Address word, std::uint64_t value, int peer, Stream stream) {
  check(peers_.raise(pointer(word), value, peer, handle(stream)), "a signal");
}

void NvshmemRemote::open(Stream stream, std::uint32_t epoch) {
  for (const int peer : peers_.others) raise(word(peers_.rank), epoch, peer, stream);
}

// Sends first, as in DirectRemote.
void NvshmemRemote::exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) {
  for (const Move& m : moves) {
    if (m.kind != Move::kSend) continue;
    driver_->await_signal(stream, word(m.peer), epoch);
    check(peers_.put(reinterpret_cast<void*>(peers_.data + m.there),
                     reinterpret_cast<const void*>(peers_.data + m.at), m.bytes,
                     pointer(word(peers_.world + m.box)), epoch, m.peer, handle(stream)),
          "a put");
  }
  std::vector<MemOp> awaited;
  for (const Move& m : moves) {
    if (m.kind == Move::kReceive) {
      awaited.push_back({MemOp::kWait, word(peers_.world + m.box), epoch});
    }
  }
  driver_->memory_ops(stream, awaited);
}

const std::uint64_t* NvshmemRemote::opened() const { return pointer(word(0)); }

std::uint64_t* NvshmemRemote::box(int index) const { return pointer(word(peers_.world + index)); }

void NvshmemRemote::send(const FluxRelayArgs& args, Stream stream) const {
  check(peers_.relay(&args, handle(stream)), "the relay");
}

void NvshmemRemote::add_up(const FluxNodeSumArgs& args, Stream stream) const {
  check(peers_.node_sum(&args, handle(stream)), "the sum of nodes");
}

void NvshmemRemote::renew(Stream stream, std::uint32_t epoch) {
  fill_mail(stream, peers_.world, epoch - 1);
}

void NvshmemRemote::fill_mail(Stream stream, int first, std::uint32_t value) {
  std::vector<MemOp> words;
  for (int i = first; i < mail_words(peers_.world, peers_.boxes); ++i) {
    words.push_back({MemOp::kWrite, word(i), value});
  }
  driver_->memory_ops(stream, words);
}

// Words may overtake one another on the network: a peer may see that a rank has given up before it
// sees which rank.
void NvshmemRemote::give_up(Stream stream, std::uint32_t epoch) {
  const auto at = [&](int index) { return peers_.status + index * sizeof(std::uint64_t); };
  for (const int peer : peers_.others) {
    raise(at(FLUX_STATUS_SIGNAL), static_cast<std::uint64_t>(peers_.rank), peer, stream);
    raise(at(FLUX_STATUS_EXPECTED), epoch, peer, stream);
    raise(at(FLUX_STATUS_CODE), FLUX_ABANDONED, peer, stream);
  }
  fill_mail(stream, 0, epoch);
  driver_->synchronize(stream);
}

}  // namespace flux::host
