"""One rank's part of `flux trace op`: one op in several ways, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from flux.bench import launch
from flux.bench.config import ONE_GPU, BenchConfig
from flux.bench.places import open_place
from flux.core.collector import paused_collector
from flux.core.env import TRACE
from flux.core.events import Trace
from flux.core.knobs import Knobs
from flux.core.sparse_problem import SparseProblem
from flux.kernels.registry import Registry
from flux.launch.progress import Progress
from flux.trace.record import record_op

METHODS = ("flux", "medium", "unfused")
_GAP = 0.05
"""Gap between two methods in one trace, as a part of the longest one."""


@dataclass(frozen=True)
class Wanted:
    """What to trace, except the problem.

    Attributes:
        methods: of METHODS, in this order.
        calls: number of calls of each.
        capacity: events of each lane.
    """

    methods: tuple[str, ...]
    calls: int
    capacity: int

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if len(set(self.methods)) != len(self.methods):
            raise ValueError(f"each method must be given once, got {', '.join(self.methods)}")
        if not 1 <= self.calls <= 1000:
            raise ValueError(f"calls must be in [1, 1000], got {self.calls}")
        if not 1 <= self.capacity <= 1_000_000:
            raise ValueError(f"capacity must be in [1, 1000000], got {self.capacity}")


def traced(config: BenchConfig, wanted: Wanted, progress: Progress) -> Trace | None:
    """Return the trace; under torchrun None except on rank 0.

    Raises:
        RankFailedError: as flux.bench.launch.on_ranks.
        HostsUnavailableError: as flux.bench.launch.on_ranks.
    """
    trace: Trace | None = launch.on_ranks(trace_methods, config, wanted, progress)
    return trace


def reason_unsupported(config: BenchConfig, wanted: Wanted) -> str | None:
    """Return what is missing for such a trace on GPUs; None if nothing is."""
    if config.backend != "cuda":
        return None
    if config.transport in ONE_GPU and "unfused" in wanted.methods:
        return f"--transport {config.transport} has no library collective: omit the method unfused"
    problem = config.problem
    if problem.op.reduces and problem.nodes == 1 and "medium" in wanted.methods:
        return f"copy engines send partials of {problem.op.name} in the method medium: omit it"
    if problem.sparse and "medium" in wanted.methods:
        return f"kernels of {problem.name} have no method medium: omit it"
    built = Registry.load().traced.values()
    op = problem.spec().kernel if isinstance(problem, SparseProblem) else problem.op.kernel
    if wanted.methods != ("unfused",) and not any(kernel.config.op == op for kernel in built):
        return f"no trace build of {op} kernels was found: run `flux compile --trace`"
    return None


def trace_methods(job: tuple[BenchConfig, Wanted], rank: int, progress: Progress) -> Trace | None:
    """Trace the methods on this rank; return the trace on rank 0."""
    config, wanted = job
    place = open_place(config, rank)
    try:
        inputs = place.inputs(config.seed)
        traces = []
        for number, name in enumerate(wanted.methods):
            progress(f"tracing {name}", number, len(wanted.methods))
            on_gpu = config.backend == "cuda" and name != "unfused"
            with TRACE.during("1") if on_gpu else nullcontext():  # kernels of a trace build
                method = place.fused(name, config, _tuning(config, name))
            place.give(inputs, [method])
            try:
                with torch.no_grad(), paused_collector(collect=True):
                    traces.append(
                        record_op(
                            method.ops,
                            lambda method=method: method(inputs),  # type: ignore[misc]
                            calls=wanted.calls,
                            warmup=config.warmup,
                            capacity=wanted.capacity,
                        )
                    )
            finally:
                method.close()
    finally:
        place.close()
    done = [trace for trace in traces if trace is not None]
    return in_a_row(wanted.methods, done) if done else None


def _tuning(config: BenchConfig, name: str) -> Knobs | None:
    if name == "flux":
        return Knobs(**config.knobs) if config.knobs else None
    return Knobs(path=name)


def in_a_row(methods: Sequence[str], traces: Sequence[Trace]) -> Trace:
    """Return one trace of several methods, one after the other on all ranks."""
    if len(traces) == 1 and len(methods) == 1:
        of_method = {**traces[0].metadata, "begins_us": 0.0}
        return Trace(_named(methods[0], traces[0], 0.0), {"methods": {methods[0]: of_method}})
    lengths = [max(calls[-1][1] for calls in trace.metadata["calls"].values()) for trace in traces]
    events, metadata, begins = [], dict[str, Any](), 0.0
    for method, trace, length in zip(methods, traces, lengths, strict=True):
        events += _named(method, trace, begins)
        metadata[method] = {**trace.metadata, "begins_us": begins}
        begins += length + _GAP * max(lengths)
    return Trace(events, {"methods": metadata})


def _named(method: str, trace: Trace, begins_us: float) -> list[Any]:
    return [
        replace(
            event,
            start_us=event.start_us + begins_us,
            details={"method": method, **event.details},
        )
        for event in trace.events
    ]
