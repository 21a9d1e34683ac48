"""Plain CUDA kernels in the manner of CUDA's samples, with NVIDIA's own headers: CUB, cooperative
groups, cuda::barrier, cuda::pipeline and cuda::atomic_ref."""

from __future__ import annotations

import random

import pytest
import torch

from ptx_machine import Device, Module, PtxError
from ptx_text import compiled

GROUPS = r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

extern "C" __global__ void transpose(const double* in, double* out, int rows, int columns) {
  __shared__ double tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += blockDim.y) {
    if (x < columns && y + j < rows) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * columns + x];
  }
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x;
  y = blockIdx.x * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += blockDim.y) {
    if (x < rows && y + j < columns) out[(y + j) * rows + x] = tile[threadIdx.x][threadIdx.y + j];
  }
}

// Each block counts in shared memory, with one atomic operation for equal values of a warp.
extern "C" __global__ void histogram(const unsigned* values, unsigned* counts, int n, int bins) {
  extern __shared__ unsigned own[];
  for (int i = threadIdx.x; i < bins; i += blockDim.x) own[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const unsigned bin = values[i] % bins;
    auto equal = cg::labeled_partition(cg::coalesced_threads(), bin);
    if (equal.thread_rank() == 0) atomicAdd(&own[bin], equal.size());
  }
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x) {
    if (own[i] != 0) atomicAdd(&counts[i], own[i]);
  }
}

// Sums of groups of 8 threads, running sums of warps, and what is left of a diverged warp.
extern "C" __global__ void groups(const int* in, int* sums, int* running, int* odd) {
  const auto block = cg::this_thread_block();
  const auto warp = cg::tiled_partition<32>(block);
  const auto eight = cg::tiled_partition<8>(warp);
  const int i = block.thread_rank();
  sums[i] = cg::reduce(eight, in[i], cg::plus<int>());
  running[i] = cg::inclusive_scan(warp, in[i]);
  odd[i] = -1;
  if (in[i] & 1) {
    const auto some = cg::coalesced_threads();
    odd[i] = cg::reduce(some, in[i], cg::greater<int>()) + 1000 * cg::exclusive_scan(some, 1);
  }
}

// The last block to come adds up what the others have left.
__device__ unsigned arrived = 0;
extern "C" __global__ void grid_sum(const float* in, float* partial, float* total, int n) {
  __shared__ float sums[8];
  __shared__ bool last;
  float sum = 0;
  const int threads = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) sum += in[i];
  const auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  sum = cg::reduce(warp, sum, cg::plus<float>());
  if (warp.thread_rank() == 0) sums[warp.meta_group_rank()] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < blockDim.x / 32; ++w) sum += sums[w];
    partial[blockIdx.x] = sum;
    __threadfence();
    last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    float all = 0;
    for (int b = 0; b < gridDim.x; ++b) all += __ldcg(&partial[b]);
    *total = all;
  }
}

// What nvcc calls of its own library: a division of 128 bits.
extern "C" __global__ void divide(const unsigned long long* in, unsigned long long* out) {
  in += 4 * threadIdx.x;
  const unsigned __int128 a = static_cast<unsigned __int128>(in[1]) << 64 | in[0];
  const unsigned __int128 b = static_cast<unsigned __int128>(in[3]) << 64 | in[2];
  const unsigned __int128 result[] = {a / b, a % b};
  for (int i = 0; i < 2; ++i) {
    out[4 * threadIdx.x + 2 * i] = static_cast<unsigned long long>(result[i]);
    out[4 * threadIdx.x + 2 * i + 1] = static_cast<unsigned long long>(result[i] >> 64);
  }
}

// Running sums of n values in so many steps as n has bits, with all blocks meeting between them.
extern "C" __global__ void grid_scan(int* from, int* to, int n) {
  const auto grid = cg::this_grid();
  const int i = grid.thread_rank();
  for (int by = 1; by < n; by *= 2) {
    if (i < n) to[i] = from[i] + (i >= by ? from[i - by] : 0);
    grid.sync();
    int* other = from;
    from = to;
    to = other;
  }
}
"""

BLOCKS = r"""
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

