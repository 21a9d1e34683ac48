"""The commands `flux plan simulate` and `explain`, and options that all plan commands share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from flux.cli import options
from flux.cli.mounting import MountedGroup
from flux.cli.ranks import check_writable
from flux.cli.terminal import (
    EXIT_FAILED,
    PLAIN,
    command_line,
    complain,
    open_console,
    refuse,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from flux.plan.compare import Compared
    from flux.plan.model import TrainingStep
    from flux.plan.simulate import Timeline

plan = typer.Typer(
    name="plan",
    cls=MountedGroup,
    help="Predict, explain and run the schedule of a training step.",
    no_args_is_help=True,
)

Model = Annotated[
    str, typer.Option(help="Name of a model in tuning/shapes, or a file in that format.")
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policy, with options behind a colon: domino:slices=4,order=blocks. Repeat it to "
        "compare. Default: serial and domino; of search: all.",
    ),
]
ClusterName = Annotated[
    str, typer.Option(help="Name of a cluster in tuning/clusters, or a file in that format.")
]
Hosts = Annotated[
    int | None, typer.Option("--hosts", help="Hosts to assume, in place of the cluster's own.")
]
Tp = Annotated[int, typer.Option(help="Tensor parallel ranks.")]
Dp = Annotated[int, typer.Option(help="Data parallel ranks.")]
Pp = Annotated[int, typer.Option(help="Pipeline stages.")]
Cp = Annotated[int, typer.Option(help="Context parallel ranks.")]
Ep = Annotated[int, typer.Option(help="Expert parallel ranks, among the data parallel ones.")]
SequenceParallel = Annotated[
    bool, typer.Option(help="AllGather and ReduceScatter in place of AllReduce.")
]
Layers = Annotated[int | None, typer.Option(help="Layers, in place of all of the model.")]
Sequence = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
MicroBatch = Annotated[int, typer.Option(help="Sequences of a micro-batch.")]
MicroBatches = Annotated[
    int | None, typer.Option(help="Micro-batches of a step (default: 1, or 4 for each stage).")
]
Zero = Annotated[int, typer.Option(help="0: AllReduce of gradients; 1: ZeRO-1; 3: FSDP.")]
Shard = Annotated[
    int, typer.Option(help="With --zero 3: data parallel ranks that share weights (0: all).")
]
Regather = Annotated[
    bool, typer.Option(help="Gather inputs of column-parallel linears again in backward.")
]
TraceFile = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write timelines for ui.perfetto.dev."),
]
PictureFile = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE", help="Draw the timelines: an HTML page, or for *.svg a picture."
    ),
]
MemoryGb = Annotated[
    float | None, typer.Option(help="GB of a device that a plan may use (default: the device's).")
]

SHARED = (
    *("model", "tp", "dp", "pp", "cp", "ep", "sequence_parallel", "layers", "sequence"),
    *("micro_batch", "micro_batches", "zero", "regather", "shard"),
)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a policy on the command line.

    Raises:
        ValueError: an option has no value, or is given twice.
    """
    name, _, rest = text.partition(":")
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"policy {name}: expected option=value, got {part!r}")
        if key in found:
            raise ValueError(f"policy {name}: {key} is given twice")
        found[key] = _value(value)
    return name, found


