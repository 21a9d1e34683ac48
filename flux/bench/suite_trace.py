"""The timeline of `flux bench suite`: one call of flux's fused path, traced on ranks of its own."""

from __future__ import annotations

from typing import Any

import flux
from flux.trace import Trace, record_op

from .methods import Fused
from .op import Progress
from .problem import BenchConfig
from .reference import make_inputs
from .results import timeline_of


def trace_rank(config: BenchConfig, rank: int, progress: Progress) -> Trace | None:
    """Entry of every rank; the trace on rank 0."""
    method = Fused("flux", config, flux.Knobs(path="fused"))
    try:
        inputs = make_inputs(config.problem, rank, config.seed)
        return record_op(method.op, lambda: method(inputs))
    finally:
        method.close()


def why_not(config: BenchConfig) -> str | None:
    """Why no timeline can be recorded with this configuration; None if it can."""
    if config.backend == "cuda":
        return "only the CPU backend is traced"
    return "one rank waits for nobody" if config.problem.world == 1 else None


def put(document: dict[str, Any], config: BenchConfig, trace: Trace) -> None:
    """Put the timeline of one call into the document."""
    problem = config.problem
    title = f"{problem.op} {problem.m} x {problem.n} x {problem.k}, {problem.world} ranks"
    if trace.dropped:
        title += f"; {trace.dropped} events had no room and are missing"
    document["timeline"] = timeline_of(trace.events, title)
