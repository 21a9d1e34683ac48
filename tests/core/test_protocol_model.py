"""A model check of the CUDA backend's signals and epochs: docs/kernels/protocol.md."""

from __future__ import annotations

import ctypes
import random
import shutil
import sys
from pathlib import Path

import pytest

from harness import more
from model.bugs import BUGS, Bug
from model.check import LimitError, Mode, Report, explore
from model.program import Program, Step, program_of
from model.recording import RecordingDevice, build, record
from model.records import Kind, Record, Scenario
from model.scenarios import LAST_EPOCHS, OPS, drawn, standard
from side_by_side import built_once


@pytest.fixture(scope="module")
def device(pytestconfig: pytest.Config) -> RecordingDevice:
    return RecordingDevice(built_once(pytestconfig, "recorder", build))


def check(
    device: RecordingDevice,
    scenario: Scenario,
    mode: Mode = Mode.reduced,
    blocks: int | None = None,
) -> Report:
    report = explore(program_of(record(device, scenario), blocks), mode)
    assert report.violation is None, f"{scenario}\n{report.violation}"
    return report


@pytest.mark.parametrize("scenario", list(standard()), ids=str)
def test_no_interleaving_breaks_the_protocol(device: RecordingDevice, scenario: Scenario) -> None:
    report = check(device, scenario)
    assert report.states > 10


