"""Record the timeline of `flux bench suite`: one call of flux's fused path, on new ranks."""

from __future__ import annotations

import flux
from flux.bench.config import BenchConfig
from flux.bench.methods import Fused
from flux.bench.reference import make_inputs
from flux.bench.results import CallTimeline
from flux.launch.progress import Progress
from flux.trace import Trace, record_op


def trace_rank(job: tuple[BenchConfig, None], rank: int, progress: Progress) -> Trace | None:
    """Trace one call on this rank; return the trace on rank 0."""
    config, _ = job
    method = Fused("flux", config, flux.Knobs(path="fused"))
    try:
        inputs = make_inputs(config.problem, rank, config.seed)
        return record_op(method.op, lambda: method(inputs))
    finally:
        method.close()


def reason_unsupported(config: BenchConfig) -> str | None:
    """Return why no timeline can be recorded with this configuration; None if it can."""
    if config.backend == "cuda":
        return "only the CPU backend is traced"
    return "a single rank does not communicate" if config.problem.world == 1 else None


def timeline_of(config: BenchConfig, trace: Trace) -> CallTimeline:
    """Return the timeline of a traced call."""
    problem = config.problem
    title = f"{problem.op.name} {problem.m} x {problem.n} x {problem.k}, {problem.world} ranks"
    if trace.dropped:
        title += f"; {trace.dropped} events were dropped: the buffer was full"
    return CallTimeline(title, trace.events)
