"""What the scripts here share: running `flux bench op`, raw JSON, and markdown tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flux.bench.metrics import ratio_interval
from flux.core.datafile import write_whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks", "results", "cpu")
"""Relative to the root, where the commands run: they are part of the files."""
LINK_NAMES = {
    "none": "one host",
    "350mbit": "350 Mbit/s",
    "500mbit": "500 Mbit/s",
    "750mbit": "750 Mbit/s",
    "1gbit": "1 Gbit/s",
    "2gbit": "2 Gbit/s",
    "10gbit": "10 Gbit/s",
}


def compute_below_network() -> None:
    """Lower the priority of this thread, and of those that it starts from now on.

    A rank has one core. What arrives must not wait for the end of a time slice of the multiplies:
    the link would be idle. Threads of the network that are there keep their priority.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def bench_op(
    op: str, shape: Sequence[int], world: int, repeats: int, target: Path, extra: Sequence[str]
) -> dict[str, Any]:
    """Run `flux bench op` once, keep its raw JSON in `target`, and return it.

    Raises:
        SystemExit: the benchmark failed or a result was wrong; its message is on stderr already.
    """
    m, n, k = map(str, shape)
    arguments = ["bench", "op", "--op", op, "--m", m, "--n", n, "--k", k]
    arguments += ["--dtype", "float32", "--nproc", str(world), "--threads", "1"]
    return measured([*arguments, "--repeats", str(repeats), *extra], target)


def measured(arguments: Sequence[str], target: Path) -> dict[str, Any]:
    """Run a command of `flux bench`, keep its raw JSON in `target`, and return it.

    Raises: as `bench_op`.
    """
    arguments = [*arguments, "--quiet", "--json", target.as_posix()]
    print(f"flux {' '.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "flux", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return load(target)


def repeats_for(m: int) -> int:
    """More repeats where a call lasts a millisecond: wake-ups scatter, and repeats are cheap."""
    return 201 if m <= 64 else 101 if m <= 256 else 51 if m <= 512 else 21


def ratio(document: dict[str, Any], method: str) -> float:
    """Time of a method over that of the unfused path; below 1 is faster."""
    methods = document["methods"]
    return float(methods[method]["overall_ms"] / methods["unfused"]["overall_ms"])


def unfused_interval(document: dict[str, Any], method: str) -> tuple[float, float] | None:
    """Return the interval of `ratio`."""
    methods = document["methods"]
    return ratio_interval(methods[method]["repeats_ms"], methods["unfused"]["repeats_ms"])


def load(path: Path) -> dict[str, Any]:
    """Return a raw JSON, whose path is relative to the root."""
    document: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return document


def keep(content: dict[str, Any], path: Path) -> None:
    """Write a raw JSON, whose path is relative to the root, and its folders.

    The file is replaced at once: a run that is cut short leaves the last one.
    """
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(ROOT / path, json.dumps(content, indent=1) + "\n")


def versions(document: dict[str, Any]) -> str:
    """Return the versions of packages in a line."""
    return ", ".join(f"{name} {version}" for name, version in document["versions"].items())


def unbroken(text: str) -> str:
    """Return a text whose words stay in one line of a narrow table."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def sizes(document: dict[str, Any]) -> str:
    """Return M x N x K, unbroken."""
    return unbroken(f"{document['m']} x {document['n']} x {document['k']}")


def milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def interval_text(ends: Sequence[float] | None) -> str:
    """Nothing of fewer repeats than an interval needs."""
    return "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"


def efficiency(method: dict[str, Any]) -> str:
    """Overlap efficiency and its interval, which files of older runs do not have."""
    text = percent(method["overlap_efficiency"])
    interval = method.get("overlap_efficiency_interval")
    if interval is None:
        return text
    return unbroken(f"{text} ({interval[0]:.0%} to {interval[1]:.0%})")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table: the first column to the left, figures to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(document: dict[str, Any]) -> str:
    """The line that belongs under every table."""
    return (
        f"{document['device']}; {versions(document)}; {document['dtype']}, "
        f"{document['threads']} thread per rank; median over interleaved repeats of the slowest "
        "rank's time."
    )
