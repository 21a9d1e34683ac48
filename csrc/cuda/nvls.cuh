// NVLink SHARP: a multicast address stands for the same memory of all ranks. On a load the switch returns
// the sum over all ranks, in fp32; a store writes to all ranks. Hopper and newer; on older devices
// the host never passes such an address.
#pragma once

#include <cstdint>

namespace flux {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FLUX_NVLS(...) asm volatile(__VA_ARGS__)
#else
#define FLUX_NVLS(...) asm volatile("trap;")
#endif

// 16 bytes of sums over all ranks, of bfloat16 or else float16.
template <bool kBfloat16>
__device__ __forceinline__ uint4 load_sum(const void* at) {
  uint4 sum{};
#define FLUX_LOAD_SUM(pair)                                               \
  FLUX_NVLS("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4." pair \
            " {%0, %1, %2, %3}, [%4];" : "=r"(sum.x),                     \
            "=r"(sum.y), "=r"(sum.z), "=r"(sum.w) : "l"(at) : "memory")
  if constexpr (kBfloat16) FLUX_LOAD_SUM("bf16x2");
  if constexpr (!kBfloat16) FLUX_LOAD_SUM("f16x2");
#undef FLUX_LOAD_SUM
  return sum;
}

__device__ __forceinline__ void store_everywhere(void* at, uint4 value) {
  FLUX_NVLS("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at),
            "f"(__uint_as_float(value.x)), "f"(__uint_as_float(value.y)),
            "f"(__uint_as_float(value.z)), "f"(__uint_as_float(value.w)) : "memory");
}

// Between accesses to the same memory at different addresses.
__device__ __forceinline__ void fence_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

#undef FLUX_NVLS

}  // namespace flux
