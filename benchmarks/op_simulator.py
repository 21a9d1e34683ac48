"""Compare the op simulator with published times of fused ops. Runs without a GPU, in a minute.

    python benchmarks/op_simulator.py benchmarks/results/simulator/op.json

The only published time that enters is the GEMM's of the same row; links and devices are those of
tuning/clusters. Exposed communication and total are never inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, keep, markdown, percent

from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.machine.cluster import Cluster, load_cluster
from flux.opsim.simulator import Simulated, legal_knobs, simulate, unfused
from flux.select.kernel import default_kernel

RESULT = ROOT / "benchmarks" / "results" / "simulator" / "op.json"
WORLD = 8
SIZES = {"ag_gemm": (49152, 12288), "gemm_rs": (12288, 49152)}
"""N and K of each op: the two layers of GPT-3 175B's MLP (Flux paper, section 5.1)."""

AS_PUBLISHED = Knobs(sm_margin=0)
"""The published kernels leave no multiprocessors to others."""


class Published(NamedTuple):
    """One row of a published table; times in ms."""

    cluster: str
    op: str
    torch_gemm: float
    torch_exposed: float
    flux_gemm: float
    flux_exposed: float


# github.com/bytedance/flux, README.md and docs/performance_report.md: M = 4096, fp16, 8 ranks.
PUBLISHED = (
    Published("flux-a800", "ag_gemm", 2.438, 0.662, 2.378, 0.091),
    Published("flux-a800", "gemm_rs", 2.453, 0.646, 2.429, 0.080),
    Published("flux-h800", "ag_gemm", 0.846, 0.583, 0.814, 0.143),
    Published("flux-h800", "gemm_rs", 0.818, 0.590, 0.822, 0.111),
    Published("flux-l20-pcie", "ag_gemm", 5.746, 11.200, 5.316, 0.587),
    Published("flux-l20-pcie", "gemm_rs", 5.392, 12.273, 5.389, 0.341),
)
ROWS = 4096


class PublishedExperts(NamedTuple):
    """The two layers of a mixture of experts on 8 ranks; times in ms of torch and of flux."""

    cluster: str
    experts: int
    topk: int
    torch: tuple[float, float]
    flux: tuple[float, float]


# github.com/bytedance/flux, docs/performance.md: M = N = K = 8192, tensor parallelism alone.
EXPERTS = (
    PublishedExperts("flux-l20-pcie", 32, 4, (26.792, 42.092), (7.813, 7.976)),
    PublishedExperts("flux-l20-pcie", 8, 2, (19.734, 28.046), (5.901, 6.744)),
    PublishedExperts("flux-h800", 32, 4, (4.702, 10.452), (1.146, 1.863)),
    PublishedExperts("flux-h800", 8, 2, (2.124, 4.561), (0.657, 1.019)),
)
EXPERTS_SIZE = 8192
EXPERTS_RESULT = RESULT.with_name("experts.json")


class Ranges(NamedTuple):
    """Lowest and highest figures of a cluster over both ops and all M.

    Overlap efficiencies of flux and of medium, and the time of medium over that of flux.
    """

    cluster: str
    rows: tuple[int, ...]
    flux: tuple[float, float]
    medium: tuple[float, float]
    over_medium: tuple[float, float]


LARGE, SMALL = (1024, 2048, 4096, 8192), (64, 512)
# Flux paper, section 5.1, figures 11 to 14, bf16, 8 ranks; medium is TransformerEngine.
PAPER = (
    Ranges("flux-a100-pcie", LARGE, (0.41, 0.57), (-1.25, 0.36), (1.20, 3.25)),
    Ranges("flux-a100-nvlink", LARGE, (0.36, 0.96), (-0.99, 0.74), (1.01, 1.33)),
    Ranges("flux-h800", LARGE, (0.37, 0.93), (-0.40, 0.80), (1.10, 1.51)),
    Ranges("flux-a100-pcie", SMALL, (-0.02, 0.41), (-2.13, -0.36), (1.45, 3.21)),
    Ranges("flux-a100-nvlink", SMALL, (0.14, 0.88), (-3.25, -0.49), (1.33, 4.68)),
    Ranges("flux-h800", SMALL, (-1.65, -0.82), (-1.42, -0.93), (0.95, 1.03)),
)


