#include "cuda_host/remote.h"

#include "cuda/abi.h"

namespace flux::host {

std::vector<MemOp> tell_of_giving_up(Address status, int rank, std::uint32_t epoch) {
  constexpr Address kStatusWord = sizeof(std::uint64_t);
  // The code is written last: it says that the other words are there.
  return {
      {MemOp::kWrite, status + FLUX_STATUS_SIGNAL * kStatusWord, static_cast<std::uint32_t>(rank)},
      {MemOp::kWrite, status + FLUX_STATUS_EXPECTED * kStatusWord, epoch},
      {MemOp::kWrite, status + FLUX_STATUS_CODE * kStatusWord, FLUX_ABANDONED}};
}

DirectRemote::DirectRemote(std::shared_ptr<Driver> driver, DirectPeers peers)
    : driver_(std::move(driver)), peers_(std::move(peers)) {
  if (peers_.mail.size() != peers_.data.size() || peers_.status.size() != peers_.data.size()) {
    throw std::invalid_argument("a DirectRemote needs data, mail and status of each rank");
  }
}

Address DirectRemote::word(int rank, int index) const {
  return peers_.mail[rank] + index * sizeof(std::uint32_t);
}

void DirectRemote::open(Stream stream, std::uint32_t epoch) {
  std::vector<MemOp> raised;
  for (const int peer : peers_.others) {
    raised.push_back({MemOp::kWrite, word(peer, peers_.rank), epoch});
  }
  driver_->memory_ops(stream, raised);
}

// All sends come first. If two ranks each waited for the other's rows before they sent their own,
// both would wait for ever.
void DirectRemote::exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t epoch) {
  const int boxes = static_cast<int>(peers_.data.size());  // boxes come after a word for each rank
  for (const Move& m : moves) {
    if (m.kind != Move::kSend) continue;
    driver_->await_signal(stream, word(peers_.rank, m.peer), epoch);
    driver_->copy(stream, peers_.data[m.peer] + m.there, peers_.data[peers_.rank] + m.at, m.bytes);
    driver_->signal(stream, word(m.peer, boxes + m.box), epoch);
  }
  std::vector<MemOp> awaited;
  for (const Move& m : moves) {
    if (m.kind == Move::kReceive) {
      awaited.push_back({MemOp::kWait, word(peers_.rank, boxes + m.box), epoch});
    }
  }
  driver_->memory_ops(stream, awaited);
}

void DirectRemote::renew(Stream stream, std::uint32_t epoch) {
  driver_->fill(stream, word(peers_.rank, static_cast<int>(peers_.data.size())), epoch - 1,
                static_cast<std::size_t>(peers_.boxes));
}

void DirectRemote::give_up(Stream stream, std::uint32_t epoch) {
  for (const int peer : peers_.others) {
    driver_->memory_ops(stream, tell_of_giving_up(peers_.status[peer], peers_.rank, epoch));
  }
  driver_->fill(stream, peers_.mail[peers_.rank], epoch,
                peers_.data.size() + static_cast<std::size_t>(peers_.boxes));
  driver_->synchronize(stream);
}

}  // namespace flux::host
