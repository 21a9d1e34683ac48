"""Steps at scale: the committed figures, and closed forms that no schedule may beat."""

from __future__ import annotations

import json
from typing import Any

import pytest
import scale

CONTENT: dict[str, Any] = json.loads(scale.RESULT.read_text(encoding="utf-8"))
SMALL = [
    scale.Case("test", "gpt-6.7b", "dhelix-a800", 8, 1, 1, 2, 1, 2),
    scale.Case("test", "llama3-8b", "dhelix-a40", 4, 1, 2, 4, 2, 3, 4096),
    scale.Case("test", "llama3-8b", "dhelix-h100", 8, 2, 8, 2, 4, 4, 4096),
    scale.Case("test", "gpt3-175b", "flux-a100-pcie", 16, 1, 1, 2, 1, 1),
]


@pytest.mark.parametrize("case", [*scale.ACROSS, next(iter(scale.cases()))], ids=str)
def test_the_committed_figures_are_what_the_simulator_gives(case: scale.Case) -> None:
    committed = [
        row
        for row in CONTENT["rows"]
        if tuple(row[name] for name in scale.Case._fields) == tuple(case)
    ]
    assert committed and committed == scale.rows(case)


def test_every_case_is_there_and_none_beats_the_bound() -> None:
    cases = list(scale.cases())
    assert len(CONTENT["rows"]) == len(cases) * len(scale.POLICIES)
    assert {case.gpus for case in cases} >= {8, 16384}
    for row in CONTENT["rows"]:
        share = row["share"]
        assert row["bound"] == pytest.approx(min(1 / share, 1 / (1 - share)), rel=1e-3)
        assert row["speedup"] <= row["bound"], row
        assert 0 <= row["exposed_comm_ms"] <= row["iteration_ms"] - row["compute_ms"] + 2e-3, row


def test_the_largest_step_takes_seconds_and_little_memory() -> None:
    largest = CONTENT["largest"]
    assert largest["gpus"] == 16384
    assert largest["seconds"] < 10 and largest["memory_gib"] < 4


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_overlap_beats_the_closed_forms(case: scale.Case) -> None:
    found = scale.timelines(case)
    serial = found["serial"]
    share = serial.comm_ms / (serial.comm_ms + serial.compute_ms)
    bound = min(1 / share, 1 / (1 - share))
    if case.pp == 1:
        assert serial.iteration_ms == pytest.approx(serial.comm_ms + serial.compute_ms)
        assert serial.exposed_comm_ms == pytest.approx(serial.comm_ms)
    for label, timeline in found.items():
        assert serial.iteration_ms / timeline.iteration_ms <= bound * (1 + 1e-9), label
        busiest = max(
            sum(timeline.solo[number] for number in numbers)
            for numbers in timeline.schedule.lanes.values()
        )
        assert timeline.iteration_ms >= busiest * (1 - 1e-9), label


def test_a_step_that_does_not_fit_is_refused() -> None:
    case = scale.Case("test", "llama3-70b", "dhelix-a40", 8, 1, 1, 2, 1)
    with pytest.raises(ValueError, match="serial needs"):
        scale.timelines(case)
