"""Steps at scale: closed forms that no schedule may beat, here and in the committed figures."""

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


def test_every_case_is_there_and_none_beats_the_bound() -> None:
    cases = list(scale.cases())
    assert len(CONTENT["rows"]) == len(cases) * len(scale.POLICIES)
    assert {case.gpus for case in cases} >= {8, 16384}
    for row in CONTENT["rows"]:
        share = row["share"]
        assert row["bound"] == pytest.approx(min(1 / share, 1 / (1 - share)), rel=1e-3)
        assert row["speedup"] <= row["bound"], row
        assert 0 <= row["exposed_comm_ms"] <= row["iteration_ms"] - row["compute_ms"] + 2e-3, row


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_no_overlap_beats_the_closed_forms(case: scale.Case) -> None:
    timelines = scale.timelines(case)
    serial = timelines["serial"]
    share = serial.comm_ms / (serial.comm_ms + serial.compute_ms)
    bound = min(1 / share, 1 / (1 - share))
    if case.pp == 1:
        assert serial.iteration_ms == pytest.approx(serial.comm_ms + serial.compute_ms)
        assert serial.exposed_comm_ms == pytest.approx(serial.comm_ms)
    for label, timeline in timelines.items():
        assert serial.iteration_ms / timeline.iteration_ms <= bound * (1 + 1e-9), label
        busiest = max(
            sum(timeline.solo[number] for number in numbers)
            for numbers in timeline.schedule.lanes.values()
        )
        assert timeline.iteration_ms >= busiest * (1 - 1e-9), label


def test_a_step_that_does_not_fit_is_refused() -> None:
    case = scale.Case("test", "llama3-70b", "dhelix-a40", 8, 1, 1, 2, 1)
    with pytest.raises(ValueError, match="serial: a device needs"):
        scale.timelines(case)
