// Named ranges for profilers (NVTX), around the work that a call puts on streams. A profiler also
// shows them on the GPU's timeline.
//
// NVTX is a library that does nothing until a profiler is attached. It is loaded on request
// (flux/backends/cuda/nvtx.py) from the place where it is installed. So the build needs no header
// and no CUDA, and without NVTX a range costs one load and one branch.
#pragma once

#include <atomic>
#include <string>

namespace flux::host {

// Entry points of an NVTX library. Ranges nest, per thread.
struct Nvtx {
  int (*push)(const char* name);
  int (*pop)();
};

// Functions that ranges call; null: none. The object exists until the process ends.
inline std::atomic<const Nvtx*> nvtx{nullptr};

// Sends ranges to this library, or nowhere if its name is empty. One thread at a time may call it.
// Throws std::runtime_error if the library does not exist or lacks an entry point.
void load_nvtx(const std::string& library);

// A range that ends with the scope, also on an exception. It ends in the library in which it began.
class Span {
 public:
  explicit Span(const char* name) : nvtx_(nvtx.load(std::memory_order_acquire)) {
    if (nvtx_ != nullptr) nvtx_->push(name);
  }
  // A call of an op: "flux AGGemm M=8192".
  Span(const char* op, int m) : nvtx_(nvtx.load(std::memory_order_acquire)) {
    if (nvtx_ != nullptr) push_call(op, m);
  }
  ~Span() {
    if (nvtx_ != nullptr) nvtx_->pop();
  }
  Span(const Span&) = delete;

 private:
  void push_call(const char* op, int m) const;

  const Nvtx* nvtx_;
};

}  // namespace flux::host
