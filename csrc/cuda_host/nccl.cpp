#include "cuda_host/nccl.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#include "cuda_host/shared_library.h"

namespace flux::host {

namespace {

// Values of nccl.h, which never change.
constexpr int kNcclSuccess = 0;
constexpr int kNcclRemoteError = 6;
constexpr int kNcclInProgress = 7;
constexpr int kUint8 = 1;
constexpr const char* kWhat = "the NCCL library";
constexpr std::uint64_t kFlushNs = 5'000'000'000;  // for close: peers may be gone

}  // namespace

struct NcclUniqueId {
  char bytes[128];
};

// ncclConfig_t as it was in 2.17. Newer libraries check its version and use their defaults for
// newer fields.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 0;
  int cluster = 0;  // no clusters of blocks: a cluster needs neighbouring free multiprocessors
  int least_blocks = 1;
  int most_blocks = INT_MIN;
  const char* network = nullptr;
  int share = INT_MIN;  // INT_MIN: not set
};

namespace {

std::string text_of(const char* (*error_string)(int), int result) {
  const char* text = error_string(result);
  return text != nullptr ? text : "NCCL error " + std::to_string(result);
}

}  // namespace

struct NcclRemote::Entries {
  SharedLibrary library;
  const char* (*error_string)(int);
  int (*init)(void**, int, NcclUniqueId, int, NcclConfig*);
  int (*finalize)(void*);
  int (*destroy)(void*);
  int (*abort)(void*);
  int (*state)(void*, int*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, std::size_t, int, int, void*, void*);
  int (*receive)(void*, std::size_t, int, int, void*, void*);

  explicit Entries(const std::string& name) : library(name, kWhat) {
    library.look_up("ncclGetErrorString", &error_string);
    library.look_up("ncclCommInitRankConfig", &init);
    library.look_up("ncclCommFinalize", &finalize);
    library.look_up("ncclCommDestroy", &destroy);
    library.look_up("ncclCommAbort", &abort);
    library.look_up("ncclCommGetAsyncError", &state);
    library.look_up("ncclGroupStart", &group_start);
    library.look_up("ncclGroupEnd", &group_end);
    library.look_up("ncclSend", &send);
    library.look_up("ncclRecv", &receive);
  }
};

std::string nccl_unique_id(const std::string& library) {
  const SharedLibrary nccl(library, kWhat);
  int (*unique_id)(NcclUniqueId*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  nccl.look_up("ncclGetUniqueId", &unique_id);
  nccl.look_up("ncclGetErrorString", &error_string);
  NcclUniqueId id{};
  const int result = unique_id(&id);
  if (result != kNcclSuccess) {
    throw std::runtime_error("ncclGetUniqueId failed: " + text_of(error_string, result));
  }
  return std::string(id.bytes, sizeof(id.bytes));
}

NcclRemote::NcclRemote(std::shared_ptr<Driver> driver, NcclSetup setup)
    : driver_(std::move(driver)), setup_(std::move(setup)) {
  NcclUniqueId id{};
  if (setup_.id.size() != sizeof(id.bytes)) {
    throw std::invalid_argument("an NCCL id has " + std::to_string(sizeof(id.bytes)) +
                                " bytes, got " + std::to_string(setup_.id.size()));
  }
  std::memcpy(id.bytes, setup_.id.data(), sizeof(id.bytes));
  entries_ = std::make_shared<Entries>(setup_.library);
  NcclConfig config;
  config.most_blocks = setup_.blocks;
  try {
    check(entries_->init(&communicator_, setup_.world, id, setup_.rank, &config),
          "ncclCommInitRankConfig");
    connect();
  } catch (...) {
    abort();
    throw;
  }
}

NcclRemote::~NcclRemote() { close(); }

void NcclRemote::connect() {
  std::vector<Move> moves;
  for (int peer = 0; peer < setup_.world; ++peer) {
    if (peer == setup_.rank) continue;
    moves.push_back({Move::kSend, peer, setup_.rank, 0, 1, 0});
    moves.push_back({Move::kReceive, peer, setup_.world + peer, 0, 1, 0});
  }
  const Stream aside = driver_->create_stream();
  const std::shared_ptr<void> owned(nullptr, [&](void*) { driver_->destroy_stream(aside); });
  try {
    exchange(aside, moves, 0);
    const auto limit =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(setup_.timeout_ns);
    while (!driver_->ready(aside)) {
      if (std::chrono::steady_clock::now() > limit)
        throw PeerLost("a rank did not connect by NCCL");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (...) {
    abort();  // otherwise the stream would never be done
    throw;
  }
}

void NcclRemote::check(int result, const char* what) {
  if (result == kNcclInProgress) return settle(what, setup_.timeout_ns);
  if (result == kNcclSuccess) return;
  const std::string text =
      std::string(what) + " failed: " + text_of(entries_->error_string, result);
  if (result == kNcclRemoteError) throw PeerLost(text);
  throw std::runtime_error(text);
}

// Waits on the host until the communicator has completed its last operation.
void NcclRemote::settle(const char* what, std::uint64_t limit_ns) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
  for (int turn = 0;; ++turn) {
    int state = kNcclSuccess;
    const int result = entries_->state(communicator_, &state);
    if (result != kNcclSuccess) return check(result, "ncclCommGetAsyncError");
    if (state != kNcclInProgress) return check(state, what);
    if (std::chrono::steady_clock::now() > limit) {
      throw PeerLost(std::string(what) + ": a peer did not come within " +
                     std::to_string(limit_ns / 1'000'000) + " ms");
    }
    if (turn > 100) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void NcclRemote::exchange(Stream stream, const std::vector<Move>& moves, std::uint32_t) {
  if (moves.empty()) return;
  if (communicator_ == nullptr) throw std::runtime_error("the NCCL communicator is closed");
  auto* queue = reinterpret_cast<void*>(stream);
  check(entries_->group_start(), "ncclGroupStart");
  int result = kNcclSuccess;
  for (const Move& m : moves) {
    auto* at = reinterpret_cast<void*>(setup_.data + m.at);
    const bool sends = m.kind == Move::kSend;
    const int one = sends ? entries_->send(at, m.bytes, kUint8, m.peer, communicator_, queue)
                          : entries_->receive(at, m.bytes, kUint8, m.peer, communicator_, queue);
    if (result == kNcclSuccess && one != kNcclInProgress) result = one;
  }
  const int ended =
      entries_->group_end();  // in any case: a group that stays open collects later calls
  check(result, "ncclSend or ncclRecv");
  check(ended, "ncclGroupEnd");
  // A group may be accepted and fail later.
  settle("an exchange by NCCL", setup_.timeout_ns);
}

// NCCL's kernels end when their communicator is aborted. None of their data arrives after that.
void NcclRemote::give_up(Stream, std::uint32_t) { abort(); }

void NcclRemote::abort() {
  if (communicator_ == nullptr) return;
  entries_->abort(communicator_);
  communicator_ = nullptr;
}

// Sent data may still be in NCCL's buffers, so it is flushed first. The flush has a time limit:
// peers that are gone would never receive the data.
void NcclRemote::close() {
  if (communicator_ == nullptr) return;
  try {
    check(entries_->finalize(communicator_), "ncclCommFinalize");
    settle("ncclCommFinalize", std::min(setup_.timeout_ns, kFlushNs));
    entries_->destroy(communicator_);
    communicator_ = nullptr;
  } catch (const std::runtime_error&) {
    abort();  // also frees the communicator
  }
}

}  // namespace flux::host