class Sweep(NamedTuple):
    """One knob varied, everything else at its default. The paper has charts without numbers.

    Attributes:
        figure: of the Flux paper.
        knob: a field of Knobs.
        published: what the paper says of it.
        cluster: of the calls.
        op: of the calls.
        rows: M.
        values: of the knob; none: chunk / 1, 2, 4 ... down to the rows of a GEMM tile.
    """

    figure: int
    knob: str
    published: str
    cluster: str
    op: str
    rows: tuple[int, ...]
    values: tuple[str, ...] = ()


_SWIZZLE = ("swizzle", "always faster with, most at 8192", "flux-a100-nvlink")
_DIRECTION = ("direction", "which is faster depends on the links")
SWEEPS = (
    *(Sweep(8, *_SWIZZLE, op, (1024, 8192), ("rank_shift", "none")) for op in SIZES),
    *(
        Sweep(9, *_DIRECTION, cluster, "ag_gemm", LARGE, ("push", "pull"))
        for cluster in ("flux-a100-pcie", "flux-a100-nvlink")
    ),
    Sweep(10, "comm_tile_rows", "differ, no clear trend", "flux-a100-nvlink", "ag_gemm", LARGE),
)


class TwoHosts(NamedTuple):
    """The best of both ops on a cluster: speed-up over PyTorch and overlap efficiency."""

    cluster: str
    speedup: float
    efficiency: float


# Flux paper, section 5.1 and figure 15: M = 8192, bf16, 16 ranks on two hosts, "up to".
PAPER_TWO_HOSTS = (
    TwoHosts("flux-a100-pcie", 1.32, 0.18),
    TwoHosts("flux-a100-nvlink", 1.57, 0.74),
    TwoHosts("flux-h800", 1.55, 0.56),
)
TWO_HOSTS_ROWS = 8192


class Variant(NamedTuple):
    """A published row again, on a cluster that differs in one assumption."""

    cluster: str
    op: str
    what: str
    part: str
    field: str
    value: float


VARIANTS = (
    Variant("flux-a800", "gemm_rs", "no reduction", "device", "memory_gbs", 1e9),
    Variant("flux-l20-pcie", "gemm_rs", "no limit between processors", "link", "numa_gbs", 0.0),
    Variant("flux-l20-pcie", "ag_gemm", "links a sixth slower", "link", "gbs", 26.7),
)


def best(problem: Problem, cluster: str | Cluster, gemm_ms: float | None = None) -> Simulated:
    """Return the fastest call over all orders and directions, as tuning would find it."""
    if isinstance(cluster, str):
        cluster = load_cluster(cluster)
    runs = [
        simulate(problem, cluster, knobs, gemm_ms=gemm_ms)
        for knobs, _ in legal_knobs(problem, cluster, AS_PUBLISHED)
    ]
    return min(runs, key=lambda run: run.total_ms)


def line(published: Published, method: str) -> dict[str, Any]:
    """Return one method of a published row, and its simulation."""
    op = published.op
    problem = Problem(Op[op], ROWS, *SIZES[op], "float16", WORLD)
    if method == "torch":
        gemm, exposed = published.torch_gemm, published.torch_exposed
        run = unfused(problem, load_cluster(published.cluster), gemm)
    else:
        gemm, exposed = published.flux_gemm, published.flux_exposed
        run = best(problem, published.cluster, gemm)
    return {
        "cluster": published.cluster,
        "op": op,
        "method": method,
        "gemm_ms": gemm,
        "published_exposed_ms": exposed,
        "simulated_exposed_ms": round(run.ect_ms, 4),
        "published_total_ms": round(gemm + exposed, 4),
        "simulated_total_ms": round(run.total_ms, 4),
        "total_off": round(run.total_ms / (gemm + exposed) - 1, 4),
        "exposed_off": round(run.ect_ms / exposed - 1, 4),
        "order": run.knobs.order,
        "direction": run.knobs.direction,
    }


