// Stands in for libflux_nvshmem.so without GPUs: ranks are processes, symmetric memory is shared memory.
// Or they are in one process, which says where the heap of each is (fake_nvshmem_heaps).
//
// Streams are those of an emulated device (emulator/gpu) if one is given (fake_nvshmem_use). Else all
// is done at once. What is put on its streams arrives when it pleases, and what kernels put is also read
// then: from memory, until its word is there.
//
// The kernels are the real ones. tests/support/emulation/fake_nvshmem.py takes csrc/cuda/runtime/relay.cuh and what it
// includes, puts host functions in the place of PTX, and this file gives them threads for blocks.
// Ranks of a "node" (FAKE_NVSHMEM_LANES of them) address each other, others have to put.
//
// Variables: FAKE_NVSHMEM_LANES, FAKE_NVSHMEM_ABI (a version to pretend), FAKE_NVSHMEM_FAIL
// ("function:rank": fails there), FAKE_NVSHMEM_HANG (the same: never returns).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "device_shim.h"
#include "gpu/heaps.h"
// The order matters: the shim stands for CUDA, CUTLASS and NVSHMEM.
#include "cuda/runtime/relay.cuh"

namespace {

constexpr std::size_t kHeap = 16 << 20;
constexpr std::size_t kControl = 4096;
constexpr std::uint64_t kAlignment = 256;

struct Control {
  std::atomic<int> arrived;
  std::atomic<int> round;
};

struct State {
  int rank = -1;
  int world = 0;
  int lanes = 0;
  std::string name;
  Control* control = nullptr;
  std::vector<char*> heaps;
  std::size_t used = 0;
  int blocks = 0;
};

State state;
std::string said;

// Of an emulated device.
struct Device {
  void (*run)(void* stream, void (*body)(void*), void* argument, void (*release)(void*)) = nullptr;
  void (*dawdle)() = nullptr;
};
Device emulated;

int on_stream(void* stream, std::function<void()> body) {
  if (emulated.run == nullptr) {  // else stream 0 is the default stream
    body();
    return FLUX_OK;
  }
  using Body = std::function<void()>;
  emulated.run(
      stream, [](void* argument) { (*static_cast<Body*>(argument))(); }, new Body(std::move(body)),
      [](void* argument) { delete static_cast<Body*>(argument); });
  return FLUX_OK;
}

int fail(const char* text) {
  said = text;
  return 7;
}

bool asked(const char* variable, const char* function) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::string(text) == function + (":" + std::to_string(state.rank));
}

#define MAYBE_FAIL(function)                                 \
  while (asked("FAKE_NVSHMEM_HANG", function)) usleep(1000); \
  if (asked("FAKE_NVSHMEM_FAIL", function)) return fail("asked to fail: " function)

void* map(const std::string& name, std::size_t bytes) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

void barrier() {
  const int round = state.control->round.load();
  if (state.control->arrived.fetch_add(1) + 1 == state.world) {
    state.control->arrived = 0;
    state.control->round = round + 1;
    return;
  }
  while (state.control->round.load() == round) usleep(200);
}

int unique_id(void* id) {
  MAYBE_FAIL("unique_id");
  std::memset(id, 0, FLUX_NVSHMEM_ID_BYTES);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(static_cast<char*>(id), FLUX_NVSHMEM_ID_BYTES, "/flux-fake-%d-%lld", getpid(),
                static_cast<long long>(now));
  return FLUX_OK;
}

int prepare(int device) {
  state.rank = device;  // tests give each rank a device of its own
  MAYBE_FAIL("prepare");
  return FLUX_OK;
}

int init(int rank, int world, const void* id, int) {
  state.rank = rank;
  MAYBE_FAIL("init");
  const char* lanes = std::getenv("FAKE_NVSHMEM_LANES");
  state.world = world;
  state.lanes = lanes != nullptr ? std::atoi(lanes) : world;
  state.name = static_cast<const char*>(id);
  state.control = static_cast<Control*>(map(state.name, kControl));
  state.heaps.clear();
  for (int r = 0; r < world; ++r) {
    state.heaps.push_back(static_cast<char*>(map(state.name + "-" + std::to_string(r), kHeap)));
    if (state.heaps.back() == nullptr) return fail("no shared memory");
  }
  barrier();
  shm_unlink((state.name + "-" + std::to_string(rank)).c_str());
  if (rank == 0) shm_unlink(state.name.c_str());
  return FLUX_OK;
}

int finalize() {
  MAYBE_FAIL("finalize");
  barrier();
  for (char* heap : state.heaps) munmap(heap, kHeap);
  munmap(state.control, kControl);
  state = State{};
  return FLUX_OK;
}

int allocate(std::uint64_t bytes, void** address) {
  MAYBE_FAIL("allocate");
  const std::size_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  barrier();
  if (state.used + size > kHeap) return fail("the heap is full");
  *address = state.heaps[state.rank] + state.used;
  std::memset(*address, 0, size);
  state.used += size;
  ++state.blocks;
  return FLUX_OK;
}

int release(void*) {
  MAYBE_FAIL("release");
  barrier();
  if (--state.blocks == 0) state.used = 0;  // a heap that is empty begins anew
  return FLUX_OK;
}

// The place of `pe` that has this rank's address.
char* at(const void* address, int pe) {
  if (!all_heaps.empty()) return at_rank(static_cast<char*>(const_cast<void*>(address)), pe);
  const auto offset = static_cast<const char*>(address) - state.heaps[state.rank];
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(kHeap)) std::abort();
  return state.heaps[pe] + offset;
}

