"""Search over policies and degrees of parallelism for the fastest step: `flux plan search`.

Three rounds, each on fewer candidates:

    1  every layout (degrees, micro-batch, ZeRO) by closed forms: operators of one layer one after
       the other, or with all communication hidden; the bubble of 1F1B; memory
    2  every policy on the best layouts, simulated with few layers and micro-batches
    3  the best of those, simulated with all layers and, up to MOST_OPS operators, with all
       micro-batches; only these are ranked, and only if they fit

A step has a given number of sequences, so steps of all candidates do the same work.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from flux.bench.shapes import model_of
from flux.core.datafile import MOST_SIZE, Table, shown
from flux.launch.sockets import use_short_socket_paths
from flux.machine.cluster import Cluster
from flux.plan.build import build_step
from flux.plan.cost import AnalyticCost
from flux.plan.fabric import Fabric
from flux.plan.model import Parallel, Step
from flux.plan.policies import Policies, label_of, planned, policy_names, policy_of
from flux.plan.simulate import Timeline, simulate

VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "serial": ({"wgrad_overlap": True}, {"fused": "auto"}),
    "domino": ({"slices": 2}, {"slices": 4}, {"slices": 2, "fused": "auto"}),
    "centauri": ({}, {"chunks": 2}),
}
"""Options that are tried, of policies that have more than one way worth trying."""
LAYERS = 2
"""Layers of a stage in the second round; 1 where a stage has an odd number, as folds need two."""
ROUNDS = 2
"""Micro-batches for each stage in the second round."""
LEAST_TOKENS = 4096
"""Of a sequence on each context parallel rank: shorter ones are served by tensor parallelism."""
MOST_OPS = 60_000
"""Operators of a step in the third round. Of a longer one fewer micro-batches are simulated: at
least twice as many as stages, which fill the pipeline and hold the most memory."""


@dataclass(frozen=True)
class Query:
    """What is searched for.

    Attributes:
        model: name of a model in tuning/shapes, or a file of that form.
        cluster: devices and links.
        gpus: ranks of the step.
        batch: sequences of a step, over all ranks.
        sequence: tokens of a sequence.
        memory_gb: of a device.
        policies: (name, options) to try.
        beam: layouts that reach the second round; half as many candidates reach the third.
    """

    model: str
    cluster: Cluster
    gpus: int
    batch: int
    sequence: int
    memory_gb: float
    policies: Policies
    beam: int = 24

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "sequence", "beam"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
            if value > MOST_SIZE:
                raise ValueError(f"{name} must be at most {MOST_SIZE}, got {shown(value)}")
        if not self.memory_gb > 0:
            raise ValueError(f"memory must be above 0 GB, got {self.memory_gb:g}")
        if not self.memory_gb <= 1e9:
            raise ValueError(f"memory must be at most 1e9 GB, got {self.memory_gb:g}")
        devices = self.cluster.hosts * self.cluster.devices
        if self.gpus > devices:
            raise ValueError(
                f"{self.cluster.name} has {devices} devices, and {self.gpus} are asked for; more "
                "hosts can be assumed"
            )


@dataclass(frozen=True)
class Plan:
    """A layout under a policy, and what the simulation of it says.

    Attributes:
        step: with its degrees of parallelism.
        policy: its name.
        options: of the policy.
        label: both, as they are shown.
        iteration_ms: time of the step.
        compute_ms: as of ``flux.plan.simulate.Timeline``; likewise the others.
        comm_ms: likewise.
        exposed_comm_ms: likewise.
        peak_memory_bytes: likewise.
        scaled: whether the times are those of fewer micro-batches, scaled.
    """

    step: Step
    policy: str
    options: Mapping[str, Any]
    label: str
    iteration_ms: float
    compute_ms: float
    comm_ms: float
    exposed_comm_ms: float
    peak_memory_bytes: float
    scaled: bool = False

    def timeline(self, cluster: Cluster) -> Timeline:
        """Return the timeline, simulated anew: those of a whole search take too much memory.

        Of a step with more than MOST_OPS operators it has fewer micro-batches.
        """
        step, _ = _shortened(self.step)
        return _Layout(cluster, step).timeline(self.policy, self.options)[0]

    def small_timeline(self, cluster: Cluster) -> Timeline:
        """Return the timeline of a few layers and micro-batches, as a picture can show them."""
        return _Layout(cluster, _small(self.step)).timeline(self.policy, self.options)[0]


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Attributes:
        ranked: plans that fit into memory, the fastest first.
        layouts: layouts that are possible, and fit by the closed form.
        simulated: candidates of the second round.
        reasons: why candidates of the second round could not be planned: how many, by policy.
        too_large: layouts, and plans of the last round, that do not fit into memory.
    """

    ranked: tuple[Plan, ...]
    layouts: int
    simulated: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    too_large: int = 0


