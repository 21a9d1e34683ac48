"""The commands `flux bench` and `flux bench op`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer

from flux.bench.command_options import ProblemOptions, RunOptions, config_of
from flux.cli import options
from flux.cli.app import MountedGroup
from flux.cli.options import with_options
from flux.cli.ranks import check_writable, say_wrong, speaks, watched_ranks
from flux.cli.terminal import EXIT_FAILED, command_line, open_console, say, writing

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig
    from flux.bench.op import Measurement

bench = typer.Typer(
    name="bench",
    cls=MountedGroup,
    help="Compare fused ops with the unfused path.",
    no_args_is_help=True,
)


@with_options
def bench_op(
    what: ProblemOptions,
    *,
    repeats: options.Repeats = 15,
    warmup: options.Warmup = 3,
    how: RunOptions,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Time one op: unfused (library), medium (chunk per rank), flux. One run, interleaved.

    Every method's result is checked against float64, before and after. A wrong method is reported
    without a time, and the exit status is 1.

    Starts its own ranks, or joins torchrun's. torchrun takes --m as one of its own options, unless
    -- ends those: torchrun --nproc-per-node 2 -m -- flux bench op --m 2048
    """
    config = config_of(what, how, repeats=repeats, warmup=warmup)
    silent = quiet or json_target == "-" or not speaks()
    if speaks():
        check_writable(json_target)
    measurement = _measure(config, silent=silent)
    if speaks():
        _report(config, measurement, json_target, silent=silent)
    if measurement.complaints:
        raise typer.Exit(EXIT_FAILED)


def _measure(config: BenchConfig, *, silent: bool) -> Measurement:
    from flux.bench import launch

    with watched_ranks(silent) as progress:
        measurement: Measurement = launch.measured(config, progress)
        return measurement


def _report(
    config: BenchConfig, measurement: Measurement, json_target: str | None, *, silent: bool
) -> None:
    from flux.bench import report

    content = report.document(config, measurement, command_line())
    if not silent:
        report.show(content, open_console())
    say_wrong(measurement.complaints)
    if json_target is not None:
        with writing(json_target):
            report.write_json(content, json_target)
        if not silent:
            say(f"wrote {json_target}: {shlex.join(content['command'])}")
