"""The `flux` command. Commands import heavy modules when they run, so that `--help` is fast."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from flux.cli import options
from flux.cli.compile import compile_kernels
from flux.cli.model import bench_model
from flux.cli.plan import plan
from flux.cli.plan_run import run_command as _run_command  # noqa: F401
from flux.cli.plan_search import search_command as _search_command  # noqa: F401
from flux.cli.ranks import check_writable, say_wrong, speaks, watched_ranks
from flux.cli.simulate import simulate
from flux.cli.suite import suite
from flux.cli.terminal import (
    EXIT_FAILED,
    Commands,
    command_line,
    open_console,
    say,
    writing,
)
from flux.cli.trace import trace
from flux.cli.tune import tune

if TYPE_CHECKING:
    from flux.bench.config import BenchConfig
    from flux.bench.op import Measurement

app = typer.Typer(
    name="flux",
    cls=Commands,
    help="Tensor-parallel GEMMs with overlapped communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Compare fused ops with the unfused path.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        import flux

        say(f"flux {flux.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Show what was detected, what will be used, and why other parts are not.

    Under torchrun it also shows the transport between each pair of ranks; rank 0 prints.
    """
    from flux.cli import doctor as diagnosis
    from flux.cli import doctor_ranks
    from flux.launch.torchrun import torchrun_rank, torchrun_world

    places = doctor_ranks.places_of_all() if torchrun_world() is not None else []
    if places and torchrun_rank() != 0:
        raise typer.Exit
    findings = diagnosis.examine(places)
    if json_output:
        print(json.dumps(findings.as_dict(), indent=1))
    else:
        diagnosis.show(findings, open_console())
    raise typer.Exit(0 if findings.usable else EXIT_FAILED)


app.command("compile")(compile_kernels)
app.add_typer(tune, name="tune")
app.add_typer(trace, name="trace")
app.add_typer(simulate, name="simulate")
app.add_typer(plan, name="plan")


bench.command("model")(bench_model)
bench.command("suite")(suite)


@bench.command("op")
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
    chosen = options.Chosen.among(locals())
    config = options.config_of(chosen, repeats=repeats, warmup=warmup)
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


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
