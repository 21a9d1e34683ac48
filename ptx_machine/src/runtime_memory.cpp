// Memory, copies, streams and events of the CUDA runtime that libraries of kernels call.
//
// Without streams (CudaDevice::attach) all work is done when a call returns.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

#include "cudart/ptx_machine_cuda.h"
#include "device.h"
#include "races.h"
#include "runtime_calls.h"

namespace ptx_machine {
namespace {

constexpr std::align_val_t kAlignment{256};  // of cudaMalloc

// What a copy or a fill tells of its bytes in memory of the device.
void note_copy(std::uint64_t to, std::uint64_t from, std::size_t bytes, bool ended) {
  CudaDevice::ordering()->copies(to, from, bytes, 0, ended ? 1 : 0);
}

void need_memory(const char* call, const void* memory, std::size_t bytes) {
  const std::string why = outside_global(*CudaDevice::instance().machine.memory(),
                                         reinterpret_cast<std::uint64_t>(memory), bytes);
  if (!why.empty()) throw PtxError(std::string(call) + ": " + why);
}

}  // namespace

int guarded(int otherwise, const std::function<int()>& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    CudaDevice::instance().fail(error.what());
    return otherwise;
  }
}

bool CudaDevice::fill(void* stream, void* memory, std::uint32_t value, int size,
                      std::size_t count) {
  return enqueue(stream, [memory, value, size, count] {
    const std::size_t bytes = size * count;
    need_memory("cudaMemsetAsync", memory, bytes);
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    note_copy(address, 0, bytes, false);
    if (size == 1) {
      std::memset(memory, static_cast<int>(value), bytes);
    } else {
      std::fill_n(static_cast<std::uint32_t*>(memory), count, value);
    }
    note_copy(address, 0, bytes, true);
  });
}

bool CudaDevice::copy(void* stream, const Copy& what) {
  return enqueue(stream, [what] {
    if (what.to_device) need_memory("cudaMemcpy, to", what.to, what.bytes);
    if (what.from_device) need_memory("cudaMemcpy, from", what.from, what.bytes);
    const auto to = reinterpret_cast<std::uint64_t>(what.to);
    const auto from = reinterpret_cast<std::uint64_t>(what.from);
    note_copy(to, from, what.bytes, false);
    std::memcpy(what.to, what.from, what.bytes);
    note_copy(to, from, what.bytes, true);
  });
}

bool CudaDevice::record(void* stream, std::uint64_t* nanoseconds) {
  return enqueue(stream, [nanoseconds] {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    *nanoseconds = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  });
}

bool CudaDevice::finish(void* stream) {
  if (streams_.synchronize != nullptr && streams_.synchronize(stream) != 0) return false;
  return error().empty();
}

bool CudaDevice::finish() {
  std::set<void*> used;
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    used = used_;
  }
  for (void* stream : used) {
    if (!finish(stream)) return false;
  }
  return error().empty();
}

void CudaDevice::forget_stream(void* stream) {
  const std::lock_guard<std::mutex> lock(reporting_);
  used_.erase(stream);
}

int fill(void* memory, std::uint32_t value, int size, std::size_t count, void* stream) {
  return guarded(kInvalidValue, [&] {
    if (size != 1 && size != 4) return kInvalidValue;
    const bool queued = CudaDevice::instance().fill(stream, memory, value, size, count);
    return queued ? kSuccess : kLaunchFailure;
  });
}

int copy(void* to, bool to_device, const void* from, bool from_device, std::size_t bytes,
         void* stream) {
  return guarded(kInvalidValue, [&] {
    if (bytes == 0) return kSuccess;
    const CudaDevice::Copy what{to, to_device, from, from_device, bytes};
    return CudaDevice::instance().copy(stream, what) ? kSuccess : kLaunchFailure;
  });
}

int allocate(void** memory, std::size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return kSuccess;
  *memory = ::operator new(bytes, kAlignment, std::nothrow);
  if (*memory == nullptr) return kOutOfMemory;
  CudaDevice::instance().machine.add_memory(reinterpret_cast<std::uint64_t>(*memory), bytes,
                                            "memory of cudaMalloc", false);
  return kSuccess;
}

int release(void* memory) {
  if (memory == nullptr) return kSuccess;
  CudaDevice& device = CudaDevice::instance();
  const bool done = device.finish();  // cudaFree waits for the device
  device.machine.remove_memory(reinterpret_cast<std::uint64_t>(memory));
  ::operator delete(memory, kAlignment);
  return done ? kSuccess : kLaunchFailure;
}

int is_known(const void* memory) {
  const auto known = CudaDevice::instance().machine.memory();
  return outside_global(*known, reinterpret_cast<std::uint64_t>(memory), 1).empty() ? 1 : 0;
}

int record(std::uint64_t* nanoseconds, void* stream) {
  return CudaDevice::instance().record(stream, nanoseconds) ? kSuccess : kLaunchFailure;
}

int create_stream(void** stream) {
  const auto create = CudaDevice::instance().streams().create;
  *stream = nullptr;
  return create == nullptr ? kSuccess : create(stream, 0, 0);
}

int destroy_stream(void* stream) {
  CudaDevice::instance().forget_stream(stream);
  const auto destroy = CudaDevice::instance().streams().destroy;
  return destroy == nullptr ? kSuccess : destroy(stream);
}

int synchronize(void* stream) {
  return CudaDevice::instance().finish(stream) ? kSuccess : kLaunchFailure;
}

int synchronize_all() { return CudaDevice::instance().finish() ? kSuccess : kLaunchFailure; }

void describe_model(PtxMachineModel* model) {
  const Room& room = CudaDevice::instance().machine.room();
  const DeviceModel& of = room.model();
  *model = {of.name,
            static_cast<int>(of.arch),
            room.multiprocessors(),
            static_cast<int>(of.threads),
            static_cast<int>(of.blocks),
            static_cast<int>(of.registers),
            of.shared,
            of.most_shared,
            of.reserved};
}

const char* error_text() {
  thread_local std::string text;
  text = CudaDevice::instance().error();
  return text.c_str();
}

}  // namespace ptx_machine
