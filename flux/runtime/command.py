"""The command `flux plan run`, which runs a step on CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.options import with_options
from flux.cli.ranks import check_writable, speaks, torchrun_or_own, watched_ranks
from flux.cli.terminal import open_console, refuse, write_json
from flux.plan import options as plan_options
from flux.plan.command import draw, title_of, write_trace

if TYPE_CHECKING:
    from flux.plan.policies import Policies
    from flux.runtime.run import PlanRun


@dataclass(frozen=True)
class SmallStepOptions(plan_options.RankStepOptions):
    """A step that is small enough for CPUs, and the hosts."""

    model: plan_options.Model = "gpt-6.7b"
    tp: plan_options.Tp = 2
    layers: plan_options.Layers = 2
    sequence: plan_options.Sequence = 256
    scale: Annotated[int, typer.Option(help="Divisor of the model's sizes.")] = 8
    hosts: options.Hosts = "1"
    link_rate: options.LinkRate = None


@with_options
def run_command(
    step: SmallStepOptions,
    *,
    plan: plan_options.PlanFile = None,
    repeats: options.Repeats = 9,
    warmup: options.Warmup = 2,
    threads: options.Threads = 1,
    seed: options.Seed = 0,
    timeout: options.Timeout = 60.0,
    trace: options.TraceFile = None,
    picture: plan_options.PictureFile = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Run a step under each policy on CPU ranks, beside what the simulator predicts.

    First every operator is measured by itself, and beside communication. The trace has predicted
    and measured timelines above each other.
    """
    settings = {"repeats": repeats, "warmup": warmup, "threads": threads, "seed": seed}
    if speaks():
        check_writable(trace, picture, json_target)
    silent = quiet or json_target == "-"
    try:
        config = _config(step, plan, {**settings, "timeout_s": timeout})
    except OSError as error:
        refuse(f"{plan}: {error.strerror}")
    except ValueError as error:
        refuse(str(error))
    torchrun_or_own(config.ranks, step.hosts)
    from flux.bench.launch import on_ranks
    from flux.plan import report
    from flux.runtime.run import run_entry

    with watched_ranks(silent or not speaks()) as progress:
        runs = on_ranks(run_entry, config, None, progress)
    if not speaks():
        return
    rows, timelines = [], []
    for policy_run in runs:
        row = report.document(policy_run.label, config.step, config.cluster, policy_run.run)
        times = policy_run.times_ms
        row["iteration_ms"] = sorted(times)[len(times) // 2]
        row |= {"predicted_ms": policy_run.predicted.iteration_ms, "times_ms": list(times)}
        rows.append(row)
        timelines.append((f"{policy_run.label}, predicted", policy_run.predicted))
        timelines.append((f"{policy_run.label}, run", policy_run.run))
    title = title_of(config.step, config.cluster.name)
    if not silent:
        report.show(rows, title, open_console())
    write_json(rows[0] if len(rows) == 1 else rows, json_target)
    if trace is not None:
        write_trace(timelines, trace)
    if picture is not None:
        draw(title, timelines, picture)


def _config(step: SmallStepOptions, plan: str | None, settings: dict[str, Any]) -> PlanRun:
    """Return the configuration of a run: of the options, or of a plan in a file."""
    from flux.bench.config import check_memory
    from flux.bench.model import scaled
    from flux.plan.files import options_with
    from flux.runtime.run import PlanRun, memory_of, schedules_of

    policies: Policies = tuple(map(plan_options.parse_policy, step.policy or ["serial", "domino"]))
    if plan is not None:
        taken, step = options_with(step, plan)
        policies = policies if step.policy else taken.policies
    whole = plan_options.step_with(step, dtype="float32")
    config = PlanRun(
        step=replace(whole, layer=scaled(whole.layer, step.scale, step.tp)),
        policies=policies,
        hosts=step.hosts,
        link_rate=step.link_rate,
        **settings,
    )
    # All of this raises here, before any rank starts.
    check_memory(memory_of(config, schedules_of(config)))
    return config
