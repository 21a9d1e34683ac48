"""Search over policies and degrees of parallelism for the fastest step: `flux plan search`.

Three rounds, each on fewer candidates:

    1  every layout (degrees, micro-batch, ZeRO) by closed forms: operators of one layer one after
       the other under 1F1B; the same with all communication hidden; or without bubbles; memory.
       Of the best ones, and of some that fit so alone, also other layers of each stage
    2  every policy on the best layouts, and on those with nothing but data parallelism: time and
       memory from steps with few layers and micro-batches (flux/plan/sample.py)
    3  all within MARGIN of round 2's fifth, and what is usual, with all layers; of steps with
       more than MOST_OPS operators, two shorter ones; the first five of these at their whole length

What round 2 says of a candidate depends on no other candidate. So further policies take candidates
out of round 3 only if five others are faster by more than MARGIN. The winner stays as fast.

A step has a given number of sequences, so steps of all candidates do the same work.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product, repeat
from math import inf, isqrt
from operator import le
from typing import Any, NamedTuple, TypeVar

from flux.bench.model_files import model_of
from flux.launch.spawn import begin_worker, use_short_socket_paths
from flux.machine.cluster import Cluster
from flux.plan import sample
from flux.plan.closed_form import ClosedForm, Rating
from flux.plan.model import Parallel, TrainingStep, check_sizes, step_of
from flux.plan.policies import Policies, policy_names, policy_of
from flux.plan.simulate import Timeline

T = TypeVar("T")
VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "serial": ({"wgrad_overlap": True}, {"fused": "auto"}),
    "domino": ({"slices": 2}, {"slices": 4}, {"slices": 2, "fused": "auto"}),
    "centauri": ({}, {"chunks": 2}),
}
"""Options that are tried, of policies that have more than one way worth trying."""
LEAST_TOKENS = 4096
"""Of a sequence on each context parallel rank: shorter ones are served by tensor parallelism."""
LEAST_GAIN = 1e-3
"""By which stages of other lengths have to shorten a step in the closed form, to be simulated."""
MOST_SPLITS = 2
"""Layouts that fit with other stages alone, and are simulated."""
FIRST = 5
"""Plans whose order is that of whole simulations."""
LEAST_FILLED = 0.95
"""Layers of a model over those of a pipeline whose stages all have as many as the longest."""
MARGIN = 0.03
"""How much longer than the fifth the second round may say that a step is, and it still reaches the
third one. Of random searches the second round was off by 2% at most (tests/plan/test_search.py)."""
MEMORY_MARGIN = 0.05
"""Likewise of memory beyond a device's."""
MOST_OPS = 120_000
"""Operators of a step that the third round simulates at its whole length at once."""
MOST_WHOLE_OPS = 1_500_000
"""Operators of one of the first five at its whole length; longer ones take minutes, and GBs."""


@dataclass(frozen=True)
class Query:
    """A model, the devices, the batch, and the policies to try.

    Attributes:
        model: name of a model in tuning/shapes, or a file of that form.
        batch: sequences of a step, over all ranks.
        sequence: tokens of a sequence.
        memory_gb: of a device.
        beam: layouts that reach the second round.
    """

    model: str
    cluster: Cluster
    gpus: int
    batch: int
    sequence: int
    memory_gb: float
    policies: Policies
    beam: int = 12

    def __post_init__(self) -> None:
        check_sizes(self, ("gpus", "batch", "sequence", "beam"))
        if not self.memory_gb > 0:
            raise ValueError(f"memory must be above 0 GB, got {self.memory_gb:g}")
        if not self.memory_gb <= 1e9:
            raise ValueError(f"memory must be at most 1e9 GB, got {self.memory_gb:g}")
        devices = self.cluster.hosts * self.cluster.devices
        if self.gpus > devices:
            raise ValueError(
                f"{self.cluster.name} has {devices} devices, and {self.gpus} are asked for; more "
                "hosts can be assumed (--hosts)"
            )


