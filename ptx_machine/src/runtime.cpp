#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <mutex>

#include "cudart/ptx_machine_cuda.h"
#include "device.h"
#include "put.h"
#include "races.h"
#include "runtime_calls.h"
#include "tensor_map.h"

namespace ptx_machine {
namespace {

// Fatbinaries, as cuobjdump and the linker see them: a header, then entries with headers.
constexpr std::uint32_t kMagic = 0xBA55ED50;
constexpr std::uint16_t kPtx = 1;
constexpr std::uint64_t kCompressed = 0x2000 | 0x4000 | 0x8000;  // ways to compress
struct FatHeader {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;  // behind the header
};
struct EntryHeader {
  std::uint16_t kind, version;
  std::uint32_t header_bytes;
  std::uint64_t bytes;  // behind this header
  std::uint32_t compressed_bytes, options_offset;
  std::uint16_t minor, major;
  std::uint32_t arch, name_offset, name_bytes;
  std::uint64_t flags;
};

// The PTX for the newest architecture that is not newer than the device's.
std::string ptx_of(const void* fatbinary, std::uint32_t arch) {
  std::string found;
  std::uint32_t newest = 0;
  const auto* at = static_cast<const std::uint8_t*>(fatbinary);
  FatHeader header;
  std::memcpy(&header, at, sizeof(header));
  if (header.magic != kMagic) throw PtxError("not a fatbinary");
  const std::uint8_t* end = at + header.header_bytes + header.bytes;
  for (at += header.header_bytes; at < end;) {
    EntryHeader entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.kind == kPtx && entry.arch > newest && entry.arch <= arch) {
      if ((entry.flags & kCompressed) != 0) {
        throw PtxError("the PTX is compressed: use nvcc --compress-mode=none");
      }
      const auto* text = reinterpret_cast<const char*>(at + entry.header_bytes);
      found.assign(text, strnlen(text, entry.bytes));
      newest = entry.arch;
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (newest == 0) throw PtxError("the fatbinary has no PTX for sm_" + std::to_string(arch));
  return found;
}

struct Library {
  const void* fatbinary;
  std::shared_ptr<const Module> module;  // parsed when it is first needed
  std::string text;                      // that it was made of
  std::uint32_t arch = 0;                // of the device that it was made for

  void retire();  // keeps the module, for the next library of the same text
};

struct LibraryKernel {
  Library* library;
  std::string name;
  int dynamic_shared = 48 * 1024;  // that a launch may have
  bool large_clusters = false;     // of more than eight blocks
};

std::mutex registering;  // guards what follows
std::map<Library*, std::unique_ptr<Library>> libraries;
std::map<const void*, LibraryKernel> kernels;
// Of libraries that were unloaded, by text: ops load and unload the same ones again and again.
std::map<std::string, std::shared_ptr<const Module>> idle;

void Library::retire() {
  if (module != nullptr) idle[std::move(text)] = std::move(module);
}

struct Found {
  std::shared_ptr<const Module> module;
  const Kernel* kernel;
  int dynamic_shared;
  bool large_clusters;

  // What a block of it takes.
  Footprint footprint(int threads, std::size_t shared) const {
    Machine& machine = CudaDevice::instance().machine;
    return ptx_machine::footprint(machine.room().model(), machine.program(module, kernel->name),
                                  static_cast<std::uint64_t>(threads), shared);
  }
};

// Nanoseconds for which this thread has had a core.
std::uint64_t thread_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

Room& room() { return CudaDevice::instance().machine.room(); }

Found find(const void* host) {
  const std::lock_guard<std::mutex> lock(registering);
  const auto found = kernels.find(host);
  if (found == kernels.end()) throw PtxError("no kernel is registered at this address");
  Library& library = *found->second.library;
  const std::uint32_t arch = room().model().arch;
  if (library.module == nullptr || library.arch != arch) {
    library.retire();
    library.arch = arch;
    std::string text = ptx_of(library.fatbinary, arch);
    const CudaDevice& device = CudaDevice::instance();
    if (device.edit) text = device.edit(text);
    if (auto again = idle.extract(text); !again.empty()) {
      library.module = std::move(again.mapped());
      CudaDevice::instance().machine.reset(library.module);
    } else {
      library.module = std::shared_ptr<const Module>(parse(text));
    }
    library.text = std::move(text);
  }
  return {library.module, &library.module->kernel(found->second.name), found->second.dynamic_shared,
          found->second.large_clusters};
}

void* load(const void* fatbinary) {
  auto library = std::make_unique<Library>(Library{fatbinary, nullptr, {}, 0});
  Library* handle = library.get();
  const std::lock_guard<std::mutex> lock(registering);
  libraries[handle] = std::move(library);
  return handle;
}

// As on a GPU it waits for all kernels that run.
void unload(void* handle) {
  CudaDevice& device = CudaDevice::instance();
  if (const std::string kernel = room().await_none(device.unload_patience); !kernel.empty()) {
    device.fail("unloading a library waits for " + kernel + ", which does not end");
  }
  const std::lock_guard<std::mutex> lock(registering);
  std::erase_if(kernels, [&](const auto& entry) { return entry.second.library == handle; });
  auto found = libraries.extract(static_cast<Library*>(handle));
  if (!found.empty()) found.mapped()->retire();
}

void add_kernel(void* handle, const void* host, const char* name) {
  const std::lock_guard<std::mutex> lock(registering);
  kernels[host] = {static_cast<Library*>(handle), name};
}

// Returns the size of a kernel's clusters: the launch's, the kernel's own, or one block.
Dim cluster_of(const Kernel& kernel, const unsigned* given) {
  if (given != nullptr) return {given[0], given[1], given[2]};
  if (kernel.cluster.empty()) return {};
  return {kernel.cluster[0], kernel.cluster[1], kernel.cluster[2]};
}

bool fits(const Found& found, const Dim& cluster) {
  const std::uint64_t blocks = cluster.count();
  return blocks >= 1 && blocks <= (found.large_clusters ? 16u : 8u);
}

int launch(const void* host, const unsigned grid[3], const unsigned block[3],
           const unsigned* cluster, std::size_t shared, void* stream, void** arguments, int early) {
  return guarded(kInvalidDeviceFunction, [&] {
    const Found found = find(host);
    if (shared > static_cast<std::size_t>(found.dynamic_shared)) return kInvalidValue;
    Launch request;
    request.grid = {grid[0], grid[1], grid[2]};
    request.block = {block[0], block[1], block[2]};
    if (request.grid.count() == 0 || request.block.count() == 0) return kInvalidConfiguration;
    if (cluster != nullptr) request.cluster = cluster_of(*found.kernel, cluster);
    const Dim size = cluster_of(*found.kernel, cluster);
    if (!fits(found, size)) return kInvalidClusterSize;
    if (grid[0] % size.x != 0 || grid[1] % size.y != 0 || grid[2] % size.z != 0) {
      return kInvalidConfiguration;
    }
    const auto threads = static_cast<int>(request.block.count());
    if (!too_large(room().model(), found.footprint(threads, shared)).empty()) {
      return kOutOfResources;
    }
    request.dynamic_shared = shared;
    request.params.resize(found.kernel->param_bytes);
    for (std::size_t i = 0; i < found.kernel->params.size(); ++i) {
      const Variable& v = found.kernel->params[i];
      std::memcpy(request.params.data() + v.offset, arguments[i], v.bytes);
    }
    const bool queued = CudaDevice::instance().launch(stream, found.module, found.kernel->name,
                                                      request, early != 0);
    return queued ? kSuccess : kLaunchFailure;
  });
}

int shared_bytes(const void* host, std::size_t* bytes) {
  return guarded(kInvalidDeviceFunction, [&] {
    *bytes = find(host).kernel->shared_bytes;
    return kSuccess;
  });
}

int most_threads(const void* host, int* threads) {
  return guarded(kInvalidDeviceFunction, [&] {
    const int most = find(host).kernel->max_threads;
    *threads = most > 0 ? most : 1024;
    return kSuccess;
  });
}

int allow_shared(const void* host, int bytes) {
  return guarded(kInvalidDeviceFunction, [&] {
    const std::uint64_t most = room().model().most_shared - find(host).kernel->shared_bytes;
    if (bytes < 0 || static_cast<std::uint64_t>(bytes) > most) return kInvalidValue;
    const std::lock_guard<std::mutex> lock(registering);
    kernels.at(host).dynamic_shared = bytes;
    return kSuccess;
  });
}

int allow_large_clusters(const void* host, int yes) {
  const std::lock_guard<std::mutex> lock(registering);
  const auto found = kernels.find(host);
  if (found == kernels.end()) return kInvalidDeviceFunction;
  found->second.large_clusters = yes != 0;
  return kSuccess;
}

int blocks_per_multiprocessor(const void* host, int threads, std::size_t shared, int* blocks) {
  return guarded(kInvalidDeviceFunction, [&] {
    if (threads <= 0) return kInvalidValue;
    *blocks = blocks_that_fit(room().model(), find(host).footprint(threads, shared));
    return kSuccess;
  });
}

int most_clusters(const void* host, const unsigned* cluster, int threads, std::size_t shared,
                  int* clusters) {
  return guarded(kInvalidDeviceFunction, [&] {
    if (threads <= 0) return kInvalidValue;
    const Found found = find(host);
    const Dim size = cluster_of(*found.kernel, cluster);
    if (!fits(found, size)) return kInvalidClusterSize;
    *clusters = room().clusters_that_fit(found.footprint(threads, shared), size.count());
    return kSuccess;
  });
}

int encode(void* map, int type, unsigned rank, void* address, const std::uint64_t* sizes,
           const std::uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
           int swizzle, int promotion, int fill) {
  std::string why;
  return encode_tiled(
      map, {type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill},
      &why);
}

int multiprocessors() { return room().multiprocessors(); }

constexpr PtxMachineCuda kTable = {load,
                                   unload,
                                   add_kernel,
                                   launch,
                                   shared_bytes,
                                   most_threads,
                                   allow_shared,
                                   blocks_per_multiprocessor,
                                   multiprocessors,
                                   allow_large_clusters,
                                   most_clusters,
                                   encode,
                                   fill,
                                   create_stream,
                                   destroy_stream,
                                   synchronize,
                                   CudaDevice::add_memory,
                                   CudaDevice::remove_memory,
                                   attach_nic,
                                   describe_model,
                                   allocate,
                                   release,
                                   copy,
                                   is_known,
                                   synchronize_all,
                                   record,
                                   error_text};

}  // namespace

CudaDevice& CudaDevice::instance() {
  static auto* const device = new CudaDevice;  // streams may use it while the process ends
  return *device;
}

void CudaDevice::attach(const Streams& streams, FailDevice* fail) {
  streams_ = streams;
  fail_ = fail;
}

void CudaDevice::attach_early(RunOnStream* run_early, ReleaseNext* release_next,
                              PredecessorEnded* predecessor_ended) {
  run_early_ = run_early;
  release_next_ = release_next;
  predecessor_ended_ = predecessor_ended;
}

void CudaDevice::add_memory(void* memory, std::size_t bytes, const char* name) {
  instance().machine.add_memory(reinterpret_cast<std::uint64_t>(memory), bytes, name);
}

void CudaDevice::remove_memory(void* memory) {
  instance().machine.remove_memory(reinterpret_cast<std::uint64_t>(memory));
}

void CudaDevice::add_multicast(void* memory, std::size_t bytes, const std::uint64_t* members,
                               int count) {
  instance().machine.add_multicast(reinterpret_cast<std::uint64_t>(memory), bytes,
                                   {members, members + count});
}

namespace {

GlobalOrder& order() { return CudaDevice::instance().machine.order(); }

void copies(std::uintptr_t to, std::uintptr_t from, std::size_t bytes, int words, int ended) {
  CudaDevice& device = CudaDevice::instance();
  try {
    order().copy(to, from, bytes, words != 0, ended != 0, device.races && device.copy_races,
                 *device.machine.memory());
  } catch (const std::exception& problem) {
    device.fail(problem.what());
  }
}

using Reached = GlobalOrder::Reached;

constexpr emulated::Ordering kOrdering = {
    [] { return order().submitted(); },
    [](int stream, std::uint64_t submitted) { order().begin_item(stream, submitted); },
    [](int stream) { order().await_stream(stream); },
    copies,
    [](std::uintptr_t to, std::size_t bytes, int ended) {
      order().put(to, to + bytes, ended != 0);
    },
    [](std::uintptr_t word, std::uint32_t value) { order().write_word(word, value); },
    [](std::uintptr_t word, std::uint32_t value) { order().see_word(word, value); },
    []() -> void* { return new Reached(order().reached()); },
    [](const void* known) { order().learn(*static_cast<const Reached*>(known)); },
    [](void* known) { delete static_cast<Reached*>(known); },
};

}  // namespace

const emulated::Ordering* CudaDevice::ordering() { return &kOrdering; }

void CudaDevice::fail(const std::string& text) {
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    if (!error_.empty()) return;
    error_ = text;
    has_failed_ = true;
  }
  if (fail_ != nullptr) fail_(text.c_str());
}

std::string CudaDevice::error() {
  const std::lock_guard<std::mutex> lock(reporting_);
  return error_;
}

void CudaDevice::clear() {
  const std::lock_guard<std::mutex> lock(reporting_);
  error_.clear();
  has_failed_ = false;
  counters_.clear();
  launches_ = 0;  // so that a seed gives the same orders again
  machine.order().forget_all();
}

std::vector<CudaDevice::Record> CudaDevice::counters() {
  const std::lock_guard<std::mutex> lock(reporting_);
  std::vector<Record> all;
  for (const auto& [key, record] : counters_) all.push_back(record);
  return all;
}

bool CudaDevice::launch(void* stream, const std::shared_ptr<const Module>& module,
                        const std::string& kernel, Launch request, bool early) {
  request.seed = seed == 0 ? 0 : seed + launches_++;
  request.max_statements = max_statements;
  request.device = device;
  request.races = races;
  request.peer_reductions = peer_reductions;
  request.vectors = vectors;
  request.stop = &has_failed_;
  request.real_time = true;  // peers are other threads, or processes
  request.stops_clock = machine.room().idle_patience > 0;
  if (yield_turn_ != nullptr) request.yield_turn = [this] { return yield_turn_() != 0; };
  if (run_early_ != nullptr) {
    request.release_next = release_next_;
    request.predecessor_ended = [this] { return predecessor_ended_() != 0; };
  }
  const auto work = [this, module, kernel, request = std::move(request)] {
    const std::uint64_t began = thread_time();
    const Counters done = machine.launch(module, kernel, request);
    const std::lock_guard<std::mutex> lock(reporting_);
    const std::size_t statements = module->kernel(kernel).statements.size();
    Record& all = counters_[{kernel, module->lines.size(), statements}];
    all.module = module;
    all.kernel = kernel;
    all.launches += 1;
    all.nanoseconds += thread_time() - began;
    all.counters += done;
  };
  return enqueue(stream, work, early);
}

bool CudaDevice::enqueue(void* stream, std::function<void()> work, bool early) {
  if (!error().empty()) return false;  // as after an illegal access: nothing runs any more
  using Work = std::function<void()>;
  auto guarded = std::make_unique<Work>([this, work = std::move(work)] {
    try {
      work();
    } catch (const std::exception& problem) {
      fail(problem.what());
    }
  });
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    used_.insert(stream);
  }
  if (streams_.run == nullptr) {
    (*guarded)();
    return error().empty();
  }
  RunOnStream* const run = early && run_early_ != nullptr ? run_early_ : streams_.run;
  run(
      stream, [](void* argument) { (*static_cast<Work*>(argument))(); }, guarded.release(),
      [](void* argument) { delete static_cast<Work*>(argument); });
  return true;
}

}  // namespace ptx_machine

const PtxMachineCuda* ptx_machine_cuda() { return &ptx_machine::kTable; }
