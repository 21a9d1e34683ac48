// CUDA kernels behind the C ABI (cuda/abi.h): libraries are opened at run time, so that this module
// is the same on machines with and without a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/abi.h"

namespace flux::host {

// One kernel of an open library. The library stays open as long as a kernel of it is held.
class Kernel {
 public:
  // Throws std::runtime_error: the library cannot be opened, has no such kernel, or was built for
  // another version of the ABI. Messages name `library`; `file` is the path to open it by, unless
  // empty: one of an open descriptor, so that what was checked is what is loaded.
  Kernel(const std::string& library, const std::string& symbol, const std::string& file = "");

  std::string name() const { return table_->name; }
  int tile_m() const { return table_->tile_m; }
  int tile_n() const { return table_->tile_n; }
  bool reduces() const { return table_->reduce != nullptr; }
  // Whether it is one of a trace build, which looks at FluxSync.trace.
  bool traces() const { return table_->stamp != nullptr; }

  // Loads the code onto a device, which must not happen while another kernel spins there.
  void prepare(int device) const;
  std::uint64_t workspace_bytes(const FluxGemmArgs& args) const;
  // Asynchronous, on a cudaStream_t. Throws std::invalid_argument when the kernel cannot do the
  // arguments, and std::runtime_error when the launch fails.
  void launch(const FluxGemmArgs& args, std::uintptr_t stream) const;
  void meet(const FluxMeetArgs& args, std::uintptr_t stream) const;
  void reduce(const FluxReduceArgs& args, std::uintptr_t stream) const;
  // Puts readings of the device's clock at `times`, which the device can write to.
  void stamp(std::uint64_t* times, int count, std::uintptr_t stream) const;

 private:
  void check(int status, const char* what) const;

  std::shared_ptr<void> library_;
  const FluxKernel* table_ = nullptr;
};

}  // namespace flux::host
