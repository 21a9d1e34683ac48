"""Simulate the pair of dispatch and combine at published sizes. Runs without a GPU, in a minute.

    python benchmarks/moe_simulator.py benchmarks/results/simulator/dispatch.json

No published time enters. Both calls run the work that kernels would list for one drawn routing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, keep, markdown
from op_simulator import signed

from flux.core.knobs import Knobs
from flux.core.sparse_problem import SparseProblem, make_problem
from flux.machine.cluster import Cluster, load_cluster
from flux.opsim.simulator import Simulated
from flux.opsim.sparse import simulate_sparse
from flux.select.dispatching import lists_ms
from flux.select.hardware import ELEMENTWISE_SHARE, LAUNCH_US

RESULT = ROOT / "benchmarks" / "results" / "simulator" / "dispatch.json"
WORLD, TOPK = 8, 6


class Model(NamedTuple):
    """Experts of a model, and published times in us: of Mega MoE, and of DeepEP and two GEMMs.

    github.com/deepseek-ai/DeepGEMM, pull request 383: H200, float8, M tokens of each rank ("High
    Throughput"); sizes are those of pull request 316.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    mega: tuple[float, ...]
    deep_ep: tuple[float, ...]


ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MODELS = (
    Model(
        "Flash",
        256,
        4096,
        2048,
        (225.0, 245.9, 253.1, 265.8, 265.1, 293.4, 413.4, 637.3, 959.1, 1739.0, 3269.0),
        (348.0, 395.4, 394.4, 402.6, 414.0, 439.3, 496.8, 705.0, 1208.0, 2238.1, 4317.6),
    ),
    Model(
        "Pro",
        384,
        7168,
        3072,
        (636.6, 778.0, 822.9, 858.1, 871.6, 881.8, 1004.5, 1392.7, 2405.7, 4217.0, 7939.0),
        (801.8, 946.4, 1244.4, 1022.8, 1042.5, 1085.2, 1178.7, 1617.5, 2678.6, 4832.9, 9207.9),
    ),
)
# Of ByteDance's flux, test_moe_gather_rs.py; github.com/vllm-project/vllm-omni, issue 5092.
GATHER_RS = {"m": 32768, "n": 5120, "k": 5120, "sizes": {"experts": 32, "topk": 5, "ep": 4}}
ULYSSES = {"heads": 24, "head_dim": 128, "rows": (2048, 8192, 32768, 65536)}
LINKS = (("h200", 2), ("h200", 4), ("flux-a100-pcie", 2), ("flux-a100-pcie", 4))


def calls(
    name: str,
    m: int,
    shape: tuple[int, int],
    dtype: str,
    world: int,
    sizes: dict[str, Any],
    cluster: Cluster,
) -> tuple[SparseProblem, Simulated, Simulated]:
    """Return a problem, its unfused call, and its fused one."""
    problem = make_problem(name, m, *shape, dtype, world, sizes)
    assert isinstance(problem, SparseProblem)
    return problem, *simulate_sparse(problem, cluster, Knobs(path="fused"))


def pair(model: Model, index: int) -> dict[str, Any]:
    """Return a layer of a model. Between its calls a kernel casts the gated rows to float8."""
    cluster, m = load_cluster("h200"), WORLD * ROWS[index]
    hidden, wide = model.hidden, model.intermediate
    total = dict.fromkeys(("unfused", "flux", "gemm", "lists"), 0.0)
    shapes = {"dispatch_grouped_gemm": (2 * wide, hidden), "grouped_gemm_combine": (hidden, wide)}
    for name, shape in shapes.items():
        sizes = {"experts": model.experts, "topk": TOPK}
        of_call = calls(name, m, shape, "float8_e4m3fn", WORLD, sizes, cluster)
        problem, library, fused = of_call
        total["unfused"] += 1e3 * library.total_ms
        total["flux"] += 1e3 * fused.total_ms
        total["gemm"] += 1e3 * fused.gemm_ms
        total["lists"] += 1e3 * lists_ms(problem)
    memory = cluster.device.memory_gbs * 1e3 * ELEMENTWISE_SHARE
    cast = LAUNCH_US["cuda"] + ROWS[index] * TOPK * wide * 3 / memory
    row = {
        name: round(us + (0 if name in ("gemm", "lists") else cast), 1)
        for name, us in total.items()
    }
    published = {"mega": model.mega[index], "deep_ep": model.deep_ep[index]}
    off = {"off": round(row["flux"] / published["mega"] - 1, 4)}
    off["off_deep_ep"] = round(row["unfused"] / published["deep_ep"] - 1, 4)
    return {"model": model.name, "m": ROWS[index], **published, **row, **off}


def gather_rs() -> list[dict[str, Any]]:
    """Return the call of a script whose times are not published."""
    rows = []
    for on in ("flux-h800", "h200"):
        shape = GATHER_RS["n"], GATHER_RS["k"]
        of_call = calls(
            "grouped_gemm_combine",
            GATHER_RS["m"],
            shape,
            "bfloat16",
            WORLD,
            GATHER_RS["sizes"],
            load_cluster(on),
        )
        _, library, fused = of_call
        times = {
            "gemm_ms": fused.gemm_ms,
            "unfused_ms": library.total_ms,
            "flux_ms": fused.total_ms,
        }
        rows.append({"cluster": on, **{name: round(ms, 4) for name, ms in times.items()}})
    return rows


def ulysses() -> list[dict[str, Any]]:
    """Return both all-to-alls of heads on fast and slow links."""
    rows = []
    heads, dim = ULYSSES["heads"], ULYSSES["head_dim"]
    wide = heads * dim
    for on, world in LINKS:
        for m in ULYSSES["rows"]:
            row: dict[str, Any] = {"cluster": on, "world": world, "m": m}
            for name, shape, packed in (
                ("gemm_all_to_all", (3 * wide, wide), 3),
                ("all_to_all_gemm", (wide, wide), 1),
            ):
                sizes = {"heads": (heads,) * packed, "head_dim": dim}
                of_call = calls(name, m, shape, "bfloat16", world, sizes, load_cluster(on))
                _, library, fused = of_call
                row[name] = [round(library.total_ms, 4), round(fused.total_ms, 4)]
            rows.append(row)
    return rows


def document() -> dict[str, Any]:
    """Return everything, as it is written."""
    return {
        "pairs": [pair(model, index) for model in MODELS for index in range(len(ROWS))],
        "gather_rs": gather_rs(),
        "ulysses": ulysses(),
    }


def table(content: dict[str, Any]) -> str:
    """Return published and simulated times of layers, in us."""
    header = ["model", "M of a rank", "Mega MoE, published", "flux, simulated", "off"]
    header += ["two GEMMs", "lists of work", "DeepEP, published", "unfused, simulated", "off"]
    rows = []
    for row in content["pairs"]:
        cells = [row["model"], str(row["m"]), f"{row['mega']:.0f}", f"{row['flux']:.0f}"]
        off = signed(row["off"])
        cells.append(f"**{off}**" if abs(row["off"]) > LIMIT else off)
        cells += [f"{row[name]:.0f}" for name in ("gemm", "lists", "deep_ep", "unfused")]
        rows.append([*cells, signed(row["off_deep_ep"])])
    return markdown(header, rows)


LIMIT = 0.15
"""Deviations beyond it are set in bold, and explained in benchmarks/results/runs.md."""


def other_table(content: dict[str, Any]) -> str:
    """Return simulated times of the other calls, in ms."""
    rows = [
        [f"test_moe_gather_rs, {row['cluster'].removeprefix('flux-')}", "8", str(GATHER_RS["m"])]
        + [f"{row[name]:.3f}" for name in ("gemm_ms", "unfused_ms", "flux_ms")]
        for row in content["gather_rs"]
    ]
    for row in content["ulysses"]:
        for name in ("gemm_all_to_all", "all_to_all_gemm"):
            unfused, fused = row[name]
            where = f"{name}, {row['cluster'].removeprefix('flux-')}"
            rows.append([where, str(row["world"]), str(row["m"]), "-"])
            rows[-1] += [f"{unfused:.3f}", f"{fused:.3f}"]
    for row in rows:
        row.append(signed(1 - float(row[5]) / float(row[4])))
    header = ["op, cluster", "ranks", "M", "GEMM ms", "unfused ms", "flux ms", "gain"]
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=RESULT)
    keep(document(), parser.parse_args().target)


if __name__ == "__main__":
    main()
