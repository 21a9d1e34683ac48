// What calls of the CUDA runtime return, and those of them that move or wait for data
// (runtime_memory.cpp), for the table of all calls (runtime.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct PtxMachineModel;

namespace ptx_machine {

// Values of cudaError_t.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kInvalidConfiguration = 9;
constexpr int kInvalidDeviceFunction = 98;
constexpr int kOutOfResources = 701;
constexpr int kLaunchFailure = 719;
constexpr int kInvalidClusterSize = 912;
constexpr int kOutOfMemory = 2;

// Runs a call; an error becomes the device's first one.
int guarded(int otherwise, const std::function<int()>& call);

int fill(void* memory, std::uint32_t value, int size, std::size_t count, void* stream);
int copy(void* to, bool to_device, const void* from, bool from_device, std::size_t bytes,
         void* stream);
int allocate(void** memory, std::size_t bytes);
int release(void* memory);
int is_known(const void* memory);
int record(std::uint64_t* nanoseconds, void* stream);
int create_stream(void** stream);
int destroy_stream(void* stream);
int synchronize(void* stream);
int synchronize_all();
void describe_model(PtxMachineModel* model);
const char* error_text();

}  // namespace ptx_machine
