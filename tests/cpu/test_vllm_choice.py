"""How row-parallel layers inside vLLM choose between their two ways to sum."""

from __future__ import annotations

import pytest

from flux.integrations.vllm.choice import PATHS, TRIALS, WARM_UP, Choice


@pytest.mark.parametrize("others", [{"fused": 1.0, "plain": 5.0}, {"fused": 5.0, "plain": 1.0}])
def test_ranks_keep_the_way_that_is_faster_in_sum(others: dict[str, float]) -> None:
    own = {"fused": 2.0, "plain": 3.0}
    asked: list[list[float]] = []

    def add(numbers: list[float]) -> list[float]:
        asked.append(numbers)
        return [number + others[path] for number, path in zip(numbers, PATHS, strict=True)]

    choice = Choice(add)
    for call in range(2 * (WARM_UP + TRIALS)):
        assert choice.path is None
        path = choice.next()
        assert path == PATHS[call % 2]
        choice.note(path, 1e9 if call < 2 * WARM_UP else own[path])
    assert asked == [[2.0, 3.0]]
    sums = {path: own[path] + others[path] for path in PATHS}
    assert choice.path == choice.next() == min(sums, key=sums.__getitem__)
    choice.note(choice.path, 1e9)
    assert len(asked) == 1
