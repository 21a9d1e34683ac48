// An NVSHMEM for tests, in the library of the emulated GPU. Ranks are processes, and their heaps are
// shared memory. Or they are in one process, which says where the heap of each is
// (emulated_nvshmem_add_heaps).
//
// A put that a kernel makes comes from the PTX machine (ptx_machine/src/put.cpp). A NIC performs it: a
// thread of the host, at any time after the call. It reads the source when it copies, so a source that
// has been overwritten by then is an error of the device. Puts may overtake each other, but no word its
// own put. A put on a stream has read its source when the stream goes on.
//
// Ranks of a "node" (EMULATED_NVSHMEM_LANES of them; without: all) address each other, others put.
// EMULATED_NVSHMEM_FAIL names a function that fails in this process, EMULATED_NVSHMEM_HANG one that does
// not return while the variable is there.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cudart/ptx_machine_cuda.h"
#include "gpu/device.h"
#include "nvshmem/heaps.h"
#include "nvshmem/include/nvshmemx.h"

extern "C" {
void emulator_run(void* stream, void (*body)(void*), void* argument, void (*release)(void*));
}

namespace {

constexpr std::size_t kHeap = 16 << 20;
constexpr std::size_t kControl = 4096;
constexpr int kFailed = 7;
constexpr std::chrono::seconds kLongest{300};  // NVSHMEM has no limit; a test's process has

struct Control {
  std::atomic<int> arrived;
  std::atomic<int> round;
};

struct Job {
  int rank = -1;
  int world = 0;
  int lanes = 0;
  Control* control = nullptr;
  std::vector<char*> heaps;
  std::size_t used = 0;
  int blocks = 0;

  bool shares_node(int pe) const { return pe / lanes == rank / lanes; }
};

// Never destroyed: threads of puts may use it while the process ends.
Job& job() {
  static auto* const one = new Job;
  return *one;
}

const PtxMachineCuda* machine() {
  void* entry = dlsym(RTLD_DEFAULT, "ptx_machine_cuda");
  return entry == nullptr ? nullptr : reinterpret_cast<const PtxMachineCuda* (*)()>(entry)();
}

bool is_named(const char* variable, const char* function) {
  const char* text = std::getenv(variable);
  return text != nullptr && std::strcmp(text, function) == 0;
}

// Whether a function is to fail.
bool fails(const char* function) {
  while (is_named("EMULATED_NVSHMEM_HANG", function)) usleep(1000);
  return is_named("EMULATED_NVSHMEM_FAIL", function);
}

[[noreturn]] void end(const char* what) {
  std::fprintf(stderr, "emulated NVSHMEM: %s takes too long\n", what);
  std::abort();
}

template <class Done>
void await(const char* what, Done&& done) {
  const auto until = std::chrono::steady_clock::now() + kLongest;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) end(what);
    usleep(200);
  }
}

void barrier() {
  Control& control = *job().control;
  const int round = control.round.load();
  if (control.arrived.fetch_add(1) + 1 == job().world) {
    control.arrived = 0;
    control.round = round + 1;
    return;
  }
  await("a barrier", [&] { return control.round.load() != round; });
}

void* map(const std::string& name, std::size_t bytes) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

// -- puts ------------------------------------------------------------------------------------------

std::atomic<int> under_way{0};

void await_puts() {
  await("a put", [] { return under_way == 0; });
}

void* at_rank_or_null(const void* place, int pe) {
  const auto at = reinterpret_cast<std::uintptr_t>(place);
  if (has_heaps()) return reinterpret_cast<void*>(find_at_rank(at, pe));
  const Job& of = job();
  if (pe < 0 || pe >= of.world) return nullptr;
  const auto own = reinterpret_cast<std::uintptr_t>(of.heaps[of.rank]);
  if (at < own || at >= own + kHeap) return nullptr;
  return of.heaps[pe] + (at - own);
}

template <class T>
T* at(T* place, int pe) {
  void* found = at_rank_or_null(place, pe);
  if (found == nullptr) {
    emulated::device().fail("emulated NVSHMEM: an address is not in the symmetric memory of rank " +
                            std::to_string(pe));
  }
  return static_cast<T*>(found);
}

void raise(std::uint64_t* word, std::uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// Performs a put in a while. `sent` is what the source was when the put was started.
void send(void* to, const void* from, std::string sent, std::uint64_t* word, std::uint64_t value) {
  ++under_way;
  std::thread([=, sent = std::move(sent)] {
    emulated::dawdle();
    std::this_thread::sleep_for(std::chrono::microseconds(emulated::device().copy_us));
    if (from != nullptr && std::memcmp(from, sent.data(), sent.size()) != 0) {
      emulated::device().fail(
          "emulated NVSHMEM: the source of a put was overwritten before it was read");
    }
    const emulated::Ordering* const tell = emulated::ordering;
    const auto place = reinterpret_cast<std::uintptr_t>(to);
    if (tell != nullptr) tell->puts(place, sent.size(), 0);
    std::memcpy(to, sent.data(), sent.size());
    if (tell != nullptr) tell->puts(place, sent.size(), 1);
    raise(word, value);
    --under_way;
  }).detach();
}

// Of a kernel: the source is read later.
void put(void* to, const void* from, std::size_t bytes, std::uint64_t* word, std::uint64_t value) {
  send(to, from, std::string(static_cast<const char*>(from), bytes), word, value);
}

constexpr PtxMachineNic kNic = {at_rank_or_null, put};

void on_stream(CUstream_st* stream, std::function<void()> body) {
  using Body = std::function<void()>;
  emulator_run(
      stream, [](void* argument) { (*static_cast<Body*>(argument))(); }, new Body(std::move(body)),
      [](void* argument) { delete static_cast<Body*>(argument); });
}

void check_operation(int operation) {
  if (operation != NVSHMEM_SIGNAL_SET) {
    emulated::device().fail("emulated NVSHMEM: words are set, and nothing else");
  }
}

}  // namespace

