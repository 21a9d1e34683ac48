"""Simulate calls of few and many rows on GPUs, with the path that an untuned op takes.

python benchmarks/few_rows.py benchmarks/results/simulator/few_rows.json --before EARLIER.json

Needs no GPU. EARLIER.json is of an earlier version, whose times stand beside.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import ROOT, keep, markdown

from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.core.spec import OpSpec
from flux.machine.cluster import Cluster, load_cluster
from flux.opsim.simulator import default_kernel, simulate, unfused
from flux.select.choose import untuned_on_gpus
from flux.select.heuristic import kernels_can_push, untuned

RESULT = ROOT / "benchmarks" / "results" / "simulator" / "few_rows.json"
CLUSTERS = ("dhelix-h100", "flux-a100-pcie")
SIZES = {"ag_gemm": (49152, 12288), "gemm_rs": (12288, 49152), "gemm_ar": (12288, 49152)}
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
WORLD = 8


def call(cluster: Cluster, op: str, m: int) -> dict[str, Any]:
    """Return the times of all paths in ms, and the path that an untuned op takes."""
    problem = Problem(Op[op], m, *SIZES[op], "bfloat16", WORLD)
    largest = Problem(Op[op], ROWS[-1], *SIZES[op], "bfloat16", WORLD)
    n, k = SIZES[op]
    spec = OpSpec(Op[op], ROWS[-1], (n,), k, torch.bfloat16, False, "sum")
    library = unfused(problem, cluster)
    times = {
        "unfused": library.total_ms,
        "fused": simulate(problem, cluster, untuned(problem, cluster)).total_ms,
    }
    ways = {"medium": Knobs(path="medium")}
    if problem.op.reduces:
        ways["copies"] = Knobs(sends="copies")
    if kernels_can_push(problem):
        ways["in_kernel"] = Knobs(path="in_kernel")
        if problem.op.reduces and cluster.switch_adds:
            ways["in_kernel_by_switch"] = Knobs(path="in_kernel", reduce="in_flight")
    elif problem.op.scatters and default_kernel(problem, cluster).arch == "90a":
        ways["in_kernel"] = Knobs(reduce="in_kernel")
    times.update({name: simulate(problem, cluster, way).total_ms for name, way in ways.items()})
    return {
        "op": op,
        "m": m,
        "gemm_ms": round(library.gemm_ms, 4),
        **{f"{path}_ms": round(time, 4) for path, time in times.items()},
        "takes": untuned_on_gpus(spec, largest, cluster).knobs(m).path,
    }


def document(before: dict[str, Any] | None) -> dict[str, Any]:
    """Return everything, as it is written; ``before``: what an earlier version wrote."""
    content = {
        "command": "python benchmarks/few_rows.py",
        "clusters": {
            name: [call(load_cluster(name), op, m) for op in SIZES for m in ROWS]
            for name in CLUSTERS
        },
    }
    for name, calls in (before or {"clusters": {}})["clusters"].items():
        for one, earlier in zip(content["clusters"][name], calls, strict=True):
            one["before_ms"] = earlier[f"{earlier['takes']}_ms"]
    return content


def table(content: dict[str, Any]) -> str:
    """Return the times in us; before: of the earlier version. GemmRS: sums in_kernel."""
    paths = ("gemm", "unfused", "fused", "medium", "copies", "in_kernel")
    header = ["cluster", "op", "M", "GEMM us", *paths[1:], "an op takes"]
    header += ["its time over unfused", "before"]
    rows = []
    for cluster, calls in content["clusters"].items():
        for one in calls:
            times = [f"{1e3 * one[f'{p}_ms']:.0f}" if f"{p}_ms" in one else "-" for p in paths]
            taken = one[f"{one['takes']}_ms"]
            over = [ms / one["unfused_ms"] for ms in (taken, one.get("before_ms", taken))]
            cells = [cluster, Op[one["op"]].label, str(one["m"]), *times, one["takes"]]
            rows.append([*cells, *(f"{share:.2f}" for share in over)])
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--before", type=Path, help="JSON of an earlier version")
    options = parser.parse_args()
    before = json.loads(options.before.read_text()) if options.before else None
    content = document(before)
    keep(content, options.target)
    print(table(content))


if __name__ == "__main__":
    main()
