"""Commands of `flux plan`: simulate, explain and serve; and the output of all others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from flux.cli import options, terminal
from flux.cli.app import MountedGroup
from flux.cli.options import with_options
from flux.cli.ranks import check_writable
from flux.plan.command_calibrate import calibrate_command
from flux.plan.options import (
    PictureFile,
    ServeOptions,
    StepOptions,
    parse_policy,
    step_with,
)

if TYPE_CHECKING:
    from flux.machine.cluster import Cluster
    from flux.plan.compare import Compared
    from flux.plan.model import TrainingStep
    from flux.plan.policies import Policies
    from flux.plan.simulate import Timeline

plan = typer.Typer(
    name="plan",
    cls=MountedGroup,
    help="Predict, explain and run the schedule of a training step.",
    no_args_is_help=True,
)
plan.command("calibrate")(calibrate_command)


def title_of(step: TrainingStep, cluster: str) -> str:
    """Return what stands above the table of a step."""
    p = step.parallel
    degrees = ", ".join(f"{name}={ranks}" for name, ranks in asdict(p).items() if ranks > 1)
    batch = f"{step.micro_batches} x {step.micro_batch} sequences of {step.sequence}"
    where = f"{p.world} ranks of {cluster}{', ' + degrees if degrees else ''}"
    size = f"{step.model.size}, " if step.vocabulary else ""  # else layers alone
    return f"{step.name}, {size}{step.layers} layers, {batch}; {where}"


def write_trace(timelines: list[tuple[str, Timeline]], target: str) -> None:
    """Write labelled timelines to a file for Perfetto."""
    from flux.trace.chrome import write_chrome

    events = [event for label, t in timelines for event in t.events(f"{label}: ")]
    with terminal.writing(target):
        write_chrome(events, target, {"command": terminal.command_line()})


def draw(
    title: str, timelines: list[tuple[str, Timeline]], target: str, sections: str = ""
) -> None:
    """Draw labelled timelines in a file: HTML with sections, or SVG; exit if they are too large."""
    from flux.plan.picture import drawing, page

    svg = target.endswith(".svg")
    try:
        content = drawing(timelines) if svg else page(title, timelines, sections)
    except ValueError as error:
        terminal.refuse(str(error))
    terminal.write_file(target, content)


def _draw_steps(
    target: str, options: StepOptions, planned: Any, rows: list[dict[str, Any]]
) -> None:
    """Draw the outcomes; HTML also compares them with a link of half the speed."""
    from flux.plan import page, report
    from flux.plan.compare import compared, usable
    from flux.plan.picture import drawable
    from flux.plan.policies import policy_of
    from flux.plan.sample import small_timeline

    step, cluster, policies, outcomes = planned
    timelines, sections = usable(outcomes), ""
    if not target.endswith(".svg"):
        half, link = page.halved(cluster, step.parallel.world)
        memory = options.memory_gb, options.headroom
        again = report.documents(compared(policies, step, half, *memory), step, half)
        notes = []
        if not drawable(timelines):
            used = zip(policies, outcomes, strict=True)
            short = (
                (outcome.label, small_timeline(cluster, step, policy_of(*policy)))
                for policy, outcome in used
                if not outcome.reason
            )
            timelines, notes = list(short), [page.SHORTENED]
        sections = page.candidates(rows, notes) + page.slower(rows, again, link)
    draw(title_of(step, cluster.name), timelines, target, sections)


def step_of_options(
    options: StepOptions, default: Policies
) -> tuple[TrainingStep, Policies, StepOptions]:
    """Return the step of options, or of a plan's file, policies, options; exit for bad input.

    Options on the command line replace a plan's. Without --policy they are the plan's, or else
    ``default``.
    """
    plan = None
    try:
        policies = tuple(map(parse_policy, options.policy or ()))
        if options.plan is not None:
            from flux.plan.files import options_with

            plan, options = options_with(options, options.plan, options.row, options.gpus)
        if options.split == "search":
            from flux.machine.cluster import load_cluster
            from flux.plan.compare import usable_gb
            from flux.plan.search import with_split

            cluster = load_cluster(options.cluster, options.calibration, options.hosts)
            limit = usable_gb(cluster, options.memory_gb, options.headroom)
            step = with_split(step_with(replace(options, split="")), cluster, limit)
        else:
            step = step_with(options)
    except OSError as error:
        terminal.refuse(f"{options.plan}: {error.strerror}")
    except ValueError as error:
        terminal.refuse(str(error))
    if plan is None:
        return step, policies or default, options
    for text in plan.notes:
        note(text)
    of_plan = plan.policies if len(default) > 1 else (plan.policy,)
    return step, policies or of_plan, options


def note(text: str) -> None:
    """Print a note on a plan to stderr."""
    print(terminal.printable(f"note: {text}"), file=sys.stderr)


def _compare(
    options: StepOptions,
) -> tuple[TrainingStep, Cluster, Policies, list[Compared], StepOptions]:
    """Return step, cluster, policies, the outcome of each, and options; exit for bad input."""
    from flux.machine.cluster import load_cluster
    from flux.plan.compare import compared

    step, policies, options = step_of_options(options, (("serial", {}), ("domino", {})))
    try:
        cluster = load_cluster(options.cluster, options.calibration, options.hosts)
        outcomes = compared(policies, step, cluster, options.memory_gb, options.headroom)
    except ValueError as error:
        terminal.refuse(str(error))
    if all(outcome.reason for outcome in outcomes):
        terminal.refuse("; ".join(f"{outcome.label}: {outcome.reason}" for outcome in outcomes))
    return step, cluster, policies, outcomes, options


@plan.command("simulate")
@with_options
def simulate_command(
    step_options: StepOptions,
    trace: options.TraceFile = None,
    picture: PictureFile = None,
    json_target: options.JsonTarget = None,
) -> None:
    """Predict the time of a training step under one or more policies.

    Nothing is run: times are a calibration's, or come from data sheets. A policy that cannot plan
    the step, or needs more memory than a device has, is a row with the reason; the exit status is
    then 1.
    """
    from flux.plan import report
    from flux.plan.compare import usable

    check_writable(trace, picture, json_target)
    step, cluster, policies, outcomes, step_options = _compare(step_options)
    rows = report.documents(outcomes, step, cluster)
    if json_target != "-":
        report.show(rows, title_of(step, cluster.name), terminal.open_console())
    terminal.write_json(rows[0] if len(rows) == 1 else rows, json_target)
    if trace is not None:
        write_trace(usable(outcomes), trace)
    if picture is not None:
        _draw_steps(picture, step_options, (step, cluster, policies, outcomes), rows)
    _fail_if((label, reason) for label, _, reason in outcomes if reason)


@plan.command("explain")
@with_options
def explain_command(step_options: StepOptions) -> None:
    """Say which communication a policy hides, and which it does not."""
    from flux.plan.report import explain

    console = terminal.open_console()
    step, cluster, _, outcomes, _ = _compare(step_options)
    console.print(title_of(step, cluster.name), **terminal.PLAIN)
    for label, timeline, reason in outcomes:
        if timeline is None or reason:
            console.print(f"\n[bold]{label}[/]: {escape(reason)}", **terminal.PLAIN)
            continue
        console.print(f"\n[bold]{label}[/]: {timeline.iteration_ms:.2f} ms", **terminal.PLAIN)
        console.print("\n".join(explain(timeline)), **terminal.PLAIN)
    _fail_if((label, reason) for label, _, reason in outcomes if reason)


@plan.command("serve")
@with_options
def serve_command(asked: ServeOptions, json_target: options.JsonTarget = None) -> None:
    """Predict what a model serves: time to first token, time per token, memory, tokens per second.

    Nothing is run. --policy is one of serial, domino and intra_batch; the default compares serial
    with Flux's fused ops. --gemm-dtype is that of stored weights, too.
    """
    from flux.machine.cluster import load_cluster
    from flux.plan import serve
    from flux.plan.model import Parallel, step_of

    check_writable(json_target)
    degrees = {name: getattr(asked, name) for name in ("tp", "dp", "pp", "ep")}
    try:
        cluster = load_cluster(asked.cluster, asked.calibration, asked.hosts)
        step = step_of(
            asked.model,
            Parallel(**degrees, sequence=asked.sequence_parallel),
            sequence=asked.prompt,
            micro_batch=asked.prompts,
            layers=asked.layers,
            gemm_dtype=asked.gemm_dtype,
        )
        served = serve.Deployment.of(step, asked.batch, asked.output, asked.kv_dtype)
        policies = tuple(map(parse_policy, asked.policy or ())) or serve.DEFAULT
        rows = serve.rows(policies, served, cluster, asked.memory_gb, asked.headroom)
    except ValueError as error:
        terminal.refuse(str(error))
    if json_target != "-":
        serve.show(rows, served.title(cluster), terminal.open_console())
    terminal.write_json(rows, json_target)
    _fail_if((row["policy"], row["error"]) for row in rows if "error" in row)


def _fail_if(reasons: Iterable[tuple[str, str]]) -> None:
    """Exit with status 1 if a plan cannot be used, and print the label and reason of each."""
    failed = list(reasons)
    for label, reason in failed:
        terminal.complain(f"{label}: {reason}")
    if failed:
        raise typer.Exit(terminal.EXIT_FAILED)
