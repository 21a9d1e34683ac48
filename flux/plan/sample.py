"""Figures of a long step from those of shorter ones: what a search over plans simulates.

A pipeline fills, then every further micro-batch takes as long as the one before it, then the
pipeline drains. How many micro-batches filling and draining take is each policy's own (1F1B: as
many as stages; zero-bubble and folded pipelines: twice as many). So two steps that both reach the
steady state lie on a line, and longer ones lie on it too:

    time(m) = time(k1) + (m - k1) * (time(k2) - time(k1)) / (k2 - k1)     2 P <= k1 < k2 < m

k1 and k2 are multiples of the number of pipeline ranks P, in which interleaved pipelines count, and
of the micro-batches whose gradients are reduced together. Memory is that of k2: a steady pipeline
holds no more.

Layers of a stage are on a line in the same way: what the first ones cannot hide, and sends between
stages, do not grow with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

from flux.core.collector import paused_collector
from flux.core.problem import SCALED
from flux.machine.cluster import Cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.layer_ops import EAGER_FUNCTIONS, FUNCTIONS
from flux.plan.model import TrainingStep, even_split
from flux.plan.policies import Policies, Policy, label_of, policy_of
from flux.plan.simulate import Timeline, simulate

LAYERS = 16
"""Layers of a short step, over all stages; at most 8 of a stage, and an even number where the stage
has one, as folds need two. With a pipeline the error of few layers is small. With 2 layers and one
stage, Centauri's steps were predicted 8% too short."""
LEAST_MICRO_BATCHES = (4, 6)
"""Of a short step without a pipeline: policies run a few micro-batches together at its ends."""


@dataclass(frozen=True)
class Figures:
    """Times and memory of a step, as of ``flux.plan.simulate.Timeline``.

    Raises:
        ValueError: the step is shorter than its own compute: the policy lets one device run
            several compute operators at a time.
    """

    iteration_ms: float
    compute_ms: float
    comm_ms: float
    exposed_comm_ms: float
    peak_memory_bytes: float
    idle_ms: float = 0.0
    resident_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.iteration_ms < self.compute_ms * (1 - 1e-9):
            raise ValueError(
                f"a step of {self.iteration_ms:g} ms is shorter than its compute of "
                f"{self.compute_ms:g} ms"
            )

    @classmethod
    def of(cls, t: Timeline, *, briefly: bool = False) -> Figures:
        """Return the figures of a timeline; briefly: without those of communication."""
        comm = (0.0, 0.0) if briefly else (t.comm_ms, t.exposed_comm_ms)
        idle = 0.0 if briefly else t.idle_ms
        return cls(
            *(t.iteration_ms, t.compute_ms, *comm, t.peak_memory_bytes, idle, t.resident_bytes)
        )


class SampleOutcome(NamedTuple):
    """A step's figures under a policy, and how the policy is shown."""

    figures: Figures
    label: str


class StepLayout:
    """The graph of a step, and its timelines under policies."""

    def __init__(
        self, cluster: Cluster, step: TrainingStep, cost: type[AnalyticCost] = AnalyticCost
    ) -> None:
        device = cluster.device
        has_scaled = device.kind == "cpu" or SCALED in device.tflops
        if SCALED in (step.dtype, step.gemm_dtype) and not has_scaled:
            raise ValueError(f"{cluster.name} states no speed of {SCALED}: its devices have none")
        self.step = step
        self.fabric = Fabric(cluster, step.parallel)
        eager = EAGER_FUNCTIONS[step.layer.gated] if step.eager else {}
        self.cost = cost(
            *(self.fabric, step.dtype, step.itemsize),
            gemm_dtype=step.gemm_dtype,
            functions=FUNCTIONS[step.layer.gated] | eager,
            serves=step.serves,
        )
        self.graph = build_step(step, self.fabric)

    def timeline(self, policy: Policy) -> Timeline:
        """Return the timeline under a policy; the simulation finds schedules that never end."""
        split, even = self.step.split, even_split(self.step.layers, self.step.parallel.pp)
        if getattr(policy, "cuts_stages", False) and split not in ((), even):
            raise ValueError(f"{policy.name}: cuts the model into stages of its own, without split")
        graph = policy.rewrite(self.graph, self.fabric, self.cost)
        return simulate(policy.order(graph, self.cost), self.cost)


def line(short: tuple[float, Figures], long: tuple[float, Figures], at: float) -> Figures:
    """Return the figures at ``at`` on the line through two lengths."""
    (near, a), (far, b) = short, long
    share = (at - near) / (far - near) if far > near else 0.0

    def on_line(name: str) -> float:
        first, second = getattr(a, name), getattr(b, name)
        return max(0.0, float(first + (second - first) * share))

    compute, comm, exposed = map(on_line, ("compute_ms", "comm_ms", "exposed_comm_ms"))
    times = max(on_line("iteration_ms"), compute), compute, comm, exposed
    peak = max(a.peak_memory_bytes, b.peak_memory_bytes)
    return Figures(*times, peak, on_line("idle_ms"), b.resident_bytes)


