"""The group of commands `flux plan`, with `flux plan export`."""

from __future__ import annotations

from typing import Annotated

import typer

from flux.cli.options import with_options
from flux.cli.terminal import printable, refuse
from flux.plan.command import note, plan, step_of_options
from flux.plan.options import StepOptions

__all__ = ["export_command", "plan"]


@plan.command("export")
@with_options
def export_command(
    to: Annotated[str, typer.Option(help="megatron, torchtitan or deepspeed.")],
    step_options: StepOptions,
) -> None:
    """Print a trainer's options for a plan, and what it does otherwise."""
    from flux.machine.cluster import load_cluster
    from flux.plan.policies import label_of, policy_of
    from flux.trainers.common import RELEASES, Planned
    from flux.trainers.files import exported

    step, policies, _ = step_of_options(step_options, (("serial", {}),))
    try:
        ((name, chosen),) = policies
    except ValueError:
        refuse("export takes one --policy")
    try:
        policy_of(name, chosen)  # raises, if there is none
        devices = load_cluster(step_options.cluster).devices
        made = exported(to, Planned(step, name, dict(chosen), devices))
    except ValueError as error:
        refuse(str(error))
    gpus = f"{step.name} on {step.parallel.world} GPUs"
    lines = [f"{gpus}, {label_of(name, chosen)}; options of {RELEASES[to]}"]
    if made.text.startswith("{"):
        for text in made.notes:
            note(text)
    else:
        lines = [f"# {printable(line)}" for line in (*lines, *made.notes)]
        print(*lines, sep="\n")
    print(made.text)
