"""The CUDA runtime of emulated libraries for sm_90: clusters, tensor maps, memory that is set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ptx_machine
from ptx_text import nvcc

MACHINE = Path(ptx_machine.__file__).parent
OPTIONS = [
    *("-std=c++17", "-O3", "-lineinfo", "-gencode=arch=compute_90a,code=compute_90a"),
    *("-shared", "--compress-mode=none", "-cudart=none", "-Xcompiler=-fPIC,-fvisibility=hidden"),
    *("kernels.cu", str(MACHINE / "cudart/cudart.cpp"), "-ldl"),
]
"""Of nvcc, as README.md has them."""

LIBRARY = r"""
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdint>

// Copies a matrix by tiles of 8 x 64 bf16: each block loads the tile of the next block of its
// cluster into the shared memory of that block, which stores it.
__global__ void __launch_bounds__(128) copy(const __grid_constant__ CUtensorMap from,
                                            const __grid_constant__ CUtensorMap to) {
  __shared__ alignas(1024) unsigned char tile[1024];
  __shared__ alignas(8) unsigned long long barrier;
  const auto at = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  unsigned rank, size, theirs, counter;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(at(&barrier)));
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    const unsigned next = (rank + 1) % size;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(at(tile)), "r"(next));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(at(&barrier)), "r"(next));
    const unsigned target = blockIdx.x - rank + next;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(theirs), "l"(&from), "r"(64 * blockIdx.y),
        "r"(8 * target), "r"(counter) : "memory");
    asm volatile(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }" ::
        "r"(at(&barrier)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&to),
        "r"(64 * blockIdx.y), "r"(8 * blockIdx.x), "r"(at(tile)) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

static int encode(CUtensorMap* map, void* address, unsigned rows, unsigned columns) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return -1;
  const cuuint64_t sizes[] = {columns, rows}, strides[] = {2 * columns};
  const cuuint32_t box[] = {64, 8}, steps[] = {1, 1};
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

struct Config {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t launch{};
  Config(dim3 grid, unsigned cluster) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    launch.gridDim = grid;
    launch.blockDim = 128;
    launch.attrs = attributes;
    launch.numAttrs = 2;
  }
};

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int copy_matrix(void* from, void* to, unsigned rows, unsigned columns, unsigned cluster) {
  CUtensorMap maps[2];
  if (const int status = encode(&maps[0], from, rows, columns)) return 1000 + status;
  if (const int status = encode(&maps[1], to, rows, columns)) return 1000 + status;
  Config config(dim3((rows + 7) / 8, (columns + 63) / 64), cluster);
  void* arguments[] = {&maps[0], &maps[1]};
  return cudaLaunchKernelExC(&config.launch, reinterpret_cast<const void*>(&copy), arguments);
}
EXPORT int clusters(unsigned cluster) {
  Config config(dim3(cluster), cluster);
  int result = 0;
  const cudaError_t status = cudaOccupancyMaxActiveClusters(&result, copy, &config.launch);
  return status == cudaSuccess ? result : -status;
}
EXPORT int allow(int large) {
  return cudaFuncSetAttribute(copy, cudaFuncAttributeNonPortableClusterSizeAllowed, large);
}
EXPORT int shared(int bytes) {
  return cudaFuncSetAttribute(copy, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
EXPORT int fill(void* memory, int value, unsigned long long bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
EXPORT int other_entry() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 12000, cudaEnableDefault, &result);
  return result;
}
"""

# In a process of its own: the device of this one may have streams.
SCRIPT = """
import ctypes, sys, torch
from ptx_machine import cuda_device, extent

device = cuda_device()
device.multiprocessors = 10
library = ctypes.CDLL(sys.argv[1])
for seed in range(4):
    device.seed = seed
    source = torch.randn(64, 200).bfloat16()  # the last tiles reach beyond it
    target = torch.zeros_like(source)
    for tensor in (source, target):
        device.machine.add_memory(*extent(tensor), "a matrix")
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (source, target)]
    assert library.copy_matrix(*addresses, 64, 200, 4) == 0, device.error()
    assert not device.error(), device.error()
    assert torch.equal(source, target)
