"""What the heuristics choose on a GPU, and how NVIDIA's model of it rates that. Runs without a GPU.

    pip install nvidia-matmul-heuristics
    python benchmarks/kernel_choice.py benchmarks/results/heuristics/kernel_choice.json

Every shape of tuning/shapes with 8 ranks: the kernel of the default set that
flux/select/cycles.py ranks first, the one that nvidia-matmul-heuristics estimates to be
fastest, and its times for both.
All times are predictions; nothing here is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import RESULTS, keep, markdown, sizes, unbroken

from flux.bench.shapes import load_shapes
from flux.core.datafile import data_root
from flux.core.knobs import Knobs, Op
from flux.core.problem import DTYPES, Problem
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem
from flux.kernels.sets import config_set
from flux.select import nvidia_heuristics
from flux.select.cycles import cost, cycles, divide
from flux.select.heuristic import resolve
from flux.select.kernel import best_of, default_configs

RESULT = RESULTS.parent / "heuristics" / "kernel_choice.json"
WORLD = 8
SMS = 132
GPU = "H200_SXM"
MHZ = 1755  # boost clock of an H100 SXM's data sheet: cycles to us, for people
PAPER = "flux-paper"
LIMITS = {"multiply": "multiplying", "L2": "loads from L2", "memory": "memory"}


def shapes() -> list[Problem]:
    """Return every shape that lists 8 ranks, the paper's first, each once."""
    names = sorted(path.stem for path in (data_root() / "shapes").glob("*.toml"))
    names.sort(key=lambda name: name != PAPER)
    problems: dict[tuple[object, ...], Problem] = {}
    for name in names:
        listed = load_shapes(name)
        if not DTYPES[listed.dtype].in_kernels or WORLD not in listed.tensor_parallel:
            continue
        for op, m, n, k in listed.sizes:
            # AllReduce runs ReduceScatter's kernel.
            kernel_op = Op.ag_gemm if op == "ag_gemm" else Op.gemm_rs
            shape = Problem(kernel_op, m, n, k, listed.dtype, WORLD)
            problems.setdefault((kernel_op, m, n, k), shape)
    return list(problems.values())


def short(config: GemmConfig) -> str:
    tile, cluster = ("x".join(map(str, extents)) for extents in (config.tile[:2], config.cluster))
    return f"{tile} {cluster} {config.schedule}"


def reason(ranked: Sequence[tuple[float, GemmConfig]], problem: GemmProblem) -> str:
    """Say what limits the first of the ranking, and what the next ones lose by."""
    least, best = ranked[0]
    parts, work = cycles(best, problem, SMS), divide(best, problem, SMS)
    text = LIMITS[parts.limit]
    if work.shared:
        text += f"; {work.tiles} tiles, the last waves shared by stream-K"
    else:
        full = work.whole * work.blocks
        text += f"; {work.tiles} tiles of {full} slots ({work.tiles / full:.0%})"
    seen = {best.tile[:2]}
    for other_cost, other in ranked[1:]:
        if other.tile[:2] not in seen:
            return text + f"; {short(other)} {other_cost / least - 1:+.0%}"
    return text


def entry(shape: Problem, model: nvidia_heuristics.Estimator | None) -> dict[str, Any]:
    """Return both choices for one shape, and the knobs that go with ours."""
    problem, configs = GemmProblem.of(shape), default_configs(shape, "90a")
    costs = [cost(c, problem, SMS) for c in configs]
    best = configs[best_of(configs, costs)]
    ranked = sorted(
        zip(costs, configs, strict=True), key=lambda one: (one[1] != best, one[0], one[1].name)
    )
    knobs = resolve(shape, Knobs(), best.cluster_tile)
    work = divide(best, problem, SMS)
    fields: dict[str, Any] = {
        "op": shape.op.name,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "kernel": short(best),
        "waves": work.tiles / work.blocks,
        "raster": knobs.raster,
        "comm_tile_rows": knobs.comm_tile_rows,
        "reason": reason(ranked, problem),
        "model_us": {short(c): cycles_ / MHZ for cycles_, c in ranked},
    }
    if model is not None:
        times = {c: nvidia_heuristics.time_of(model, c, problem, SMS) for c in configs}
        theirs = min(configs, key=lambda c: (times[c], c.name))
        fields["nvidia_us"] = {
            short(c): times[c] * 1e6 for c in configs if times[c] != float("inf")
        }
        fields["nvidia_kernel"] = short(theirs)
    return fields