void* peer_pointer(const void* address, int pe) {
  return pe / state.lanes == state.rank / state.lanes ? at(address, pe) : nullptr;
}

void raise(std::uint64_t* word, std::uint64_t value, int pe) {
  __atomic_store_n(reinterpret_cast<std::uint64_t*>(at(word, pe)), value, __ATOMIC_RELEASE);
}

// Puts may overtake one another, but no word its own put.
int put_signal(void* to, const void* from, std::uint64_t bytes, std::uint64_t* word,
               std::uint64_t value, int pe, void* stream) {
  return on_stream(stream, [=] {
    if (emulated.run == nullptr) {
      std::memcpy(at(to, pe), from, bytes);
      return raise(word, value, pe);
    }
    at(from, pe);  // NVSHMEM sends from its heap, too
    // What follows on the stream may overwrite it.
    const std::string sent(static_cast<const char*>(from), bytes);
    std::thread([=] {
      emulated.dawdle();
      std::memcpy(at(to, pe), sent.data(), bytes);
      raise(word, value, pe);
    }).detach();
  });
}

int signal(std::uint64_t* word, std::uint64_t value, int pe, void* stream) {
  return on_stream(stream, [=] { raise(word, value, pe); });
}

int relay(const FluxRelayArgs* given, void* stream) {
  if (given->dtype != FLUX_BF16) return fail("the fake has bf16 only");
  return on_stream(stream, [args = *given] {
    const bool wide = args.n % 8 == 0;
    shim::launch(args.blocks, flux::kReduceThreads, [&] {
      wide ? flux::relay_kernel<cutlass::bfloat16_t, 8>(args)
           : flux::relay_kernel<cutlass::bfloat16_t, 1>(args);
    });
  });
}

int node_sum(const FluxNodeSumArgs* given, void* stream) {
  if (given->dtype != FLUX_BF16) return fail("the fake has bf16 only");
  return on_stream(stream, [args = *given] {
    const bool wide = args.sum.n % 8 == 0 && args.sum.tile_n % 8 == 0;
    shim::launch(1, flux::kReduceThreads, [&] {
      wide ? flux::node_sum_kernel<cutlass::bfloat16_t, 8>(args)
           : flux::node_sum_kernel<cutlass::bfloat16_t, 1>(args);
    });
  });
}

const char* message() { return said.c_str(); }

std::uint32_t version() {
  const char* pretended = std::getenv("FAKE_NVSHMEM_ABI");
  return pretended != nullptr ? static_cast<std::uint32_t>(std::atoi(pretended))
                              : FLUX_NVSHMEM_ABI_VERSION;
}

}  // namespace

void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, std::size_t bytes,
                                      std::uint64_t* word, std::uint64_t value, int, int pe) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto put = [=] {
    if (emulated.dawdle != nullptr) emulated.dawdle();
    std::memcpy(at(to, pe), from, bytes);
    raise(word, value, pe);
  };
  emulated.run != nullptr ? std::thread(put).detach() : put();
}

extern "C" __attribute__((visibility("default"))) void fake_nvshmem_use(
    decltype(Device::run) run, decltype(Device::dawdle) dawdle) {
  emulated = {run, dawdle};
}
extern "C" __attribute__((visibility("default"))) void fake_nvshmem_heaps(
    int ranks, const std::uintptr_t* begins, std::size_t bytes) {
  add_heaps(ranks, begins, bytes);
}

extern "C" __attribute__((visibility("default"))) const FluxNvshmem flux_nvshmem = {
    version(),
    sizeof(FluxRelayArgs),
    sizeof(FluxNodeSumArgs),
    "0.0.0",
    &message,
    &unique_id,
    &prepare,
    &init,
    &finalize,
    &allocate,
    &release,
    &peer_pointer,
    &put_signal,
    &signal,
    &relay,
    &node_sum,
};

// Arguments of node_sum without those that one-node reductions have besides.
struct FakeSum {
  std::int32_t rank, world, m, n, tile_m, tile_n;
  std::int32_t source_count, node_count;
  std::int32_t sources[FLUX_MAX_WORLD];
  const void* slots[FLUX_MAX_WORLD];
  const std::uint64_t* words[FLUX_MAX_WORLD];
  const std::uint32_t* flags;
  void* out;
  FluxSync sync;
};

extern "C" __attribute__((visibility("default"))) int fake_node_sum(const FakeSum* given) {
  FluxNodeSumArgs args{};
  FluxReduceArgs& sum = args.sum;
  sum.rank = given->rank, sum.world = given->world;
  sum.m = given->m, sum.n = given->n, sum.tile_m = given->tile_m, sum.tile_n = given->tile_n;
  sum.first_row = flux::row_begin(sum.m, sum.world, sum.rank);
  sum.rows = flux::row_count(sum.m, sum.world, sum.rank);
  sum.slot_count = given->source_count + given->node_count;
  sum.slot_ld = sum.out_ld = sum.n;
  sum.flags = given->flags;
  sum.outs[0] = given->out;
  sum.out_count = 1;
  sum.scale = 1.0f;
  sum.sm_count = 1;
  sum.sync = given->sync;
  args.dtype = FLUX_BF16;
  args.source_count = given->source_count;
  args.node_count = given->node_count;
  for (int i = 0; i < FLUX_MAX_WORLD; ++i) {
    args.sources[i] = given->sources[i];
    args.words[i] = given->words[i];
    sum.slots[i] = given->slots[i];
  }
  return flux_nvshmem.node_sum(&args, nullptr);
}
