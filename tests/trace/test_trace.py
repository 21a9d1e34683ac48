"""Traces of ops on the CPU: what they must show of every tile, file format, and `flux trace op`."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from flux import _C, Knobs
from flux.cli.app import app
from flux.core.env import HOST
from flux.core.recorder import GEMM_LANE, LaneRecords, Record, Work
from flux.trace import Event, Kind, Trace, clocks, read_chrome, record_op, write_chrome
from flux.trace.chrome import flows
from flux.trace.clocks import align_clocks
from flux.trace.convert import Span, events_of
from flux.trace.summary import longest_wait
from flux.transport.exchange import Exchange, resolve_group
from harness import run_ranks
from reference import Inputs, Problem
from scripts import under_torchrun
from trace_cases import check_chrome, check_sound, of

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
FLUX = [sys.executable, "-m", "flux"]
M, CALLS = 40, 2
KNOBS = {
    "push": Knobs(comm_tile_rows=3, tile=(5, 8), direction="push", store="staged"),
    "pull": Knobs(comm_tile_rows=4, tile=(4, 99), direction="pull", store="staged"),
    "direct": Knobs(comm_tile_rows=5, tile=(2, 99), direction="push", store="direct"),
    "one thread": Knobs(comm_tile_rows=3, tile=(5, 8), copy_streams=0, store="staged"),
    "medium": Knobs(path="medium"),
}


def traced(
    rank: int,
    world: int,
    op_name: str,
    knobs: Knobs,
    hosts: str = "",
    late: int = -1,
    capacity: int = 4096,
) -> tuple[Trace | None, list[Any]]:
    """The trace, and this rank's schedule: its visits, transfers and reductions of own rows."""
    problem = Problem(op_name, M, (24,), 16)
    with HOST.during(hosts[rank] if hosts else "a"), problem.build(tuning=knobs) as op:
        inputs = Inputs(problem, M, world, 5)
        plain = inputs.call(op, rank)
        results = []

        def call() -> None:
            if rank == late and len(results) == 1:
                time.sleep(0.08)
            results.append(inputs.call(op, rank))

        trace = record_op(op, call, calls=CALLS, warmup=1, capacity=capacity)
        after = inputs.call(op, rank)
        for result in (*results, after):
            assert all(map(torch.equal, result, plain)), "tracing changed a result"
        inputs.check(plain, rank, "fused" if knobs.path != "medium" else "medium")
        schedule = op.schedule(M)
        return trace, [schedule.visits, schedule.transfers, op.own_rows(M), op.topology.hosts]


def check_tiles(op: str, trace: Trace, results: list[Any], world: int, call: int) -> None:
    for rank in range(world):
        visits, transfers, own, hosts = results[rank][1]
        gemms = of(trace.events, rank, call, Kind.gemm)
        tiles = Counter(
            tile
            for e in gemms
            for tile in range(int(e.details["tile"]), int(e.details["tile"] + e.details["tiles"]))
        )
        assert tiles == Counter(range(len(visits)))
        moved = Counter(
            (
                e.details["chunk"],
                e.details["row_begin"],
                e.details["row_end"],
                e.details.get("peer"),
            )
            for e in of(trace.events, rank, call, Kind.copy)
        )
        near = [t for t in transfers if hosts[t.dst] == hosts[rank] == hosts[t.src]]
        if op == "ag_gemm":
            assert moved == Counter(
                (t.chunk, t.row_begin, t.row_end, None if t.src == t.dst else t.src + t.dst - rank)
                for t in near
            )
        sums = of(trace.events, rank, call, Kind.reduce)
        summed = Counter(
            row
            for e in sums
            if "peer" not in e.details
            for row in range(int(e.details["row_begin"]), int(e.details["row_end"]))
        )
        assert set(summed.values()) <= {1}
        assert len(summed) == (0 if op == "ag_gemm" else own)


@pytest.mark.parametrize("way", KNOBS)
@pytest.mark.parametrize("op", OPS)
def test_every_tile_is_seen_once(op: str, way: str) -> None:
    world = 3
    results = run_ranks(world, traced, op, KNOBS[way])
    assert [trace is None for trace, _ in results] == [False, True, True]
    trace = results[0][0]
    assert not trace.dropped
    check_sound(trace.events)
    assert trace.metadata["world"] == world and trace.metadata["shape"] == [M, 24, 16]
    for call in range(CALLS):
        check_tiles(op, trace, results, world, call)
    for rank in range(world):
        (begin, _), (_, end) = trace.metadata["calls"][str(rank)]
        assert all(begin <= e.start_us and e.end_us <= end for e in trace.events if e.rank == rank)


