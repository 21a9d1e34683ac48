// An NCCL for tests, beside the emulated GPU and in its library: the functions of point-to-point communication, on
// streams that are threads, between processes. As NCCL's, its communicators may be asked not to block,
// sends and receives of a group go on together, and one that lacks its partner waits until it is
// aborted. Partners that disagree about the bytes end the process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

extern "C" {
void emulator_run(void* stream, void (*body)(void*), void* argument, void (*release)(void*));
void emulator_dawdle();
}

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInProgress = 7;
constexpr int kMostRanks = 16;

// One message at a time, in pieces; written by its sender while `taken` is `sent`, then by nobody.
struct Channel {
  std::atomic<std::uint64_t> sent, taken;
  std::uint64_t total, bytes;
  char data[4096];
};
struct Shared {
  std::atomic<int> joined;
  Channel channels[kMostRanks][kMostRanks];  // by sender and receiver
};

struct Communicator {
  int rank = 0, world = 0;
  std::string name;
  Shared* shared = nullptr;
  std::atomic<bool> aborted{false};
  std::atomic<int> under_way{0};
  ~Communicator() { munmap(shared, sizeof(Shared)); }
};
using Held = std::shared_ptr<Communicator>;

struct Operation {
  bool sends;
  char* at;
  std::size_t bytes;
  int peer;
  std::size_t done = 0;
  bool over = false;
};
struct Group {
  Held of;
  void* stream;
  std::vector<Operation> operations;
};

std::atomic<int> alive{0}, next_result{kSuccess};
std::map<void*, Held> communicators;
thread_local std::vector<Group> pending;

void mismatch(const Communicator& c, const Operation& o, std::uint64_t total) {
  std::fprintf(stderr, "rank %d receives %zu bytes of rank %d, which sends %llu\n", c.rank, o.bytes,
               o.peer, static_cast<unsigned long long>(total));
  std::abort();
}

// Moves a piece; whether there was one to move.
bool advance(Communicator& c, Operation* o) {
  const int from = o->sends ? c.rank : o->peer, to = o->sends ? o->peer : c.rank;
  Channel& channel = c.shared->channels[from][to];
  if (o->sends ? channel.sent != channel.taken : channel.sent == channel.taken) return false;
  if (o->sends) {
    channel.total = o->bytes;
    channel.bytes = std::min(o->bytes - o->done, sizeof(channel.data));
    std::memcpy(channel.data, o->at + o->done, channel.bytes);
    o->done += channel.bytes;
    ++channel.sent;
  } else {
    if (channel.total != o->bytes) mismatch(c, *o, channel.total);
    std::memcpy(o->at + o->done, channel.data, channel.bytes);
    o->done += channel.bytes;
    ++channel.taken;
  }
  o->over = o->done == o->bytes;
  return true;
}

void drop_group(void* argument) { delete static_cast<Group*>(argument); }

void run_group(void* argument) {
  auto* group = static_cast<Group*>(argument);
  Communicator& c = *group->of;
  emulator_dawdle();
  bool more = true;
  while (more && !c.aborted) {
    more = false;
    bool moved = false;
    for (std::size_t i = 0; i < group->operations.size(); ++i) {
      Operation& o = group->operations[i];
      const auto same = [&](const Operation& e) {
        return !e.over && e.sends == o.sends && e.peer == o.peer;
      };
      // Those with the same partner come one after another.
      const bool first = std::find_if(group->operations.begin(), group->operations.end(), same) ==
                         group->operations.begin() + static_cast<std::ptrdiff_t>(i);
      if (!o.over && first) moved |= advance(c, &o);
      more |= !o.over;
    }
    if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  --c.under_way;
}

int add(bool sends, void* at, std::size_t bytes, int peer, void* communicator, void* stream) {
  const auto found = communicators.find(communicator);
  if (found == communicators.end() || peer < 0 || peer >= found->second->world) {
    return kInvalidArgument;
  }
  if (pending.empty()) pending.push_back({found->second, stream, {}});
  if (pending.back().stream != stream) pending.push_back({found->second, stream, {}});
  pending.back().operations.push_back({sends, static_cast<char*>(at), bytes, peer});
  return kSuccess;
}

int forget(void* communicator) {
  if (communicators.erase(communicator) == 0) return kInvalidArgument;
  --alive;
  return kSuccess;
}

}  // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};
struct Config {
  std::size_t size;
  unsigned magic, version;
  int blocking;
};

int emulated_nccl_alive() { return alive; }
void emulated_nccl_fail(int result) { next_result = result; }

const char* ncclGetErrorString(int) { return "emulated failure"; }

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> count{0};
  std::memset(id->bytes, 0, sizeof(id->bytes));
  std::snprintf(id->bytes, sizeof(id->bytes), "/ptx_machine_nccl_%d_%d", getpid(), ++count);
  return kSuccess;
}

int ncclCommInitRankConfig(void** communicator, int world, UniqueId id, int rank, Config* config) {
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0 ||
      world > kMostRanks) {
    return kInvalidArgument;
  }
  const int file = shm_open(id.bytes, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return kSystemError;
  auto made = std::make_shared<Communicator>();
  made->rank = rank;
  made->world = world;
  made->name = id.bytes;
  made->shared = static_cast<Shared*>(at);
  if (++made->shared->joined == world) shm_unlink(id.bytes);
  communicators[made.get()] = made;
  ++alive;
  *communicator = made.get();
  return kInProgress;
}

int ncclCommGetAsyncError(void* communicator, int* state) {
  const Communicator& c = *communicators.at(communicator);
  *state = c.shared->joined < c.world ? kInProgress : kSuccess;
  return kSuccess;
}

int ncclGroupStart() { return kSuccess; }

int ncclSend(const void* at, std::size_t count, int, int peer, void* communicator, void* stream) {
  return add(true, const_cast<void*>(at), count, peer, communicator, stream);
}
int ncclRecv(void* at, std::size_t count, int, int peer, void* communicator, void* stream) {
  return add(false, at, count, peer, communicator, stream);
}

int ncclGroupEnd() {
  const int result = next_result.exchange(kSuccess);
  for (const Group& group : pending) {
    if (result != kSuccess) break;
    ++group.of->under_way;
    emulator_run(group.stream, &run_group, new Group(group), &drop_group);
  }
  pending.clear();
  return result != kSuccess ? result : kInProgress;
}

int ncclCommFinalize(void* communicator) {
  return communicators.at(communicator)->under_way == 0 ? kSuccess : kInProgress;
}
int ncclCommDestroy(void* communicator) { return forget(communicator); }
int ncclCommAbort(void* communicator) {
  const auto found = communicators.find(communicator);
  if (found == communicators.end()) return kInvalidArgument;
  found->second->aborted = true;
  shm_unlink(found->second->name.c_str());
  return forget(communicator);
}

}  // extern "C"