assert library.copy_matrix(*addresses, 64, 200, 3) == 9  # cudaErrorInvalidConfiguration
assert library.copy_matrix(*addresses, 64, 199, 4) == 1001  # rows of no multiple of 16 bytes
assert library.copy_matrix(*addresses, 128, 200, 16) == 912  # cudaErrorInvalidClusterSize
assert [library.clusters(size) for size in (1, 2, 4, 16)] == [160, 80, 40, -912]
assert library.allow(1) == 0 and library.clusters(16) == 10
most = 227 * 1024 - 1032  # without the kernel's own shared memory
assert library.shared(most) == 0 and library.shared(most + 1) == 1
assert library.copy_matrix(*addresses, 64, 200, 1) == 0
device.model = "A100"
assert library.shared(1024) == 98  # cudaErrorInvalidDeviceFunction
assert "the fatbinary has no PTX for sm_80" in device.error()
device.clear()
device.model = "H200"
assert library.other_entry() == 1  # cudaDriverEntryPointSymbolNotFound
source.fill_(1)
assert library.fill(addresses[0], 0, ctypes.c_ulonglong(400)) == 0
assert not source[0].any() and not source[1].eq(0).any()
assert library.fill(addresses[0], 0, ctypes.c_ulonglong(64 * 400 + 1)) == 719  # LaunchFailure
assert "cudaMemsetAsync: access of 25601 bytes outside of global memory" in device.error()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library of all kernels of this file; skip the test where nvcc is missing."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "kernels.cu").write_text(LIBRARY + EARLY + PROGRAM)
    subprocess.run([nvcc(), *OPTIONS, "-o", "library.so"], cwd=folder, check=True)
    return folder / "library.so"


