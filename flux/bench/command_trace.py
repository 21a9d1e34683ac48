"""`flux trace`: record tile transfers and waits of one op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flux.bench.command_options import ProblemOptions, RunOptions, config_of
from flux.cli.options import with_options
from flux.cli.ranks import check_writable, speaks, watched_ranks
from flux.cli.terminal import open_console, refuse, say, writing

if TYPE_CHECKING:
    from flux.core.events import Trace

trace = typer.Typer(help="Record a timeline of all ranks.", no_args_is_help=True)


@trace.callback()
def _root() -> None:
    """Keep `op` a subcommand while it is the only one."""


@trace.command("op")
@with_options
def trace_op(
    what: ProblemOptions,
    *,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method: flux | medium | unfused (default: flux). May be given several times."
        ),
    ] = None,
    calls: Annotated[int, typer.Option(help="Number of calls to trace, back to back.")] = 1,
    warmup: Annotated[int, typer.Option(help="Number of calls before the traced ones.")] = 3,
    capacity: Annotated[
        int, typer.Option(help="Events that the buffer of each thread holds.")
    ] = 4096,
    how: RunOptions,
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="Write the Chrome trace to FILE, for ui.perfetto.dev."),
    ] = "trace.json",
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print no summary and no progress bar.")
    ] = False,
) -> None:
    """Run one op with time stamps of every tile, and write a trace that browsers show.

    Open the file in ui.perfetto.dev or chrome://tracing. Several methods follow one another in it.

    Starts its own ranks, or joins torchrun's. torchrun takes --m as one of its own options, unless
    -- ends those: torchrun --nproc-per-node 2 -m -- flux trace op --m 2048
    """
    config = config_of(what, how, warmup=warmup)
    from flux.bench.traced import Wanted, reason_unsupported, traced

    try:
        wanted = Wanted(tuple(method or ["flux"]), calls, capacity)
    except ValueError as error:
        refuse(str(error))
    missing = reason_unsupported(config, wanted)
    if missing is not None:
        refuse(missing)
    if speaks():
        check_writable(out)
    silent = quiet or not speaks()
    with watched_ranks(silent) as progress:
        trace = traced(config, wanted, progress)
    if speaks() and trace is not None:
        _report(trace, out, silent=silent)


def _report(trace: Trace, out: str, *, silent: bool) -> None:
    import flux
    from flux.trace.chrome import write_chrome
    from flux.trace.summary import show

    with writing(out):
        write_chrome(trace.events, out, {"flux": flux.__version__, **trace.metadata})
    if not silent:
        show(trace.events, trace.metadata, open_console())
        say(f"wrote {out}: {len(trace.events)} events; open it in ui.perfetto.dev")