extern "C" {

// For tests: where the heaps of the ranks of this process are.
void emulated_nvshmem_add_heaps(int ranks, const std::uintptr_t* begins, std::size_t bytes) {
  machine()->attach_nic(&kNic);
  add_heaps(ranks, begins, bytes);
}
// For tests: waits for the puts of this process.
void emulated_nvshmem_await_puts() { await_puts(); }

int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
  if (fails("get_uniqueid")) return kFailed;
  static std::atomic<int> count{0};
  *id = {};
  std::snprintf(id->name, sizeof(id->name), "/ptx_machine_nvshmem_%d_%d", getpid(), ++count);
  return 0;
}

int nvshmemx_set_attr_uniqueid_args(int rank, int world, const nvshmemx_uniqueid_t* id,
                                    nvshmemx_init_attr_t* attributes) {
  *attributes = {rank, world, *id};
  return 0;
}

int nvshmemi_init_thread(int requested, int* provided, unsigned flags,
                         nvshmemx_init_attr_t* attributes, nvshmemi_version_t) {
  if (fails("init") || machine() == nullptr || flags != NVSHMEMX_INIT_WITH_UNIQUEID) return kFailed;
  *provided = requested;
  Job& made = job();
  made.rank = attributes->rank;
  made.world = attributes->world;
  const char* lanes = std::getenv("EMULATED_NVSHMEM_LANES");
  made.lanes = lanes != nullptr ? std::atoi(lanes) : made.world;
  const std::string name = attributes->id.name;
  const auto heap = [&](int rank) { return name + "_" + std::to_string(rank); };
  made.control = static_cast<Control*>(map(name, kControl));
  made.heaps.clear();
  for (int r = 0; r < made.world; ++r) {
    made.heaps.push_back(static_cast<char*>(map(heap(r), kHeap)));
    if (made.control == nullptr || made.heaps.back() == nullptr) return kFailed;
  }
  barrier();
  shm_unlink(heap(made.rank).c_str());
  if (made.rank == 0) shm_unlink(name.c_str());
  machine()->attach_nic(&kNic);
  return 0;
}

void nvshmem_finalize() {
  Job& left = job();
  await_puts();
  barrier();
  for (char* heap : left.heaps) munmap(heap, kHeap);
  munmap(left.control, kControl);
  left = Job{};
}

int nvshmem_my_pe() { return job().rank; }
int nvshmem_n_pes() { return job().world; }

void* nvshmem_align(std::size_t alignment, std::size_t bytes) {
  if (fails("align")) return nullptr;
  Job& of = job();
  barrier();
  const std::size_t begin = (of.used + alignment - 1) / alignment * alignment;
  if (bytes > kHeap || begin > kHeap - bytes) return nullptr;
  of.used = begin + bytes;
  ++of.blocks;
  for (int r = 0; r < of.world; ++r) {  // kernels must not access what they cannot address
    if (!of.shares_node(r)) continue;
    const std::string name = "symmetric memory of rank " + std::to_string(r);
    machine()->add_memory(of.heaps[r] + begin, bytes, name.c_str());
  }
  return of.heaps[of.rank] + begin;
}

void nvshmem_free(void* memory) {
  Job& of = job();
  await_puts();
  barrier();
  for (int r = 0; r < of.world; ++r) {
    if (of.shares_node(r)) machine()->remove_memory(at_rank_or_null(memory, r));
  }
  if (--of.blocks == 0) of.used = 0;  // a heap that is empty begins anew
}

void* nvshmem_ptr(const void* place, int pe) {
  return job().shares_node(pe) ? at_rank_or_null(place, pe) : nullptr;
}

void nvshmemx_putmem_signal_on_stream(void* to, const void* from, std::size_t bytes,
                                      std::uint64_t* word, std::uint64_t value, int operation,
                                      int pe, CUstream_st* stream) {
  check_operation(operation);
  on_stream(stream, [=] {
    char* there = at(static_cast<char*>(to), pe);
    std::uint64_t* raised = at(word, pe);
    if (there == nullptr || raised == nullptr || at(from, pe) == nullptr) return;
    // What follows on the stream may overwrite the source.
    send(there, nullptr, std::string(static_cast<const char*>(from), bytes), raised, value);
  });
}

void nvshmemx_signal_op_on_stream(std::uint64_t* word, std::uint64_t value, int operation, int pe,
                                  CUstream_st* stream) {
  check_operation(operation);
  on_stream(stream, [=] {
    if (std::uint64_t* raised = at(word, pe)) raise(raised, value);
  });
}

void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  *major = NVSHMEM_VENDOR_MAJOR_VERSION;
  *minor = NVSHMEM_VENDOR_MINOR_VERSION;
  *patch = NVSHMEM_VENDOR_PATCH_VERSION;
}

}  // extern "C"