@pytest.mark.parametrize("op", OPS)
def test_the_unfused_path_is_two_events(op: str) -> None:
    (trace, _), _ = run_ranks(2, traced, op, Knobs(path="unfused"))
    check_sound(trace.events)
    for rank in (0, 1):
        (gemm,) = of(trace.events, rank, 1, Kind.gemm)
        (collective,) = of(trace.events, rank, 1, Kind.copy)
        first, last = (collective, gemm) if op == "ag_gemm" else (gemm, collective)
        assert first.end_us <= last.start_us
        assert collective.name in ("all-gather", "reduce-scatter", "all-reduce")


@pytest.mark.parametrize("way", ["push", "one thread"])
def test_waits_for_a_late_rank_are_traced(way: str) -> None:
    """Rank 1 sleeps 80 ms before its first traced call: only the other ranks wait."""
    (trace, _), *_ = run_ranks(4, traced, "ag_gemm", KNOBS[way], "", 1)
    check_sound(trace.events)

    def waited(rank: int, call: int) -> float:
        kinds = (Kind.wait, Kind.barrier)
        return max(e.duration_us for kind in kinds for e in of(trace.events, rank, call, kind))

    for rank in (0, 2, 3):
        assert waited(rank, 0) > 50e3
    assert waited(1, 0) < 50e3


def test_events_beyond_the_capacity_are_counted() -> None:
    (trace, _), _ = run_ranks(2, traced, "gemm_rs", KNOBS["push"], "", -1, 3)
    assert trace.dropped > 0
    lanes = {(e.rank, e.lane) for e in trace.events}
    for rank, lane in lanes:
        kept = [e for e in trace.events if (e.rank, e.lane) == (rank, lane)]
        assert len(kept) <= 3
    assert trace.metadata["dropped"]["0"][GEMM_LANE] > 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("way", ["push", "direct"])
def test_sends_and_receives_between_hosts_are_paired(op: str, way: str) -> None:
    results = run_ranks(3, traced, op, KNOBS[way], "aab")
    trace = results[0][0]
    check_sound(trace.events, 2 * max(trace.metadata["clock_uncertainty_us"]))
    sends = [e for e in trace.events if e.kind is Kind.send]
    receives = [e for e in trace.events if e.kind is Kind.receive]
    crossing = [(cause, effect) for cause, effect in flows(sends + receives)]
    assert sends and len(sends) == len(receives) == len(crossing)
    for cause, effect in crossing:
        assert (cause.rank == 2) != (effect.rank == 2), "hosts are a, a and b"
        assert cause.details["peer"] == effect.rank and effect.details["peer"] == cause.rank
        for what in ("row_begin", "row_end", "bytes"):
            assert cause.details[what] == effect.details[what]
    assert trace.metadata["clock_uncertainty_us"][:2] == [0, 0]
    assert 0 < trace.metadata["clock_uncertainty_us"][2] < 1e5
    ended = {effect.kind for _, effect in flows(trace.events)}
    assert Kind.receive in ended
    for call in range(CALLS):
        check_tiles(op, trace, results, 3, call)


def aligned(rank: int, world: int, ahead_ns: int) -> list[tuple[int, int]]:
    now = _C.Lane.now
    lane = SimpleNamespace(now=lambda: now() + ahead_ns * (rank == 2))
    with HOST.during("aab"[rank]), mock.patch.object(clocks, "_C", SimpleNamespace(Lane=lane)):
        return [tuple(c) for c in align_clocks(Exchange(resolve_group(None)), rounds=20)]


@pytest.mark.parametrize("ahead_ns", [0, 5_000_000_000])
def test_clock_offsets_of_hosts_are_measured(ahead_ns: int) -> None:
    """Hosts of these tests share a clock, to which rank 2 adds an offset."""
    clocks_of = run_ranks(3, aligned, ahead_ns)
    assert clocks_of[0] == clocks_of[1] == clocks_of[2]
    assert clocks_of[0][:2] == [(0, 0), (0, 0)]
    offset, uncertainty = clocks_of[0][2]
    assert 0 < uncertainty < 1e9 and abs(offset + ahead_ns) <= uncertainty


def test_events_are_on_the_clock_of_rank_0() -> None:
    record = Record(7_000, 9_000, 1, Work.gemm, -1, -1, -1, 0, 0, -1, -1, 0)
    lane = LaneRecords(GEMM_LANE, [record], 0)
    (event,) = events_of("ag_gemm", 1, [lane], [], [Span(6_000, 9_500)], -5_000, 1_000)
    assert (event.start_us, event.duration_us) == (1.0, 2.0)