def experts(published: PublishedExperts) -> list[dict[str, Any]]:
    """Return both layers of a published mixture of experts, and their simulation."""
    cluster, size = load_cluster(published.cluster), EXPERTS_SIZE
    rows = []
    for layer, op in enumerate(SIZES):
        of_experts = {"experts": published.experts, "topk": published.topk}
        sizes = (size * published.topk, size, size, "bfloat16", WORLD)
        problem = Problem(Op[op], *sizes, **of_experts)
        library, fused = unfused(problem, cluster), best(problem, cluster)
        rows.append(
            {
                "cluster": published.cluster,
                "op": op,
                **of_experts,
                "gemm_ms": round(library.gemm_ms, 4),
                "comm_ms": round(library.comm_ms, 4),
                "unfused_ms": round(library.total_ms, 4),
                "flux_ms": round(fused.total_ms, 4),
                "published_torch_ms": published.torch[layer],
                "published_flux_ms": published.flux[layer],
                "off": round(fused.total_ms / published.flux[layer] - 1, 4),
            }
        )
    return rows


def ranges(published: Ranges) -> dict[str, Any]:
    """Return the simulated efficiencies and a published range."""
    cluster = load_cluster(published.cluster)
    shapes = []
    for op, sizes in SIZES.items():
        for m in published.rows:
            problem = Problem(Op[op], m, *sizes, "bfloat16", WORLD)
            library = unfused(problem, cluster)
            fused = best(problem, published.cluster)
            ring = simulate(problem, cluster, replace(AS_PUBLISHED, path="medium"))
            shapes.append(
                {
                    "op": op,
                    "m": m,
                    "gemm_ms": round(library.gemm_ms, 4),
                    "unfused_ms": round(library.total_ms, 4),
                    "flux_ms": round(fused.total_ms, 4),
                    "medium_ms": round(ring.total_ms, 4),
                    "flux": round(1 - fused.ect_ms / library.ect_ms, 4),
                    "medium": round(1 - ring.ect_ms / library.ect_ms, 4),
                }
            )
    return {
        "cluster": published.cluster,
        "published_flux": list(published.flux),
        "published_medium": list(published.medium),
        "published_over_medium": list(published.over_medium),
        "shapes": shapes,
    }


def sweep(varied: Sweep) -> dict[str, Any]:
    """Return the time of every value of a knob, at every M."""
    cluster = load_cluster(varied.cluster)
    calls = []
    for m in varied.rows:
        problem = Problem(Op[varied.op], m, *SIZES[varied.op], "bfloat16", WORLD)
        values: list[Any] = list(varied.values) or tile_rows(problem, cluster)
        for value in values:
            run = simulate(problem, cluster, replace(AS_PUBLISHED, **{varied.knob: value}))
            times = {"ms": round(run.total_ms, 4), "ect_ms": round(run.ect_ms, 4)}
            calls.append({"m": m, varied.knob: value, **times})
    return {**varied._asdict(), "calls": calls}


