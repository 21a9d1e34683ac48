"""The commands `flux plan run` and `profile`, which run a step on CPU ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.options import with_options
from flux.cli.ranks import check_writable, speaks, torchrun_or_own, watched_ranks
from flux.cli.terminal import open_console, refuse, say, writing
from flux.plan.command import draw, title_of, write, write_trace
from flux.plan.options import (
    Layers,
    Model,
    PictureFile,
    PlanFile,
    RankStepOptions,
    Sequence,
    Tp,
    TraceFile,
    parse_policy,
    step_with,
)

if TYPE_CHECKING:
    from flux.plan.policies import Policies
    from flux.runtime.run import PlanRun


@dataclass(frozen=True)
class SmallStepOptions(RankStepOptions):
    """A step that is small enough for CPUs, and the hosts."""

    model: Model = "gpt-6.7b"
    tp: Tp = 2
    layers: Layers = 2
    sequence: Sequence = 256
    scale: Annotated[int, typer.Option(help="Divisor of the model's sizes.")] = 8
    hosts: options.Hosts = "1"
    link_rate: options.LinkRate = None


@with_options
def run_command(
    step: SmallStepOptions,
    *,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Use this profile; measure none.")
    ] = None,
    plan: PlanFile = None,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="With --plan: divide its degrees and sizes until it runs on the ranks here: "
            "torchrun's, or one for each core and at least 2.",
        ),
    ] = False,
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
    settings = {
        "profile": profile,
        "repeats": repeats,
        "warmup": warmup,
        "threads": threads,
        "seed": seed,
        "timeout_s": timeout,
    }
    policies: Policies | None = None
    smaller: dict[str, list[Any]] = {}
    if plan is not None:
        step, policies, smaller = _take_plan(plan, shrink, step, settings)
    elif shrink:
        refuse("--shrink needs --plan FILE")
    if speaks():
        check_writable(trace, picture, json_target)
    hint = "" if plan is None else "; --shrink makes the plan smaller"
    silent = quiet or json_target == "-"
    config, (_, runs) = _on_ranks(step, policies, settings, hint=hint, silent=silent)
    if not speaks():
        return
    from flux.plan import report

    name = config.cluster.name
    rows = []
    for policy_run in runs:
        row = report.document(policy_run.label, config.step, config.cluster, policy_run.run)
        times = policy_run.times_ms
        row["iteration_ms"] = sorted(times)[len(times) // 2]
        row |= {"predicted_ms": policy_run.predicted.iteration_ms, "times_ms": list(times)}
        rows.append(row | ({"shrunk": smaller} if smaller else {}))
    title = title_of(config.step, name)
    if not silent:
        report.show(rows, title, open_console())
    write(rows[0] if len(rows) == 1 else rows, json_target)
    timelines = []
    for policy_run in runs:
        timelines.append((f"{policy_run.label}, predicted", policy_run.predicted))
        timelines.append((f"{policy_run.label}, run", policy_run.run))
    if trace is not None:
        write_trace(timelines, trace)
    if picture is not None:
        draw(title, timelines, picture)


def _take_plan(
    file: str, shrink: bool, step: SmallStepOptions, settings: dict[str, Any]
) -> tuple[SmallStepOptions, Policies, dict[str, list[Any]]]:
    """Return the options of a plan in a file, made small with --shrink, and its policies.

    Returns:
        Options; policies; and [before, after] of what was made smaller, by name.
    """
    from flux.launch.supervisors import torchrun_world
    from flux.plan.shrink import changes_of, shrunk
    from flux.plan.trainers import read_plan

    default = SmallStepOptions()
    own = ("layers", "scale", "sequence")
    if shrink and any(getattr(step, name) != getattr(default, name) for name in own):
        refuse("--shrink chooses --layers, --scale and --sequence: leave these out")
    try:
        plan = read_plan(file)
        step = replace(step, **plan.options)
        if not shrink:
            return step, plan.policies, {}
        here = torchrun_world()
        ranks = max(2, os.cpu_count() or 1) if here is None else here
        changes = shrunk(
            asdict(step),
            ranks,
            here is not None,
            lambda changes: _config(replace(step, **changes), plan.policies, settings),
        )
    except OSError as error:
        refuse(f"{file}: {error.strerror}")
    except ValueError as error:
        refuse(str(error))
    smaller = changes_of(asdict(step), changes)
    if speaks():
        words = [f"{key} {before} to {after}" for key, (before, after) in smaller.items()]
        print(f"shrunk: {', '.join(words) or 'nothing'}", file=sys.stderr)
    return replace(step, **changes), plan.policies, smaller


@with_options
def profile_command(
    out: Annotated[str, typer.Option(metavar="FILE", help="Write the profile to FILE.")],
    step: SmallStepOptions,
    *,
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
    settings = {
        "pairs": pairs,
        "repeats": repeats,
        "warmup": 0,
        "threads": threads,
        "seed": seed,
        "timeout_s": timeout,
    }
    _, (profile, _) = _on_ranks(step, None, settings, only_profile=True, silent=quiet)
    if speaks():
        with writing(out):
            profile.write(Path(out))
        if not quiet:
            count = len(profile.oef) + len(profile.pairs)
            say(f"wrote {out}: {len(profile.solo)} operators, {count} pairs")


def _config(step: SmallStepOptions, policies: Policies | None, settings: dict[str, Any]) -> PlanRun:
    """Return the configuration of a run."""
    from flux.bench.config import check_memory
    from flux.bench.model import scaled
    from flux.runtime.profile import read_profile
    from flux.runtime.run import PlanRun, memory_of, predictions, schedules_of

    whole = step_with(step, dtype="float32")
    if policies is None:
        policies = tuple(map(parse_policy, step.policy or ["serial", "domino"]))
    profile = settings.get("profile")
    config = PlanRun(
        step=replace(whole, layer=scaled(whole.layer, step.scale, step.tp)),
        policies=policies,
        hosts=step.hosts,
        link_rate=step.link_rate,
        **settings | {"profile": None if profile is None else read_profile(Path(profile))},
    )
    # All of this raises here, before any rank starts.
    schedules = schedules_of(config, config.profile)
    check_memory(memory_of(config, schedules))
    if config.profile is not None:
        predictions(config.profile, schedules)
    return config


def _on_ranks(
    step: SmallStepOptions,
    policies: Policies | None,
    settings: dict[str, Any],
    *,
    only_profile: bool = False,
    hint: str = "",
    silent: bool,
) -> Any:
    """Return the configuration, and the profile and runs of its ranks; exit for bad input."""
    from flux.bench.launch import on_ranks
    from flux.runtime.run import run_entry

    torchrun_or_own(prod((step.tp, step.cp, step.dp, step.pp)), step.hosts)
    try:
        config = _config(step, policies, settings)
    except (ValueError, OSError) as error:
        refuse(f"{error}{hint}")
    with watched_ranks(silent or not speaks()) as progress:
        return config, on_ranks(run_entry, config, only_profile, progress)