def lengths(step: TrainingStep) -> tuple[int, ...]:
    """Return the two numbers of micro-batches that are simulated; or the step's own, if few."""
    stages, least = step.parallel.pp, LEAST_MICRO_BATCHES
    unit = lcm(stages, step.reduce_every)
    short, long = (-(-max(n * stages, few) // unit) for n, few in zip((2, 3), least, strict=True))
    pair = short * unit, max(long, short + 1) * unit
    return pair if step.micro_batches > pair[1] else (step.micro_batches,)


def figures_of(
    cluster: Cluster,
    step: TrainingStep,
    name: str,
    options: Mapping[str, Any],
    counts: Sequence[int] = (),
) -> SampleOutcome:
    """Return a step's figures: from its own simulation, or from steps with fewer micro-batches."""
    counts, points = counts or (step.micro_batches,), []
    policy = policy_of(name, options)
    _share(policy, counts[-1] / step.micro_batches)
    with paused_collector():
        for count in counts:
            layout = StepLayout(cluster, replace(step, micro_batches=count))
            points.append((float(count), Figures.of(layout.timeline(policy))))
    figures = line(points[0], points[-1], step.micro_batches)
    return SampleOutcome(figures, label_of(name, options, policy))


def short_of(step: TrainingStep, layers: int, micro_batches: int) -> TrainingStep:
    """Return a step with fewer micro-batches, and so many layers in its longest stage.

    A split's other stages lack as many as in the step, and have one at least.
    """
    most = max(step.stages)
    split = tuple(max(1, layers - (most - count)) for count in step.split)
    total = sum(split) or layers * step.parallel.pp
    dense = min(step.dense_layers, total)
    short = replace(step, layers=total, split=split, dense_layers=dense)
    return replace(short, micro_batches=micro_batches)


def small_timeline(cluster: Cluster, step: TrainingStep, policy: Policy) -> Timeline:
    """Return the timeline of a few layers and micro-batches, as a picture can show them."""
    stages = step.parallel.pp
    short = short_of(step, few_layers(step, total=1), min(step.micro_batches, 2 * stages))
    return StepLayout(cluster, short).timeline(policy)


def few_layers(step: TrainingStep, total: int = LAYERS) -> int:
    """Return the number of layers of a stage in a short step of ``total`` layers."""
    layers = max(step.stages)
    even = layers % 2 == 0
    few = min(layers, 8, max(2 if even else 1, total // step.parallel.pp))
    period = lcm(step.layer.period, 2 if even else 1)
    return few - few % (period if period <= few else 2 if even else 1)


def _share(policy: Policy, share: float) -> None:
    """Tell a policy which share of the whole step it plans, if it asks for that."""
    if hasattr(policy, "share"):
        policy.share = share


class Estimate(NamedTuple):
    """A step's time and memory, from short steps."""

    iteration_ms: float
    peak_memory_bytes: float


def estimates(cluster: Cluster, step: TrainingStep, policies: Policies) -> list[Estimate | str]:
    """Return the estimate of a step under each policy; or why the policy cannot be used."""
    with paused_collector():
        short = _Short(cluster, step)
        rated: list[Estimate | str] = []
        for name, options in policies:
            try:
                rated.append(short.estimate(name, options))
            except ValueError as error:
                rated.append(refusal(name, error))
        return rated


class _Short:
    """Short steps of a layout."""

    def __init__(self, cluster: Cluster, step: TrainingStep) -> None:
        self.cluster, self.step = cluster, step
        self.stages, self.layers = step.parallel.pp, max(step.stages)
        self.made: dict[tuple[int, int], StepLayout] = {}

    def estimate(self, name: str, options: Mapping[str, Any]) -> Estimate:
        """Return the estimate under a policy."""
        from flux.plan.policies.folding import UnevenStages

        few = few_layers(self.step)
        if self.step.split:  # all stages are as much shorter
            few = max(few, min(self.layers, 2 + self.layers - min(self.step.split)))
        try:
            return self._with_layers(few, name, options)
        except UnevenStages as error:
            of_rank = error.stages // self.stages
            if self.layers % of_rank:
                raise UnevenStages(error.stages, self.step.layers) from None
            return self._with_layers(of_rank * max(1, few // of_rank), name, options)

    def _with_layers(self, few: int, name: str, options: Mapping[str, Any]) -> Estimate:
        policy, counts = policy_of(name, options), lengths(self.step)
        least = counts[0]
        points = [(float(n), self._figures(few, n, policy)) for n in counts]
        at = line(points[0], points[-1], self.step.micro_batches)
        if few == self.layers:
            return Estimate(at.iteration_ms, at.peak_memory_bytes)
        more = min(self.layers, 2 * few)
        short, long = points[0][1], self._figures(more, least, policy)
        all_layers = line((few, short), (more, long), self.layers)
        time = at.iteration_ms * all_layers.iteration_ms / short.iteration_ms
        shortest = at.compute_ms * all_layers.compute_ms / short.compute_ms
        grown = (long.peak_memory_bytes - short.peak_memory_bytes) / (more - few)
        memory = at.peak_memory_bytes + grown * (self.layers - few)
        return Estimate(max(time, shortest), memory)

    def _figures(self, layers: int, count: int, policy: Policy) -> Figures:
        _share(policy, layers * count / (self.layers * self.step.micro_batches))
        if (layers, count) not in self.made:
            step = short_of(self.step, layers, count)
            self.made[layers, count] = StepLayout(self.cluster, step)
        return Figures.of(self.made[layers, count].timeline(policy), briefly=True)


def refusal(name: str, error: ValueError) -> str:
    """Return why a policy cannot be used, with its name in front."""
    return str(error) if str(error).startswith(name) else f"{name}: {error}"
