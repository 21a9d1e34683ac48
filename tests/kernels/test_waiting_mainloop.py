"""The waits of the producer warp of AllGather + GEMM (sm90/waiting_mainloop.cuh), by threads of the
host: 32 of them are the warp, and CUTLASS's mainloop is a stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

from emulated import ROOT, compiler
from fake_nvshmem import HERE, as_host_code

_STAND_IN = """
#include "device_shim.h"
#define CUTLASS_DEVICE inline
namespace cute {
template <int, class T>
auto get(const T& tuple) { return tuple; }
}
"""

_PROGRAM = r"""
#include <atomic>
#include <cassert>
#include <cstdio>

#include "cuda/gemm/sm90/waiting_mainloop.cuh"

constexpr int kTileM = 64;
std::uint32_t signals[64];  // two tiles, 32 each
std::uint64_t status[FLUX_STATUS_WORDS], report[FLUX_STATUS_WORDS];
std::atomic<int> loads{0};

// One elected lane loads, which takes a while; then the rows of the next tile arrive.
struct Mainloop {
  struct Arguments {};
  struct Params {};
  using MainloopPipeline = int;
  using PipelineState = int;
  using TensorStorage = int;
  template <class... Rest>
  void load(Params const&, int, int, int const&, int const& tile, Rest&&...) {
    if (threadIdx.x != 0) return;
    for (int i = 0; i < 32; ++i) assert(signals[tile * 32 + i] == 5);
    ++loads;
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    for (int i = 32; i < 64; ++i) __atomic_store_n(&signals[i], 5u, __ATOMIC_RELEASE);
  }
  void load_tail(int, int) {}
};

int main(int count, char**) {
  for (int i = 0; i < 32; ++i) signals[i] = 5;
  flux::FluxSync sync{5, 0, 20'000'000, status, report, nullptr, nullptr};
  if (count > 1) status[FLUX_STATUS_CODE] = FLUX_ABANDONED, status[FLUX_STATUS_SIGNAL] = 3;
  shim::launch(1, 32, [&] {
    flux::sm90::WaitingMainloop<Mainloop, kTileM> mainloop;
    decltype(mainloop)::Params params;
    params.waits = {signals, flux::CommTiling{128, 1, 2}, sync};
    int storage = 0;
    for (int tile = 0; tile < 2; ++tile) {
      mainloop.load(params, 0, 0, 0, tile, 0, 1, threadIdx.x, 0, storage);
    }
    mainloop.load_tail(0, 0);
  });
  std::printf("%d %llu %llu %llu\n", loads.load(), (unsigned long long)status[FLUX_STATUS_CODE],
              (unsigned long long)report[FLUX_STATUS_CODE],
              (unsigned long long)report[FLUX_STATUS_SIGNAL]);
}
"""


def build(folder: Path) -> Path:
    include = folder / "include"
    (include / "cute").mkdir(parents=True)
    (include / "cute/tensor.hpp").write_text(_STAND_IN)
    names = ("cuda/sync.cuh", "cuda/trace.cuh", "cuda/gemm/sm90/waiting_mainloop.cuh")
    as_host_code(include, names)
    source, target = folder / "main.cpp", folder / "main"
    source.write_text(_PROGRAM.replace("flux::FluxSync", "FluxSync"))
    options = ["-std=c++17", "-O1", "-pthread", "-Wno-unknown-pragmas", "-include", "device_shim.h"]
    includes = [f"-I{include}", f"-I{HERE}", f"-I{ROOT / 'csrc'}"]
    command = [compiler(), *options, *includes, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def run(program: Path, *arguments: str) -> list[int]:
    """(loads, code of the status, code and signal of the report)."""
    command = [str(program), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [int(word) for word in done.stdout.split()]


def test_lanes_wait_for_a_tile_when_the_one_before_is_loaded(tmp_path: Path) -> None:
    """An elected lane alone goes through the loads of a tile. The others meet it before they poll
    for the next one, whose rows are not there yet; waits give up after 20 ms, a load takes 60."""
    program = build(tmp_path)
    assert run(program) == [2, 0, 0, 0]
    assert run(program, "abandoned") == [2, 4, 4, 3]  # FLUX_ABANDONED, told when the block ends
