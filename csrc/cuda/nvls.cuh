// NVLink SHARP: a multicast address stands for the same memory of all ranks. On a load the switch returns
// the sum over all ranks, in fp32; a store writes to all ranks. Hopper and newer; on older devices
// the host never passes such an address.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"

namespace flux {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FLUX_NVLS(...) asm volatile(__VA_ARGS__)
#else
#define FLUX_NVLS(...) asm volatile("trap;")
#endif

// 16 bytes of sums over all ranks.
template <class Element>
__device__ __forceinline__ uint4 load_sum(const void* at) {
  static_assert(sizeof(Element) == 2);
  uint4 sum{};
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    FLUX_NVLS(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
        : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)
        : "l"(at)
        : "memory");
  } else {
    FLUX_NVLS(
        "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];" : "="
                                                                                                "r"(sum.x),
        "=r"(sum.y), "=r"(sum.z), "=r"(sum.w) : "l"(at) : "memory");
  }
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
