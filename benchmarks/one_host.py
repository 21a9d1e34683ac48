"""Ops between the ranks of one host: float32, one thread per rank.

    python benchmarks/one_host.py                       # all parts
    python benchmarks/one_host.py --parts growth --ops gemm_rs --worlds 1 2 --rows 64 1024

`shapes`  the ops against the unfused path over gloo, 2 ranks, large and small M
`growth`  time against M and against the number of ranks, and what limits each
`slabs`   what a local GEMM loses when it is cut into slabs of rows (flux/select/heuristic.py), in
          CPU time of the thread, which other load on the machine disturbs less than wall time

One raw JSON per run of `shapes` and `growth` goes to benchmarks/results/cpu/; tables go to stdout.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    ROOT,
    bench_op,
    conditions,
    load,
    markdown,
    milliseconds,
    percent,
    ratio,
    repeats_for,
    unbroken,
)

from flux.bench.metrics import median
from flux.core.knobs import OPS, Op
from flux.core.problem import Problem

Shape = tuple[int, int, int]
LARGE: list[Shape] = [(2048, 4096, 2048), (4096, 4096, 1024), (1024, 4096, 1024)]
SMALL: list[Shape] = [(m, 4096, 1024) for m in (1, 16, 64, 256)]
WORLD = 2
N, K = 4096, 1024
"""Of `growth`."""
ROWS = [1, 8, 64, 256, 1024, 2048, 4096, 8192]
WORLDS = [1, 2, 4, 8]
FEW_BYTES = 256 << 10
SLAB_SHAPES: list[Shape] = [*LARGE, (512, 4096, 1024)]


def result_path(op: str, shape: Shape, world: int = WORLD, folder: Path = RESULTS) -> Path:
    """Return where the raw JSON of a run is."""
    return folder / f"{op}_{'x'.join(map(str, shape))}_float32_w{world}.json"


def growth_path(op: str, m: int, world: int) -> Path:
    """Return where the raw JSON of a run of `growth` is."""
    return result_path(op, (m, N, K), world, RESULTS / "growth")


def shapes_table() -> str:
    """Return time over the unfused path, medium's in brackets, and overlap efficiency."""
    header = ["M, N, K"]
    for op in Op:
        header += [op.label, "overlap"]
    rows, documents = [], []
    for shape in [*LARGE, *reversed(SMALL)]:
        row = [unbroken(", ".join(map(str, shape)))]
        for op in Op:
            documents.append(load(result_path(op.name, shape)))
            row.append(
                f"**{ratio(documents[-1], 'flux'):.2f}** ({ratio(documents[-1], 'medium'):.2f})"
            )
            row.append(percent(documents[-1]["methods"]["flux"]["overlap_efficiency"]))
        rows.append(row)
    return f"{markdown(header, rows)}\n\n{conditions(documents[0])}"


def bytes_received(op: str, m: int, world: int) -> int:
    """Return the bytes that each rank gets from its peers in one call."""
    problem = Problem(Op[op], m, N, K, "float32", world)
    times = 2 if problem.op.all_reduces else 1
    return times * (world - 1) * problem.chunk * problem.row_bytes


def limit(document: dict[str, Any]) -> str:
    """Return what takes the larger part of the time, in a word."""
    fused = document["methods"]["flux"]
    cores = int(re.findall(r"(\d+) core", document["device"])[0])
    if document["world"] * document["threads"] > cores:
        return "cores"
    if fused["gemm_non_split_ms"] > 0.8 * fused["overall_ms"]:
        return "GEMM"
    if bytes_received(document["op"], document["m"], document["world"]) < FEW_BYTES:
        return "wake-ups"
    return "copies" if fused["ect_ms"] > 0.5 * fused["overall_ms"] else "GEMM, then copies"


def growth_table() -> str:
    """Return a table per op, M against ranks: flux ms (unfused ms), and what limits it."""
    parts = []
    for op in OPS:
        rows = []
        for m in ROWS:
            paths = [growth_path(op, m, world) for world in WORLDS]
            if all((ROOT / path).exists() for path in paths):
                rows.append([str(m)])
                for document in map(load, paths):
                    fused, unfused = (
                        milliseconds(document["methods"][name]["overall_ms"])
                        for name in ("flux", "unfused")
                    )
                    rows[-1].append(f"{fused} ({unfused}) {limit(document)}")
        if rows:
            header = ["M", *(f"{world} rank{'s' if world > 1 else ''}" for world in WORLDS)]
            parts.append(f"**{op}**\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def slabs_table(repeats: int = 15) -> str:
    """Time local GEMMs of AGGemm and GemmRS, whole and in slabs, and the copy of a shard."""
    torch.set_num_threads(1)
    rows = []
    for m, n, k in SLAB_SHAPES:
        for op in ("ag_gemm", "gemm_rs"):
            columns, depth = (n // WORLD, k) if op == "ag_gemm" else (n, k // WORLD)
            x, weight, out = (
                torch.randn(m, depth),
                torch.randn(columns, depth),
                torch.empty(m, columns),
            )
            shard, room = torch.randn(m // WORLD, k), torch.empty(m // WORLD, k)
            calls: dict[str, Callable[[], object]] = {
                str(count): lambda count=count, x=x, weight=weight, out=out: [  # type: ignore[misc]
                    torch.mm(part, weight.t(), out=into)
                    for part, into in zip(x.chunk(count), out.chunk(count), strict=True)
                ]
                for count in (1, 2, 4)
            }
            calls["copy"] = lambda room=room, shard=shard: room.copy_(shard)  # type: ignore[misc]
            times: dict[str, list[float]] = {name: [] for name in calls}
            for index in range(repeats + 1):
                for name, call in calls.items():
                    begin = time.thread_time()
                    call()
                    if index:  # the first round warms up
                        times[name].append((time.thread_time() - begin) * 1e3)
            whole, two, four, copy = (median(times[name]) for name in ("1", "2", "4", "copy"))
            cells = [f"{two / whole - 1:+.1%}", f"{four / whole - 1:+.1%}", f"{copy / whole:.1%}"]
            rows.append([op, f"{m}, {n}, {k}", f"{whole:.1f}", *cells])
    header = ["op", "M, N, K", "whole ms", "2 slabs", "4 slabs", "copy of a shard"]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = {"shapes": shapes_table, "growth": growth_table, "slabs": slabs_table}
    parser.add_argument("--parts", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="ops to measure")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="ranks, of growth")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="rows M, of growth")
    parser.add_argument("--repeats", type=int, help="timed repeats (default: depends on M)")
    options, extra = parser.parse_known_args()
    for op in options.ops:
        if "shapes" in options.parts:
            for shape in LARGE + SMALL:
                repeats = options.repeats or repeats_for(shape[0])
                bench_op(op, shape, WORLD, repeats, result_path(op, shape), extra)
        if "growth" in options.parts:
            for m in options.rows:
                repeats = options.repeats or (15 if m > 1024 else repeats_for(m))
                for world in options.worlds:
                    bench_op(op, (m, N, K), world, repeats, growth_path(op, m, world), extra)
    for part in options.parts:
        print(tables[part](), end="\n\n")


if __name__ == "__main__":
    main()