@pytest.mark.parametrize("captured", [(), (0,)], ids=["eager", "captured"])
def test_medium_is_a_gemm_per_chunk_and_a_ring_of_copies(
    device: RecordingDevice, captured: tuple[int, ...]
) -> None:
    world, rows = 4, (7,)  # the last chunk has one row
    scenario = Scenario(("ag_gemm",), world, rows, path="medium", order="ring1d", captured=captured)
    recording = record(device, scenario)
    for rank in range(world):
        mine = [r for r in recording.records if recording.streams[r.stream][0] == rank]
        own = [r for r in mine if recording.streams[r.stream][1] == "caller's stream"]
        ring = [(rank - step) % world for step in range(world)]
        reads: list[list[Record]] = []  # of each launch
        for r in own:
            if r.kind is Kind.launch:
                reads.append([])
            elif r.kind is Kind.read:
                reads[-1].append(r)
        gemms = [{r.content.source for r in of if r.content} for of in reads if of]
        assert gemms == [{chunk} for chunk in ring]
        copies = [
            r
            for r in mine
            if r.kind is Kind.copy and recording.streams[r.stream][1] == "copy stream"
        ]
        (data,) = (
            g
            for g in recording.regions
            if g.rank == (rank + 1) % world and g.name == "gathered row"
        )
        assert len(copies) == world - 1
        begins = [(copy.at - data.at) // data.unit for copy in copies]
        assert begins == [2 * chunk for chunk in ring[:-1]]


def test_stale_multicast_addresses_do_not_affect_a_scenario(device: RecordingDevice) -> None:
    members = (ctypes.c_size_t * 4)()
    device.library.multicast_add(ctypes.c_size_t(0), ctypes.c_size_t(1 << 62), members, 4)
    check(device, Scenario(("gemm_rs",), 3, (3, 5, 1), captured=(0, 1, 2), switch=True))


def test_the_tool_checks_the_op_of_its_options(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    import model_check

    built = built_once(pytestconfig, "recorder", build)
    monkeypatch.setattr(model_check, "build", lambda folder: Path(shutil.copy(built, folder)))
    monkeypatch.setattr(sys, "argv", ["model_check.py", "--op", "ag_gemm", "--rows", "4,3"])
    assert model_check.main() == 0
    assert "no violation" in capsys.readouterr().out


SMALL = [
    Scenario((op,), 2, rows, direction, poison=poison)
    for op in OPS
    for direction in (("push", "pull") if op == "ag_gemm" else ("push",))
    for rows, poison in (((4, 4, 4), False), ((3, 1), True))
]


@pytest.mark.parametrize("scenario", SMALL, ids=str)
def test_literal_and_reduced_search_agree(device: RecordingDevice, scenario: Scenario) -> None:
    literal = check(device, scenario, Mode.literal)
    reduced = check(device, scenario, Mode.reduced)
    assert literal.states > 10 * reduced.states
    # What lets the reduced search tell states apart by their places: memory follows from them.
    assert literal.places == literal.states


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_protocol_holds_with_fewer_blocks_than_tiles(
    device: RecordingDevice, op: str, blocks: int
) -> None:
    """A waiting tile delays the later tiles of its block."""
    for direction in ("push", "pull") if op == "ag_gemm" else ("push",):
        check(device, Scenario((op,), 3, (6, 5), direction, comm_tile_rows=1), blocks=blocks)


# Seed 6 draws a scenario with some hundred times the states of the others.
@pytest.mark.parametrize("seed", [seed for seed in range(13) if seed != 6])
def test_protocol_holds_in_random_scenarios(device: RecordingDevice, seed: int) -> None:
    rng = random.Random(seed)
    check(device, drawn(rng), blocks=rng.choice([None, 1, 2]))


# -- bugs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def correct() -> set[Scenario]:
    """Scenarios that have been checked without a bug: many bugs share one."""
    return set()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_removing_any_rule_is_found(
    device: RecordingDevice, bug: Bug, correct: set[Scenario]
) -> None:
    if bug.scenario not in correct:
        check(device, bug.scenario)
        correct.add(bug.scenario)
    recording = record(device, bug.scenario)
    for mode in (Mode.reduced, *more(Mode.literal)):
        program = program_of(recording)
        bug.edit(program)
        try:
            violation = explore(program, mode, limit=20_000).violation
        except LimitError:
            assert mode is Mode.literal and bug.large
            continue
        assert violation is not None, f"{mode}: {bug.rule}"
        assert violation.kind in bug.finds, violation


def test_a_counterexample_lists_the_steps_of_each_rank(device: RecordingDevice) -> None:
    bug = next(bug for bug in BUGS if bug.name == "push-entry")
    program = program_of(record(device, bug.scenario))
    bug.edit(program)
    violation = explore(program).violation
    assert violation is not None
    assert violation.kind == "race"
    copy, read = violation.text.split(" while ")
    if "reads" in copy:
        copy, read = read, copy
    for rank in (0, 1):
        if f"rank {rank}, copy stream, call 2: copies x, row 0-1 at rank {rank}" in copy:
            assert f"reads gathered row {2 * rank}-{2 * rank + 1} at rank {1 - rank}" in read
            break
    else:
        raise AssertionError(violation.text)
    assert "call 1, tile" in read
    assert any("raises signal" in line for line in violation.trace)


def unsigned(observed: int, expected: int) -> bool:
    return observed >= expected


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_epoch_comparison_without_wrap_around_is_found(device: RecordingDevice, op: str) -> None:
    scenario = Scenario((op,), 2, (4, 4, 4), epochs=LAST_EPOCHS)
    report = explore(program_of(record(device, scenario)), reached=unsigned)
    assert report.violation is not None


@pytest.mark.parametrize("op", OPS)
def test_calls_that_share_an_epoch_are_found(device: RecordingDevice, op: str) -> None:
    """A replayed graph would otherwise use the same epochs again."""
    report = explore(program_of(record(device, Scenario((op,), 2, (4, 4), epochs=(1, 1)))))
    assert report.violation is not None


def waits_of(program: Program, rank: int) -> list[Step]:
    kinds = (Kind.await_, Kind.join)
    return [s for s in program.number() if s.kind in kinds and s.rank == rank and s.call >= 0]


def sort_of(program: Program, wait: Step) -> str:
    """Return the rule that a wait belongs to."""
    if wait.kind is Kind.join:
        return "join" if "caller" in program.names[wait.stream] else "fork"
    raisers = [
        s
        for s in program.steps()
        if s.kind is Kind.raise_ and (s.word, s.value) == (wait.word, wait.value)
    ]
    if all(s.stream == wait.stream for s in raisers):
        return "own word"
    name = program.words[wait.word].split()[0]
    return "first entry" if wait.call == 0 and name == "entry" else name


# Waits any one of which can be left out:
#   own word      the own stream has raised it before
#   first entry   before the first call nobody has read anything
#   fork          of calls that pull: a peer's signal comes behind this rank's entry
#   join          of the last call: its x is not written again. Of every call that pulls: the kernel
#                 has waited for all signals, which this rank's copy stream has raised
#   entry         GemmAR: 'done' of the last call says as much, but for poison, which comes between.
#                 Pulling with poison: they are awaited twice, before the poison and after it
SPARE = {
    Scenario(("ag_gemm",), 2, (4, 4, 4)): {"own word", "first entry", "join"},
    Scenario(("ag_gemm",), 2, (4, 4, 4), "pull"): {"own word", "first entry", "join"},
    Scenario(("ag_gemm",), 2, (4, 4), "pull", poison=True): {
        "own word",
        "first entry",
        "entry",
        "join",
    },
    Scenario(("gemm_rs",), 2, (4, 4, 4)): {"own word", "first entry"},
    Scenario(("gemm_rs",), 2, (4, 4), poison=True): {"own word"},
    Scenario(("gemm_ar",), 2, (4, 4, 4)): {"own word", "first entry", "entry"},
    Scenario(("gemm_ar",), 2, (4, 4), poison=True): {"own word"},
}


def leave_out(program: Program, wait: Step) -> None:
    for items in program.streams:
        items[:] = [item for item in items if item is not wait]
        for item in items:
            if isinstance(item, list):
                for block in item:
                    block[:] = [step for step in block if step is not wait]


@pytest.mark.parametrize("scenario", SPARE, ids=str)
def test_removing_any_wait_is_found(device: RecordingDevice, scenario: Scenario) -> None:
    recording = record(device, scenario)
    spare: dict[str, list[int]] = {}
    for number in range(len(waits_of(program_of(recording), 0))):
        program = program_of(recording)
        wait = waits_of(program, 0)[number]
        sort = sort_of(program, wait)
        leave_out(program, wait)
        if explore(program).violation is None:
            spare.setdefault(sort, []).append(wait.call)
    assert set(spare) == SPARE[scenario]
    if scenario.direction == "push" and "join" in spare:
        assert spare["join"] == [len(scenario.rows) - 1]


# -- what the protocol does not survive ------------------------------------------------------------