def default_policies() -> Policies:
    """Return all installed policies, with the options that are worth trying."""
    return tuple(
        (name, options) for name in policy_names() for options in VARIANTS.get(name, ({},))
    )


def search(query: Query, progress: Callable[[str, int, int], None], workers: int = 2) -> Found:
    """Return the fastest plans.

    Args:
        query: what is searched for.
        progress: called with a round's name, how many of its candidates are done, and their number.
        workers: processes that simulate.

    Raises:
        ValueError: no layout is possible, or none fits into memory; or all policies refuse.
    """
    possible = list(layouts(query))
    if not possible:
        raise ValueError(
            f"no layout of {query.model} on {query.gpus} GPUs is possible: heads, layers, the "
            f"batch of {query.batch} or {query.cluster.devices} devices of a host do not divide"
        )
    progress("layouts", 0, len(possible))
    rated = [(estimate(step, query.cluster), step) for step in possible]
    limit = query.memory_gb * 1e9
    fitting = [(rating, step) for rating, step in rated if rating.memory_bytes <= limit]
    if not fitting:
        least = min(rating.memory_bytes for rating, _ in rated) / 1e9
        raise ValueError(
            f"no layout of {query.model} on {query.gpus} GPUs fits into {query.memory_gb:g} GB: "
            f"the smallest needs {least:.1f} GB"
        )
    kept = _best(fitting, query.beam)
    use_short_socket_paths()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        round2 = pool.map(partial(_quick, query.cluster, query.policies), kept)
        quick = list(_followed(round2, "policies", len(kept), progress))
        reasons = Counter(ms for of_step in quick for ms in of_step if isinstance(ms, str))
        times = [
            (ms, (step, name, options))
            for step, of_step in zip(kept, quick, strict=True)
            for ms, (name, options) in zip(of_step, query.policies, strict=True)
            if not isinstance(ms, str)
        ]
        if not times:
            raise ValueError(f"no policy can be used: {'; '.join(reasons)}")
        times.sort(key=lambda pair: pair[0])
        best = [job for _, job in times[: max(4, query.beam // 2)]]
        ended = list(
            _followed(pool.map(partial(_whole, query.cluster), best), "best", len(best), progress)
        )
    reasons.update(found for found in ended if isinstance(found, str))
    plans = [found for found in ended if isinstance(found, Plan)]
    if not plans:
        raise ValueError(f"no policy can be used: {'; '.join(reasons)}")
    fits = [plan for plan in plans if plan.peak_memory_bytes <= limit]
    if not fits:
        least = min(plan.peak_memory_bytes for plan in plans) / 1e9
        raise ValueError(
            f"the {len(plans)} fastest plans need {least:.1f} GB and more, and a device has "
            f"{query.memory_gb:g}: a larger beam reaches others"
        )
    fits.sort(key=lambda plan: plan.iteration_ms)
    large = len(possible) - len(fitting) + len(plans) - len(fits)
    return Found(tuple(fits), len(fitting), len(times), dict(reasons), large)


def _followed(
    results: Iterator[Any], what: str, total: int, progress: Callable[[str, int, int], None]
) -> Iterator[Any]:
    for done, result in enumerate(results):
        progress(what, done + 1, total)
        yield result


# -- first round -----------------------------------------------------------------------------------


def layouts(query: Query) -> Iterator[Step]:
    """Yield every step that the model, the cluster and the batch allow.

    Tensor parallelism stays inside hosts. With it comes sequence parallelism or not, with inputs
    gathered again or kept. Context parallel ranks share a sequence, of which each keeps at least
    LEAST_TOKENS. Data parallel ranks share the optimizer's states (ZeRO-1), or weights too
    (ZeRO-3). Experts are spread over as many data parallel ranks as divide both.
    """
    model = model_of(query.model)
    experts = model.layer.moe.experts if model.layer.moe else 1
    for tp, cp, pp in product(
        _divisors(min(query.gpus, query.cluster.devices)),
        [size for size in _divisors(query.sequence) if query.sequence >= size * LEAST_TOKENS]
        or [1],
        _divisors(model.layers),
    ):
        if query.gpus % (tp * cp * pp) or model.layer.heads % tp:
            continue
        dp = query.gpus // (tp * cp * pp)
        if query.batch % dp or (model.layer.moe is None and model.layer.intermediate % tp):
            continue
        ep = max(size for size in _divisors(experts) if dp % size == 0)
        zeros = (1, 3) if dp > 1 else (1,)
        for micro_batch, (sequence, regather), zero in product(
            _divisors(query.batch // dp), ((False, False), (True, False), (True, True)), zeros
        ):
            if sequence and (tp == 1 or micro_batch * query.sequence // cp % tp):
                continue
            yield Step(
                name=model.name,
                layer=model.layer,
                layers=model.layers,
                dtype=model.dtype,
                parallel=Parallel(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, sequence=sequence),
                sequence=query.sequence,
                micro_batch=micro_batch,
                micro_batches=query.batch // dp // micro_batch,
                zero=zero,
                regather=regather,
            )


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


class Rating(NamedTuple):
    """A step under 1F1B, in ms: nothing hidden, and all communication; and its memory."""

    serial_ms: float
    hidden_ms: float
    memory_bytes: float


def _best(rated: Sequence[tuple[Rating, Step]], count: int) -> list[Step]:
    """Return the layouts that are best with nothing hidden, or with all, by turns."""
    orders = [sorted(rated, key=lambda pair: pair[0][which]) for which in (0, 1)]
    found = dict.fromkeys(step for pair in zip(*orders, strict=True) for _, step in pair)
    return list(found)[:count]


def estimate(step: Step, cluster: Cluster) -> Rating:
    """Rate a step from one layer of each stage."""
    stages, layers = step.parallel.pp, step.layers // step.parallel.pp
    layout = _Layout(cluster, replace(step, layers=stages, micro_batches=1))
    slots = step.micro_batches + stages - 1
    serial = hidden = 0.0
    kept = now = most = 0.0  # bytes: from forward until backward; at a time
    for op in layout.graph.ops:
        if op.stage == stages // 2:
            time = layout.cost.solo(op) * (1 if op.role == "step" else slots)
            serial += time
            hidden += 0.0 if op.is_collective else time
            kept += op.allocates - op.frees if op.role == "fwd" else 0.0
            most = max(most, now + op.allocates)
            now += op.allocates - op.frees
    held = min(stages, step.micro_batches)
    memory = layers * (layout.graph.resident[0] + held * kept) + most - kept
    return Rating(layers * serial, layers * hidden, memory)


# -- second and third round ------------------------------------------------------------------------


Job = tuple[Step, str, Mapping[str, Any]]


class _Layout:
    """The graph of a step, and its timelines under policies."""

    def __init__(self, cluster: Cluster, step: Step) -> None:
        self.fabric = Fabric(cluster, step.parallel)
        self.cost = AnalyticCost(self.fabric, step.dtype, step.itemsize)
        self.graph = build_step(step, self.fabric)

    def timeline(self, name: str, options: Mapping[str, Any]) -> tuple[Timeline, str]:
        """Return the timeline under a policy, and how the policy is shown."""
        policy = policy_of(name, options)
        schedule = planned(policy, self.graph, self.fabric, self.cost)
        return simulate(schedule, self.cost), label_of(name, options, policy)


def _small(step: Step) -> Step:
    """Return a step with few layers and micro-batches."""
    stages = step.parallel.pp
    layers = LAYERS if step.layers // stages % 2 == 0 else 1
    count = min(step.micro_batches, ROUNDS * stages)
    return replace(step, layers=layers * stages, micro_batches=count)


def _quick(cluster: Cluster, policies: Policies, step: Step) -> list[float | str]:
    """Return the time of a step under each policy; or why the policy cannot be used.

    Times are those of fewer layers and micro-batches, scaled.
    """
    stages, small = step.parallel.pp, _small(step)
    slots = (step.micro_batches + stages - 1) / (small.micro_batches + stages - 1)
    layout = _Layout(cluster, small)
    found: list[float | str] = []
    for name, options in policies:
        try:
            time = layout.timeline(name, options)[0].iteration_ms
            found.append(time * slots * step.layers / small.layers)
        except ValueError as error:
            found.append(_refusal(name, error))
    return found


def _shortened(step: Step) -> tuple[Step, float]:
    """Return a step with at most MOST_OPS operators, and how much longer the whole one takes.

    Both take a pass of all stages and then one more slot for each micro-batch.
    """
    stages, count = step.parallel.pp, step.micro_batches
    per_micro = step.layers * 32  # operators of a layer, forward and backward
    kept = min(count, max(2 * stages, MOST_OPS // per_micro // stages * stages))
    factor = (count + stages - 1) / (kept + stages - 1)
    return replace(step, micro_batches=kept), factor


def _whole(cluster: Cluster, job: Job) -> Plan | str:
    """Return a plan and its figures; or why there is none."""
    step, name, options = job
    short, factor = _shortened(step)
    try:
        t, label = _Layout(cluster, short).timeline(name, options)
    except ValueError as error:
        return _refusal(name, error)
    return Plan(
        step,
        name,
        options,
        label,
        factor * t.iteration_ms,
        factor * t.compute_ms,
        factor * t.comm_ms,
        factor * t.exposed_comm_ms,
        t.peak_memory_bytes,
        scaled=short.micro_batches < step.micro_batches,
    )


def _refusal(name: str, error: ValueError) -> str:
    return str(error) if str(error).startswith(name) else f"{name}: {error}"


# -- why -------------------------------------------------------------------------------------------


def reasons(found: Found, cluster: Cluster) -> list[str]:
    """Return lines that say where the winner's time goes, beside what came close.

    Args:
        found: a search's outcome.
        cluster: of the search.
    """
    winner = found.ranked[0]
    serial = _whole(cluster, (winner.step, "serial", {}))
    rows = [("the winner", winner)]
    if isinstance(serial, Plan):
        rows.append(("its layout without overlap", serial))
    other = next((p for p in found.ranked if layout_of(p.step) != layout_of(winner.step)), None)
    if other is not None:
        rows.append((f"the next layout, {layout_of(other.step)}, {other.label}", other))
    lines = []
    for what, plan in rows:
        idle = plan.iteration_ms - plan.compute_ms - plan.exposed_comm_ms
        lines.append(
            f"{what}: {plan.iteration_ms:.1f} ms = {plan.compute_ms:.1f} compute + "
            f"{plan.exposed_comm_ms:.1f} exposed communication (of {plan.comm_ms:.1f}) + "
            f"{max(idle, 0.0):.1f} idle and interference"
        )
    return lines


def layout_of(step: Step) -> str:
    """Return degrees and micro-batches of a step, as they are shown."""
    p = step.parallel
    degrees = [f"{name}={getattr(p, name)}" for name in ("tp", "cp", "pp", "dp", "ep")]
    words = [word for word in degrees if not word.endswith("=1")] or ["1 GPU"]
    words.append(f"{step.micro_batches} x {step.micro_batch}")
    if p.sequence:
        words.append("sequence parallel" + (", regather" if step.regather else ""))
    if step.zero == 3:
        words.append("zero=3")
    return " ".join(words)


def winner_of(path: str) -> dict[str, Any]:
    """Return options of `flux plan run` for the first plan in a file of `flux plan search`.

    Raises:
        ValueError: the file holds something else.
        OSError: it cannot be read.
    """
    top = Table.load_json(Path(path), "an outcome of flux plan search")
    plans = top.tables("plans")
    if not plans:
        top.fail("plans", "expected at least one")
    first = plans[0]
    options = first.scalars("policy_options")
    words = {k: v if isinstance(v, str) else json.dumps(v) for k, v in options.items()}
    for key, text in words.items():
        if not re.fullmatch(r"[\w.+-]+", key + text, re.ASCII):
            first.fail(f"policy_options.{key}", f"expected a word or a number, got {shown(text)}")
    name = words.pop("name", "")
    if not name:
        first.fail("policy_options.name", "missing")
    chosen = ",".join(f"{key}={text}" for key, text in words.items())
    counts = ("tp", "cp", "dp", "pp", "ep", "micro_batch", "micro_batches")
    return {
        **{key: first.integer(key) for key in counts},
        "zero": first.integer("zero", least=0),
        **{key: first.flag(key) for key in ("sequence_parallel", "regather")},
        "model": top.text("model"),
        "sequence": top.integer("sequence"),
        "policy": ["serial", f"{name}:{chosen}" if chosen else name],
    }
