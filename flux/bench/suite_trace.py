"""Record the timeline of `flux bench suite`: one call of flux's fused path, on new ranks."""

from __future__ import annotations

from flux.bench.config import BenchConfig
from flux.bench.places import open_place
from flux.bench.results import CallTimeline
from flux.core.knobs import Knobs
from flux.launch.progress import Progress
from flux.trace import Trace, record_op


def trace_rank(job: tuple[BenchConfig, None], rank: int, progress: Progress) -> Trace | None:
    """Trace one call on this rank; return the trace on rank 0."""
    config, _ = job
    place = open_place(config, rank)
    method = place.fused("flux", config, Knobs(path="fused"))
    try:
        inputs = place.inputs(config.seed)
        return record_op(method.ops, lambda: method(inputs))
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
    title = f"{problem.name} {problem.m} x {problem.n} x {problem.k}, {problem.world} ranks"
    if trace.dropped:
        title += f"; {trace.dropped} events were dropped: the buffer was full"
    return CallTimeline(title, trace.events)
