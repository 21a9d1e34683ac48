"""CUDA kernels as nvcc compiles them, ours among them, run on the PTX machine."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from flux.machine import toolchain
from ptx_machine import Device, Module

ROOT = Path(__file__).parents[2]

SAMPLES = r"""
// Sum of each row: warps by shuffles, then the block through shared memory.
extern "C" __global__ void row_sums(const float* x, float* sums, int columns) {
  __shared__ float partial[32];
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += x[blockIdx.x * columns + i];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += partial[warp];
    sums[blockIdx.x] = sum;
  }
}

// y = x weight^T by tiles of 16 x 16 in shared memory, for any sizes.
extern "C" __global__ void matmul(const float* x, const float* weight, float* y, int m, int n,
                                  int k) {
  __shared__ float a[16][17], b[16][17];
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  float sum = 0;
  for (int begin = 0; begin < k; begin += 16) {
    const int at = begin + threadIdx.x, of = blockIdx.x * 16 + threadIdx.y;
    a[threadIdx.y][threadIdx.x] = row < m && at < k ? x[row * k + at] : 0;
    b[threadIdx.y][threadIdx.x] = of < n && at < k ? weight[of * k + at] : 0;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum += a[threadIdx.y][i] * b[threadIdx.x][i];
    __syncthreads();
  }
  if (row < m && column < n) y[row * n + column] = sum;
}

// Blocks hand a ticket on, one to the next, through global memory.
extern "C" __global__ void relay(volatile int* ticket, int* order) {
  if (threadIdx.x == 0) {
    while (*ticket != blockIdx.x) __nanosleep(20);
    order[blockIdx.x] = *ticket;
    __threadfence();
    *ticket = blockIdx.x + 1;
  }
}

struct Pair { double first; long long second; };
__device__ double scale(Pair p, int i) { return p.first * i + (double)p.second; }
extern "C" __global__ void of_struct(Pair p, double* out) {
  double values[8];
  for (int i = 0; i < 8; ++i) values[(i * 5) % 8] = scale(p, i);
  out[threadIdx.x] = values[(threadIdx.x * 3) % 8];
}
"""


def compiled(text: str, folder: Path, *options: str) -> Module:
    """Compile CUDA source to PTX, with source lines."""
    nvcc = toolchain.nvcc()
    if nvcc is None or nvcc.problem:
        pytest.skip("there is no nvcc")
    source, target = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text(text)
    command = [nvcc.path, "-std=c++17", "-O3", "-lineinfo", "-ptx", *options]
    subprocess.run([*command, source, "-o", target], check=True, env=dict(os.environ))
    return Module(target.read_text())


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return compiled(SAMPLES, tmp_path_factory.mktemp("samples"), "-arch=compute_90a")


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("columns", [1, 33, 300])
def test_rows_are_summed_by_shuffles(samples: Module, columns: int, seed: int) -> None:
    x, sums = torch.randn(5, columns), torch.zeros(5)
    args = [x, sums, columns]
    Device().launch(samples, "row_sums", grid=5, block=128, args=args, seed=seed)
    torch.testing.assert_close(sums, x.sum(dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (16, 32, 48), (35, 20, 17)])
def test_matrices_are_multiplied_by_tiles(samples: Module, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight, y = torch.randn(m, k), torch.randn(n, k), torch.zeros(m, n)
    grid = ((n + 15) // 16, (m + 15) // 16)
    args = [x, weight, y, m, n, k]
    Device().launch(samples, "matmul", grid=grid, block=(16, 16), args=args, seed=3)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


def test_blocks_that_run_together_may_wait_for_each_other(samples: Module) -> None:
    for seed in range(5):
        ticket, order = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        Device().launch(samples, "relay", grid=6, block=64, args=[ticket, order], seed=seed)
        assert order.tolist() == list(range(6))


def test_structs_and_memory_of_threads(samples: Module) -> None:
    out = torch.zeros(32, dtype=torch.float64)
    pair = struct.pack("<dq", 0.5, 3)
    Device().launch(samples, "of_struct", grid=1, block=32, args=[pair, out])
    values = [0.0] * 8
    for i in range(8):
        values[(i * 5) % 8] = 0.5 * i + 3
    assert out.tolist() == [values[(thread * 3) % 8] for thread in range(32)]


# -- csrc/cuda/gemm/meet.cuh ----------------------------------------------------------------------

MEET = """
#include "cuda/gemm/meet.cuh"
extern "C" int keep(FluxMeetArgs const* args) { return flux::meet(args, nullptr); }
"""
WORLD = 3
MAX_WORLD = 32
TIMED_OUT_AFTER = 5000  # ns; the machine's clock counts statements


@pytest.fixture(scope="module", params=["80", "90a"])
def meet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Module:
    folder = tmp_path_factory.mktemp("meet")
    return compiled(MEET, folder, f"-arch=compute_{request.param}", f"-I{ROOT / 'csrc'}")


class Rank:
    """Memory of one rank that captured calls meet on, and its FluxMeetArgs."""

    def __init__(self) -> None:
        self.count = torch.full((1,), 4, dtype=torch.int32)
        self.reset = torch.ones(600, dtype=torch.int32)
        self.words = torch.zeros(WORLD, dtype=torch.int32)  # by peer
        self.status = torch.zeros(8, dtype=torch.int64)

    def args(self, device: Device, rank: int, ranks: list[Rank]) -> bytes:
        def pointers(found: list[int]) -> list[int]:
            return found + [0] * (MAX_WORLD - len(found))

        raised = pointers([device.register(peer.words) + 4 * rank for peer in ranks])
        statuses = pointers([device.register(peer.status) for peer in ranks])
        own = [device.register(t) for t in (self.count, self.reset, self.words, self.status)]
        count, reset, words, status = own
        head = struct.pack("<iiIi", WORLD, rank, 1, 600)
        body = struct.pack("<67Q", count, reset, *raised, words, *statuses)
        sync = struct.pack("<IIQQQQQ", 0, 0, TIMED_OUT_AFTER, status, 0, 0, 0)
        return head + body + sync


def met(module: Module, ranks: list[Rank], rank: int, seed: int) -> None:
    device = Device()
    (name,) = (kernel for kernel in module.kernels if "meet_kernel" in kernel)
    args = [ranks[rank].args(device, rank, ranks)]
    device.launch(module, name, grid=1, block=256, args=args, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_have_come_meet(meet: Module, seed: int) -> None:
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words[:] = torch.tensor([5, 0, 6])  # one peer is a call ahead
    met(meet, ranks, 1, seed)
    assert ranks[1].count.item() == 5
    assert not ranks[1].reset.any()
    assert [peer.words[1].item() for peer in ranks] == [5, 5, 5]
    assert not any(peer.status.any() for peer in ranks)


def test_a_rank_that_does_not_come_is_given_up(meet: Module) -> None:
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words[:] = torch.tensor([5, 0, 4])  # rank 2 has not entered call 5
    met(meet, ranks, 1, 0)
    code, _, signal, expected, observed = ranks[1].status[:5].tolist()
    assert code != 0 and (signal, expected, observed) == (2, 5, 4)
    for peer in (0, 2):
        assert ranks[peer].status[0] != 0 and ranks[peer].status[2] == 1  # told by rank 1
