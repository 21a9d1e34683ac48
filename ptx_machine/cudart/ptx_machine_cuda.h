// The machine's functions for cudart.cpp, which is compiled into each library of kernels, and for the
// emulated NVSHMEM (nvshmem/nvshmem.cpp).
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// The emulated NVSHMEM, as the machine calls it when a kernel puts.
struct PtxMachineNic {
  // What `place`, an address of this rank's symmetric memory, names at a rank; null: it is not in
  // symmetric memory, or there is no such rank.
  void* (*at_rank)(const void* place, int rank);
  // Returns at once. Later, at any time, it copies the bytes and then stores the value, whole, to the
  // word. `to` and `word` are addresses of this process. It reads `from` when it copies.
  void (*put)(void* to, const void* from, std::size_t bytes, std::uint64_t* word,
              std::uint64_t value);
};

// What a multiprocessor of the device has, and a block at most; `arch` as 90.
struct PtxMachineModel {
  const char* name;
  int arch, multiprocessors, threads, blocks, registers;
  std::size_t shared, most_shared, reserved;
};

// Errors are values of cudaError_t. A kernel is named by the address of its host function.
struct PtxMachineCuda {
  // Of a fatbinary, as nvcc lays it out: its header, behind which its entries lie.
  void* (*load)(const void* fatbinary);
  void (*unload)(void* library);
  void (*add_kernel)(void* library, const void* kernel, const char* name);
  // `cluster` is in blocks; null: the launch does not say. `early`: programmatic stream serialization.
  int (*launch)(const void* kernel, const unsigned grid[3], const unsigned block[3],
                const unsigned* cluster, std::size_t shared, void* stream, void** arguments,
                int early);
  int (*shared_bytes)(const void* kernel, std::size_t* bytes);  // static ones
  int (*most_threads)(const void* kernel, int* threads);
  int (*allow_shared)(const void* kernel, int bytes);  // dynamic ones
  int (*blocks_per_multiprocessor)(const void* kernel, int threads, std::size_t shared,
                                   int* blocks);
  int (*multiprocessors)();
  int (*allow_large_clusters)(const void* kernel, int yes);
  int (*most_clusters)(const void* kernel, const unsigned* cluster, int threads, std::size_t shared,
                       int* clusters);
  // cuTensorMapEncodeTiled; returns a CUresult.
  int (*encode_tiled)(void* map, int type, unsigned rank, void* address, const std::uint64_t* sizes,
                      const std::uint64_t* strides, const unsigned* box, const unsigned* steps,
                      int interleave, int swizzle, int promotion, int fill);
  // cudaMemsetAsync, of numbers of one or four bytes.
  int (*fill)(void* memory, std::uint32_t value, int size, std::size_t count, void* stream);
  int (*create_stream)(void** stream);
  int (*destroy_stream)(void* stream);
  int (*synchronize)(void* stream);
  // Memory that kernels may access from now on, or no more; the name is for messages.
  void (*add_memory)(void* memory, std::size_t bytes, const char* name);
  void (*remove_memory)(void* memory);
  void (*attach_nic)(const PtxMachineNic* nic);
  void (*model)(PtxMachineModel* model);
  int (*allocate)(void** memory, std::size_t bytes);  // cudaMalloc
  int (*release)(void* memory);
  // cudaMemcpyAsync; each side is memory of the device or of the host.
  int (*copy)(void* to, bool to_device, const void* from, bool from_device, std::size_t bytes,
              void* stream);
  int (*is_known)(const void* memory);  // whether kernels may access it
  int (*synchronize_all)();
  // Writes the host's time to `nanoseconds` when all before it on the stream is done.
  int (*record)(std::uint64_t* nanoseconds, void* stream);
  const char* (*error)();  // the device's, in words; empty: none
};

// The only symbol of the machine that libraries look up.
__attribute__((visibility("default"))) const PtxMachineCuda* ptx_machine_cuda();

}  // extern "C"
