// Enough of CUDA, CUTLASS and NVSHMEM for device code without tensor cores to run on host threads: a
// thread for each thread of a block, all blocks at once.
#pragma once

#include <pthread.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

namespace shim {

struct Index {
  int x;
};

struct Block {
  explicit Block(int threads) : votes(threads) { pthread_barrier_init(&barrier, nullptr, threads); }
  ~Block() { pthread_barrier_destroy(&barrier); }
  pthread_barrier_t barrier;
  std::vector<int> votes;
};

inline thread_local Block* block = nullptr;

inline std::uint64_t nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

}  // namespace shim

inline thread_local shim::Index threadIdx, blockIdx, gridDim;

inline void __syncthreads() { pthread_barrier_wait(&shim::block->barrier); }
inline int __syncthreads_and(int vote) {
  shim::block->votes[threadIdx.x] = vote;
  __syncthreads();
  bool all = true;
  for (const int one : shim::block->votes) all = all && one != 0;
  __syncthreads();
  return all;
}
inline void __syncwarp() { __syncthreads(); }  // blocks that call it are one warp
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// Long: hundreds of threads that wait must leave the cores to those that they wait for.
inline void __nanosleep(unsigned) { std::this_thread::sleep_for(std::chrono::microseconds(200)); }
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T atomicCAS(T* at, T expected, T desired) {
  __atomic_compare_exchange_n(at, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace shim {

inline void launch(int blocks, int threads, const std::function<void()>& kernel) {
  std::vector<std::unique_ptr<Block>> made;
  std::vector<std::thread> running;
  for (int b = 0; b < blocks; ++b) {
    made.push_back(std::make_unique<Block>(threads));
    for (int t = 0; t < threads; ++t) {
      running.emplace_back([&, b, t, own = made.back().get()] {
        block = own;
        threadIdx.x = t, blockIdx.x = b, gridDim.x = blocks;
        kernel();
      });
    }
  }
  for (auto& thread : running) thread.join();
}

}  // namespace shim

// CUTLASS.
namespace cutlass {

struct bfloat16_t {
  std::uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {  // to the nearest, ties to even
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    const bool nan = std::isnan(value);
    bits = nan ? 0x7FFF : static_cast<std::uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

template <class T, int N>
struct Array {
  T values[N];
  void clear() { std::memset(values, 0, sizeof values); }
  T& operator[](int i) { return values[i]; }
  const T& operator[](int i) const { return values[i]; }
};
template <class T, int N>
struct alignas(sizeof(T) * N) AlignedArray : Array<T, N> {};
template <class To, class From, int N>
struct NumericArrayConverter {
  Array<To, N> operator()(const Array<From, N>& from) const {
    Array<To, N> to;
    for (int i = 0; i < N; ++i) to[i] = static_cast<To>(from[i]);
    return to;
  }
};

}  // namespace cutlass

// The runtime: never called, but there is code that would.
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
struct cudaFuncAttributes {};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
struct dim3 {
  explicit dim3(unsigned x = 1) : x(x) {}
  unsigned x;
};
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
template <class Kernel, class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t*, Kernel, const Args&) {
  std::abort();
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}

// cuda/nvls.cuh: there is no switch.
namespace flux {
template <class Element>
uint4 load_sum(const void*) {
  std::abort();
}
inline void store_everywhere(void*, uint4) { std::abort(); }
inline void fence_alias() {}
}  // namespace flux

// NVSHMEM.
enum { NVSHMEM_SIGNAL_SET = 9 };
void nvshmemx_putmem_signal_nbi_block(void* to, const void* from, std::size_t bytes,
                                      std::uint64_t* word, std::uint64_t value, int operation,
                                      int pe);
