"""The cache of winners: round trips, damaged files, concurrent and killed writers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flux.core.knobs import Knobs
from flux.kernels.config import GemmConfig
from flux.select.cache import Cache, default_caches, look_up, read
from flux.select.winners import (
    DamagedEntryError,
    Entry,
    Key,
    Winner,
    bucket,
    checksum,
    fit,
    most_tiles,
    tile_count,
)

KEY = Key("ag_gemm", "float32", 4096, 1024, "1x2", "0123456789abcdef", "cpu 0.1.0 r1", "torch 2.13")
KNOBS = Knobs(
    tile=(512, 2048),
    raster=1,
    comm_tile_rows=128,
    direction="push",
    order="direct",
    swizzle="rank_shift",
    store="staged",
    reduce="local",
    copy_streams=1,
)
KERNEL = GemmConfig("ag_gemm", "90a", "bf16", (128, 256, 64), "cooperative", cluster=(2, 1))
MACHINE = {"device": {"kind": "cpu", "units": 1}, "world": "1x2"}


def winner(m: int, **changes: Any) -> Winner:
    base = Winner(m, KNOBS, 1.5, 2.0, 1.75, 20, "2026-01-02T03:04:05Z")
    return replace(base, **changes)


def file_of(cache: Cache, key: Key = KEY) -> Path:
    return cache.directory / f"{key.name}.json"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "tune")


def test_stored_winners_are_read_back_in_full(cache: Cache) -> None:
    assert cache.load(KEY) is None
    stored = [winner(64), winner(1000, kernel=KERNEL), winner(8192, knobs=Knobs(path="unfused"))]
    for one in stored:
        cache.store(Entry(KEY, MACHINE, (one,)))
    entry = cache.load(KEY)
    assert entry is not None
    assert entry.key == KEY and entry.machine == MACHINE
    assert list(entry.winners) == stored
    assert list(cache.entries()) == [entry]
    assert cache.damaged() == []


def test_the_file_can_be_read_by_people(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(1000, kernel=KERNEL),)))
    assert file_of(cache).name.startswith("ag_gemm_float32_n4096_k1024_1x2_")
    content = json.loads(file_of(cache).read_text())
    assert {**content["key"], "variant": ""} == asdict(KEY)
    assert content["machine"] == MACHINE
    (stored,) = content["winners"]
    assert stored["m"] == 1000 and stored["bucket"] == 1024
    assert stored["knobs"]["comm_tile_rows"] == 128 and stored["kernel"]["tile"] == [128, 256, 64]
    assert len(file_of(cache).read_text().splitlines()) > 40


@pytest.mark.parametrize(
    "change",
    [
        {"op": "gemm_rs"},
        {"dtype": "bfloat16"},
        {"n": 8192},
        {"k": 512},
        {"world": "2x1"},
        {"fingerprint": "f" * 16},
        {"kernels": "cpu 0.2.0 r1"},
        {"toolchain": "torch 2.14"},
        {"variant": "e8t2p1"},
    ],
)
def test_every_part_of_the_key_keeps_winners_apart(cache: Cache, change: dict[str, Any]) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    assert cache.load(replace(KEY, **change)) is None


def test_a_newer_winner_replaces_an_older_one(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64, ms=3.0),)))
    cache.store(Entry(KEY, MACHINE, (winner(64, ms=2.0),)))
    entry = cache.load(KEY)
    assert entry is not None and [w.ms for w in entry.winners] == [2.0]
    old = Entry(KEY, MACHINE, (winner(32, tuned_at="2020"), winner(64, ms=9.0, tuned_at="2020")))
    merged = cache.store(old, keep_newer=True)
    assert [(w.m, w.ms) for w in merged.winners] == [(32, 1.5), (64, 2.0)]


DAMAGES = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: text.replace("{", "[", 1),
    "a flipped digit": lambda text: text.replace('"comm_tile_rows": 128', '"comm_tile_rows": 129'),
    "another format": lambda text: text.replace('"format": 1', '"format": 2'),
    "a list": lambda text: "[]",
    "somebody else's JSON": lambda text: '{"name": "not ours"}',
    "nested too deep": lambda text: "[" * 100_000,
    "binary": lambda text: "\0\1\2" * 50,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_set_aside_with_a_warning(cache: Cache, damage: str) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    other = replace(KEY, n=77)
    cache.store(Entry(other, MACHINE, (winner(32),)))
    text = file_of(cache).read_text()
    spoilt = DAMAGES[damage](text)
    assert spoilt != text
    file_of(cache).write_text(spoilt)
    with pytest.warns(RuntimeWarning, match="damaged tuning results set aside"):
        assert cache.load(KEY) is None
    assert [entry.key for entry in cache.entries()] == [other]
    (aside,) = cache.damaged()
    assert aside.read_text() == spoilt
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    assert cache.load(KEY) is not None


def test_a_constructor_does_not_wait_for_the_lock_of_a_damaged_file(cache: Cache) -> None:
    """Its peers wait for it meanwhile, for its timeout at most."""
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    file_of(cache).write_text("{")
    with cache._lock(KEY.name), pytest.warns(RuntimeWarning, match="are ignored"):
        began = time.monotonic()
        assert look_up(KEY, [cache], timeout_s=0.4) is None
        assert time.monotonic() - began < 2.0
    assert not cache.damaged()


def test_damage_found_while_writing_is_set_aside_too(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    for number in (1, 2):
        file_of(cache).write_text("{")
        with pytest.warns(RuntimeWarning, match=rf"damaged-{number}"):
            cache.store(Entry(KEY, MACHINE, (winner(32),)))
    entry = cache.load(KEY)
    assert entry is not None and [w.m for w in entry.winners] == [32]


def test_an_entry_under_a_foreign_name_is_not_trusted(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    other = replace(KEY, k=2048)
    file_of(cache).rename(file_of(cache, other))
    with pytest.warns(RuntimeWarning, match="contains the entry of"):
        assert cache.load(other) is None


def test_contents_are_checked_even_with_a_right_checksum(cache: Cache) -> None:
    good = Entry(KEY, MACHINE, (winner(64),)).as_dict()
    for path, value in (
        (("winners", 0, "knobs", "order"), "sideways"),
        (("winners", 0, "knobs", "speed"), 3),
        (("winners", 0, "ms"), -1.0),
        (("winners", 0, "ms"), True),
        (("winners", 0, "bucket"), 63),
        (("winners", 0, "m"), "64"),
        (("winners", 0, "kernel"), {"op": "gemm"}),
        (("key", "n"), 0),
        (("key", "op"), "gemm"),
        (("key", "world"), "../../etc"),
        (("machine",), []),
        (("winners",), {}),
    ):
        content = json.loads(json.dumps(good))
        at = content
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        del content["sha256"]
        content["sha256"] = checksum(content)
        with pytest.raises(DamagedEntryError):
            Entry.from_dict(content)


def test_other_files_in_the_directory_are_left_alone(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    mine = cache.directory / "notes.json"
    mine.write_text("my notes")
    assert len(list(cache.entries())) == 1
    assert mine.read_text() == "my notes"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_damage_in_a_read_only_directory_is_ignored(cache: Cache) -> None:
    cache.store(Entry(KEY, MACHINE, (winner(64),)))
    file_of(cache).write_text("{")
    cache.directory.chmod(0o555)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be set aside"):
            assert cache.load(KEY) is None
    finally:
        cache.directory.chmod(0o755)


def test_shipped_winners_are_the_fallback_and_read_only(tmp_path: Path) -> None:
    shipped = Cache(tmp_path / "results", read_only=True)
    shipped.directory.mkdir()
    text = json.dumps(Entry(KEY, MACHINE, (winner(64, ms=9.0),)).as_dict())
    (shipped.directory / f"{KEY.name}.json").write_text(text)
    own = Cache(tmp_path / "own")
    entry = look_up(KEY, [own, shipped])
    assert entry is not None and entry.winners[0].ms == 9.0
    own.store(Entry(KEY, MACHINE, (winner(64, ms=1.0),)))
    entry = look_up(KEY, [own, shipped])
    assert entry is not None and entry.winners[0].ms == 1.0
    (shipped.directory / f"{KEY.name}.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="does not write to"):
        assert shipped.load(KEY) is None
    assert sorted(path.name for path in shipped.directory.iterdir()) == [f"{KEY.name}.json"]


def test_environment_variable_sets_the_cache_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLUX_TUNE_CACHE", str(tmp_path / "here"))
    assert default_caches()[0].root == tmp_path / "here"


def test_shipped_winners_can_be_read() -> None:
    shipped = default_caches()[1]
    names = [path.name for path in shipped.directory.glob("*.json")]
    assert len(list(shipped.entries())) == len(names)


# -- concurrent and killed writers -----------------------------------------------------------------

WRITERS, ROUNDS = 8, 25


def _write(root: str, number: int, go: Any) -> None:
    cache = Cache(Path(root))
    go.wait()
    for step in range(ROUNDS):
        # Two keys, so that writers meet both in one file and in one directory.
        key = replace(KEY, n=1 + step % 2)
        cache.store(Entry(key, MACHINE, (winner(1 + number * ROUNDS + step, ms=1.0 + number),)))
        entry = cache.load(key)
        assert entry is not None and any(w.m == 1 + number * ROUNDS + step for w in entry.winners)


def test_eight_concurrent_processes_lose_no_winner(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    go = context.Event()
    processes = [
        context.Process(target=_write, args=(str(tmp_path), number, go))
        for number in range(WRITERS)
    ]
    for process in processes:
        process.start()
    go.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    cache = Cache(tmp_path)
    times = {w.m: w.ms for entry in cache.entries() for w in entry.winners}
    assert times == {
        1 + number * ROUNDS + step: 1.0 + number
        for number in range(WRITERS)
        for step in range(ROUNDS)
    }
    assert cache.damaged() == []


def _write_for_ever(root: str) -> None:
    cache = Cache(Path(root))
    m = 0
    while True:
        m += 1
        cache.store(Entry(KEY, MACHINE, (winner(m),)))


def test_writers_that_are_killed_leave_whole_files_and_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache = Cache(tmp_path)
    most = 0
    for attempt in range(10):
        process = context.Process(target=_write_for_ever, args=(str(tmp_path),))
        process.start()
        time.sleep(0.02 + 0.011 * attempt)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        begin = time.monotonic()
        cache.store(Entry(replace(KEY, n=1), MACHINE, (winner(attempt + 1),)))
        if file_of(cache).exists():
            read(file_of(cache))  # raises if damaged
        entry = cache.load(KEY)
        count = len(entry.winners) if entry else 0
        assert count >= most, "a winner was lost"
        most = count
        cache.store(Entry(KEY, MACHINE, (winner(10**6 + attempt),)))
        most += 1
        assert time.monotonic() - begin < 5, "a dead process holds the lock"
    assert most > 10
    assert cache.damaged() == []
    assert not list(cache.directory.glob(f".{KEY.name}.*.tmp")), "a dead writer's file is left"


# -- look-up by M ----------------------------------------------------------------------------------


def test_bucket_rounds_m_up_to_a_power_of_two() -> None:
    assert [bucket(m) for m in (1, 2, 3, 64, 65, 1000, 1024)] == [1, 2, 4, 64, 128, 1024, 1024]


def test_the_nearest_winner_is_found() -> None:
    entry = Entry(KEY, {}, tuple(winner(m) for m in (60, 64, 1000, 8192)))

    def nearest(m: int) -> tuple[int, bool]:
        winner, close = entry.nearest(m)
        assert winner is not None
        return winner.m, close

    assert nearest(64) == (64, True)
    assert nearest(61) == (60, True)
    assert nearest(33) == (60, True)
    assert nearest(1024) == (1000, True)
    assert nearest(1025) == (1000, False)
    assert nearest(5000) == (8192, True)
    assert nearest(100_000) == (8192, False)
    assert nearest(1) == (60, False)
    assert Entry(KEY).nearest(5) == (None, False)


@settings(max_examples=300)
@given(
    measured=st.integers(1, 20_000),
    m=st.integers(1, 20_000),
    world=st.integers(1, 9),
    comm=st.integers(1, 9000),
    rows=st.integers(1, 20_000),
)
def test_fitted_knobs_are_in_range_and_cut_no_finer(
    measured: int, m: int, world: int, comm: int, rows: int
) -> None:
    before, now = -(-measured // world), -(-m // world)
    knobs = replace(KNOBS, comm_tile_rows=min(comm, before), tile=(min(rows, measured), 7))
    fitted = fit(knobs, measured, m, world)
    assert fitted.comm_tile_rows is not None and fitted.tile is not None
    assert 1 <= fitted.comm_tile_rows <= now and 1 <= fitted.tile[0] <= m
    assert fitted.tile[1] == 7
    assert knobs.comm_tile_rows is not None
    limit = tile_count(knobs.comm_tile_rows, before)
    assert tile_count(fitted.comm_tile_rows, now) <= limit
    assert most_tiles([winner(measured, knobs=knobs)], world) == limit
    if measured == m:
        assert fitted == knobs


def test_fitted_knobs_keep_what_they_mean() -> None:
    whole = fit(replace(KNOBS, tile=(1024, 7), comm_tile_rows=512), 1024, 2000, 2)
    assert (whole.tile, whole.comm_tile_rows) == ((2000, 7), 1000)
    chunk = fit(replace(KNOBS, tile=(512, 7), comm_tile_rows=128), 1024, 2000, 2)
    assert (chunk.tile, chunk.comm_tile_rows) == ((1000, 7), 250)
    assert fit(Knobs(path="unfused"), 64, 128, 2) == Knobs(path="unfused")
