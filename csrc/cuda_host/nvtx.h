// Named ranges for profilers (NVTX), around what a call puts on streams. A profiler carries them over
// to the GPU's timeline.
//
// NVTX itself is a library that does nothing until a tool is there. It is loaded when it is wanted
// (flux/backends/cuda/nvtx.py), from wherever it is installed: no header and no CUDA is needed to build this, and
// without it a range costs one load and one branch.
#pragma once

#include <atomic>
#include <string>

namespace flux::host {

// Entry points of an NVTX library. Ranges nest, per thread.
struct Nvtx {
  int (*push)(const char* name);
  int (*pop)();
};

// Functions that ranges call; null: none. The object stays until the process ends.
inline std::atomic<const Nvtx*> nvtx{nullptr};

// Lets ranges go to this library, or nowhere if its name is empty. One thread at a time.
// Throws std::runtime_error: no such library, or it lacks an entry point.
void load_nvtx(const std::string& library);

// A range, which ends with the scope, also when that throws, in the library that it began in.
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
