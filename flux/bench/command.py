"""The commands `flux bench` and `flux bench op`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer

from flux.bench.command_options import Chosen, config_of
from flux.cli import options
from flux.cli.mounting import MountedGroup
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


def bench_op(
    op: options.Op = "ag_gemm",
    m: options.M = 2048,
    n: options.N = 4096,
    k: options.K = 2048,
    dtype: options.Dtype = None,
    nproc: options.Nproc = None,
    hosts: options.Hosts = "1",
    link_rate: options.LinkRate = None,
    backend: options.Backend = None,
    transport: options.Transport = None,
    repeats: options.Repeats = 15,
    warmup: options.Warmup = 3,
    threads: options.Threads = 1,
    seed: options.Seed = 0,
    timeout: options.Timeout = 60.0,
    path: options.PathKnob = None,
    order: options.Order = None,
    direction: options.Direction = None,
    comm_tile_rows: options.CommTileRows = None,
    tile: options.Tile = None,
    store: options.Store = None,
    swizzle: options.Swizzle = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Time one op: unfused (library), medium (chunk per rank), flux. One run, interleaved.

    Every method's result is checked against float64, before and after. A wrong method is reported
    without a time, and the exit status is 1.

    Starts its own ranks, or joins torchrun's. torchrun takes --m as one of its own options, unless
    -- ends those: torchrun --nproc-per-node 2 -m -- flux bench op --m 2048
    """
    chosen = Chosen.among(locals())
    config = config_of(chosen, repeats=repeats, warmup=warmup)
    silent = quiet or json_target == "-" or not speaks()
    if speaks() and json_target not in (None, "-"):
        check_writable(json_target)
    measurement = _measure(config, silent=silent)
    if speaks():
        _report(config, measurement, json_target, silent=silent)
    if measurement.complaints:
        raise typer.Exit(EXIT_FAILED)


def _measure(config: BenchConfig, *, silent: bool) -> Measurement:
    from flux.bench import launch

    with watched_ranks(silent) as progress:
        found: Measurement = launch.measured(config, progress)
        return found


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