extern "C" __global__ void __launch_bounds__(128) sort(unsigned* keys, int* values) {
  using Sort = cub::BlockRadixSort<unsigned, 128, 4, int>;
  __shared__ typename Sort::TempStorage memory;
  unsigned k[4];
  int v[4];
  for (int i = 0; i < 4; ++i) {
    k[i] = keys[threadIdx.x * 4 + i];
    v[i] = threadIdx.x * 4 + i;
  }
  Sort(memory).Sort(k, v);
  for (int i = 0; i < 4; ++i) {
    keys[threadIdx.x * 4 + i] = k[i];
    values[threadIdx.x * 4 + i] = v[i];
  }
}

extern "C" __global__ void __launch_bounds__(128) scan(const long long* in, long long* out,
                                                       long long* most) {
  using Scan = cub::BlockScan<long long, 128>;
  using Reduce = cub::BlockReduce<long long, 128>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  } memory;
  long long sum = 0;
  Scan(memory.scan).ExclusiveSum(in[threadIdx.x], out[threadIdx.x], sum);
  __syncthreads();
  const long long result = Reduce(memory.reduce).Reduce(in[threadIdx.x], cuda::maximum<>{});
  if (threadIdx.x == 0) {
    most[0] = result;
    most[1] = sum;
  }
}
"""

ASYNC = r"""
#include <cooperative_groups.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;

// Rows come through two stages of shared memory, while those before are summed.
extern "C" __global__ void pipelined(const float* in, float* sums, int rows) {
  __shared__ alignas(16) float stages[2][128];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
  const auto block = cg::this_thread_block();
  auto pipe = cuda::make_pipeline(block, &state);
  float sum = 0;
  for (int row = 0, loaded = 0; row < rows; ++row) {
    for (; loaded < rows && loaded < row + 2; ++loaded) {
      pipe.producer_acquire();
      cuda::memcpy_async(block, stages[loaded % 2], in + loaded * 128,
                         cuda::aligned_size_t<16>(sizeof(stages[0])), pipe);
      pipe.producer_commit();
    }
    pipe.consumer_wait();
    sum += stages[row % 2][(threadIdx.x + row) % 128];
    pipe.consumer_release();
  }
  sums[threadIdx.x] = sum;
}

// Half of the warps make values, the others use them: a barrier of all for full, and one for empty.
extern "C" __global__ void handed_over(const int* in, int* out, int rounds) {
  using Barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ int slot[64];
  __shared__ Barrier full, empty;
  if (threadIdx.x == 0) {
    init(&full, 128);
    init(&empty, 128);
  }
  __syncthreads();
  const int lane = threadIdx.x % 64;
  int sum = 0;
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x < 64) {
      if (round > 0) empty.arrive_and_wait();
      slot[lane] = in[round * 64 + lane];
      (void)full.arrive();
    } else {
      full.arrive_and_wait();
      sum = 3 * sum + slot[lane ^ 1];
      (void)empty.arrive();
    }
  }
  if (threadIdx.x >= 64) out[lane] = sum;
}

