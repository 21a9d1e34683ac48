"""Examples of a checkout of CUTLASS, untouched, on the machine that executes PTX.

Each program is compiled to PTX as a library, whose main function runs on the emulated device. It
compares its results itself: those of 54 and 63 with sums of the host, those of 48 and 57 with
another kernel's. So results of 48 and 57 are also compared with sums in double (`_CHECKS`).

    python tests/support/emulation/cutlass_examples.py CUTLASS --include DIR --out FILE

CUTLASS is the root of the checkout; DIR has `curand_kernel.h`, if nvcc has no cuRAND.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # as a script

from flux.machine.toolchain import nvcc  # noqa: E402
from ptx_target import ptx_target  # noqa: E402

BUILT = ROOT / "build" / "cutlass-examples"
SEEDS = (0, 1, 2, 3)
MULTIPROCESSORS = 10

_CHECK = """
// Whether D is alpha A B' + beta C in double. A and B lie by rows of k, C and D by columns.
template <class A, class B, class D>
bool is_right(const A* a, const B* b, const D* c, const D* d, int m, int n, int k, float alpha,
              float beta) {
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < m; ++i) {
      double sum = 0;
      for (int t = 0; t < k; ++t) sum += double(float(a[i * k + t])) * double(float(b[j * k + t]));
      sum = alpha * sum + (beta == 0 ? 0 : beta * double(float(c[i + j * m])));
      if (d[i + j * m] != D(float(sum))) return false;
    }
  }
  return true;
}
"""
_CHECKS = {
    48: """  return is_right(block_A.get(), block_B.get(), block_C.get(), block_D.get(), options.m,
                  options.n, options.k, options.alpha, options.beta);
""",
    57: """  for (int i = 0; i < options.groups; ++i) {
    const auto [m, n, k] = options.problem_sizes_host.at(i);
    if (!is_right(block_A.get() + offset_A.at(i), block_B.get() + offset_B.at(i),
                  block_C.get() + offset_C.at(i), block_D.get() + offset_D.at(i), m, n, k,
                  alpha_host.at(i), beta_host.at(i))) {
      return false;
    }
  }
  return true;
""",
}

WITHOUT_RACES = "no-races"
"""Races are not looked for: 63 writes what it prefetches to one buffer, which nothing reads."""
_GROUPS = "0 256x128x128\n1 64x384x64\n2 400x48x208\n3 16x16x32\n"
RUNS = {
    48: (
        "--m=128 --n=256 --k=96 --alpha=2 --beta=0.5",
        "--m=600 --n=260 --k=100 --beta=1 --swizzle=2 --raster=N",
    ),
    54: (
        "--m=192 --n=144 --k=160 --l=2 --alpha=2 --beta=1",
        "--m=16 --n=272 --k=400 --scale_a=0.5 --scale_d=2 --device_scale=true",
    ),
    57: ("--m=128 --n=128 --k=64 --groups=2", "--benchmark={groups} --alpha=2 --beta=0.5"),
    63: (
        "--m=208 --n=144 --k=384 --l=2 --beta=1 --p=0 --o=0",
        "--m=128 --n=64 --k=128 --p=0.5 --o=0.5",
        f"{WITHOUT_RACES} --m=128 --n=64 --k=512 --p=0.5 --o=0.5",
        f"{WITHOUT_RACES} --m=208 --n=144 --k=384 --l=2 --beta=1 --p=1 --o=0",
        f"{WITHOUT_RACES} --m=64 --n=64 --k=1024 --p=0.25 --o=-1",
    ),
}


@dataclass(frozen=True)
class Example:
    """A program of the checkout."""

    number: int
    source: Path

    @property
    def library(self) -> Path:
        """Where it lies when it is built."""
        return BUILT / f"example{self.number}.so"

    def wrapper(self) -> str:
        """C++ that calls its main function, and looks at what that has left."""
        check = _CHECKS.get(self.number, "  return true;\n")
        return f"""#define main example_main
