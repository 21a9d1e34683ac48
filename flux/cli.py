"""The `flux` command. Heavy imports happen inside the commands, so that `--help` is instant."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from flux.bench.command import check_writable, progress_bar, ranks_or_exit, torchrun_or_own
from flux.bench.model_cli import bench_model
from flux.kernels.cli import compile_kernels
from flux.terminal import EXIT_FAILED, PLAIN, refuse
from flux.tune.cli import tune

if TYPE_CHECKING:
    from flux.bench.op import Measurement
    from flux.bench.problem import BenchConfig

app = typer.Typer(
    name="flux",
    help="GEMMs of tensor parallelism, with their communication overlapped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Measure fused ops against the unfused path.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        import flux

        print(f"flux {flux.__version__}")
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
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what was detected, what will be used, and why not the rest.

    Under torchrun also what moves tiles between each two ranks; rank 0 speaks.
    """
    from flux import doctor as diagnosis
    from flux import doctor_ranks
    from flux.bench.launch import torchrun_rank, torchrun_world

    places = doctor_ranks.places_of_all() if torchrun_world() is not None else []
    if places and torchrun_rank() != 0:
        raise typer.Exit
    findings = diagnosis.examine(places)
    if json_output:
        print(json.dumps(findings.as_dict(), indent=1))
    else:
        diagnosis.show(findings, Console())
    raise typer.Exit(0 if findings.usable else EXIT_FAILED)


app.command("compile")(compile_kernels)
app.add_typer(tune, name="tune")


def _knobs(**chosen: Any) -> dict[str, Any]:
    """Knobs that were given on the command line, checked before any rank is started."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if "tile" in given:
        try:
            rows, columns = given["tile"].lower().split("x")
            given["tile"] = (int(rows), int(columns))
        except ValueError:
            raise ValueError(f"tile must look like 512x1024, got {given['tile']!r}") from None
    if given:
        from flux import Knobs

        Knobs(**given)
    return given


bench.command("model")(bench_model)


@bench.command("op")
def bench_op(
    op: Annotated[str, typer.Option(help="ag_gemm | gemm_rs | gemm_ar")] = "ag_gemm",
    m: Annotated[int, typer.Option("--m", help="Rows of the global problem.")] = 2048,
    n: Annotated[int, typer.Option("--n", help="Columns; ag_gemm divides them by rank.")] = 4096,
    k: Annotated[int, typer.Option("--k", help="Depth; the others divide it by rank.")] = 2048,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 | bfloat16 | float16 | float64; on GPUs bfloat16 if not given."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start; 2 if not given. Under torchrun: its.")
    ] = None,
    hosts: Annotated[
        str, typer.Option(help="Hosts to make and spread the ranks over: 2, or 3+1. Needs root.")
    ] = "1",
    link_rate: Annotated[
        str | None, typer.Option(help="Speed of every host's link, as 500mbit or 1gbit.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="cpu | cuda; cpu if not given.")] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help="cpu: shm | send_recv. cuda: symm_mem, or on one GPU virtual | loopback."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats of every method.")] = 15,
    warmup: Annotated[int, typer.Option(help="Repeats that are not counted.")] = 3,
    threads: Annotated[int, typer.Option(help="GEMM threads of each rank.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a peer.")] = 60.0,
    path: Annotated[str | None, typer.Option(help="Knob: fused | medium | unfused")] = None,
    order: Annotated[str | None, typer.Option(help="Knob: direct | ring1d | ring2d | ...")] = None,
    direction: Annotated[str | None, typer.Option(help="Knob: push | pull")] = None,
    comm_tile_rows: Annotated[int | None, typer.Option(help="Knob: rows moved at once.")] = None,
    tile: Annotated[str | None, typer.Option(help="Knob: GEMM tile, ROWSxCOLUMNS.")] = None,
    store: Annotated[str | None, typer.Option(help="Knob: direct | staged")] = None,
    swizzle: Annotated[str | None, typer.Option(help="Knob: none | rank_shift | xor")] = None,
    json_target: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON there; - is stdout.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table, no progress bar.")] = False,
) -> None:
    """Time one op: unfused (library), medium (chunk per rank), flux. One run, interleaved.

    Every method's result is checked against float64, before and after; a wrong one has no speed,
    and the exit status is 1.

    Starts its own ranks, or joins torchrun's. torchrun takes --m for one of its own options unless
    told where those end: torchrun --nproc-per-node 2 -m -- flux bench op --m 2048
    """
    from flux.bench.launch import torchrun_rank
    from flux.bench.problem import ONE_GPU, BenchConfig, Problem, dtype_name

    world = torchrun_or_own(nproc, hosts)
    if backend is None and transport in ONE_GPU:
        backend = "cuda"
    dtype = dtype or ("bfloat16" if backend == "cuda" else "float32")
    try:
        config = BenchConfig(
            problem=Problem(op, m, n, k, dtype_name(dtype), world or nproc or 2),
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            backend=backend,
            transport=transport,
            knobs=_knobs(
                path=path,
                order=order,
                direction=direction,
                comm_tile_rows=comm_tile_rows,
                tile=tile,
                store=store,
                swizzle=swizzle,
            ),
            timeout_s=timeout,
            seed=seed,
            hosts=hosts,
            link_rate=link_rate,
        )
    except (ValueError, TypeError) as error:
        refuse(str(error))
    if config.backend == "cuda" and world is None:
        from flux.bench.gpu import problem_here

        problem = problem_here(config)
        if problem is not None:
            refuse(problem)
    speaks = world is None or torchrun_rank() == 0
    silent = quiet or json_target == "-" or not speaks
    if speaks and json_target not in (None, "-"):
        check_writable(json_target)
    measurement = _measure(config, joining=world is not None, silent=silent)
    if speaks:
        _report(config, measurement, json_target, silent=silent)
    if measurement.complaints:
        raise typer.Exit(EXIT_FAILED)


def _measure(config: BenchConfig, *, joining: bool, silent: bool) -> Measurement:
    from flux.bench import launch

    console = Console()
    with (
        ranks_or_exit(),
        progress_bar(console, shown=console.is_terminal and not silent) as progress,
    ):
        return (launch.joined if joining else launch.spawned)(config, progress)


def _report(
    config: BenchConfig, measurement: Measurement, json_target: str | None, *, silent: bool
) -> None:
    from flux.bench import report

    content = report.document(config, measurement, ["flux", *sys.argv[1:]])
    if not silent:
        report.show(content, Console())
    errors = Console(stderr=True)
    for complaint in measurement.complaints:
        errors.print(f"[bold red]wrong result:[/] {escape(complaint)}", **PLAIN)
    if json_target is not None:
        report.write_json(content, json_target)
        if not silent:
            print(f"wrote {json_target}: {shlex.join(content['command'])}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
