"""The tuner's files for the fuzzer: good ones, and checks of what is read (see fuzz_files.py)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from flux.core.knobs import OPS, Knobs, Op
from flux.core.problem import Problem
from flux.kernels.config import GemmConfig
from flux.select.cache import Cache
from flux.select.heuristic import make_schedule
from flux.select.space import ALWAYS
from flux.select.winners import Entry, Key, Winner, checksum, fit
from flux.tune.halving import Halving
from flux.tune.journal import Journal
from flux.tune.tuner import Options, Search, Tuner

SIZE = 2**30  # no M, N or K is larger
KERNEL = GemmConfig("ag_gemm", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))
KEY = Key("ag_gemm", "float32", 256, 128, "1x2", "0123456789abcdef", "cpu 0.1.0 r1", "torch 2.13")
KNOBS = Knobs(
    tile=(32, 128),
    raster=1,
    comm_tile_rows=8,
    direction="push",
    order="direct",
    swizzle="rank_shift",
    store="staged",
    reduce="local",
    copy_streams=1,
)


# -- winners ---------------------------------------------------------------------------------------


def sample_entry() -> Entry:
    winners = [
        Winner(8, KNOBS, 0.5, 1.0, 0.75, 20, "2026-01-02T03:04:05Z"),
        Winner(64, KNOBS, 1.5, 2.0, None, 20, "2026-01-02T03:04:05Z", KERNEL),
        Winner(1000, Knobs(path="unfused"), 4.0, 4.0, 5.0, 20, "2026-01-02T03:04:05Z"),
    ]
    return Entry(KEY, {"device": {"kind": "cpu", "units": 1}, "world": "1x2"}, tuple(winners))


def seal(content: Any) -> Any:
    """With the checksum of a changed entry, so that what is behind the checksum is met."""
    try:
        rest = {name: value for name, value in content.items() if name != "sha256"}
        return {**content, "sha256": checksum(rest)}
    except (AttributeError, ValueError, TypeError, RecursionError):
        return content


def seal_all(content: Any) -> Any:
    if isinstance(content, dict) and isinstance(content.get("entries"), list):
        return {**content, "entries": list(map(seal, content["entries"]))}
    return content


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e12


def check_knobs(knobs: Knobs) -> None:
    """What an op may be given: nothing of another type, no size beyond a problem's."""
    sizes = [knobs.raster, knobs.comm_tile_rows, *(knobs.tile or ())]
    assert all(size is None or (type(size) is int and 1 <= size < 2**31) for size in sizes)
    assert knobs.path in ("fused", "medium", "unfused")
    assert knobs.copy_streams is None or type(knobs.copy_streams) is int
    for m in (1, 7, 64):
        fitted = fit(knobs, 64, m, 2)
        try:
            make_schedule("ag_gemm", (m, 16, 16), 2, 0, knobs=fitted)
        except ValueError:
            continue  # which Tuned asks beforehand


def check_winner(winner: Winner) -> None:
    assert type(winner.m) is int and 1 <= winner.m <= SIZE
    assert _is_time(winner.ms)
    assert all(
        time_ms is None or _is_time(time_ms) for time_ms in (winner.unfused_ms, winner.medium_ms)
    )
    check_knobs(winner.knobs)
    if winner.kernel is not None:
        assert all(1 <= extent < 2**31 for extent in winner.kernel.tile)
        assert winner.kernel.name.isidentifier()


def check_entry(entry: Entry | None) -> None:
    if entry is None:
        return
    assert entry.key.op in OPS and 1 <= entry.key.n <= SIZE and 1 <= entry.key.k <= SIZE
    assert "/" not in entry.key.name and entry.key.name.isascii()
    for winner in entry.winners:
        check_winner(winner)
    entry.nearest(100)
    assert Entry.from_dict(json.loads(json.dumps(entry.as_dict()))) == entry


def check_entries(entries: list[Entry]) -> None:
    for entry in entries:
        check_entry(entry)


def load_cached(path: Path) -> Entry | None:
    root = path.parent.parent
    return Cache(root).load(KEY)


# -- the journal -----------------------------------------------------------------------------------

_PROBLEM = Problem(Op.ag_gemm, 64, 256, 128, "float32", 2)


def new_search() -> Search:
    names = (*ALWAYS, "one", "two")
    halving = Halving(names, ALWAYS, (1, 2))
    return Search(_PROBLEM, (), [], halving)


def journal_text() -> bytes:
    label, names = new_search().label, (*ALWAYS, "one", "two")
    times = {name: [1.5 + 0.1 * index, 1.5] for index, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        with Journal(Path(folder), "run", {"shapes": {label: list(names)}}) as journal:
            for name in names:
                journal.add("checked", shape=label, name=name)
            journal.add("excluded", shape=label, name="two", reason="rank 1: killed by SIGKILL")
            for _ in range(2):
                journal.add("round", shape=label, times=times)
            journal.add("winner", shape=label, winner=sample_entry().winners[1].as_dict())
        return journal.path.read_bytes()


def resume(path: Path) -> Search:
    search, nothing = new_search(), None
    unused: Any = nothing
    with Journal(path.parent, path.stem, {}) as journal:
        Tuner([search], unused, unused, unused, journal, Options())
    return search


def check_search(search: Search) -> None:
    for taken in search.samples.values():
        assert all(_is_time(own) and _is_time(anchor) for own, anchor in taken)
    assert all(isinstance(text, str) for text in (*search.excluded.values(), *search.excluded))
    if search.winner is not None:
        check_winner(search.winner)
        assert search.winner.m == _PROBLEM.m
    best = search.best()
    assert best is None or search.ms(best) is not None
    assert search.done in (True, False)
