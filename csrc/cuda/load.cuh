// Loading of kernels. CUDA loads the code of a kernel when it is first asked about, which beside a kernel
// that waits would wait too. So all code is loaded before.
#pragma once

#include <cuda_runtime.h>

namespace flux {

// Setting an attribute need not load the code; asking for all of them does.
template <class... Kernels>
int load_code(Kernels... kernels) {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaSuccess;
  ((status = status == cudaSuccess ? cudaFuncGetAttributes(&attributes, kernels) : status), ...);
  return static_cast<int>(status);
}

// Loads a kernel on a device, and lets it have shared memory. `more` is called while the device is current.
template <class Function>
int prepare_on(int device, Function kernel, int shared_bytes, int (*more)(int device) = nullptr) {
  int before = 0;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status != cudaSuccess) return static_cast<int>(status);
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  int result = status == cudaSuccess ? load_code(kernel) : static_cast<int>(status);
  if (result == 0 && more != nullptr) result = more(device);
  const cudaError_t restored = cudaSetDevice(before);
  return result != 0 ? result : static_cast<int>(restored);
}

}  // namespace flux
