"""Plans in files: those of `flux plan search`, and of programs that have a reader."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from flux.core.datafile import Table
from flux.plan.options import READERS, DeviceOptions
from flux.plan.policies import Policies

DEVICE = frozenset(field.name for field in fields(DeviceOptions))
"""Options of a cluster: with another cluster on the command line a plan's are left out."""


class FilePlan(NamedTuple):
    """Options of a step by name, as of `flux plan simulate`, its policy, and notes."""

    options: dict[str, Any]
    policy: tuple[str, dict[str, Any]]
    notes: list[str]

    @property
    def policies(self) -> Policies:
        """The policy beside serial."""
        serial: tuple[str, dict[str, Any]] = ("serial", {})
        return (serial,) if self.policy == serial else (serial, self.policy)


def read_plan(
    path: str, row: int = 1, gpus: int | None = None, model: str | None = None
) -> FilePlan:
    """Return the plan in a file.

    Args:
        path: of `flux plan search`, or of a program with a reader.
        row: of a search's plans, from 1 on.
        gpus: ranks of the step, if the file does not say it.
        model: name or file, in place of the file's.
    """
    file = Path(path)
    of_others = (read(file, gpus, model) for read in READERS)
    plan = next((plan for plan in of_others if plan is not None), None) or _searched(file, row)
    world = prod(plan.options[degree] for degree in ("tp", "cp", "dp", "pp"))
    if gpus not in (None, world):
        raise ValueError(f"{path} is a plan for {world} GPUs, and --gpus says {gpus}")
    return plan


def options_with(
    options: Any, path: str, row: int = 1, gpus: int | None = None
) -> tuple[FilePlan, Any]:
    """Return the plan in a file, and options with what it says and the command line does not.

    ``options`` are ``RankStepOptions``; the others are those of ``read_plan``.
    """
    model = options.model if "model" in options.given else None
    plan = read_plan(path, row, gpus, model)
    fixed = options.given
    if "cluster" in fixed or not isinstance(options, DeviceOptions):
        fixed |= DEVICE
    if "headroom" in fixed:  # of the memory that the cluster has
        fixed |= {"memory_gb"}
    others = {name: it for name, it in plan.options.items() if name not in fixed}
    if model is None and "model" not in others:
        raise ValueError(f"{path} does not say which model: give --model")
    return plan, replace(options, **others)


def _searched(file: Path, number: int) -> FilePlan:
    top = Table.load_json(file, "an outcome of flux plan search")
    plans = top.tables("plans")
    if not plans:
        top.fail("plans", "expected at least one")
    if not 1 <= number <= len(plans):
        raise ValueError(f"{top.file}: row must be from 1 to {len(plans)}, got {number}")
    plan = plans[number - 1]
    policy = dict(plan.scalars("policy_options"))
    name = policy.pop("name", "")
    if not isinstance(name, str) or not name:
        plan.fail("policy_options.name", "expected the name of a policy")
    counts = ("tp", "cp", "dp", "pp", "ep", "micro_batch", "micro_batches")
    options: dict[str, Any] = {
        **{key: plan.integer(key) for key in counts},
        "zero": plan.integer("zero", least=0),
        **{key: plan.flag(key) for key in ("sequence_parallel", "regather")},
        "recompute": plan.text("recompute", "none"),
        "split": plan.text("split", ""),
        "model": top.text("model"),
        "sequence": top.integer("sequence"),
    }
    if "device" in top.keys:
        of = top.table("device")
        options |= {"cluster": of.text("cluster"), "calibration": of.text("calibration") or None}
        options |= {"hosts": of.integer("hosts"), "memory_gb": of.number("memory_gb")}
    return FilePlan(options, (name, policy), [])
