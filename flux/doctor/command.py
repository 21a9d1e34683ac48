"""The command `flux doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flux.cli.terminal import EXIT_FAILED, open_console


def doctor(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Show what was detected, what will be used, and why other parts are not.

    Under torchrun it also shows the transport between each pair of ranks; rank 0 prints.
    """
    from flux.doctor import examine, ranks
    from flux.launch.supervisors import torchrun_rank, torchrun_world

    places = ranks.places_of_all() if torchrun_world() is not None else []
    if places and torchrun_rank() != 0:
        raise typer.Exit
    findings = examine.examine(places)
    if json_output:
        print(json.dumps(findings.as_dict(), indent=1))
    else:
        examine.show(findings, open_console())
    raise typer.Exit(0 if findings.usable else EXIT_FAILED)