def bands_us(model: nvidia_heuristics.Estimator) -> dict[str, Any]:
    """Return the estimates of one kernel and problem, by the height of its bands of tiles."""
    config = next(c for c in config_set("minimal", ["90a"]) if c.op == "ag_gemm")
    problem = GemmProblem(16384, 13312, 16384, WORLD)
    times = {band: model.seconds(config, problem, [band]) for band in nvidia_heuristics.BANDS}
    return {
        "kernel": short(config),
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "us": {str(band): None if t is None else t * 1e6 for band, t in times.items()},
    }


def paper_table(document: dict[str, Any]) -> str:
    """Return what the heuristics choose for the paper's shapes."""
    paper = {(Op[op], m, n, k) for op, m, n, k in load_shapes(PAPER).sizes}
    header = ["op, M", "kernel", "waves", "raster", "rows of a communication tile", "limit; reason"]
    rows = [
        [
            unbroken(f"{shape['op']}, {shape['m']}"),
            unbroken(shape["kernel"]),
            f"{shape['waves']:.2f}",
            str(shape["raster"]),
            str(shape["comm_tile_rows"]),
            shape["reason"],
        ]
        for shape in document["shapes"]
        if (Op[shape["op"]], shape["m"], shape["n"], shape["k"]) in paper
    ]
    text = (
        f"W = {WORLD}, (N, K) = (49152, 12288) for AllGather and (12288, 49152) for ReduceScatter, "
        f"bfloat16, {SMS} multiprocessors. Percentages are the model's, of the next tile."
    )
    return f"{markdown(header, rows)}\n\n{text}"


def agreement(shape: dict[str, Any]) -> float:
    """Return NVIDIA's estimate of our choice over its estimate of its own."""
    times = shape["nvidia_us"]
    return float(times[shape["kernel"]] / times[shape["nvidia_kernel"]])


def rated(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shapes for which its model estimates our choice."""
    return [
        shape for shape in document["shapes"] if shape.get("nvidia_us", {}).get(shape["kernel"])
    ]


def agreements(document: dict[str, Any]) -> list[tuple[str, int, int, float, float]]:
    """Return by M: its name, shapes, how often both agree, median and largest `agreement`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for shape in sorted(rated(document), key=lambda shape: shape["m"]):
        last = "8192 and more" if shape["m"] >= 8192 else str(shape["m"])
        groups.setdefault(last, []).append(shape)
    rows = []
    for name, members in groups.items():
        ratios = [agreement(shape) for shape in members]
        same = sum(shape["kernel"] == shape["nvidia_kernel"] for shape in members)
        rows.append((name, len(members), same, statistics.median(ratios), max(ratios)))
    return rows


def comparison_table(document: dict[str, Any], worst: int = 6) -> str:
    """Return, by M, how often both agree and what its model says of ours; the worst; bands."""
    rows = [
        [name, str(count), str(same), f"{middle:.2f}", f"{most:.2f}"]
        for name, count, same, middle, most in agreements(document)
    ]
    header = ["M", "shapes", "same kernel", "ours / best, median", "largest"]
    parts = [markdown(header, rows)]
    apart = sorted(rated(document), key=agreement, reverse=True)[:worst]
    cases = [
        [
            f"{shape['op']} {sizes(shape)}",
            f"{shape['kernel']}: {shape['nvidia_us'][shape['kernel']]:.0f} us",
            f"{shape['nvidia_kernel']}: {shape['nvidia_us'][shape['nvidia_kernel']]:.0f} us",
        ]
        for shape in apart
        if agreement(shape) > 1.005
    ]
    if cases:
        header = ["farthest apart: M x N x K of all ranks", "ours", "fastest by its estimates"]
        parts.append(markdown(header, cases))
    if document["bands"] is not None:
        bands = document["bands"]
        times = ", ".join(f"{band}: {us:.0f} us" for band, us in bands["us"].items())
        size = f"{bands['m']} x {bands['n']} x {bands['k']}"
        parts.append(f"{bands['kernel']} at {size}, by rows of tiles in a band: {times}.")
    parts.append(
        f"nvidia-matmul-heuristics {document['nvidia']}, its {document['gpu']}; estimates, not "
        "measurements. It knows no stream-K: such a kernel has its estimate of the tile, times "
        "what our model says that sharing saves."
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    model = nvidia_heuristics.estimator(GPU)
    try:
        release = version("nvidia-matmul-heuristics")
    except PackageNotFoundError:
        release = "not installed"
    document = {
        "command": f"python benchmarks/kernel_choice.py {options.json.as_posix()}",
        "gpu": GPU,
        "nvidia": release,
        "bands": None if model is None else bands_us(model),
        "shapes": [entry(shape, model) for shape in shapes()],
    }
    keep(document, options.json)
    print(paper_table(document))
    if model is not None:
        print()
        print(comparison_table(document))


if __name__ == "__main__":
    main()
