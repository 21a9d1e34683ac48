"""The output of the op simulator: the JSON object of `flux bench op`, tables, and a timeline.

The timeline is of rank 0. A column is a slice of time, and its shade is the share in use:

    GEMM    of the blocks that run at once, those that multiply
    link    any transfer from or to the rank; unfused: the library's collective
    sums    the reduction of partials, and copies inside the GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux.bench.config import link_bytes_minimum
from flux.bench.metrics import Metrics, evaluate
from flux.bench.report import FIGURES, number
from flux.core.events import Kind
from flux.core.problem import Problem
from flux.core.spans import Span, union
from flux.core.version import __version__
from flux.machine.cluster import Cluster
from flux.opsim.simulator import Simulated, topology_of

SHADES = " ░▒▓█"
WIDTH = 64
"""Columns of a timeline."""


@dataclass(frozen=True)
class OrderComparison:
    """All simulated calls of one problem on one cluster.

    Attributes:
        medium: one chunk per rank round a ring; None for experts.
        in_kernel: the GEMM's blocks push the rows; None where that path does not exist.
        flux: pairs of a call and the names of the orders that make its schedule; fastest first.
        gemm_given: whether the GEMM's time was given; else it is the roofline's.
        taken: multiprocessors that other kernels hold.
    """

    cluster: Cluster
    unfused: Simulated
    medium: Simulated | None
    flux: Sequence[tuple[Simulated, tuple[str, ...]]]
    gemm_given: bool = False
    in_kernel: Simulated | None = None
    taken: int = 0

    @property
    def calls(self) -> list[Simulated]:
        """One call of each method."""
        others = [call for call in (self.medium, self.in_kernel) if call is not None]
        return [self.unfused, *others, self.best]

    @property
    def best(self) -> Simulated:
        """The fastest fused call."""
        return self.flux[0][0]

    def metrics(self, call: Simulated) -> Metrics:
        """Return the figures of one call, beside the unfused path."""
        return evaluate(call.total_ms, call.gemm_ms, self.unfused.comm_ms, self.unfused.total_ms)


def _figures(comparison: OrderComparison, call: Simulated) -> dict[str, Any]:
    metrics = comparison.metrics(call)
    return {name: getattr(metrics, name) for name in FIGURES}


def document(comparison: OrderComparison, command: list[str] | None = None) -> dict[str, Any]:
    """Return the object of `flux bench op --json` with "simulated": true.

    What only a measurement has (errors, skew, CPU time) is null. Added: ``cluster``, ``gemm_from``
    (``given`` | ``roofline``), ``taken_multiprocessors``, ``kernel``, and ``schedules``: every
    order and direction with its figures, the fastest first.
    """
    unfused, problem = comparison.unfused, comparison.unfused.problem
    unknown = ("overlap_efficiency_interval", "max_abs_err", "comm_cpu_ms", "link_bytes")
    methods = {
        call.method: _figures(comparison, call)
        | dict.fromkeys(unknown)
        | {
            "repeats_ms": [call.total_ms],
            "knobs": {name: it for name, it in asdict(call.knobs).items() if it is not None},
        }
        for call in comparison.calls
    }
    schedules = [
        {
            "orders": list(orders),
            "direction": call.knobs.direction,
            **_figures(comparison, call),
            "ranks_ms": list(call.ranks_ms),
        }
        for call, orders in comparison.flux
    ]
    kernel = comparison.best.kernel
    hosts = topology_of(problem, comparison.cluster).hosts
    parts = {"gemm/whole": unfused.gemm_ms, "comm/library": unfused.comm_ms}
    return {
        **problem.as_dict(),
        "simulated": True,
        "cluster": comparison.cluster.name,
        "hosts": problem.nodes,
        "backend": "cuda",
        "transport": "symm_mem" if problem.nodes == 1 else "send_recv",
        "device": comparison.cluster.device.name,
        "versions": {"flux": __version__},
        "gemm_from": "given" if comparison.gemm_given else "roofline",
        "taken_multiprocessors": comparison.taken,
        "kernel": None if kernel is None else kernel.name,
        "methods": methods,
        "schedules": schedules,
        **dict.fromkeys(("link_rate", "threads", "seed", "start_skew_ms")),
        "link_bytes_minimum": link_bytes_minimum(problem, hosts),
        "repeats": 1,
        "warmup": 0,
        "parts_ms": parts,
        "parts_repeats_ms": {name: [time] for name, time in parts.items()},
        "command": command,
    }


def _collective(problem: Problem) -> str:
    return "all_to_all" if problem.variant else problem.op.collective


def table(comparison: OrderComparison) -> Table:
    """Return a row for each method; for flux for each order and direction, the fastest first."""
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("method", style="bold", no_wrap=True)
    view.add_column("orders")
    view.add_column("direction", no_wrap=True)
    for name in ("overall\nms", "ECT\nms", "overlap\neff", "bounded\neff", "vs\nunfused"):
        view.add_column(name, justify="right", no_wrap=True)
    medium, unfused, in_kernel = comparison.medium, comparison.unfused, comparison.in_kernel
    rows = [
        *([] if in_kernel is None else [(in_kernel, ("direct",))]),
        *comparison.flux,
        *([] if medium is None else [(medium, (str(medium.knobs.order),))]),
        (unfused, (_collective(unfused.problem),)),
    ]
    for call, orders in rows:
        figures = comparison.metrics(call)
        view.add_row(
            call.method,
            ", ".join(orders),
            call.knobs.direction or "-",
            f"{figures.overall_ms:.3f}",
            f"{figures.ect_ms:.3f}",
            number(figures.overlap_efficiency, ".0%"),
            number(figures.bounded_efficiency, ".0%"),
            number(figures.speedup_vs_unfused, ".2f", "x"),
        )
    return view


def shades(spans: Sequence[Span], lanes: int, end_us: float, width: int = WIDTH) -> str:
    """Return a line of ``width`` characters for [0, ``end_us``]."""
    used = [0.0] * width
    step = end_us / width
    for start, end in spans:
        for column in range(max(int(start / step), 0), min(int(end / step) + 1, width)):
            used[column] += max(0.0, min(end, (column + 1) * step) - max(start, column * step))
    line = ""
    for time in used:
        share = min(time / (step * lanes), 1.0)
        # Any use shows, and only full use is black.
        line += SHADES[0 if share < 1e-3 else min(1 + int(share * 3 + 0.01), 4)]
    return line


def timeline(call: Simulated, end_us: float, rank: int = 0) -> dict[str, str]:
    """Return the lines of one rank, by name; without those in which nothing happens."""
    by_kind: dict[Kind, list[Span]] = {}
    for event in call.events():
        if event.rank == rank:
            by_kind.setdefault(event.kind, []).append((event.start_us, event.end_us))
    if call.method == "unfused":
        link = by_kind.pop(Kind.copy, [])
        sums: list[Span] = []
    else:
        link = [(m.start_us, m.end_us) for m in call.moves if rank in (m.src, m.dst)]
        sums = by_kind.get(Kind.reduce, [])
    lines = {
        "GEMM": shades(by_kind.get(Kind.gemm, []), max(call.blocks, 1), end_us),
        "link": shades(union(link), 1, end_us),
        "sums": shades(union(sums), 1, end_us),
    }
    return {name: line for name, line in lines.items() if line.strip()}


def show(comparison: OrderComparison, console: Console) -> None:
    """Print headline, table, timelines of rank 0, and what the figures rest on."""
    problem, cluster = comparison.unfused.problem, comparison.cluster
    where = f", {problem.nodes} hosts" if problem.nodes > 1 else ""
    tokens, rows = problem.m if problem.variant else problem.m // problem.topk, ""
    if problem.experts > 1:
        rows = f", {problem.experts} experts, {problem.topk} of each token"
    console.print(
        Text(
            f"{problem.name} {tokens} x {problem.n} x {problem.k} (M x N x K){rows} "
            f"{problem.dtype}, {problem.world} ranks{where}, simulated on {cluster.name}",
            "bold",
        )
    )
    console.print(table(comparison))
    end = 1e3 * max(call.total_ms for call in comparison.calls)
    console.print(Text(f"rank 0, 0 to {end:.0f} us", "dim"))
    for call in comparison.calls:
        for row, (name, line) in enumerate(timeline(call, end).items()):
            label = call.method if row == 0 else ""
            console.print(Text(f"{label:<9} {name}  |{line}|"), soft_wrap=True)
    unfused, best = comparison.unfused, comparison.best
    source = "given" if comparison.gemm_given else "from the roofline of the cost model"
    kernel = "" if best.kernel is None else f"; kernel {best.kernel.name}"
    console.print(
        Text(
            f"GEMM {unfused.gemm_ms:.3f} ms ({source}), {_collective(problem)} of the library "
            f"{unfused.comm_ms:.3f} ms{kernel}\nflux: {best.knobs}\n"
            "Simulated, not measured: docs/use/simulator.md says how far it is off.",
            "dim",
        )
    )
