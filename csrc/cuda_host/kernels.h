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
  // Throws std::runtime_error if the library cannot be opened, has no such kernel, or was built for
  // another version of the ABI. Messages name `library`. If `file` is not empty, it is the path by
  // which the library is opened. It names an open descriptor, so that the file that was checked is
  // the one that is loaded.
  Kernel(const std::string& library, const std::string& symbol, const std::string& file = "");

  std::string name() const { return table_->name; }
  int tile_m() const { return table_->tile_m; }
  int tile_n() const { return table_->tile_n; }
  bool routes() const { return table_->route != nullptr; }
  bool reduces() const { return table_->reduce != nullptr; }
  // Whether the kernel is of a trace build, which uses FluxSync.trace.
  bool traces() const { return table_->stamp != nullptr; }

  // Loads the code onto a device, which must not happen while another kernel spins there.
  void prepare(int device) const;
  std::uint64_t workspace_bytes(const FluxGemmArgs& args) const;
  // Asynchronous, on a cudaStream_t. Throws std::invalid_argument if the kernel does not support
  // the arguments, and std::runtime_error if the launch fails.
  void launch(const FluxGemmArgs& args, std::uintptr_t stream) const;
  void meet(const FluxMeetArgs& args, std::uintptr_t stream) const;
  void reduce(const FluxReduceArgs& args, std::uintptr_t stream) const;
  void route(const FluxRouteArgs& args, std::uintptr_t stream) const;
  void collect(const FluxCollectArgs& args, std::uintptr_t stream) const;
  // Writes readings of the device's clock to `times`, which the device must be able to write.
  void stamp(std::uint64_t* times, int count, std::uintptr_t stream) const;

 private:
  void check(int status, const char* what) const;

  std::shared_ptr<void> library_;
  const FluxKernel* table_ = nullptr;
};

}  // namespace flux::host
