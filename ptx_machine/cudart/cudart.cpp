// Stands in for NVIDIA's CUDA runtime in libraries of kernels that the PTX machine runs: it passes on
// what kernels' launches call to the machine of the process (src/runtime.cpp). Compile it into the
// library. Hide all symbols, so that a real runtime may live in the same process.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>

#include "ptx_machine_cuda.h"

namespace {

// The machine, which the process has to load first, with its symbols visible to all.
const PtxMachineCuda* machine() {
  static const auto* const table = [] {
    void* entry = dlsym(RTLD_DEFAULT, "ptx_machine_cuda");
    return entry == nullptr ? nullptr : reinterpret_cast<const PtxMachineCuda* (*)()>(entry)();
  }();
  return table;
}

cudaError_t result(int status) { return static_cast<cudaError_t>(status); }

thread_local cudaError_t last = cudaSuccess;
cudaError_t keep(cudaError_t status) {
  if (status != cudaSuccess) last = status;
  return status;
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  void* stream;
};
thread_local Configuration pushed;

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, const unsigned* cluster,
                   std::size_t shared, void* stream, void** arguments, bool early = false) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  const unsigned blocks[] = {grid.x, grid.y, grid.z}, threads[] = {block.x, block.y, block.z};
  return keep(result(machine()->launch(kernel, blocks, threads, cluster, shared, stream, arguments,
                                       early ? 1 : 0)));
}

// Reads the attributes of a launch: `cluster` gets three sizes, `given` whether there are any, `early`
// whether it may start before the launch in front of it has ended.
cudaError_t read_attributes(const cudaLaunchConfig_t& config, unsigned* cluster, bool* given,
                            bool* early) {
  *given = *early = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& size = attribute.val.clusterDim;
      cluster[0] = size.x;
      cluster[1] = size.y;
      cluster[2] = size.z;
      *given = true;
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      *early = attribute.val.programmaticStreamSerializationAllowed != 0;
    } else {
      return cudaErrorNotSupported;
    }
  }
  return cudaSuccess;
}

// What a program may ask of the device; the rest is zero.
void describe(cudaDeviceProp* all) {
  PtxMachineModel model;
  machine()->model(&model);
  *all = {};
  std::strncpy(all->name, model.name, sizeof(all->name) - 1);
  all->major = model.arch / 10;
  all->minor = model.arch % 10;
  all->multiProcessorCount = model.multiprocessors;
  all->warpSize = 32;
  all->maxThreadsPerBlock = 1024;
  all->maxThreadsPerMultiProcessor = model.threads;
  all->maxBlocksPerMultiProcessor = model.blocks;
  all->regsPerBlock = all->regsPerMultiprocessor = model.registers;
  all->sharedMemPerBlock = 48 * 1024;
  all->sharedMemPerBlockOptin = model.most_shared;
  all->sharedMemPerMultiprocessor = model.shared;
  all->reservedSharedMemPerBlock = model.reserved;
  const int grid[] = {0x7fffffff, 65535, 65535}, block[] = {1024, 1024, 64};
  std::memcpy(all->maxGridSize, grid, sizeof(grid));
  std::memcpy(all->maxThreadsDim, block, sizeof(block));
  all->concurrentKernels = 1;
}

// An event: when the work in front of it on its stream was done.
struct Event {
  std::uint64_t nanoseconds = 0;
  cudaStream_t stream = nullptr;
  bool is_recorded = false;
};
Event* event_of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }

// Whether one side of a copy is memory of the device. With cudaMemcpyDefault its address tells.
bool of_device(const void* memory, cudaMemcpyKind kind, bool target) {
  if (kind == cudaMemcpyDefault) return machine()->is_known(memory) != 0;
  return kind == cudaMemcpyDeviceToDevice ||
         kind == (target ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost);
}

}  // namespace

extern "C" {

// -- what nvcc's own code calls -------------------------------------------------------------------

struct Wrapper {  // __fatBinC_Wrapper_t
  int magic, version;
  const void* data;
  void* files;
};

void** __cudaRegisterFatBinary(void* wrapper) {
  if (machine() == nullptr) return nullptr;
  return static_cast<void**>(machine()->load(static_cast<const Wrapper*>(wrapper)->data));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** library) {
  if (library != nullptr) machine()->unload(library);
}
void __cudaRegisterFunction(void** library, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  if (library != nullptr) machine()->add_kernel(library, host, name);
}
// Variables live in the machine; the host does not look at any.
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared,
                                     cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, nullptr, shared, stream, arguments);
}

// -- what launches call --------------------------------------------------------------------------

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  unsigned cluster[3];
  bool given = false, early = false;
  const cudaError_t status = read_attributes(*config, cluster, &given, &early);
  if (status != cudaSuccess) return keep(status);
  return launch(kernel, config->gridDim, config->blockDim, given ? cluster : nullptr,
                config->dynamicSmemBytes, config->stream, arguments, early);
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->fill(memory, static_cast<unsigned char>(value), 1, bytes, stream)));
}

cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  const cudaError_t status = cudaMemsetAsync(memory, value, bytes, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->copy(to, of_device(to, kind, true), from,
                                     of_device(from, kind, false), bytes, stream)));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return status == cudaSuccess ? cudaStreamSynchronize(nullptr) : status;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->allocate(memory, bytes)));
}
cudaError_t cudaFree(void* memory) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->release(memory)));
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* memory) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  *found = {};
  found->hostPointer = const_cast<void*>(memory);
  if (machine()->is_known(memory) != 0) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void*>(memory);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->create_stream(reinterpret_cast<void**>(stream))));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return keep(result(machine()->destroy_stream(stream)));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->synchronize(stream)));
}
cudaError_t cudaDeviceSynchronize() {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->synchronize_all()));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  Event& recorded = *event_of(event);
  recorded.stream = stream;
  recorded.is_recorded = true;
  return keep(result(machine()->record(&recorded.nanoseconds, stream)));
}
// Waits for all that is on the stream now, which may be more than what the event comes behind.
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return event_of(event)->is_recorded ? cudaStreamSynchronize(event_of(event)->stream)
                                      : cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t status = cudaEventSynchronize(event);
  delete event_of(event);
  return status;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!event_of(begin)->is_recorded || !event_of(end)->is_recorded) {
    return keep(cudaErrorInvalidResourceHandle);
  }
  const auto from = static_cast<double>(event_of(begin)->nanoseconds);
  *ms = static_cast<float>((static_cast<double>(event_of(end)->nanoseconds) - from) * 1e-6);
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const cudaError_t status = last;
  last = cudaSuccess;
  return status;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorString(cudaError_t status) {
  if (status == cudaSuccess) return "no error";
  const char* text = machine() == nullptr ? "" : machine()->error();
  return *text != 0 ? text : "an error of the emulated CUDA runtime";
}
const char* cudaGetErrorName(cudaError_t status) {
  return status == cudaSuccess ? "cudaSuccess" : "an error of the emulated CUDA runtime";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = machine() == nullptr ? 0 : 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return device == 0 ? cudaSuccess : keep(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  cudaDeviceProp all;
  describe(&all);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = all.multiProcessorCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = all.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = all.minor;
      break;
    case cudaDevAttrWarpSize:
      *value = all.warpSize;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = all.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = all.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = all.maxBlocksPerMultiProcessor;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = all.regsPerBlock;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = all.regsPerMultiprocessor;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = all.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
      *value = all.maxGridSize[1];
      break;
    case cudaDevAttrMaxGridDimZ:
      *value = all.maxGridSize[2];
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(all.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(all.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(all.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = static_cast<int>(all.reservedSharedMemPerBlock);
      break;
    case cudaDevAttrGPUDirectRDMAWritesOrdering:
      *value = cudaGPUDirectRDMAWritesOrderingOwner;  // the weakest order that a GPU has
      break;
    default:
      return keep(cudaErrorNotSupported);
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int device) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  if (device != 0) return keep(cudaErrorInvalidDevice);
  describe(all);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void* kernel) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  *found = {};
  const int status = machine()->shared_bytes(kernel, &found->sharedSizeBytes);
  return keep(
      result(status != 0 ? status : machine()->most_threads(kernel, &found->maxThreadsPerBlock)));
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    return keep(result(machine()->allow_large_clusters(kernel, value)));
  }
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return keep(cudaErrorNotSupported);
  return keep(result(machine()->allow_shared(kernel, value)));
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel,
                                                                   int threads, std::size_t shared,
                                                                   unsigned) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  return keep(result(machine()->blocks_per_multiprocessor(kernel, threads, shared, blocks)));
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, std::size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel,
                                           const cudaLaunchConfig_t* config) {
  if (machine() == nullptr) return keep(cudaErrorInsufficientDriver);
  unsigned cluster[3];
  bool given = false, early = false;
  const cudaError_t status = read_attributes(*config, cluster, &given, &early);
  if (status != cudaSuccess) return keep(status);
  const dim3& block = config->blockDim;
  return keep(result(machine()->most_clusters(kernel, given ? cluster : nullptr,
                                              static_cast<int>(block.x * block.y * block.z),
                                              config->dynamicSmemBytes, clusters)));
}

// -- what CUTLASS calls, or looks up, in the driver -----------------------------------------------

CUresult cuMemsetD32Async(CUdeviceptr memory, unsigned value, std::size_t count, CUstream stream) {
  if (machine() == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  const int status = machine()->fill(reinterpret_cast<void*>(memory), value, 4, count, stream);
  return status == 0 ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (machine() == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  return static_cast<CUresult>(machine()->encode_tiled(
      map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill));
}
CUresult cuGetErrorString(CUresult status, const char** text) {
  *text = cudaGetErrorString(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = machine() != nullptr && std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (found != nullptr) {
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"
