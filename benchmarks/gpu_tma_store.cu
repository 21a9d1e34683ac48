// What TMA does with the rows of a store that lie in front of a tensor map, or behind it.
//
//     nvcc -gencode=arch=compute_90a,code=sm_90a benchmarks/gpu_tma_store.cu -o tma_store && ./tma_store
//
// A kernel stores a box of 128 x 32 bf16 values into a tensor of 256 x 32 at a given row, plainly or
// adding up. The tensor lies in the middle of an allocation, so rows written outside of it are seen.
// The CUDA programming guide wants the top left corner of a store not to be negative; loads may begin
// in front of a tensor. The scatter store of GEMM + ReduceScatter relies on boxes that end behind the
// tensor, and avoids negative rows with guard rows (csrc/core/scatter.h).
//
// Without arguments: boxes at row 0 and after it, which must be clipped (exit status 0 if they are).
// With ROW ADD: that one case. A fault loses the context, so each negative row has its own process.
// With "host": plain stores into pinned memory of the host, where peers of a LoopbackWorld have their
// slots. No document says that TMA can store there, or that it cannot.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kRows = 256, kColumns = 32, kBox = 128;
constexpr int kAround = 256;  // rows of the allocation before and after the tensor
constexpr float kBefore = 1.0f;
constexpr float kNew = 2.0f;

__global__ void store_box(const __grid_constant__ CUtensorMap map, int row, bool add) {
  __shared__ alignas(128) __nv_bfloat16 box[kBox * kColumns];
  for (int i = threadIdx.x; i < kBox * kColumns; i += blockDim.x) box[i] = __float2bfloat16(kNew);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  const auto from = static_cast<std::uint32_t>(__cvta_generic_to_shared(box));
  if (add) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::
            "l"(&map),
        "r"(0), "r"(row), "r"(from)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
        "r"(0), "r"(row), "r"(from)
        : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(status));
  std::exit(2);
}

// The driver's function by name: nothing has to be linked for it.
CUtensorMap map_of(void* tensor) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how;
#if CUDART_VERSION >= 13000
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &how),
        "entry");
#else
  check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &how),
        "entry");
#endif
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  CUtensorMap map;
  const cuuint64_t extents[] = {kColumns, kRows}, stride[] = {kColumns * sizeof(__nv_bfloat16)};
  const cuuint32_t box[] = {kColumns, kBox}, steps[] = {1, 1};
  const CUresult result =
      encode == nullptr
          ? CUDA_ERROR_NOT_FOUND
          : encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, tensor, extents, stride, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                   CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return map;
  std::printf("cuTensorMapEncodeTiled: error %d\n", static_cast<int>(result));
  std::exit(2);
}

// Whether memory holds what a store that is clipped at the tensor's borders leaves. `host`: memory of
// the host, which the device addresses as the host does.
bool run(int row, bool add, bool host) {
  const std::size_t count = static_cast<std::size_t>(kRows + 2 * kAround) * kColumns;
  std::vector<__nv_bfloat16> values(count, __float2bfloat16(kBefore));
  __nv_bfloat16* memory = nullptr;
  const std::size_t bytes = count * sizeof(*memory);
  if (host) {
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
          "host memory");
  } else {
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
  }
  check(cudaMemcpy(memory, values.data(), bytes, cudaMemcpyDefault), "copy");
  store_box<<<1, 128>>>(map_of(memory + kAround * kColumns), row, add);
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s at row %4d%s: ", add ? "reduce-add" : "store     ", row, host ? ", host" : "");
  if (status != cudaSuccess) {  // the context is lost: the process ends here
    std::printf("FAULT, %s\n", cudaGetErrorString(status));
    std::exit(row < 0 ? 3 : 1);
  }
  check(cudaMemcpy(values.data(), memory, bytes, cudaMemcpyDefault), "copy");
  check(host ? cudaFreeHost(memory) : cudaFree(memory), "free");
  int wrong_inside = 0, written_outside = 0, first = -1;
  for (std::size_t i = 0; i < count; ++i) {
    const int at = static_cast<int>(i / kColumns) - kAround;
    const bool inside = at >= 0 && at < kRows;
    const bool hit = inside && at >= row && at < row + kBox;
    const float right = !hit ? kBefore : add ? kBefore + kNew : kNew;
    if (__bfloat162float(values[i]) == right) continue;
    if (first < 0) first = at;
    ++(inside ? wrong_inside : written_outside);
  }
  if (wrong_inside + written_outside == 0) {
    std::printf("clipped, right\n");
    return true;
  }
  std::printf("WRONG: %d values of the tensor, %d outside of it, the first in row %d\n",
              wrong_inside, written_outside, first);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) return run(std::atoi(argv[1]), std::atoi(argv[2]) != 0, false) ? 0 : 1;
  const bool host = argc == 2 && std::string(argv[1]) == "host";
  bool fine = true;
  for (const int row : {0, 5, kRows - kBox, kRows - kBox + 5, kRows + 5}) {
    fine = run(row, false, host) && fine;
    if (!host) fine = run(row, true, host) && fine;
  }
  return fine ? 0 : 1;
}
