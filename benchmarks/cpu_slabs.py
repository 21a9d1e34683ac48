"""Measure what a GEMM loses when it is cut into slabs of rows, for flux/select/heuristic.py.

    python benchmarks/cpu_slabs.py [--json FILE]

Local GEMMs of AGGemm and GemmRS for 2 ranks, fp32, one thread, whole and in 2 and 4 slabs, in CPU
time of the thread (which other load on the machine disturbs less than wall time), interleaved; and
the copy of one rank's shard beside them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

WORLD = 2
SHAPES = ((2048, 4096, 2048), (4096, 4096, 1024), (1024, 4096, 1024), (512, 4096, 1024))


def in_slabs(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, count: int) -> Callable[[], None]:
    """The GEMM x @ w.T, cut into ``count`` slabs of rows."""
    rows = x.shape[0] // count

    def run() -> None:
        for begin in range(0, x.shape[0], rows):
            torch.mm(x[begin : begin + rows], w.t(), out=out[begin : begin + rows])

    return run


def measure(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """CPU ms of every part, interleaved; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for i in range(repeats + 1):
        for name, part in parts.items():
            start = time.thread_time()
            part()
            if i:
                times[name].append((time.thread_time() - start) * 1e3)
    return times


def main(repeats: int = 15, json_file: Path | None = typer.Option(None, "--json")) -> None:
    """Measure, print a table, write raw times."""
    torch.set_num_threads(1)
    table = Table("op", "m, n, k", "whole ms", "2 slabs", "4 slabs", "copy of a shard")
    raw = []
    for m, n, k in SHAPES:
        for op in ("ag_gemm", "gemm_rs"):
            columns, depth = (n // WORLD, k) if op == "ag_gemm" else (n, k // WORLD)
            x, w = torch.randn(m, depth), torch.randn(columns, depth)
            out, shard = torch.empty(m, columns), torch.randn(m // WORLD, k)
            room = torch.empty(m, k)
            parts: dict[str, Callable[[], object]] = {
                str(c): in_slabs(x, w, out, c) for c in (1, 2, 4)
            }
            parts["copy"] = lambda room=room, shard=shard: room[: shard.shape[0]].copy_(shard)
            times = measure(parts, repeats)
            best = {name: statistics.median(t) for name, t in times.items()}
            table.add_row(
                op,
                f"{m}, {n}, {k}",
                f"{best['1']:.1f}",
                f"{best['2'] / best['1'] - 1:+.1%}",
                f"{best['4'] / best['1'] - 1:+.1%}",
                f"{best['copy'] / best['1']:.1%}",
            )
            raw.append({"op": op, "m": m, "n": n, "k": k, "world": WORLD, "cpu_ms": times})
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
