"""One GPU and a real link: what flux hides of PCIe's time, with the peers' memory in the host.

    python benchmarks/gpu_loopback.py benchmarks/results/h100/loopback.json

The measurement of `flux bench op --transport loopback` (flux/bench/places/loopback.py) at the
paper's shapes, with every direction and communication tile beside one another in one run.
docs/use/metrics.md says what the figures mean. Shapes that an existing output file has are
skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import efficiency, keep, load, markdown, milliseconds, percent

from flux import Knobs, PeerTimeoutError
from flux.bench import report
from flux.bench.config import BenchConfig
from flux.bench.methods import Method
from flux.bench.op import measure
from flux.bench.places.loopback import RealRank
from flux.core.knobs import Op
from flux.core.problem import Problem

NARROW, WIDE = 12288, 49152  # the paper's GPT-3 shapes: AllGather N = WIDE, ReduceScatter K = WIDE
WARM_UP = 3
TIMEOUT_S = 10.0
BAND_ROWS = 256  # of raster 1, with clusters of two tiles


def variants(problem: Problem, tiles: Sequence[int]) -> dict[str, Knobs]:
    """Return the heuristic's knobs, and those of the sweep by name.

    Swept are the rows of a communication tile and, for AllGather, the direction, and bands of as
    many rows; for ReduceScatter, copy engines in place of multiprocessors, and sums in the GEMM's
    kernel. What the margin costs is seen beside.
    """
    knobs = {"flux": Knobs(), "flux no margin": Knobs(sm_margin=0)}
    if not problem.op.gathers:
        knobs["flux copies"] = Knobs(sends="copies")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    if problem.op.scatters and hopper:
        knobs["flux sums in kernel"] = Knobs(reduce="in_kernel")
    for direction in ("push", "pull") if problem.op.gathers else (None,):
        for count in tiles:
            rows = max(1, problem.chunk // count)
            name = " ".join(filter(None, ["flux", direction, f"{rows} rows"]))
            knobs[name] = Knobs(direction=direction, comm_tile_rows=rows)
            if direction == "push" and count > 1:
                raster = max(1, rows // BAND_ROWS)
                knobs[f"{name}, raster {raster}"] = replace(knobs[name], raster=raster)
    return knobs


class Sweep(RealRank):
    """The op with each of several knobs."""

    def __init__(self, config: BenchConfig, swept: dict[str, Knobs]) -> None:
        super().__init__(config, 0)
        self._swept = swept

    def factory(self, config: BenchConfig, rank: int) -> list[Method]:
        fused = [self.fused(name, config, knobs) for name, knobs in self._swept.items()]
        return self.beside_unfused(fused)


def config_of(problem: Problem, repeats: int) -> BenchConfig:
    return BenchConfig(
        problem,
        repeats=repeats,
        warmup=WARM_UP,
        backend="cuda",
        transport="loopback",
        timeout_s=TIMEOUT_S,
    )


def run_shape(problem: Problem, tiles: Sequence[int], repeats: int) -> dict[str, Any]:
    """Check and measure one shape; ``complaints`` says what is wrong."""
    config = config_of(problem, repeats)
    try:
        place = Sweep(config, variants(problem, tiles))
        measurement = measure(config, 0, place=place)
    except PeerTimeoutError as error:  # the other shapes still count
        return {"op": problem.op.name, "m": problem.m, "n": problem.n, "k": problem.k,
                "world": problem.world, "methods": {}, "complaints": [str(error)]}  # fmt: skip
    return {**report.document(config, measurement), "complaints": measurement.complaints}


def table(shape: dict[str, Any]) -> str:
    rows = []
    for name, figure in shape["methods"].items():
        if figure["overall_ms"] is None:
            continue
        interval = figure["overlap_efficiency_interval"]
        rows.append(
            [
                name,
                *(
                    milliseconds(figure[key])
                    for key in ("overall_ms", "gemm_non_split_ms", "comm_ms", "ect_ms")
                ),
                percent(figure["overlap_efficiency"]),
                "-" if interval is None else f"{interval[0]:.0%} to {interval[1]:.0%}",
                percent(figure["bounded_efficiency"]),
            ]
        )
    header = ["method", "overall ms", "GEMM ms", "comm ms", "ECT ms", "overlap eff.", "90%"]
    title = "{op}, W = {world}, M = {m}, N = {n}, K = {k}".format(**shape)
    lines = [title, markdown([*header, "bounded eff."], rows)]
    return "\n".join([*lines, *(f"WRONG {complaint}" for complaint in shape["complaints"])])


def best_table(document: dict[str, Any]) -> str:
    """Write the best of each direction at each shape, over unfused."""
    rows = []
    for shape in sorted(document["shapes"], key=lambda shape: (shape["op"], shape["world"])):
        methods = shape["methods"]
        for way in ("push", "pull") if shape["op"] == "ag_gemm" else ("rows",):
            best = min(
                (name for name in methods if f" {way}" in name or (way == "rows" and " " in name)),
                key=lambda name: methods[name]["overall_ms"],
            )
            figure = methods[best]
            rows.append(
                [
                    f"{shape['op']}, W = {shape['world']}, M = {shape['m']}"
                    + (f", {way}" if way != "rows" else ""),
                    *(milliseconds(figure[key]) for key in ("gemm_non_split_ms", "comm_ms")),
                    milliseconds(methods["unfused"]["overall_ms"]),
                    milliseconds(figure["overall_ms"]),
                    efficiency(figure),
                    percent(figure["bounded_efficiency"]),
                ]
            )
    header = ["op", "GEMM ms", "comm ms", "unfused ms", "flux ms", "overlap eff.", "bounded"]
    return markdown(header, rows)


def problems(worlds: Sequence[int], rows: Sequence[int]) -> list[Problem]:
    """The largest first: a run that is cut short leaves what matters most."""
    return [
        Problem(op, m, *((WIDE, NARROW) if op.gathers else (NARROW, WIDE)), "bfloat16", world)
        for m in sorted(rows, reverse=True)
        for world in sorted(worlds, reverse=True)
        for op in (Op.ag_gemm, Op.gemm_rs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="file to write or continue")
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192], help="rows M")
    parser.add_argument(
        "--tiles", type=int, nargs="+", default=[1, 4, 16], help="communication tiles per chunk"
    )
    options = parser.parse_args()
    shapes = load(options.json)["shapes"] if options.json.exists() else []
    done = {(s["op"], s["m"], s["world"]) for s in shapes}
    for problem in problems(options.worlds, options.rows):
        if (problem.op.name, problem.m, problem.world) in done:
            continue
        shapes.append(run_shape(problem, options.tiles, options.repeats))
        keep({"command": "python benchmarks/gpu_loopback.py", "shapes": shapes}, options.json)
        print(table(shapes[-1]), flush=True)
    raise SystemExit(1 if any(s["complaints"] for s in shapes) else 0)


if __name__ == "__main__":
    main()