extern "C" __global__ void atomics(float* sum, int* most, unsigned long long* tickets, int* lock,
                                   int* guarded) {
  cuda::atomic_ref<float, cuda::thread_scope_device>(*sum).fetch_add(0.5f);
  cuda::atomic_ref<int, cuda::thread_scope_system>(*most).fetch_max(threadIdx.x * 7 % 32);
  cuda::atomic_ref<unsigned long long, cuda::thread_scope_block> next(tickets[blockIdx.x]);
  auto seen = next.load(cuda::memory_order_relaxed);
  while (!next.compare_exchange_weak(seen, seen * 3 + 1, cuda::memory_order_acq_rel)) {
  }
  if (threadIdx.x % 32 == 0) {  // one at a time
    cuda::atomic_ref<int, cuda::thread_scope_device> held(*lock);
    while (held.exchange(1, cuda::memory_order_acquire) != 0) __nanosleep(20);
    *guarded = *guarded + 1;
    held.store(0, cuda::memory_order_release);
  }
}
"""

CLUSTER = r"""
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
// Bins lie in the shared memory of all blocks of a cluster.
extern "C" __global__ void __cluster_dims__(4, 1, 1) shared_bins(const int* values, int* counts,
                                                                 int n) {
  __shared__ int bins[8];
  const auto cluster = cg::this_cluster();
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  cluster.sync();
  for (int i = cluster.thread_rank(); i < n; i += cluster.num_threads()) {
    const int value = values[i];
    atomicAdd(cluster.map_shared_rank(bins, value / 8) + value % 8, 1);
  }
  cluster.sync();
  if (threadIdx.x < 8) counts[cluster.block_rank() * 8 + threadIdx.x] = bins[threadIdx.x];
}
"""

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module", params=["80", "90a"])
def groups(request: pytest.FixtureRequest) -> Module:
    return compiled(GROUPS, f"-arch=compute_{request.param}")


@pytest.fixture(scope="module", params=["80"])
def blocks(request: pytest.FixtureRequest) -> Module:
    return compiled(BLOCKS, f"-arch=compute_{request.param}")


@pytest.fixture(scope="module", params=["80", "90a"])
def asynchronous(request: pytest.FixtureRequest) -> Module:
    return compiled(ASYNC, f"-arch=compute_{request.param}")


@pytest.mark.parametrize("seed", SEEDS)
def test_cooperative_groups(groups: Module, seed: int) -> None:
    inputs = torch.randint(-50, 50, (96,), dtype=torch.int32)
    sums, running, odd = (torch.zeros(96, dtype=torch.int32) for _ in range(3))
    args = [inputs, sums, running, odd]
    Device().launch(groups, "groups", grid=1, block=96, args=args, seed=seed)
    assert torch.equal(sums.view(-1, 8)[:, 0], inputs.view(-1, 8).sum(1, dtype=torch.int32))
    assert torch.equal(running.view(3, 32), inputs.view(3, 32).cumsum(1, dtype=torch.int32))
    for warp, result in zip(inputs.view(3, 32).tolist(), odd.view(3, 32).tolist(), strict=True):
        odds = [v for v in warp if v % 2]
        places = iter(range(32))
        assert result == [max(odds) + 1000 * next(places) if v % 2 else -1 for v in warp]


@pytest.mark.parametrize("seed", SEEDS)
def test_grids(groups: Module, seed: int) -> None:
    x = torch.randn(45, 70, dtype=torch.float64)
    turned = torch.zeros(70, 45, dtype=torch.float64)
    args: list[object] = [x, turned, 45, 70]
    Device().launch(groups, "transpose", grid=(3, 2), block=(32, 8), args=args, seed=seed)
    assert torch.equal(turned, x.t())

    values = torch.randint(0, 2**31 - 1, (1000,), dtype=torch.int32)
    counts = torch.zeros(37, dtype=torch.int32)
    args = [values, counts, 1000, 37]
    Device().launch(
        groups, "histogram", grid=3, block=96, args=args, dynamic_shared=37 * 4, seed=seed
    )
    assert torch.equal(counts, torch.bincount(values % 37, minlength=37).int())

    x, partial, total = torch.randn(5000), torch.zeros(6), torch.zeros(1)
    device = Device()
    for _ in range(2):  # the counter begins at zero again
        device.launch(
            groups, "grid_sum", grid=6, block=128, args=[x, partial, total, 5000], seed=seed
        )
        torch.testing.assert_close(total[0].double(), x.double().sum(), rtol=1e-4, atol=1e-3)


def test_division_of_128_bits(groups: Module) -> None:
    chance = random.Random(7)
    pairs = [(2**80, 1), (5, 7), (2**128 - 1, 2**64 - 1), (2**128 - 1, 2**127), (3 << 100, 3)]
    while len(pairs) < 64:
        a, b = (chance.getrandbits(chance.randint(1, 128)) for _ in range(2))
        pairs.append((a, max(b, 1)))
    halves = [half for pair in pairs for v in pair for half in (v % 2**64, v >> 64)]
    inputs = torch.tensor([v - 2**64 if v >= 2**63 else v for v in halves])
    result = torch.zeros_like(inputs)
    Device().launch(groups, "divide", grid=1, block=64, args=[inputs, result])
    words = [v % 2**64 for v in result.tolist()]
    whole = [low + (high << 64) for low, high in zip(words[::2], words[1::2], strict=True)]
    assert list(zip(whole[::2], whole[1::2], strict=True)) == [divmod(a, b) for a, b in pairs]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_a_grid_meet(groups: Module, seed: int) -> None:
    x = torch.randint(-9, 9, (128,), dtype=torch.int32)
    steps = [x.clone(), torch.zeros_like(x)]
    device = Device()
    device.launch(groups, "grid_scan", grid=4, block=32, args=[*steps, 128], seed=seed)
    assert torch.equal(steps[1], x.cumsum(0).int())
    # Blocks that have no room together would wait for each other: a launch must be cooperative.
    small = Device(multiprocessors=1, patience=0.3)
    with pytest.raises(PtxError, match=r"deadlock: .*\n *grid_scan waits for room for 1 blocks"):
        small.launch(groups, "grid_scan", grid=3, block=1024, args=[*steps, 128], seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_cub(blocks: Module, seed: int) -> None:
    keys = torch.randint(-(2**31), 2**31 - 1, (512,), dtype=torch.int32)
    keys[:100] = keys[100:200]  # which keep their order
    result, places = keys.clone(), torch.zeros(512, dtype=torch.int32)
    Device().launch(blocks, "sort", grid=1, block=128, args=[result, places], seed=seed)
    right = (keys.long() % 2**32).sort(stable=True)
    assert torch.equal(result.long() % 2**32, right.values)
    assert torch.equal(places.long(), right.indices)
    inputs = torch.randint(-(2**40), 2**40, (128,))
    sums, most = torch.zeros(128, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    Device().launch(blocks, "scan", grid=1, block=128, args=[inputs, sums, most], seed=seed)
    assert torch.equal(sums, inputs.cumsum(0) - inputs)
    assert most.tolist() == [inputs.max(), inputs.sum()]


@pytest.mark.parametrize("seed", SEEDS)
def test_pipelines_and_barriers(asynchronous: Module, seed: int) -> None:
    x, sums = torch.randn(7, 128), torch.zeros(128)
    Device().launch(asynchronous, "pipelined", grid=1, block=128, args=[x, sums, 7], seed=seed)
    rolled = sum(torch.roll(x[row].double(), -row) for row in range(7))
    torch.testing.assert_close(sums.double(), rolled, rtol=1e-5, atol=1e-5)
    inputs = torch.randint(0, 9, (5, 64), dtype=torch.int32)
    out = torch.zeros(64, dtype=torch.int32)
    Device().launch(
        asynchronous, "handed_over", grid=1, block=128, args=[inputs, out, 5], seed=seed
    )
    wanted = torch.zeros(64, dtype=torch.int32)
    for row in inputs:
        wanted = 3 * wanted + row.view(32, 2).flip(1).reshape(64)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics(asynchronous: Module, seed: int) -> None:
    total, most = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    tickets, (lock, guarded) = (
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int32),
    )
    args = [total, most, tickets, lock, guarded]
    Device().launch(asynchronous, "atomics", grid=3, block=32, args=args, seed=seed)
    value = 0
    for _ in range(32):
        value = (3 * value + 1) % 2**64
    assert total.item() == 48 and most.item() == 31 and guarded.item() == 3
    assert [t % 2**64 for t in tickets.tolist()] == [value] * 3


@pytest.fixture(scope="module")
def cluster() -> Module:
    return compiled(CLUSTER, "-arch=compute_90a")


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_of_a_cluster(cluster: Module, seed: int) -> None:
    values = torch.randint(0, 32, (700,), dtype=torch.int32)
    counts = torch.zeros(32, dtype=torch.int32)
    args = [values, counts, 700]
    Device().launch(cluster, "shared_bins", grid=4, block=64, args=args, seed=seed)
    assert torch.equal(counts, torch.bincount(values, minlength=32).int())
