"""What kernels keep between launches (csrc/cuda/launch_cache.h), compiled for the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from test_abi import CSRC, structs

_PROGRAM = r"""
#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <cstring>
#include <thread>

#include "cuda/launch_cache.h"

using flux::launch_key;
using flux::LaunchCache;

// A copy in which nothing but the bytes [begin, begin + size) is different.
static FluxGemmArgs changed(const FluxGemmArgs& args, std::size_t begin, std::size_t size) {
  FluxGemmArgs other;
  std::memcpy(&other, &args, sizeof other);
  auto* bytes = reinterpret_cast<unsigned char*>(&other);
  for (std::size_t i = begin; i < begin + size; ++i) bytes[i] ^= 0x55;
  return other;
}

static void fields(const FluxGemmArgs& args) {
  const auto differs = [&args](const char* name, std::size_t at, std::size_t size, bool expected) {
    const bool found = !(launch_key(args) == launch_key(changed(args, at, size)));
    if (found != expected) std::printf("%s: %d\n", name, found);
    assert(found == expected);
  };
@FIELDS@
}

static void padding(const FluxGemmArgs& args) {
  alignas(FluxGemmArgs) unsigned char dirty[sizeof(FluxGemmArgs)];
  const auto* bytes = reinterpret_cast<const unsigned char*>(&args);
  std::memcpy(dirty, bytes, sizeof dirty);
  constexpr std::size_t order = offsetof(FluxGemmArgs, order);
  constexpr std::size_t begin =
      order + offsetof(FluxOrder, column_ranges) + sizeof args.order.column_ranges;
  constexpr std::size_t end = order + offsetof(FluxOrder, sequence);
  static_assert(begin < end, "there is none");
  for (std::size_t i = begin; i < end; ++i) dirty[i] = 0xee;
  FluxGemmArgs other;
  std::memcpy(&other, dirty, sizeof other);
  assert(launch_key(args) == launch_key(other));
}

static void sequences(FluxGemmArgs args) {
  const std::int32_t one[] = {2, 0, 1, 3}, same[] = {2, 0, 1, 3}, other[] = {2, 0, 3, 1};
  args.order.world = 4;
  args.order.sequence = one;
  FluxGemmArgs second = args;
  second.order.sequence = same;
  assert(launch_key(args) == launch_key(second));
  second.order.sequence = other;
  assert(!(launch_key(args) == launch_key(second)));
  second.order.sequence = nullptr;
  assert(!(launch_key(args) == launch_key(second)));
}

static FluxGemmArgs numbered(int m) {
  FluxGemmArgs args{};
  args.m = m;
  return args;
}

static void places() {
  LaunchCache<int, 3> cache;
  assert(!cache.find(launch_key(numbered(1))));
  for (int m = 1; m <= 3; ++m) cache.keep(launch_key(numbered(m)), 10 * m);
  assert(*cache.find(launch_key(numbered(1))) == 10);
  cache.keep(launch_key(numbered(4)), 40);  // 2 was not used for the longest time
  assert(!cache.find(launch_key(numbered(2))));
  for (int m : {1, 3, 4}) assert(*cache.find(launch_key(numbered(m))) == 10 * m);
  FluxGemmArgs later = numbered(3);
  later.sync.epoch = 7;
  assert(*cache.find(launch_key(later)) == 30);
  cache.keep(launch_key(later), 31);  // the first stays
  assert(*cache.find(launch_key(later)) == 30);
  auto copy = cache.find(launch_key(later));
  *copy = 0;
  assert(*cache.find(launch_key(later)) == 30);
}

static void layers() {  // a loop over layers that share an op
  LaunchCache<int> cache;
  FluxGemmArgs args = numbered(1);
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (std::uintptr_t layer = 1; layer <= 320; ++layer) {
      args.b = reinterpret_cast<void*>(layer << 8);
      assert(bool(cache.find(launch_key(args))) == (repeat == 1));
      cache.keep(launch_key(args), 1);
    }
  }
}

static void threads() {
  LaunchCache<int, 4> cache;
  const auto work = [&cache](int seed) {
    for (int i = 0; i < 20000; ++i) {
      const int m = (i * seed) % 7;
      const auto found = cache.find(launch_key(numbered(m)));
      assert(!found || *found == m);
      if (!found) cache.keep(launch_key(numbered(m)), m);
    }
  };
  std::thread one(work, 3), two(work, 5);
  one.join();
  two.join();
}

int main() {
  FluxGemmArgs args{};
  args.m = 5;
  args.order.world = 2;
  fields(args);
  padding(args);
  sequences(args);
  places();
  layers();
  threads();
}
"""


def _checks() -> str:
    """A line for each field of FluxGemmArgs: may launches that differ in it share parameters?"""
    lines = []
    for field in structs()["FluxGemmArgs"]:
        if field == "order":
            continue
        at, size = f"offsetof(FluxGemmArgs, {field})", f"sizeof(FluxGemmArgs::{field})"
        expected = "false" if field == "sync" else "true"
        lines.append(f'  differs("{field}", {at}, {size}, {expected});')
    for field in structs()["FluxOrder"]:
        if field == "sequence":  # by what it points to
            continue
        at = f"offsetof(FluxGemmArgs, order) + offsetof(FluxOrder, {field})"
        lines.append(f'  differs("order.{field}", {at}, sizeof(FluxOrder::{field}), true);')
    assert len(lines) > 25
    return "\n".join(lines)


def test_launches_that_differ_in_their_sync_alone_share_parameters(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "cache.cpp", tmp_path / "cache"
    source.write_text(_PROGRAM.replace("@FIELDS@", _checks()))
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CSRC}"]
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True, timeout=200)
    subprocess.run([program], check=True, timeout=60)
