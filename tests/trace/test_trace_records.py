"""What device code of a trace build puts down (csrc/cuda/trace.cuh): the very functions, for the
threads of a few blocks, one after the other on the host."""

from __future__ import annotations

import re
import subprocess

import pytest

from emulated import ROOT, compiler

_PTX = (
    (r'asm volatile\("mov\.u64 %0, %%globaltimer;".*?\);', "now = ++host_clock;"),
    (r'asm\("mov\.u32 %0, %%smid;".*?\);', "sm = 70 + static_cast<int>(blockIdx.x);"),
)
_PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
struct Index { unsigned x, y, z; };
Index threadIdx{}, blockIdx{}, gridDim{};
std::uint64_t host_clock = 100;
unsigned atomicAdd(std::uint32_t* word, unsigned value) {
  const unsigned before = *word;
  *word += value;
  return before;
}
#define FLUX_TRACE
#include "trace_on_host.h"

using namespace flux;

template <class Body>
void all_threads(Body body) {
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 384; ++threadIdx.x) body();
}

int main() {
  gridDim = {2, 1, 1};
  std::vector<FluxTraceRecord> records(9);
  std::vector<std::uint64_t> begun(FLUX_TRACE_UNITS * 2);
  FluxTrace trace{0, 7, records.data(), begun.data(), 2, 0};
  FluxSync sync{};
  sync.epoch = 5;
  sync.launch = 3;
  sync.trace = &trace;
  // Ping-pong: both groups of consumers have a tile; then one that they share, without a begin.
  all_threads([&] { if (threadIdx.x >= 128) begin_tile(sync); });
  all_threads([&] {
    if (threadIdx.x >= 128) end_tile<true>(sync, {FLUX_TRACE_TILE, int(threadIdx.x), 2, 0});
  });
  all_threads([&] { if (threadIdx.x >= 128) end_tile<false>(sync, {FLUX_TRACE_PART, 8, 9, 0}); });
  const std::uint64_t begin = stamp();
  all_threads([&] { tell(told_by_one(sync), begin, {FLUX_TRACE_WAIT, 1, 2, 4}); });
  gridDim.x = 3;
  blockIdx.x = 2;
  threadIdx.x = 128;
  begin_tile(sync);
  end_tile<false>(sync, {FLUX_TRACE_TILE, 0, 0, 0});  // of a block that there is no room for
  sync.trace = nullptr;
  all_threads([&] {
    begin_tile(sync);
    end_tile<true>(sync, {FLUX_TRACE_TILE, 0, 0, 0});
    tell(sync, 0, {FLUX_TRACE_SUM, 0, 0, 0});
  });
  std::printf("%u %u\\n", trace.count, trace.lost);
  for (const auto& r : records)
    std::printf("%d %d %d %d %d %d %d %d %d\\n", r.kind, r.row, r.column, r.signal, r.sm, r.unit,
                int(r.epoch), int(r.launch), r.begin_ns < r.end_ns);
}
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("records")
    text = (ROOT / "csrc/cuda/trace.cuh").read_text()
    for pattern, replacement in _PTX:
        text = re.sub(pattern, replacement, text, flags=re.S)
    assert not re.search(r"\basm\b", text), "trace.cuh has PTX that is unknown here"
    (folder / "trace_on_host.h").write_text(text)
    (folder / "main.cpp").write_text(_PROGRAM)
    program = folder / "program"
    command = [compiler(), "-std=c++17", "-Wall", f"-I{ROOT / 'csrc'}", "main.cpp", "-o", program]
    subprocess.run(command, cwd=folder, check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


def test_first_or_each_warp_group_writes_a_record(printed: list[list[int]]) -> None:
    tile, part, wait = 1, 2, 3
    records = printed[1:]
    both = [
        [tile, thread, 2, 0, 70 + b, b * 8 + thread // 128] for b in (0, 1) for thread in (128, 256)
    ]
    shared = [[part, 8, 9, 0, 70 + b, b * 8 + 1] for b in (0, 1)]
    assert [r[:6] for r in records[:7]] == [*both, *shared, [wait, 1, 2, 4, 70, 0]]
    assert all(r[6:] == [5, 3, 1] for r in records[:7]), "epoch, launch, and begin before end"


def test_records_beyond_the_capacity_are_counted_and_not_written(printed: list[list[int]]) -> None:
    (count, lost), *records = printed
    assert count == 4 + 2 + 2, "the last wait had no place any more"
    assert lost == 1, "a tile of a block that nobody has seen begin"
    assert records[7:] == [[0] * 9] * 2