def run(script: str, library: Path) -> str:
    """Run a script with the library in a process of its own, and return what it prints."""
    command = [sys.executable, "-c", script, str(library)]
    done = subprocess.run(command, cwd=MACHINE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_clusters_and_tensor_maps_of_libraries(library: Path) -> None:
    run(SCRIPT, library)


EARLY = r"""
#include <cuda_runtime.h>

__global__ void first(unsigned* flag, float* data) {
  asm volatile("griddepcontrol.launch_dependents;");
  unsigned seen = 0;
  while (seen == 0) {
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  }
  data[blockIdx.x * 32 + threadIdx.x] = 7;
}

__global__ void second(unsigned* flag, const float* data, volatile float* copy, bool waits,
                       int more) {
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    asm volatile("st.relaxed.gpu.u32 [%0], 1;" ::"l"(flag) : "memory");
  }
  if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int at = blockIdx.x * 32 + threadIdx.x;
  const float value = data[at];
  for (int left = more; left >= 0; --left) copy[at] = value + left;
}

extern "C" __attribute__((visibility("default"))) int both(unsigned* flag, float* data, float* copy,
                                                           int early, int waits, int more,
                                                           void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  first<<<4, 32, 0, on>>>(flag, data);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = early;
  cudaLaunchConfig_t config{};
  config.gridDim = 4;
  config.blockDim = 32;
  config.stream = on;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const float* from = data;
  volatile float* to = copy;
  return cudaLaunchKernelEx(&config, second, flag, from, to, waits != 0, more);
}
"""

EARLY_SCRIPT = """
import ctypes, sys, time, torch
from ptx_machine import cuda_device, extent
from ptx_machine.gpu import LIBRARY

device, gpu = cuda_device(), ctypes.CDLL(str(LIBRARY))
def addresses(*names):
    return [ctypes.cast(getattr(gpu, n), ctypes.c_void_p).value for n in names]
streams = ("cuStreamCreateWithPriority", "cuStreamDestroy_v2", "cuStreamSynchronize")
device.attach(*addresses("emulator_run", *streams, "emulator_fail"))
early = ("run_early", "release_next", "predecessor_ended")
device.attach_early(*addresses(*(f"emulator_{n}" for n in early)))
library = ctypes.CDLL(sys.argv[1])
stream = ctypes.c_void_p()
assert gpu.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0

def call(early, waits, flag=0, more=0):
    flags = torch.full((1,), flag, dtype=torch.int32)
    data, copy = torch.zeros(128), torch.zeros(128)
    for tensor in (flags, data, copy):
        device.machine.add_memory(*extent(tensor), "a tensor")
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (flags, data, copy)]
    assert library.both(*pointers, early, waits, more, stream) == 0, device.error()
    gpu.cuStreamSynchronize(stream)
    assert device.error() or copy.eq(7).all()
    return copy

for seed in range(6):
    device.seed = 100 * seed
    call(early=1, waits=1)  # the first kernel ends because the second has started
    assert not device.error(), device.error()
    call(early=0, waits=0, flag=1)  # one after the other
    assert not device.error(), device.error()
copy = call(early=1, waits=0, more=50_000)
seen = copy.clone()
time.sleep(0.02)
assert copy.equal(seen)  # both kernels have ended
print(device.error())
"""


def test_an_early_launch_runs_beside_the_one_before_it(library: Path) -> None:
    """Programmatic dependent launch; without griddepcontrol.wait nothing orders the kernels.

    Behind an error no kernel writes to memory that the host may free.
    """
    error = run(EARLY_SCRIPT, library)
    assert "race" in error and "second" in error and "first" in error


PROGRAM = r"""
__global__ void doubled(const int* from, int* to) { to[threadIdx.x] = 2 * from[threadIdx.x]; }

#define CHECK(call) \
  if (const cudaError_t status = call; status != cudaSuccess) return status

// Doubles 32 numbers in memory of its own: 0 as a program does; 1 without a copy of the numbers to
// the device, 2 in memory that was freed, 3 with a copy beyond the memory, 4 with such a copy whose
// addresses tell its direction.
extern "C" __attribute__((visibility("default"))) int program(int* numbers, int wrong) {
  constexpr std::size_t bytes = 32 * sizeof(int);
  int* memory[2];
  cudaDeviceProp device;
  cudaEvent_t events[2];
  float ms = -1;
  CHECK(cudaGetDeviceProperties(&device, 0));
  if (device.major != 9 || device.multiProcessorCount != 10) return -1;
  for (auto& event : events) CHECK(cudaEventCreate(&event));
  for (auto& one : memory) CHECK(cudaMalloc(&one, bytes));
  const auto to_device = wrong == 4 ? cudaMemcpyDefault : cudaMemcpyHostToDevice;
  if (wrong != 1) CHECK(cudaMemcpy(memory[0], numbers, bytes + (wrong >= 3), to_device));
  CHECK(cudaMemset(memory[1], 0xff, bytes));
  if (wrong == 2) CHECK(cudaFree(memory[0]));
  cudaPointerAttributes of[2];
  for (int i = 0; i < 2; ++i) CHECK(cudaPointerGetAttributes(&of[i], i ? memory[1] : numbers));
  if (of[0].type != cudaMemoryTypeUnregistered || of[1].type != cudaMemoryTypeDevice) return -3;
  CHECK(cudaEventRecord(events[0]));
  doubled<<<1, 32>>>(memory[0], memory[1]);
  CHECK(cudaEventRecord(events[1]));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
  CHECK(cudaMemcpy(numbers, memory[1], bytes, cudaMemcpyDefault));
  for (auto one : memory) CHECK(cudaFree(one));
  for (auto event : events) CHECK(cudaEventDestroy(event));
  return ms >= 0 ? 0 : -2;
}
"""

PROGRAM_SCRIPT = """
import ctypes, sys, torch
from ptx_machine import cuda_device

device, library = cuda_device(), ctypes.CDLL(sys.argv[1])
device.multiprocessors = 10
for wrong in range(5):
    numbers = torch.arange(32, dtype=torch.int32)
    status = library.program(ctypes.c_void_p(numbers.data_ptr()), wrong)
    assert (status == 0) == (wrong == 0), (wrong, status)
    assert numbers.equal(torch.arange(32, dtype=torch.int32) * (1 if wrong else 2))
    assert status == 0 or status == 719, status  # LaunchFailure
    print(device.error())
    device.clear()
"""


def test_a_program_with_its_own_memory(library: Path) -> None:
    """Memory, copies, events and properties; what it does wrong is told as for kernels."""
    right, unwritten, freed, *beyond = run(PROGRAM_SCRIPT, library).splitlines()
    assert right == ""
    assert "is read but was never written, or was made from one that was not" in unwritten
    assert "freed" in freed
    assert len(beyond) == 2
    for error in beyond:
        assert "cudaMemcpy, to: access of 129 bytes outside of global memory" in error