#include "{self.source.name}"
#undef main
{_CHECK}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int run_example(int count, char const** words) {{ return example_main(count, words); }}
EXPORT bool check_example(int count, char const** words) {{
  {"Options options;" if self.number in _CHECKS else ""}
  {"options.parse(count, words);" if self.number in _CHECKS else ""}
{check}}}
"""

    def build(self, checkout: Path, include: Path | None) -> float:
        """Compile it, if that has not been done; return the seconds.

        Raises:
            subprocess.CalledProcessError: it does not compile.
        """
        text = BUILT / f"example{self.number}.cu"
        if self.library.exists() and text.exists() and text.read_text() == self.wrapper():
            return 0.0
        tool = nvcc()
        assert tool is not None, "no nvcc"
        BUILT.mkdir(parents=True, exist_ok=True)
        text.write_text(self.wrapper())
        target, begin = ptx_target(), time.monotonic()
        folders = ["include", "tools/util/include", "examples/common"]
        command = [tool.path, *("-std=c++17", "-O3", "-lineinfo", "-shared", "-cudart=none")]
        command += ["-gencode=arch=compute_90a,code=compute_90a", "--compress-mode=none", "-w"]
        command += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        command += [f"-I{checkout / folder}" for folder in folders] + [f"-I{self.source.parent}"]
        command += [f"-I{include}"] if include else []
        command += [str(text), str(target.runtime[0]), "-ldl", "-o", str(self.library)]
        subprocess.run(command, check=True)
        return time.monotonic() - begin


def examples(checkout: Path) -> list[Example]:
    """The programs of RUNS."""
    found = []
    for number in RUNS:
        (folder,) = (checkout / "examples").glob(f"{number}_*")
        found.append(Example(number, folder / f"{folder.name}.cu"))
    return found


def run_here(library: str, seed: int, words: list[str]) -> None:
    """Run a program in this process; print what happened as JSON on the last line.

    The program itself ends the process if it finds a wrong result.
    """
    from ptx_machine import cuda_device

    device = cuda_device()
    device.multiprocessors, device.seed = MULTIPROCESSORS, seed
    device.races = WITHOUT_RACES not in words
    program, begin = ctypes.CDLL(library), time.process_time()
    texts = [word.encode() for word in (library, *words, "--iterations=0")]
    given = len(texts), (ctypes.c_char_p * len(texts))(*texts)
    status = program.run_example(*given)
    program.check_example.restype = ctypes.c_bool
    kernels = [r for r in device.records() if "device_kernel" in r["kernel"]]
    done = {
        "status": status,
        "error": device.error(),
        "right": program.check_example(*given),
        "launches": sum(r["launches"] for r in kernels),
        "thread_instructions": sum(r["instructions"] for r in kernels),
        "seconds": round(time.process_time() - begin, 2),
    }
    print("\n" + json.dumps(done))


def measure(example: Example, arguments: str) -> dict[str, object]:
    """Run a program with each seed.

    Raises:
        AssertionError: the machine has found a fault, or a result is wrong.
    """
    groups = BUILT / "groups.txt"
    groups.write_text(_GROUPS)
    total: dict[str, object] = {"example": example.number, "arguments": arguments, "seeds": []}
    for seed in SEEDS:
        words = arguments.format(groups=groups).split()
        command = [sys.executable, __file__, "--run", str(example.library), str(seed), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        where = f"{example.number} {arguments}, seed {seed}: "
        assert done.returncode == 0, where + done.stdout[-2000:] + done.stderr[-4000:]
        passed = done.stdout.count("Disposition: Passed")
        told = json.loads(done.stdout.splitlines()[-1])
        assert passed and "Failed" not in done.stdout, where + done.stdout
        assert told["status"] == 0 and not told["error"] and told["right"], where + str(told)
        total["seeds"] = [*total["seeds"], seed]  # type: ignore[misc]
        for name in ("launches", "thread_instructions", "seconds"):
            total[name] = round(total.get(name, 0) + told[name], 2)  # type: ignore[call-overload]
    return total


def version_of(checkout: Path) -> str:
    """Version of the checkout, as 4.7.0."""
    text = (checkout / "include/cutlass/version.h").read_text()
    return ".".join(re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def main() -> None:
    """Run the examples, and write what came out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--include", type=Path, help="of cuRAND")
    parser.add_argument("--only", type=int, help="number of an example")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args()
    rows = []
    for example in examples(options.checkout):
        if options.only not in (None, example.number):
            continue
        print(f"{example.number}: {example.build(options.checkout, options.include):.0f} s")
        for arguments in RUNS[example.number]:
            rows.append(measure(example, arguments))
            print(rows[-1], flush=True)
    if options.out is not None:
        head = {
            "command": "python tests/support/emulation/cutlass_examples.py CUTLASS",
            "nvcc": getattr(nvcc(), "version", None),
            "cutlass": version_of(options.checkout),
        }
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        options.out.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_here(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        main()
