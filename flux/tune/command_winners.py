"""`flux tune show | export | import | clear`: manage winners."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flux.cli.ranks import check_writable
from flux.cli.terminal import open_console, refuse, say, write_file


def show(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """List all winners: those tuned here or imported, then those shipped with flux."""
    from rich import box
    from rich.table import Table

    from flux.select.cache import default_caches

    caches = default_caches()
    entries = [(cache, entry) for cache in caches for entry in cache.entries()]
    if json_output:
        print(json.dumps([entry.as_dict() for _, entry in entries], indent=1))
        return
    table = Table(box=box.SIMPLE)
    for column in ("op", "dtype", "N", "K", "world", "M", "ms", "x unfused", "knobs", "machine"):
        table.add_column(column, overflow="fold")
    for _, entry in entries:
        key = entry.key
        for winner in entry.winners:
            ratio = f"{winner.ms / winner.unfused_ms:.2f}" if winner.unfused_ms else "-"
            kernel = "" if winner.kernel is None else f" {winner.kernel.name}"
            table.add_row(
                *(
                    f"{key.op} {key.variant}".strip(),
                    key.dtype,
                    str(key.n),
                    str(key.k),
                    key.world,
                    str(winner.m),
                ),
                *(f"{winner.ms:.4g}", ratio, f"{winner.knobs}{kernel}", key.fingerprint[:8]),
            )
    if entries:
        open_console(least=140).print(table)
    else:
        say(f"no winners in {caches[0].directory}, and flux ships none; run flux tune")
    damaged = caches[0].damaged()
    if damaged:
        say(f"{len(damaged)} damaged file(s) were set aside in {caches[0].directory}")


def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; - is stdout.")],
) -> None:
    """Write all winners of this cache into one file, for `flux tune import` elsewhere."""
    from flux.core.env import TUNE_CACHE
    from flux.select.cache import Cache

    entries = [entry.as_dict() for entry in Cache(TUNE_CACHE.path()).entries()]
    text = json.dumps({"flux_winners": 1, "entries": entries}, indent=1) + "\n"
    if str(target) == "-":
        print(text, end="")
        return
    check_writable(str(target))
    write_file(target, text)
    say(f"wrote {sum(len(entry['winners']) for entry in entries)} winners to {target}")


def import_winners(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="File that `flux tune export` wrote.")
    ],
) -> None:
    """Add winners of a file to this cache. Of two for the same shape, the newer one stays."""
    from filelock import Timeout

    from flux.core.env import TUNE_CACHE
    from flux.select.cache import Cache, read_export

    try:
        entries = read_export(source)  # everything is checked before anything is stored
    except OSError as error:
        refuse(f"cannot read {source}: {error.strerror}")
    except ValueError as error:
        refuse(f"{source}: {error}")
    cache = Cache(TUNE_CACHE.path())
    try:
        for entry in entries:
            cache.store(entry, keep_newer=True)
    except (OSError, Timeout) as error:
        refuse(f"cannot write to {cache.directory}: {error}")
    count = sum(len(entry.winners) for entry in entries)
    say(f"imported {count} winners for {len(entries)} ops into {cache.directory}")


def clear(
    op: Annotated[str | None, typer.Option(help="Delete only winners of this op.")] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Delete only winners of machines with this fingerprint prefix."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without confirmation.")] = False,
) -> None:
    """Delete winners, and interrupted runs. Winners shipped with flux stay."""
    from flux.core.env import TUNE_CACHE
    from flux.select.cache import Cache

    cache = Cache(TUNE_CACHE.path())
    chosen = [
        entry.key
        for entry in cache.entries()
        if op in (None, entry.key.op) and entry.key.fingerprint.startswith(fingerprint or "")
    ]
    everything = op is None and fingerprint is None
    if not yes:
        what = "all winners" if everything else f"the winners for {len(chosen)} ops"
        typer.confirm(f"Delete {what} in {cache.directory}?", abort=True)
    for key in chosen:
        cache.remove(key)
    if everything:
        for path in cache.damaged():
            path.unlink(missing_ok=True)
        shutil.rmtree(cache.root / "runs", ignore_errors=True)
    say(f"deleted the winners for {len(chosen)} ops")