@dataclass(frozen=True, kw_only=True)
class SearchedPlan(sample.Figures):
    """A layout under a policy, and what the simulation of it says.

    Attributes:
        step: with its degrees of parallelism.
        label: both, as they are shown.
        scaled: whether the figures are from steps with fewer micro-batches.
    """

    step: TrainingStep
    policy: str
    options: Mapping[str, Any]
    label: str
    scaled: bool = False

    def timeline(self, cluster: Cluster) -> Timeline:
        """Return the timeline, simulated anew: those of a whole search take too much memory.

        That of a scaled plan has fewer micro-batches.
        """
        count = sample.lengths(self.step)[-1] if self.scaled else self.step.micro_batches
        step = replace(self.step, micro_batches=count)
        return sample.StepLayout(cluster, step).timeline(policy_of(self.policy, self.options))

    def small_timeline(self, cluster: Cluster) -> Timeline:
        """Return the timeline of a few layers and micro-batches."""
        return sample.small_timeline(cluster, self.step, policy_of(self.policy, self.options))


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of a search.

    Attributes:
        ranked: plans that fit into memory, the fastest first.
        layouts: layouts that are possible, and fit by the closed form.
        simulated: candidates of the second round that a policy takes.
        reasons: why candidates of the second round could not be planned: how many, by policy.
        too_large: layouts, and plans of the last round, that do not fit into memory.
    """

    ranked: tuple[SearchedPlan, ...]
    layouts: int
    simulated: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    too_large: int = 0


def default_policies() -> Policies:
    """Return all installed policies, with the options that are worth trying."""
    return tuple(
        (name, options) for name in policy_names() for options in VARIANTS.get(name, ({},))
    )


def search(
    query: Query, progress: Callable[[str, int, int], None], workers: int = 2
) -> SearchOutcome:
    """Return the fastest plans.

    Args:
        query: model, devices, batch and policies.
        progress: called with a round's name, how many of its candidates are done, and their number.
        workers: processes that simulate; 1: this one.
    """
    possible = list(layouts(query))
    if not possible:
        raise ValueError(
            f"no layout of {query.model} on {query.gpus} GPUs is possible: heads, layers, the "
            f"batch of {query.batch} or {query.cluster.devices} devices of a host do not divide"
        )
    progress("layouts", 0, len(possible))
    limit = query.memory_gb * 1e9
    with _pool(workers) as pool:
        rate = partial(_rated, query.cluster, limit)
        found = list(pool.map(rate, possible, chunksize=16))
        rated = [first for first, *_ in found]
        fitting = [(rating, step) for rating, step in rated if rating.memory_bytes <= limit]
        others = sorted((pair for _, *more in found for pair in more), key=lambda pair: pair[0])
        more = [step for _, step in others[:MOST_SPLITS]]
        kept = [*_variants(_best(fitting, query.beam), more, query)]
        if not kept:
            least = min(rating.memory_bytes for rating, _ in rated) / 1e9
            raise ValueError(
                f"no layout of {query.model} on {query.gpus} GPUs fits into {query.memory_gb:g} "
                f"GB: the smallest needs {least:.1f} GB"
            )
        kept.sort(key=lambda pair: -_ops(pair[0]))  # the longest first, so that all end together
        round2 = pool.map(partial(sample.estimates, query.cluster), *zip(*kept, strict=True))
        rated2 = list(_followed(round2, "policies", len(kept), progress))
        refused = Counter(
            rating for of_step in rated2 for rating in of_step if isinstance(rating, str)
        )
        candidates = [
            PlanCandidate(rating, (step, name, options))
            for (step, policies), of_step in zip(kept, rated2, strict=True)
            for rating, (name, options) in zip(of_step, policies, strict=True)
            if not isinstance(rating, str)
        ]
        plans, refused3 = _third_round(candidates, query, pool, progress)
    refused.update(refused3)
    if not candidates or len(refused3) == len(candidates):
        raise ValueError(f"no policy can be used: {'; '.join(refused)}")
    fits = [plan for plan in plans if plan.peak_memory_bytes <= limit]
    if not fits:
        needs = [candidate.rating.peak_memory_bytes for candidate in candidates]
        raise ValueError(
            f"the {len(candidates)} plans need {min(needs) / 1e9:.1f} GB and more, and a device "
            f"has {query.memory_gb:g}: a larger beam reaches others"
        )
    large = len(possible) - len(fitting) + len(plans) - len(fits)
    large += sum(not _may_fit(candidate, query) for candidate in candidates)
    return SearchOutcome(tuple(fits), len(fitting), len(candidates), dict(refused), large)


def planned_again(
    plans: Sequence[SearchedPlan], cluster: Cluster, workers: int
) -> list[SearchedPlan | str]:
    """Return the same plans on another cluster; or why there is none."""
    jobs = [(plan.step, plan.policy, plan.options) for plan in plans]
    with _pool(workers) as pool:
        return list(pool.map(plan_of, repeat(cluster), [not plan.scaled for plan in plans], jobs))


class _Here(Executor):
    """Runs jobs in this process, one after the other."""

    def map(self, fn: Callable[..., Any], *jobs: Any, **_: Any) -> Iterator[Any]:
        return map(fn, *jobs)


def _pool(workers: int) -> Executor:
    if workers == 1:
        return _Here()
    use_short_socket_paths()
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(
        workers,
        mp_context=context,
        initializer=begin_worker,
    )


def _followed(
    results: Iterator[Any], what: str, total: int, progress: Callable[[str, int, int], None]
) -> Iterator[Any]:
    for done, result in enumerate(results):
        progress(what, done + 1, total)
        yield result


def layouts(query: Query) -> Iterator[TrainingStep]:
    """Yield every step that the model, the cluster and the batch allow.

    Tensor parallelism stays inside hosts. With it comes sequence parallelism or not, with inputs
    gathered again or kept. Context parallel ranks share a sequence, of which each keeps at least
    LEAST_TOKENS. Data parallel ranks share the optimizer's states (ZeRO-1), or weights too
    (ZeRO-3). Experts are spread over as many data parallel ranks as divide both, or over as many
    ranks of a stage.
    """
    model = model_of(query.model)
    experts = model.layer.moe.experts if model.layer.moe else 1
    for tp, cp, pp in product(
        _divisors(min(query.gpus, query.cluster.devices)),
        [size for size in _divisors(query.sequence) if query.sequence >= size * LEAST_TOKENS]
        or [1],
        _divisors(query.gpus),
    ):
        if query.gpus % (tp * cp * pp) or model.layer.heads % tp or model.layers < pp:
            continue
        if model.layers < LEAST_FILLED * pp * -(-model.layers // pp):
            continue
        dp = query.gpus // (tp * cp * pp)
        if query.batch % dp or model.layer.intermediate % tp:
            continue
        zeros = (1, 3) if dp * cp > 1 else (1,)
        spread = {
            max(size for size in _divisors(experts) if ranks % size == 0)
            for ranks in (dp, dp * cp * tp)
        }
        for micro_batch, (sequence, regather), zero, ep in product(
            _divisors(query.batch // dp),
            ((False, False), (True, False), (True, True)),
            zeros,
            sorted(spread),
        ):
            if sequence and (tp == 1 or micro_batch * query.sequence // cp % tp):
                continue
            if dp % ep and tp > 1 and not sequence:  # tensor parallel ranks have the same tokens
                continue
            yield step_of(
                model,
                Parallel(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, sequence=sequence),
                sequence=query.sequence,
                micro_batch=micro_batch,
                micro_batches=query.batch // dp // micro_batch,
                zero=zero,
                regather=regather,
            )


def _rated(cluster: Cluster, limit: float, step: TrainingStep) -> list[tuple[Rating, TrainingStep]]:
    """Rate a step; or the same with recomputation, and with other stages, if it does not fit."""
    form = ClosedForm(step, cluster)
    rating = form.rating()
    if rating.memory_bytes <= limit:
        return [(rating, step)]
    again = replace(step, recompute="full")  # slower, and smaller
    others = [(form.rating(split), replace(step, split=split)) for split in splits(form, limit)]
    return [(ClosedForm(again, cluster).rating(), again), *others]


def _variants(
    steps: Sequence[TrainingStep], others: Sequence[TrainingStep], query: Query
) -> Iterator[tuple[TrainingStep, Policies]]:
    """Yield steps with their policies; also with ZeRO-2 in place of 3, and faster other stages.

    ZeRO-2 is slower in closed forms, of which none hides the gradients alone. And ``others``.
    """
    limit = 1e9 * query.memory_gb
    half = (replace(step, zero=2) for step in steps if step.zero == 3)
    fits = (step for step in half if ClosedForm(step, query.cluster).rating()[3] <= limit)
    steps = [*steps, *fits]
    made = [(one, policy_of(*one)) for one in query.policies]
    keep = tuple(one for one, policy in made if not getattr(policy, "cuts_stages", False))
    yield from ((step, query.policies) for step in steps)
    if keep:
        yield from ((step, keep) for step in others)
        for step in steps:
            for split in splits(ClosedForm(step, query.cluster), limit):
                yield replace(step, split=split), keep


def splits(form: ClosedForm, limit: float) -> list[tuple[int, ...]]:
    """Return other layers of each stage that fit, and are faster unless the step's own do not fit.

    By closed forms; ``limit`` are bytes of a device.
    """
    if form.pp == 1:
        return []
    now, found = form.rating(), {form.split(limit), form.split(limit, levels=True)}
    longest = inf if now.memory_bytes > limit else now.serial_ms * (1 - LEAST_GAIN)
    return [split for split in sorted(found) if split and form.rating(split).serial_ms < longest]


def with_split(step: TrainingStep, cluster: Cluster, memory_gb: float) -> TrainingStep:
    """Return a step with the layers of each stage that are fastest under 1F1B, and fit."""
    limit = 1e9 * memory_gb or inf
    others = [replace(step, split=split) for split in splits(ClosedForm(step, cluster), limit)]

    def rank(some: TrainingStep) -> tuple[bool, float]:
        figures = sample.figures_of(cluster, some, "serial", {"wgrad_overlap": True}).figures
        return figures.peak_memory_bytes > limit, figures.iteration_ms

    return min([step, *others], key=rank) if others else step


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _best(rated: Sequence[tuple[Rating, TrainingStep]], count: int) -> list[TrainingStep]:
    """Return the layouts that are best by each of the three times, by turns.

    First those that no other layout of the same ranks and micro-batches beats, as it may with
    other ZeRO, experts, or inputs kept: near copies of one layout took beams that a better link
    then left another one out of.

    Besides, what everybody tries first is always compared.
    """
    alike: dict[tuple[Parallel, int], list[tuple[float, ...]]] = {}
    for rating, step in rated:
        alike.setdefault((replace(step.parallel, ep=1), step.micro_batch), []).append(rating[:3])
    beaten = {
        step
        for rating, step in rated
        for times in alike[replace(step.parallel, ep=1), step.micro_batch]
        if times != rating[:3] and all(map(le, times, rating[:3]))
    }
    orders = [
        sorted(rated, key=lambda pair: (pair[1] in beaten, pair[0][which], pair[0].serial_ms))
        for which in range(3)
    ]
    layouts = dict.fromkeys(step for pair in zip(*orders, strict=True) for _, step in pair)
    plain = usual((step, step) for _, step in sorted(rated, key=lambda pair: pair[0].serial_ms))
    return list(dict.fromkeys([*list(layouts)[:count], *plain]))


def usual(pairs: Iterable[tuple[TrainingStep, T]]) -> list[T]:
    """Return what belongs to the first step of each kind that everybody tries.

    That is data parallelism alone, that with ZeRO-3 (FSDP), and a pipeline.
    """
    first: dict[tuple[bool, bool], T] = {}
    for step, its in pairs:
        if step.zero != 2 and (step.parallel.dp == step.parallel.world or step.parallel.pp > 1):
            first.setdefault((step.parallel.pp > 1, step.parallel.pp == 1 and step.zero == 3), its)
    return list(first.values())


Job = tuple[TrainingStep, str, Mapping[str, Any]]


class PlanCandidate(NamedTuple):
    """What the second round says of a step under a policy."""

    rating: sample.Estimate
    job: Job


def _third_round(
    candidates: Sequence[PlanCandidate],
    query: Query,
    pool: Executor,
    progress: Callable[[str, int, int], None],
) -> tuple[list[SearchedPlan], list[str]]:
    """Return plans, the fastest first, and why others cannot be used.

    Of those that do not fit after all, the next ones take the places. What everybody tries first is
    simulated, however slow.
    """
    waiting = [candidate for candidate in candidates if _may_fit(candidate, query)]
    # Of equally fast ones the order does not depend on others.
    waiting.sort(key=lambda candidate: (candidate.rating.iteration_ms, str(candidate.job)))
    plain = usual((one.job[0], one) for one in waiting if one.job[1] == "serial")
    plans: list[SearchedPlan] = []
    refused: list[str] = []
    limit = 1e9 * query.memory_gb
    while waiting:
        missing = FIRST - sum(plan.peak_memory_bytes <= limit for plan in plans)
        if missing <= 0:
            break
        last = waiting[min(missing, len(waiting)) - 1].rating.iteration_ms * (1 + MARGIN)
        now = [one for one in waiting if one.rating.iteration_ms <= last or one in plain]
        waiting = [one for one in waiting if one not in now]
        jobs = sorted((one.job for one in now), key=lambda job: -_ops(job[0]))  # longest first
        ended = pool.map(partial(plan_of, query.cluster, False), jobs)
        for candidate in _followed(ended, "best", len(jobs), progress):
            (refused if isinstance(candidate, str) else plans).append(candidate)
    return _settled(plans, query, pool, progress), refused


def _settled(
    plans: list[SearchedPlan],
    query: Query,
    pool: Executor,
    progress: Callable[[str, int, int], None],
) -> list[SearchedPlan]:
    """Return plans, the fastest first, of which the first ones are simulated at whole length."""
    limit = 1e9 * query.memory_gb
    while True:
        plans = sorted(plans, key=_rank)
        first = [plan for plan in plans if plan.peak_memory_bytes <= limit][:FIRST]
        short = [plan for plan in first if plan.scaled and _ops(plan.step) <= MOST_WHOLE_OPS]
        if not short:
            return plans
        jobs = [(plan.step, plan.policy, plan.options) for plan in short]
        ended = pool.map(partial(plan_of, query.cluster, True), jobs)
        settled = list(_followed(ended, "first", len(jobs), progress))
        plans = [plan for plan in plans if plan not in short]
        plans += [plan for plan in settled if isinstance(plan, SearchedPlan)]


def _ops(step: TrainingStep) -> int:
    """Return the number of operators of a step, before a policy cuts them."""
    return step.layers * step.micro_batches * 32


def _may_fit(candidate: PlanCandidate, query: Query) -> bool:
    return candidate.rating.peak_memory_bytes <= 1e9 * query.memory_gb * (1 + MEMORY_MARGIN)


def _rank(plan: SearchedPlan) -> tuple[float, float, str]:
    return plan.iteration_ms, plan.peak_memory_bytes, str((plan.step, plan.policy, plan.options))


def plan_of(cluster: Cluster, at_whole_length: bool, job: Job) -> SearchedPlan | str:
    """Return a plan and its figures; or why there is none.

    At whole length, or else with fewer micro-batches if the step is long.
    """
    step, name, options = job
    scaled = _ops(step) > MOST_OPS and not at_whole_length and len(sample.lengths(step)) > 1
    try:
        made = sample.figures_of(cluster, *job, sample.lengths(step) if scaled else ())
    except ValueError as error:
        return sample.refusal(name, error)
    return SearchedPlan(
        **asdict(made.figures),
        step=step,
        policy=name,
        options=options,
        label=made.label,
        scaled=scaled,
    )