def tile_rows(problem: Problem, cluster: Cluster) -> list[int]:
    """Return the rows of communication tiles that the paper tries: chunk, chunk / 2, ..."""
    least = min(default_kernel(problem, cluster, AS_PUBLISHED).tile[0], problem.chunk)
    rows = [problem.chunk]
    while rows[-1] % 2 == 0 and rows[-1] // 2 >= least:
        rows.append(rows[-1] // 2)
    return rows


def two_hosts(published: TwoHosts) -> dict[str, Any]:
    """Return both ops between two hosts, and the published best of them."""
    cluster = load_cluster(published.cluster)
    ops = []
    for op, sizes in SIZES.items():
        problem = Problem(Op[op], TWO_HOSTS_ROWS, *sizes, "bfloat16", 2 * WORLD, 2)
        library, fused = unfused(problem, cluster), simulate(problem, cluster, AS_PUBLISHED)
        ops.append(
            {
                "op": op,
                "gemm_ms": round(fused.gemm_ms, 4),
                "unfused_ms": round(library.total_ms, 4),
                "flux_ms": round(fused.total_ms, 4),
                "speedup": round(library.total_ms / fused.total_ms, 4),
                "efficiency": round(1 - fused.ect_ms / library.ect_ms, 4),
            }
        )
    return {
        "cluster": published.cluster,
        "published_speedup": published.speedup,
        "published_efficiency": published.efficiency,
        "ops": ops,
    }


def variant(assumed: Variant) -> dict[str, Any]:
    """Return exposed communication of a published row on the changed cluster."""
    (row,) = (r for r in PUBLISHED if (r.cluster, r.op) == (assumed.cluster, assumed.op))
    cluster = load_cluster(assumed.cluster)
    part = replace(getattr(cluster, assumed.part), **{assumed.field: assumed.value})
    problem = Problem(Op[row.op], ROWS, *SIZES[row.op], "float16", WORLD)
    run = best(problem, replace(cluster, **{assumed.part: part}), row.flux_gemm)
    return {
        "cluster": row.cluster,
        "op": row.op,
        "what": assumed.what,
        "published_exposed_ms": row.flux_exposed,
        "simulated_exposed_ms": round(run.ect_ms, 4),
    }


def document() -> dict[str, Any]:
    """Return everything, as it is written."""
    return {
        "times": [line(row, method) for row in PUBLISHED for method in ("torch", "flux")],
        "variants": [variant(row) for row in VARIANTS],
        "efficiencies": [ranges(row) for row in PAPER],
        "sweeps": [sweep(row) for row in SWEEPS],
        "two_hosts": [two_hosts(row) for row in PAPER_TWO_HOSTS],
    }


def signed(share: float) -> str:
    """Return a deviation with its sign."""
    return f"{share:+.0%}"


def table(content: dict[str, Any]) -> str:
    """Return published and simulated times."""
    header = ["cluster", "op", "method", "GEMM ms", "total, published", "simulated", "off"]
    header += ["exposed, published", "simulated", "off"]
    rows = []
    for row in content["times"]:
        cells = [row["cluster"].removeprefix("flux-"), Op[row["op"]].label, row["method"]]
        cells.append(f"{row['gemm_ms']:.3f}")
        for part in ("total", "exposed"):
            cells += [f"{row[f'{who}_{part}_ms']:.3f}" for who in ("published", "simulated")]
            off = signed(row[f"{part}_off"])
            cells.append(f"**{off}**" if abs(row[f"{part}_off"]) > LIMITS[part] else off)
        rows.append(cells)
    return markdown(header, rows)


def scatter_ms(cluster: str) -> float:
    """Return the spread of the published GEMM times of a cluster, all of equal operations."""
    rows = [row for row in PUBLISHED if row.cluster == cluster]
    times = [time for row in rows for time in (row.torch_gemm, row.flux_gemm)]
    return max(times) - min(times)


def variants_table(content: dict[str, Any]) -> str:
    """Return the rows that are off, the spread of published GEMM times, and changed assumptions."""
    header = ["cluster", "op", "exposed, published", "simulated", "off by"]
    header += ["spread of GEMM times", "with another assumption"]
    rows = []
    for row in content["times"]:
        if abs(row["exposed_off"]) <= LIMITS["exposed"]:
            continue
        others = [
            f"{variant['what']}: {variant['simulated_exposed_ms']:.3f}"
            for variant in content["variants"]
            if (variant["cluster"], variant["op"]) == (row["cluster"], row["op"])
        ]
        published, simulated = row["published_exposed_ms"], row["simulated_exposed_ms"]
        rows.append(
            [
                row["cluster"].removeprefix("flux-"),
                Op[row["op"]].label,
                f"{published:.3f}",
                f"{simulated:.3f}",
                f"{simulated - published:+.3f}",
                f"{scatter_ms(row['cluster']):.3f}",
                "; ".join(others) or "-",
            ]
        )
    return markdown(header, rows)


LIMITS = {"total": 0.1, "exposed": 0.3}
"""Deviations beyond these are set in bold, and explained in docs/use/simulator.md."""


def _range(values: Sequence[float], form: str = ".0%") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def ranges_table(content: dict[str, Any]) -> str:
    """Return published and simulated overlap efficiencies, and times of medium over flux."""
    header = ["cluster", "M", "flux, published", "simulated", "AGGemm by M", "GemmRS by M"]
    header += ["medium, published", "simulated", "medium/flux, published", "simulated"]
    rows = []
    for row in content["efficiencies"]:
        shapes = row["shapes"]
        by_op = {op: ", ".join(percent(s["flux"]) for s in shapes if s["op"] == op) for op in SIZES}
        m = sorted({shape["m"] for shape in shapes})
        rows.append(
            [
                row["cluster"].removeprefix("flux-"),
                ", ".join(map(str, m)),
                _range(row["published_flux"]),
                _range([shape["flux"] for shape in shapes]),
                *by_op.values(),
                _range(row["published_medium"]),
                _range([shape["medium"] for shape in shapes]),
                _range(row["published_over_medium"], ".2f"),
                _range([shape["medium_ms"] / shape["flux_ms"] for shape in shapes], ".2f"),
            ]
        )
    return markdown(header, rows)


def sweeps_table(content: dict[str, Any]) -> str:
    """Return, by M, the time of the second value over the first, or of the slowest over the best.

    Where a knob has more than two values, the fastest one stands behind the ratio.
    """
    header = ["figure", "cluster", "op", "ratio", *map(str, LARGE), "paper"]
    rows = []
    for row in content["sweeps"]:
        values, cells = row["values"], []
        for m in LARGE:
            calls = [call for call in row["calls"] if call["m"] == m]
            times = [call["ms"] for call in calls]
            if not times:
                cells.append("-")
            elif values:
                cells.append(f"{times[1] / times[0]:.3f}")
            else:
                fastest = min(calls, key=lambda call: call["ms"])[row["knob"]]
                cells.append(f"{max(times) / min(times):.3f} ({fastest})")
        what = f"{values[1]}/{values[0]}" if values else "slowest/fastest tile (its rows)"
        cluster = row["cluster"].removeprefix("flux-")
        label = Op[row["op"]].label
        rows.append([str(row["figure"]), cluster, label, what, *cells, row["published"]])
    return markdown(header, rows)


def two_hosts_table(content: dict[str, Any]) -> str:
    """Return the figures between two hosts, and the published best of both ops."""
    header = ["cluster", "speed-up, published", "AGGemm", "GemmRS"]
    header += ["efficiency, published", "AGGemm", "GemmRS"]
    rows = []
    for row in content["two_hosts"]:
        ops = [next(op for op in row["ops"] if op["op"] == name) for name in SIZES]
        rows.append(
            [
                row["cluster"].removeprefix("flux-"),
                f"up to {row['published_speedup']:.2f}",
                *(f"{op['speedup']:.2f}" for op in ops),
                f"up to {row['published_efficiency']:.0%}",
                *(percent(op["efficiency"]) for op in ops),
            ]
        )
    return markdown(header, rows)


def experts_table(content: dict[str, Any]) -> str:
    """Return published and simulated times of mixtures of experts, in ms."""
    header = ["cluster", "layer", "experts, topk", "GEMM", "collective", "unfused, published"]
    header += ["simulated", "flux, published", "simulated", "off"]
    rows = []
    for row in content["rows"]:
        layer = "AllGather" if Op[row["op"]].gathers else "ReduceScatter"
        times = ("gemm", "comm", "published_torch", "unfused", "published_flux", "flux")
        cells = [row["cluster"].removeprefix("flux-"), layer, f"{row['experts']}, {row['topk']}"]
        cells += [f"{row[f'{time}_ms']:.3f}" for time in times]
        rows.append([*cells, signed(row["off"])])
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=RESULT)
    keep(document(), parser.parse_args().target)
    rows = [row for published in EXPERTS for row in experts(published)]
    keep({"size": EXPERTS_SIZE, "rows": rows}, EXPERTS_RESULT)


if __name__ == "__main__":
    main()