def refused(rank: int, world: int) -> list[str]:
    problems = []
    with Problem("gemm_rs", 8, (4,), 4).build() as op:
        for options in ({"calls": 0}, {"warmup": -1}, {"capacity": 0}, {"calls": 1 + rank}):
            with pytest.raises(ValueError) as error:
                record_op(op, lambda: pytest.fail("must not be called"), **options)
            problems.append(str(error.value))
    with pytest.raises(ValueError) as error:
        record_op(op, lambda: None)
    return [*problems, str(error.value)]


def test_refusals_come_before_any_call() -> None:
    for messages in run_ranks(2, refused):
        assert "calls must be an integer >= 1, got 0" in messages[0]
        assert "warmup must be an integer >= 0, got -1" in messages[1]
        assert "capacity must be an integer >= 1, got 0" in messages[2]
        assert "ranks disagree; rank 1 has calls = 2" in messages[3]
        assert "closed" in messages[4]


# -- files -----------------------------------------------------------------------------------------


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        Event(0, "copy thread", Kind.copy, "rows", 1.0, 2.5, {"call": 0, "raises": "1:0 1:1"}),
        Event(1, GEMM_LANE, Kind.wait, "waits", 0.5, 3.0, {"call": 0, "awaits": "1:1"}),
        Event(1, GEMM_LANE, Kind.gemm, "tile 0", 3.5, 0.0, {"call": 0, "tile": 0}),
        Event(1, GEMM_LANE, Kind.wait, "waits", 4.0, 1.0, {"call": 1, "awaits": "1:1"}),
    ]
    write_chrome(events, path, {"world": 2})
    content = json.loads(path.read_text())
    check_chrome(content)
    assert sum(e["ph"] == "s" for e in content["traceEvents"]) == 1, "call 1 raised nothing"
    back = read_chrome(path)
    assert back.events == events and back.metadata == {"world": 2}
    names = [e["args"] for e in content["traceEvents"] if e["name"] == "process_name"]
    assert names == [{"name": "rank 0"}, {"name": "rank 1"}]


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{}]}', '{"traceEvents": []}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a trace of flux"):
        read_chrome(path)


# -- the command -----------------------------------------------------------------------------------

SHAPE = ["--m", "26", "--n", "12", "--k", "10", "--warmup", "1"]


def test_the_command_writes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "new" / "trace.json"
    methods = [f"--method={name}" for name in ("flux", "medium", "unfused")]
    arguments = ["trace", "op", *SHAPE, *methods, "--op", "gemm_rs", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--comm-tile-rows", "5", "--calls", "2"])
    assert done.exit_code == 0, done.output
    check_chrome(json.loads(out.read_text()))
    trace = read_chrome(out)
    check_sound_by_method(trace)
    for word in ("GEMM", "waiting", "moving", "longest wait", "wrote", "unfused"):
        assert word in done.output
    waited = longest_wait(trace.events)
    assert waited is None or waited.name in done.output
    assert trace.metadata["methods"]["flux"]["knobs"].count("comm_tile_rows=5") == 1


def check_sound_by_method(trace: Trace) -> None:
    ends = 0.0
    for method in ("flux", "medium", "unfused"):
        mine = [e for e in trace.events if e.details["method"] == method]
        assert min(e.start_us for e in mine) >= ends, "methods follow one another"
        ends = max(e.end_us for e in mine)
        check_sound(mine)
        assert {e.rank for e in mine} == {0, 1}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--op", "gemm"], "op must be one of"),
        (["--method", "fast"], "method must be one of"),
        (["--method", "flux", "--method", "flux"], "each method must be given once"),
        (["--calls", "0"], "calls must be in"),
        (["--capacity", "0"], "capacity must be in"),
        (["--tile", "big"], "tile must look like"),
        (["--nproc", "0"], "world must be at least 1"),
        (["--out", "/proc/nothing/trace.json"], "cannot write"),
    ],
)
def test_invalid_input_starts_no_ranks(
    wrong: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flux.bench.launch.on_ranks", lambda *_: pytest.fail("started"))
    done = CliRunner().invoke(app, ["trace", "op", *wrong])
    assert done.exit_code == 2 and why in done.output


def test_joins_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    command = ["-m", "flux", "trace", "op", *SHAPE, "--out", str(out)]
    assert under_torchrun(*command, timeout_s=150).count("wrote ") == 1
    assert {e.rank for e in read_chrome(out).events} == {0, 1}
