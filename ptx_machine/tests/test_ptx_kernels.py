"""CUDA kernels as nvcc compiles them, run on the PTX machine."""

from __future__ import annotations

import struct

import pytest
import torch

from ptx_machine import Device, Module
from ptx_text import compiled

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


@pytest.fixture(scope="module")
def samples() -> Module:
    return compiled(SAMPLES, "-arch=compute_90a")


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
