"""Policies: pure functions from a graph of operators to a step schedule.

A policy is a class with a ``name`` and two methods. Other packages add theirs by entry points of
the group ``flux.plan.policies``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from flux.core.collector import paused_collector
from flux.core.problem import check_choice
from flux.plan.cost import CostModel
from flux.plan.fabric import Fabric
from flux.plan.graph import Graph
from flux.plan.schedule import StepSchedule

GROUP = "flux.plan.policies"
_OWN = {
    "serial": "serial:Serial",
    "domino": "domino:DominoPolicy",
    "centauri": "centauri:Centauri",
    "dhelix": "dhelix:DHelix",
    "wavelet": "dhelix:WaveletPlus",
    "intra_batch": "intra_batch:IntraBatch",
    "interleaved": "pipelines:Interleaved1F1B",
    "zbv": "pipelines:ZBV",
    "dualpipev": "pipelines:DualPipeV",
}
"""Modules and classes of this package's policies, which are imported at their first use."""

Policies = tuple[tuple[str, Mapping[str, Any]], ...]
"""(name, options) of each."""


class Policy(Protocol):
    """What turns a graph into a schedule.

    Attributes:
        name: as on the command line.

    A policy that decides an option by itself says what it took in ``chosen``, by option. One that
    decides by the number of operators has ``share``: a search that plans a shorter step first sets
    it to that step's share of the whole one's operators.
    """

    name: str

    def rewrite(self, graph: Graph, fabric: Fabric, cost: CostModel) -> Graph:
        """Return a graph that computes the same, of other operators: cut, substituted.

        Raises:
            ValueError: the policy cannot be used for this graph; the message says why.
        """

    def order(self, graph: Graph, cost: CostModel) -> StepSchedule:
        """Return the schedule of a graph that ``rewrite`` has returned."""


def _entries() -> dict[str, EntryPoint]:
    """Return the entry points of policies; ours cannot be replaced."""
    ours = {name: EntryPoint(name, f"{GROUP}.{value}", GROUP) for name, value in _OWN.items()}
    others = (entry for entry in entry_points(group=GROUP) if not entry.module.startswith("flux."))
    return {entry.name: entry for entry in others} | ours


def policy_names() -> list[str]:
    """Return the names of all policies that are installed."""
    return sorted(_entries())


def policy_of(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return a policy by name.

    Raises:
        ValueError: no such policy, or options or values that it does not have; the message lists
            its options with their defaults.
    """
    entries = _entries()
    check_choice("policy", name, sorted(entries))
    made, options = entries[name].load(), options or {}
    defaults = _defaults(made)
    try:
        for key, value in options.items():
            if key not in defaults:
                raise ValueError(f"policy {name}: no option {key!r}")
            if type(defaults[key]) is bool and type(value) is not bool:
                raise ValueError(f"{name}: {key} must be true or false, got {value!r}")
        policy: Policy = made(**options)
    except (TypeError, ValueError) as error:
        reason = str(error)
        if not reason.startswith((name, "policy ")):
            reason = f"{name}: {reason}"
        listed = ", ".join(f"{key}={_word(value)}" for key, value in defaults.items()) or "none"
        raise ValueError(f"{reason}; its options: {listed}") from error
    return policy


def _defaults(made: type[Policy]) -> dict[str, Any]:
    """Return the default of each option of a policy, by name."""
    if made.__init__ is object.__init__:
        return {}
    parameters = inspect.signature(made).parameters
    return {key: parameter.default for key, parameter in parameters.items()}


def _word(value: object) -> str:
    """Return a value as the command line takes it."""
    if value is inspect.Parameter.empty:
        return "..."
    return str(value).lower() if isinstance(value, bool) else str(value)


def label_of(name: str, options: Mapping[str, Any], policy: Policy | None = None) -> str:
    """Return a policy and its options, as they are shown: ``domino slices=2``.

    ``policy``, if it has planned, says what it chose by itself: ``fused=auto: row``; without the
    option ``order=grouped``.
    """
    chosen = getattr(policy, "chosen", {})
    defaults = _defaults(type(policy)) if policy else {}
    words = [
        f"{key}={value}{f': {chosen[key]}' if value == 'auto' and key in chosen else ''}"
        for key, value in options.items()
    ]
    unsaid = [key for key in chosen if key not in options and defaults.get(key) == "auto"]
    return " ".join([name, *words, *(f"{key}={chosen[key]}" for key in unsaid)])


def planned(policy: Policy, graph: Graph, fabric: Fabric, cost: CostModel) -> StepSchedule:
    """Return a policy's schedule of a graph."""
    with paused_collector():
        schedule = policy.order(policy.rewrite(graph, fabric, cost), cost)
        schedule.validate()
    return schedule
