// What a device has, and what a block of a kernel takes of a multiprocessor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx_machine {

struct Kernel;
struct Program;

// Limits of a multiprocessor (CUDA programming guide, "Compute Capabilities") and the product's number of
// them.
struct DeviceModel {
  const char* name;
  std::uint32_t arch;  // 80 is sm_80
  int multiprocessors;
  std::vector<int>
      groups;            // GPCs: how many multiprocessors each has. A cluster runs inside of one.
  std::uint64_t shared;  // bytes of a multiprocessor
  std::uint64_t most_shared;           // bytes of a block
  std::uint64_t reserved = 1024;       // bytes that a block takes beside its own
  std::uint64_t registers = 64 << 10;  // of 32 bits
  std::uint64_t threads = 2048;
  std::uint64_t blocks = 32;
};

// Returns the model of a name, "A100" or "H200". Throws PtxError.
const DeviceModel& model_named(const std::string& name);
// Returns how many multiprocessors each GPC has where a device has `count`: those of the model if that is
// its number, else GPCs as large as its largest, and one of the rest.
std::vector<int> groups_of(const DeviceModel& model, int count);

// What a block takes, as the device allots it.
struct Footprint {
  std::uint64_t threads = 0;    // of whole warps
  std::uint64_t registers = 0;  // of 32 bits
  std::uint64_t shared = 0;     // bytes
};

// Returns how many registers a thread of the kernel has. PTX does not say what ptxas allots:
// * a kernel with setmaxnreg has as many as its launch bounds leave, which it hands around;
// * others have as many 32-bit values as are alive at once, in the order of the PTX, and some for
//   addresses and constants; no more than .maxnreg or the launch bounds allow. ptxas orders statements
//   otherwise, so that this is an estimate.
std::uint64_t registers_of_thread(const Program& program, std::uint64_t threads);
// The most that .maxnreg, or .maxntid with .minnctapersm, leaves to a thread.
std::uint64_t most_registers(const Kernel& kernel, std::uint64_t threads);
// Returns the most 32-bit values that are alive between two statements.
std::uint64_t live_registers(const Program& program);

Footprint footprint(const DeviceModel& model, const Program& program, std::uint64_t threads,
                    std::uint64_t dynamic_shared);
// How many such blocks a multiprocessor holds.
int blocks_that_fit(const DeviceModel& model, const Footprint& block);
// Which limit such a block exceeds on an empty multiprocessor, in words. Empty: none.
std::string too_large(const DeviceModel& model, const Footprint& block);
std::string describe(const Footprint& block);

}  // namespace ptx_machine
