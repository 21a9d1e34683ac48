"""The commands `flux plan run` and `profile`, which run a step on CPU ranks."""

from __future__ import annotations

import os
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.ranks import check_writable, speaks, torchrun_or_own, watched_ranks
from flux.cli.terminal import open_console, refuse, say, writing
from flux.plan.command import (
    SHARED,
    Cp,
    Dp,
    Ep,
    Layers,
    MicroBatch,
    MicroBatches,
    Model,
    PictureFile,
    Policy,
    Pp,
    Regather,
    Sequence,
    SequenceParallel,
    Shard,
    Tp,
    TraceFile,
    Zero,
    draw,
    parsed,
    step_with,
    title_of,
    write,
    write_trace,
)

if TYPE_CHECKING:
    from flux.runtime.run import PlanRun


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
            "degrees, sequence, batch and policy are the plan's.",
        ),
    ] = None,
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
    given = dict(locals(), policy=policy or ["serial", "domino"])
    smaller = _take_plan(given)
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
        rows.append(row | ({"shrunk": smaller} if smaller else {}))
    if not quiet and json_target != "-":
        report.show(rows, title_of(config.step, name), open_console())
    write(rows[0] if len(rows) == 1 else rows, json_target)
    both = [
        (f"{r.label}, {what}", t)
        for r in found
        for what, t in (("predicted", r.predicted), ("run", r.run))
    ]
    write_trace(both, trace)
    draw(title_of(config.step, name), both, picture)


def _take_plan(given: dict[str, Any]) -> dict[str, list[Any]]:
    """Put the plan of --plan into the options, with --shrink made small.

    Returns:
        [before, after] of what was made smaller, by name.
    """
    if given["searched"] is None:
        if given["shrink"]:
            refuse("--shrink needs --plan FILE")
        return {}
    from flux.launch.torchrun import torchrun_world
    from flux.plan.search import winner_of
    from flux.plan.shrink import changes_of, shrunk

    own = {"layers": 2, "scale": 8, "sequence": 256}
    if given["shrink"] and any(given[key] != value for key, value in own.items()):
        refuse("--shrink chooses --layers, --scale and --sequence: leave these out")
    try:
        given |= winner_of(given["searched"])
        if not given["shrink"]:
            return {}
        here = torchrun_world()
        ranks = max(2, os.cpu_count() or 1) if here is None else here
        changes = shrunk(given, ranks, here is not None, _config)
    except OSError as error:
        refuse(f"{given['searched']}: {error.strerror}")
    except ValueError as error:
        refuse(str(error))
    smaller = changes_of(given, changes)
    given |= changes
    if speaks():
        words = [f"{key} {before} to {after}" for key, (before, after) in smaller.items()]
        print(f"shrunk: {', '.join(words) or 'nothing'}", file=sys.stderr)
    return smaller


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


def _config(given: dict[str, Any]) -> PlanRun:
    """Return the configuration of a run.

    Raises:
        ValueError: bad options, or a policy that cannot plan this step.
        OSError: the profile cannot be read.
    """
    from dataclasses import replace

    from flux.bench.config import check_memory
    from flux.bench.model import scaled
    from flux.runtime.profile import read_profile
    from flux.runtime.run import PlanRun, memory_of, predictions, schedules_of

    step = step_with(**{name: given[name] for name in SHARED}, dtype="float32")
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
    return config


def _on_ranks(given: dict[str, Any], only_profile: bool = False) -> Any:
    """Return the configuration, and what its ranks found; exit for bad input."""
    from flux.bench.launch import on_ranks
    from flux.runtime.run import run_entry

    for target in ("trace", "picture", "json_target"):
        if speaks() and given[target] not in (None, "-"):
            check_writable(given[target])
    world = prod(given[name] for name in ("tp", "cp", "dp", "pp"))
    torchrun_or_own(world, given["hosts"])
    try:
        config = _config(given)
    except (ValueError, OSError) as error:
        hint = "; --shrink makes the plan smaller" if given.get("searched") else ""
        refuse(f"{error}{hint}")
    silent = given["quiet"] or given["json_target"] == "-" or not speaks()
    with watched_ranks(silent) as progress:
        return config, on_ranks(run_entry, config, only_profile, progress)
