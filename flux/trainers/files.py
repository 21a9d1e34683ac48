"""Which trainer a file is of, and who makes files for it."""

from __future__ import annotations

from pathlib import Path

from flux.bench.model_files import SCRIPTS
from flux.bench.scripts import options_in
from flux.core.datafile import Table
from flux.plan.files import FilePlan
from flux.trainers import deepspeed, megatron, torchtitan
from flux.trainers.common import Exported, Planned, split_of


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
    if plan.chunks > 1 and split_of(plan.step.stages):
        raise ValueError(
            f"{plan.policy} cannot run split: it cuts the model into stages of its own"
        )
    return makers[trainer](plan)


def imported(file: Path, gpus: int | None, model: str | None = None) -> FilePlan | None:
    """Return the plan in a trainer's file, or a script that starts one; None: of a search.

    Args:
        file: DeepSpeed's configuration (``.json``), torchtitan's (``.toml``), or a script.
        gpus: ranks of the step, if the file does not say it.
        model: name or file, in place of the file's.
    """
    if file.suffix == ".toml":
        return torchtitan.imported(torchtitan.from_toml(file), gpus, model)
    if file.suffix == ".json":
        top = Table.load_json(file, "an outcome of flux plan search")
        of_deepspeed = any(key.startswith(("train_", "zero_")) for key in top.keys)
        return deepspeed.imported(file, gpus) if of_deepspeed else None
    if file.suffix not in SCRIPTS:
        raise ValueError(f"{file}: a plan's file ends in .json, .toml or {', '.join(SCRIPTS)}")
    options = options_in(file)
    if any("." in name for name in options) or {"module", "config"} <= options.keys():
        return torchtitan.imported(options, gpus, model)
    return megatron.imported(options, str(file), gpus)
