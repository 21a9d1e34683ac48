"""The commands `flux plan simulate`, `explain`, `profile` and `run`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flux.cli import options
from flux.cli.ranks import check_writable, speaks, torchrun_or_own, watched_ranks
from flux.cli.terminal import (
    PLAIN,
    command_line,
    open_console,
    refuse,
    say,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from flux.plan.model import Step
    from flux.plan.simulate import Timeline

plan = typer.Typer(
    help="Predict, explain and run the schedule of a training step.", no_args_is_help=True
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

_SHARED = (
    *("model", "tp", "dp", "pp", "cp", "ep", "sequence_parallel", "layers", "sequence"),
    *("micro_batch", "micro_batches", "zero", "regather", "shard"),
)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a policy on the command line.

    Raises:
        ValueError: an option has no value.
    """
    name, _, rest = text.partition(":")
    found: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"policy {name}: expected option=value, got {part!r}")
        low = value.lower()
        if low in ("true", "false"):
            found[key] = low == "true"
        else:
            try:
                found[key] = int(value)
            except ValueError:
                found[key] = value
    return name, found


def _step(**given: Any) -> Step:
    from flux.plan.model import Parallel, step_of

    degrees = {name: given.pop(name) for name in ("tp", "cp", "dp", "pp", "ep")}
    parallel = Parallel(**degrees, sequence=given.pop("sequence_parallel"))
    return step_of(given.pop("model"), parallel, **given)


def _simulated(
    policies: list[str], step: Step, cluster: str, hosts: int | None, memory_gb: float | None
) -> tuple[str, list[tuple[str, Timeline]]]:
    """Return the cluster's name, and label and timeline of each policy; exit for bad input."""
    from dataclasses import replace

    from flux.machine.cluster import load_cluster
    from flux.plan.build import build_step
    from flux.plan.cost import AnalyticCost
    from flux.plan.fabric import Fabric
    from flux.plan.graph import paused_collector
    from flux.plan.policies import label_of, planned, policy_of
    from flux.plan.simulate import simulate

    found = load_cluster(cluster)
    if hosts is not None:
        if hosts < 1:
            raise ValueError(f"hosts must be at least 1, got {hosts}")
        found = replace(found, hosts=hosts)
    fabric = Fabric(found, step.parallel)
    cost = AnalyticCost(fabric, step.dtype, step.itemsize)
    timelines = []
    with paused_collector():
        graph = build_step(step, fabric)
        for text in policies:
            name, chosen = parsed(text)
            made = policy_of(name, chosen)
            schedule = planned(made, graph, fabric, cost)
            timelines.append((label_of(name, chosen, made), simulate(schedule, cost)))
    limit = memory_gb if memory_gb is not None else found.device.memory_gb
    for label, timeline in timelines:
        needed = timeline.peak_memory_bytes / 1e9
        if limit and needed > limit:
            raise ValueError(
                f"{label}: a device needs {needed:.1f} GB, and has {limit:g}; use more tp, pp or "
                "dp (zero=1 or 3), or a smaller micro-batch"
            )
    return found.name, timelines


