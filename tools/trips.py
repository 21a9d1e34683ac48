#!/usr/bin/env python3
"""Count the files and functions of flux that an action enters: its trip.

Each function counts once; comprehensions are a part of theirs. Files that load are counted
apart. The ranks are processes of their own, which load flux at the first action.

    tools/trips.py                    # all trips: files and functions
    tools/trips.py --list backward    # the functions of one, in the order of their first call
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Trip = list[tuple[str, str]]
"""File and name of each function, in the order of the first calls."""
_LOADED = "(loaded)"
"""Name of a module and of the body of a class."""
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@contextmanager
def recorded(trip: Trip) -> Iterator[None]:
    """Append to ``trip`` the functions of flux that this thread enters."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in entered:
            return
        entered.add(code)
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT / "flux") and code.co_name not in _COMPREHENSIONS:
            is_function = code.co_flags & inspect.CO_OPTIMIZED
            name = getattr(code, "co_qualname", code.co_name) if is_function else _LOADED
            trip.append((path.relative_to(ROOT).as_posix(), name))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def rank_trips(rank: int, world: int, store: str) -> dict[str, Trip]:
    """Return the trips of an op and of a layer on this rank."""
    import torch
    import torch.distributed as dist

    import flux

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    trips: dict[str, Trip] = {}
    names = ("construction", "first call", "later call", "backward", "layer", "layer again")
    for name in names:
        trips[name] = []
    x = torch.ones(4, 8, requires_grad=True)
    weight = torch.ones(4, 8, requires_grad=True)
    with recorded(trips["construction"]):
        op = flux.AGGemm(max_m=8, n=8, k=8)
    for name in ("first call", "later call"):
        with torch.no_grad(), recorded(trips[name]):
            op(x, weight)
    y = op(x, weight)
    with recorded(trips["backward"]):
        y.backward(torch.ones_like(y))
    layer = flux.layers.ColumnParallelLinear(8, 8, sequence_parallel=True)
    for name in ("layer", "layer again"):
        with recorded(trips[name]):
            y = layer(x)
        y.backward(torch.ones_like(y))
    flux.layers.close_pools()
    op.close()
    dist.barrier()
    dist.destroy_process_group()
    return trips


def tune_trip(directory: str) -> Trip:
    """Return the trip of `flux tune` in the process of the command, for one small shape."""
    import os

    os.environ["FLUX_TUNE_CACHE"] = directory
    trip: Trip = []
    shape = ["--op", "ag_gemm", "--m", "64", "--n", "64", "--k", "32"]
    arguments = ["tune", *shape, "--nproc", "2", "--budget", "20s"]
    with recorded(trip):
        from flux.cli.app import app

        try:
            app(arguments)
        except SystemExit as done:
            if done.code:
                raise
    return trip


def main() -> None:
    """Print the trips."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", metavar="TRIP", help="print the functions of a trip")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--tune", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, store, out = options.rank
        Path(out).write_text(json.dumps(rank_trips(int(rank), 2, store)), encoding="utf-8")
        return
    if options.tune:
        directory, out = options.tune
        Path(out).write_text(json.dumps({"tune": tune_trip(directory)}), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as made:
        out = [str(Path(made, name)) for name in ("0", "1", "tune")]
        starts = [["--rank", str(rank), str(Path(made, "store")), out[rank]] for rank in (0, 1)]
        command = [sys.executable, __file__]
        ranks = [subprocess.Popen([*command, *start]) for start in starts]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")
        subprocess.run([*command, "--tune", made, out[2]], check=True, stdout=subprocess.DEVNULL)
        trips: dict[str, Trip] = {}
        for name in (out[0], out[2]):
            trips |= json.loads(Path(name).read_text(encoding="utf-8"))
    if options.list:
        print(*(f"{path}: {name}" for path, name in trips[options.list]), sep="\n")
        return
    print(f"{'trip':14} {'files':>5} {'functions':>9}   {'files loaded':>12}")
    for name, trip in trips.items():
        entered = [path for path, function in trip if function != _LOADED]
        loaded = {path for path, function in trip if function == _LOADED}
        print(f"{name:14} {len(set(entered)):>5} {len(entered):>9}   {len(loaded):>12}")


if __name__ == "__main__":
    main()
