"""Plans for other trainers, and plans from their files: `flux plan export`, and `--plan`."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from flux.bench.model_files import SCRIPTS
from flux.bench.scripts import options_in
from flux.core.datafile import Table
from flux.plan.trainers import deepspeed, megatron, torchtitan
from flux.plan.trainers.common import RELEASES, Exported, Imported, Planned

__all__ = ["RELEASES", "Exported", "Imported", "Planned", "exported", "read_plan"]


def exported(trainer: str, plan: Planned) -> Exported:
    """Return what a trainer is started with."""
    makers = {
        "megatron": megatron.exported,
        "torchtitan": torchtitan.exported,
        "deepspeed": deepspeed.exported,
    }
    if trainer not in makers:
        raise ValueError(f"--to must be one of {', '.join(makers)}, got {trainer!r}")
    if plan.chunks > 1 and plan.step.parallel.pp == 1:
        raise ValueError(f"{plan.policy} is a pipeline, and cannot run with pp = 1")
    return makers[trainer](plan)


def read_plan(path: str, row: int = 1, gpus: int | None = None) -> Imported:
    """Return the plan in a file: of `flux plan search`, of a trainer, or a script that starts one.

    Args:
        path: plans or DeepSpeed's configuration (``.json``), torchtitan's (``.toml``), or a script.
        row: of a search's plans, from 1 on.
        gpus: ranks of the step, if the file does not say it.
    """
    found = _found(Path(path), row, gpus)
    world = prod(found.options[degree] for degree in ("tp", "cp", "dp", "pp"))
    if gpus not in (None, world):
        raise ValueError(f"{path} is a plan for {world} GPUs, and --gpus says {gpus}")
    return found


def _found(file: Path, row: int, gpus: int | None) -> Imported:
    if file.suffix == ".toml":
        return torchtitan.imported(torchtitan.from_toml(file), gpus)
    if file.suffix == ".json":
        top = Table.load_json(file, "an outcome of flux plan search")
        of_deepspeed = any(key.startswith("train_") for key in top.keys)
        return deepspeed.imported(top, gpus) if of_deepspeed else _row(top, row)
    if file.suffix not in SCRIPTS:
        raise ValueError(f"{file}: a plan's file ends in .json, .toml or {', '.join(SCRIPTS)}")
    options = options_in(file)
    if any(name.startswith(("training.", "parallelism.")) for name in options):
        return torchtitan.imported(options, gpus)
    return megatron.imported(options, str(file), gpus)


def _row(top: Table, number: int) -> Imported:
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
    return Imported(options, (name, policy), [])