def _title(step: Step, cluster: str) -> str:
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
    """What `simulate` and `explain` are about: the step, its cluster, and labelled timelines."""

    step: Step
    cluster: str
    timelines: list[tuple[str, Timeline]]


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
        step = _step(**{name: given[name] for name in _SHARED})
        policies = policy or ["serial", "domino"]
        return Planned(step, *_simulated(policies, step, cluster, hosts, memory_gb))
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

    Nothing is run: times come from the data sheets in the cluster's file.
    """
    from flux.plan import report

    step, cluster, timelines = planned
    rows = [report.document(label, step, cluster, timeline) for label, timeline in timelines]
    if json_target != "-":
        report.show(rows, _title(step, cluster), open_console())
    write(rows[0] if len(rows) == 1 else rows, json_target)
    write_trace(timelines, trace)
    draw(_title(step, cluster), timelines, picture)


@plan.command("explain")
@_with_plan
def explain_command(planned: Planned) -> None:
    """Say which communication a policy hides, and which it does not."""
    from flux.plan.report import explain

    console = open_console()
    console.print(_title(planned.step, planned.cluster), **PLAIN)
    for label, timeline in planned.timelines:
        console.print(f"\n[bold]{label}[/]: {timeline.iteration_ms:.2f} ms", **PLAIN)
        for line in explain(timeline):
            console.print(line, **PLAIN)


@plan.command("run")
def run_command(
    policy: Policy = None,
    model: Model = "gpt-6.7b",
    tp: Tp = 2,
    dp: Dp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    sequence_parallel: SequenceParallel = False,
    layers: Layers = 2,
    scale: Annotated[int, typer.Option(help="Divisor of the model's sizes.")] = 8,
    sequence: Sequence = 256,
    micro_batch: MicroBatch = 2,
    micro_batches: MicroBatches = None,
    zero: Zero = 1,
    regather: Regather = False,
    shard: Shard = 0,
    hosts: options.Hosts = "1",
    link_rate: options.LinkRate = None,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use this profile; measure none.")
    ] = None,
    searched: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Run the best plan that flux plan search has written, beside serial; model, "
            "degrees, batch and policy are the plan's.",
        ),
    ] = None,
    repeats: options.Repeats = 9,
    warmup: options.Warmup = 2,
    threads: options.Threads = 1,
    seed: options.Seed = 0,
    timeout: options.Timeout = 60.0,
    trace: TraceFile = None,
    picture: PictureFile = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Run a step under each policy on CPU ranks, beside what the simulator predicts.

    First every operator is measured by itself, and beside communication. The trace has predicted
    and measured timelines above each other.
    """
    given = dict(locals(), policy=policy or ["serial", "domino"])
    if searched is not None:
        from flux.plan.search import winner_of

        try:
            given |= winner_of(searched)
        except (ValueError, OSError) as error:
            refuse(str(error))
    config, (_, found) = _on_ranks(given)
    if not speaks():
        return
    from flux.plan import report

    name = config.cluster.name
    rows = []
    for ran in found:
        row = report.document(ran.label, config.step, name, ran.run)
        row["iteration_ms"] = sorted(ran.times_ms)[len(ran.times_ms) // 2]
        row |= {"predicted_ms": ran.predicted.iteration_ms, "times_ms": list(ran.times_ms)}
        rows.append(row)
    if not quiet and json_target != "-":
        report.show(rows, _title(config.step, name), open_console())
    write(rows[0] if len(rows) == 1 else rows, json_target)
    both = [
        (f"{r.label}, {what}", t)
        for r in found
        for what, t in (("predicted", r.predicted), ("run", r.run))
    ]
    write_trace(both, trace)
    draw(_title(config.step, name), both, picture)


@plan.command("profile")
def profile_command(
    out: Annotated[str, typer.Option(metavar="FILE", help="Write the profile to FILE.")],
    policy: Policy = None,
    model: Model = "gpt-6.7b",
    tp: Tp = 2,
    dp: Dp = 1,
    pp: Pp = 1,
    cp: Cp = 1,
    ep: Ep = 1,
    sequence_parallel: SequenceParallel = False,
    layers: Layers = 2,
    scale: Annotated[int, typer.Option(help="Divisor of the model's sizes.")] = 8,
    sequence: Sequence = 256,
    micro_batch: MicroBatch = 2,
    micro_batches: MicroBatches = None,
    zero: Zero = 1,
    regather: Regather = False,
    shard: Shard = 0,
    hosts: options.Hosts = "1",
    link_rate: options.LinkRate = None,
    pairs: Annotated[
        bool, typer.Option(help="Measure forward operators beside backward ones, for dhelix.")
    ] = False,
    repeats: options.Repeats = 9,
    threads: options.Threads = 1,
    seed: options.Seed = 0,
    timeout: options.Timeout = 60.0,
    quiet: options.QuietTable = False,
) -> None:
    """Measure the operators of a step, by themselves and beside communication."""
    check_writable(out)
    given = dict(
        locals(),
        policy=policy or ["serial", "domino"],
        profile=None,
        warmup=0,
        trace=None,
        picture=None,
        json_target=None,
    )
    _, (measured, _) = _on_ranks(given, only_profile=True)
    if speaks():
        with writing(out):
            measured.write(Path(out))
        if not quiet:
            count = len(measured.oef) + len(measured.pairs)
            say(f"wrote {out}: {len(measured.solo)} operators, {count} pairs")


def _on_ranks(given: dict[str, Any], only_profile: bool = False) -> Any:
    """Return the configuration, and what its ranks found; exit for bad input."""
    from dataclasses import replace

    from flux.bench.config import check_memory
    from flux.bench.launch import on_ranks
    from flux.bench.model import scaled
    from flux.plan.profile import read_profile
    from flux.plan.run import PlanRun, memory_of, predictions, run_entry, schedules_of

    for target in ("trace", "picture", "json_target"):
        if speaks() and given[target] not in (None, "-"):
            check_writable(given[target])
    world = prod(given[name] for name in ("tp", "cp", "dp", "pp"))
    torchrun_or_own(world, given["hosts"])
    try:
        step = _step(**{name: given[name] for name in _SHARED}, dtype="float32")
        layer = scaled(step.layer, given["scale"], given["tp"])
        config = PlanRun(
            step=replace(step, layer=layer),
            policies=tuple(parsed(text) for text in given["policy"]),
            pairs=given.get("pairs", False),
            profile=read_profile(Path(given["profile"])) if given["profile"] else None,
            repeats=given["repeats"],
            warmup=given["warmup"],
            threads=given["threads"],
            seed=given["seed"],
            timeout_s=given["timeout"],
            hosts=given["hosts"],
            link_rate=given["link_rate"],
        )
        # All of this raises here, before any rank starts.
        schedules = schedules_of(config, config.profile)
        check_memory(memory_of(config, schedules))
        if config.profile is not None:
            predictions(config.profile, schedules)
    except (ValueError, OSError) as error:
        refuse(str(error))
    silent = given["quiet"] or given["json_target"] == "-" or not speaks()
    with watched_ranks(silent) as progress:
        return config, on_ranks(run_entry, config, only_profile, progress)