def _value(text: str) -> bool | int | float | str:
    """Return the value that a text on the command line stands for."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def step_with(**given: Any) -> TrainingStep:
    """Return the step that these options describe."""
    from flux.plan.model import Parallel, step_of

    degrees = {name: given.pop(name) for name in ("tp", "cp", "dp", "pp", "ep")}
    parallel = Parallel(**degrees, sequence=given.pop("sequence_parallel"))
    return step_of(given.pop("model"), parallel, **given)


def _compared(
    policies: list[str],
    step: TrainingStep,
    cluster: str,
    hosts: int | None,
    memory_gb: float | None,
) -> tuple[str, list[Compared]]:
    """Return the cluster's name, and the outcome of each policy.

    Raises:
        ValueError: bad input, or no policy's plan can be used.
    """
    from dataclasses import replace

    from flux.machine.cluster import load_cluster
    from flux.plan.compare import compared, usable

    found = load_cluster(cluster)
    if hosts is not None:
        if hosts < 1:
            raise ValueError(f"hosts must be at least 1, got {hosts}")
        found = replace(found, hosts=hosts)
    outcomes = compared(tuple(map(parsed, policies)), step, found, memory_gb)
    if not usable(outcomes):
        raise ValueError("\n".join(f"{one.label}: {one.reason}" for one in outcomes))
    return found.name, outcomes


def title_of(step: TrainingStep, cluster: str) -> str:
    """Return what stands above the table of a step."""
    p = step.parallel
    degrees = ", ".join(
        f"{name}={getattr(p, name)}"
        for name in ("tp", "cp", "dp", "pp", "ep")
        if getattr(p, name) > 1
    )
    batch = f"{step.micro_batches} x {step.micro_batch} sequences of {step.sequence}"
    where = f"{p.world} ranks of {cluster}{', ' + degrees if degrees else ''}"
    return f"{step.name}, {step.layers} layers, {batch}; {where}"


def write(content: Any, target: str | None) -> None:
    """Write JSON to a file, or to stdout if it is "-"."""
    if target == "-":
        print(json.dumps(content, indent=1))
    elif target is not None:
        write_file(target, json.dumps(content, indent=1) + "\n")


def write_trace(timelines: list[tuple[str, Timeline]], target: str | None) -> None:
    """Write labelled timelines for Perfetto, if there is a file for them."""
    from flux.trace.chrome import write_chrome

    if target is None:
        return
    events = [event for label, t in timelines for event in t.events(f"{label}: ")]
    with writing(target):
        write_chrome(events, target, {"command": command_line()})


def draw(title: str, timelines: list[tuple[str, Timeline]], target: str | None) -> None:
    """Draw labelled timelines in a file, if there is one: HTML, or SVG; exit if too large."""
    from flux.plan.picture import drawing, page

    if target is None:
        return
    try:
        content = drawing(timelines) if target.endswith(".svg") else page(title, timelines)
    except ValueError as error:
        refuse(str(error))
    write_file(target, content)


class Planned(NamedTuple):
    """What `simulate` and `explain` are about: the step, its cluster, and what policies gave."""

    step: TrainingStep
    cluster: str
    outcomes: list[Compared]


def _planned(
    policy: Policy = None,
    model: Model = "gpt3-175b",
    cluster: ClusterName = "flux-h800",
    hosts: Hosts = None,
    tp: Tp = 8,
    dp: Dp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    sequence_parallel: SequenceParallel = False,
    layers: Layers = None,
    sequence: Sequence = None,
    micro_batch: MicroBatch = 2,
    micro_batches: MicroBatches = None,
    zero: Zero = 1,
    regather: Regather = False,
    shard: Shard = 0,
    memory_gb: MemoryGb = None,
) -> Planned:
    """Return what these options ask for; exit for bad input."""
    given = locals()
    try:
        step = step_with(**{name: given[name] for name in SHARED})
        policies = policy or ["serial", "domino"]
        return Planned(step, *_compared(policies, step, cluster, hosts, memory_gb))
    except ValueError as error:
        refuse(str(error))


def _with_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of `_planned` too, and gets what that returns."""
    shared = inspect.signature(_planned, eval_str=True).parameters.values()
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(**given: Any) -> None:
        rest = {parameter.name: given.pop(parameter.name) for parameter in own}
        for target in rest.values():
            if target not in (None, "-"):
                check_writable(target)
        command(_planned(**given), **rest)

    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    return run


@plan.command("simulate")
@_with_plan
def simulate_command(
    planned: Planned,
    trace: TraceFile = None,
    picture: PictureFile = None,
    json_target: options.JsonTarget = None,
) -> None:
    """Predict the time of a training step under one or more policies.

    Nothing is run: times come from the data sheets in the cluster's file. A policy that cannot plan
    the step, or needs more memory than a device has, is a row with the reason; the exit status is
    then 1.
    """
    from flux.plan import report
    from flux.plan.compare import usable

    step, cluster, outcomes = planned
    rows = [report.outcome(one, step, cluster) for one in outcomes]
    if json_target != "-":
        report.show(rows, title_of(step, cluster), open_console())
    write(rows[0] if len(rows) == 1 else rows, json_target)
    timelines = usable(outcomes)
    write_trace(timelines, trace)
    draw(title_of(step, cluster), timelines, picture)
    _fail_if_any(outcomes)


@plan.command("explain")
@_with_plan
def explain_command(planned: Planned) -> None:
    """Say which communication a policy hides, and which it does not."""
    from flux.plan.report import explain

    console = open_console()
    console.print(title_of(planned.step, planned.cluster), **PLAIN)
    for label, timeline, reason in planned.outcomes:
        if timeline is None or reason:
            console.print(f"\n[bold]{label}[/]: {escape(reason)}", **PLAIN)
            continue
        console.print(f"\n[bold]{label}[/]: {timeline.iteration_ms:.2f} ms", **PLAIN)
        for line in explain(timeline):
            console.print(line, **PLAIN)
    _fail_if_any(planned.outcomes)


def _fail_if_any(outcomes: list[Compared]) -> None:
    """Exit with status 1 if the plan of a policy cannot be used, and name these on stderr."""
    failed = [one for one in outcomes if one.reason]
    for one in failed:
        complain(f"{one.label}: {one.reason}")
    if failed:
        raise typer.Exit(EXIT_FAILED)
