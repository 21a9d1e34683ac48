"""Compare one step under several policies: `flux plan simulate` and `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flux.core.collector import paused_collector
from flux.machine.cluster import Cluster
from flux.plan.model import TrainingStep
from flux.plan.policies import Policies, label_of, policy_of
from flux.plan.sample import StepLayout
from flux.plan.simulate import Timeline

HEADROOM = 0.05
"""Share of a device's memory that plans leave free: CUDA's context, buffers of NCCL, and what the
allocator cannot use because it lies in pieces."""


class Compared(NamedTuple):
    """What became of a policy."""

    label: str
    timeline: Timeline | None
    reason: str = ""


def compared(
    policies: Policies,
    step: TrainingStep,
    cluster: Cluster,
    memory_gb: float | None = None,
    headroom: float = HEADROOM,
) -> list[Compared]:
    """Return the outcome of each policy. One that fails leaves the others as they are.

    ``memory_gb`` and ``headroom``: see ``usable_gb``.
    """
    made = [policy_of(name, options) for name, options in policies]
    limit = usable_gb(cluster, memory_gb, headroom)
    outcomes = []
    with paused_collector():
        layout = StepLayout(cluster, step)
        for (name, options), policy in zip(policies, made, strict=True):
            try:
                timeline = layout.timeline(policy)
            except ValueError as error:
                reason = str(error).removeprefix(f"{name}: ")
                outcomes.append(Compared(label_of(name, options), None, reason))
                continue
            needed, reason = timeline.peak_memory_bytes / 1e9, ""
            if limit and needed > limit:
                reason = (
                    f"a device needs {needed:.1f} GB, and has {limit:g}; use more tp, pp or dp "
                    "(zero=1 or 3), recompute, or a smaller micro-batch"
                )
            outcomes.append(Compared(label_of(name, options, policy), timeline, reason))
    return outcomes


def usable_gb(cluster: Cluster, memory_gb: float | None, headroom: float) -> float:
    """Return GB of a device that a plan may have; 0: not known.

    ``memory_gb``, or the cluster file's, of which a share, ``headroom``, stays free.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom must be a share of at least 0 and below 1, got {headroom:g}")
    if memory_gb is None:
        return cluster.device.memory_gb * (1 - headroom)
    if not memory_gb > 0:
        raise ValueError(f"memory must be above 0 GB, got {memory_gb:g}")
    return memory_gb


def usable(outcomes: Sequence[Compared]) -> list[tuple[str, Timeline]]:
    """Return label and timeline of the policies whose plan can be used."""
    return [(label, timeline) for label, timeline, reason in outcomes if timeline and not reason]
