"""One rank's part of `flux bench model`: check, time all forms interleaved, split the time.

overall   = compute + exposed + host
host      time outside of operators: Python, by PyTorch's profiler, on separate repeats. The
          profiler adds to it, so it is an upper bound.
compute   time of the layer on a group whose collectives return at once, less its host time
exposed   the rest: communication that is not hidden; negative if a fused call is faster than the
          plain arithmetic
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from flux.bench import metrics
from flux.bench.megatron_cpu import megatron_on_cpu
from flux.bench.model import ModelConfig
from flux.bench.model_layers import FORMS, LayerCall, largest_error, make_calls
from flux.bench.places.cpu import ProcessTimer
from flux.bench.rounds import Rounds
from flux.core.collector import paused_collector
from flux.launch.progress import Progress, silent
from flux.launch.supervisors import all_gather

TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2}
"""Relative to the largest magnitude of a result. Sums have another order, and attention is not
linear."""
PROFILED = 3  # calls whose Python time is measured


@dataclass(frozen=True)
class FormResult:
    """One kind of linear layers in one phase, on the slowest rank; ms."""

    overall_ms: float
    exposed_ms: float
    host_ms: float
    repeats_ms: list[float]


@dataclass(frozen=True)
class PhaseResult:
    """Results of a phase. ``forms`` is empty if results were wrong."""

    phase: str
    compute_ms: float
    forms: dict[str, FormResult]
    max_error: float
    complaint: str = ""

    @property
    def ratio(self) -> float | None:
        """Time of our layers over Megatron's, None if results were wrong."""
        if not self.forms:
            return None
        return self.forms["flux"].overall_ms / self.forms["megatron"].overall_ms

    @property
    def ratio_interval(self) -> tuple[float, float] | None:
        """The interval with 95% of resamples of the ratio.

        None without a ratio, or with fewer than 5 repeats.
        """
        if not self.forms:
            return None
        ours, megatron = (self.forms[form].repeats_ms for form in ("flux", "megatron"))
        return metrics.ratio_interval(ours, megatron, 0.95)


@dataclass
class _PhaseSamples:
    wall_ms: dict[str, list[float]] = field(default_factory=lambda: {form: [] for form in FORMS})
    host_ms: dict[str, float] = field(default_factory=dict)


def measure_model(
    job: tuple[ModelConfig, None], rank: int, progress: Progress = silent
) -> list[PhaseResult]:
    """Run the benchmark on an initialised default process group. Collective."""
    config, _ = job
    # Megatron's small fused functions are not compiled: compiling takes longer than measuring.
    with megatron_on_cpu(config.world), torch.compiler.set_stance("force_eager"):
        return [_Phase(config, phase, rank, progress).measure() for phase in config.phases]


class _Phase:
    def __init__(self, config: ModelConfig, phase: str, rank: int, progress: Progress) -> None:
        self._config, self._phase, self._rank, self._progress = config, phase, rank, progress
        self._timer = ProcessTimer(config.world, config.threads, config.common_clock)

    def measure(self) -> PhaseResult:
        from flux.layers import close_pools

        calls = make_calls(self._config, self._phase, self._rank)
        try:
            error, complaint = self._check(calls)
            if complaint:
                return PhaseResult(self._phase, 0.0, {}, error, complaint)
            samples = self._time(calls)
            error, complaint = self._check(calls, run=False)
            result = self._result(samples, error)
        finally:
            close_pools()
        return result if not complaint else PhaseResult(self._phase, 0.0, {}, error, complaint)

    def _check(self, calls: dict[str, LayerCall], run: bool = True) -> tuple[float, str]:
        """Return the largest error over all ranks, and a complaint if it is too large."""
        if run:
            for form in ("megatron", "flux"):
                calls[form]()
        errors = all_gather(largest_error(calls["flux"], calls["megatron"]))
        limit = TOLERANCE[self._config.dtype]
        # Not `error > limit`: a NaN is wrong too.
        wrong = [rank for rank, error in enumerate(errors) if not error <= limit]
        text = f"{self._phase}: results of rank {wrong[0]} differ from Megatron's" if wrong else ""
        return max(errors), text

    def _time(self, calls: dict[str, LayerCall]) -> _PhaseSamples:
        config, samples = self._config, _PhaseSamples()
        rounds, repeats = Rounds(calls, self._timer), config.repeats_of(self._phase)
        with paused_collector(collect=True):
            for index in range(-config.warmup, repeats):
                if self._rank == 0:
                    done = index + config.warmup
                    self._progress(self._phase, done, config.warmup + repeats)
                times = rounds.run(index)
                if index >= 0:
                    for form, taken in times.items():
                        samples.wall_ms[form].append(taken.wall_ms)
            for form, call in calls.items():
                samples.host_ms[form] = _host_ms(call)
        return samples

    def _result(self, samples: _PhaseSamples, error: float) -> PhaseResult:
        everybody = all_gather(samples)
        slowest = {
            form: metrics.slowest_rank([s.wall_ms[form] for s in everybody]) for form in FORMS
        }
        overall = {form: metrics.median(times) for form, times in slowest.items()}
        host = {form: max(rank.host_ms[form] for rank in everybody) for form in FORMS}
        compute = overall["compute"] - host["compute"]
        forms = {
            form: FormResult(
                overall[form],
                overall[form] - compute - host[form],
                host[form],
                slowest[form],
            )
            for form in FORMS[1:]
        }
        return PhaseResult(self._phase, compute, forms, error)


# -- host ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def around_ops(around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Wrap every call of our ops in ``around()``, within the context."""
    from flux import AGGemm, GemmRS  # GemmAR is a subclass of GemmRS

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with around():
                return original(*args, **options)

        return call

    entries = [(op, name) for op in (AGGemm, GemmRS) for name in ("__call__", "overlapped")]
    with contextlib.ExitStack() as stack:
        for op, name in entries:
            stack.enter_context(mock.patch.object(op, name, wrapped(vars(op)[name])))
        yield


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _host_ms(call: Callable[[], object]) -> float:
    """Return the time that a call spends outside of all operators. Collective."""
    dist.barrier()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler logs its start and end
    spans, whole = [], 0.0
    ours = around_ops(lambda: record_function("flux::op"))
    with ours, profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED):
            with record_function("flux::whole"):
                call()
    for event in profiled.events():
        span = (float(event.time_range.start), float(event.time_range.end))
        if event.name == "flux::whole":
            whole += span[1] - span[0]
        elif event.name.startswith(("aten::", "c10d::", "gloo:", "flux::")):
            spans.append(span)
    return (whole - covered(spans)) / PROFILED * 1e-3
