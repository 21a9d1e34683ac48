"""Simulate GEMMs beside kernels that hold multiprocessors, by tile scheduler. Needs no GPU.

python benchmarks/tile_scheduler.py benchmarks/results/simulator/tile_scheduler.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.machine.cluster import load_cluster
from flux.opsim.simulator import simulate

RESULT = ROOT / "benchmarks" / "results" / "simulator" / "tile_scheduler.json"
CLUSTER = "dhelix-h100"
SIZES = {"ag_gemm": (49152, 12288), "gemm_rs": (12288, 49152)}
ROWS = (1024, 2048, 4096, 8192)
WORLD = 8
TAKEN = 24
"""Of 132 multiprocessors, as many as NCCL's kernels often take."""
WAYS = {
    "static": Knobs(tile_scheduler="static"),
    "static, a margin of 24": Knobs(tile_scheduler="static", sm_margin=TAKEN),
    "dynamic": Knobs(tile_scheduler="dynamic"),
}


def call(op: str, m: int) -> dict[str, Any]:
    """Return the times of all ways in ms: alone, and beside other kernels."""
    problem, cluster = Problem(Op[op], m, *SIZES[op], "bfloat16", WORLD), load_cluster(CLUSTER)
    times = {
        name: [simulate(problem, cluster, way, taken=taken).total_ms for taken in (0, TAKEN)]
        for name, way in WAYS.items()
    }
    rounded = {name: [round(time, 4) for time in pair] for name, pair in times.items()}
    return {"op": op, "m": m, "alone and beside, ms": rounded}


def document() -> dict[str, Any]:
    """Return everything, as it is written."""
    return {
        "command": "python benchmarks/tile_scheduler.py",
        "cluster": CLUSTER,
        "taken": TAKEN,
        "calls": [call(op, m) for op in SIZES for m in ROWS],
    }


def table(content: dict[str, Any]) -> str:
    """Return the times in us, and what the other kernels cost."""
    header = ["op", "M"]
    for name in WAYS:
        header += [f"{name}: alone", "beside"]
    rows = []
    for one in content["calls"]:
        cells = [Op[one["op"]].label, str(one["m"])]
        for alone, beside in one["alone and beside, ms"].values():
            cells += [f"{1e3 * alone:.0f}", f"{1e3 * beside:.0f} ({beside / alone - 1:+.0%})"]
        rows.append(cells)
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=RESULT)
    content = document()
    keep(content, parser.parse_args().target)
    print(table(content))


if __name__ == "__main__":
    main()
