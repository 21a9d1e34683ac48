"""Parts of the plugin for vLLM that do without vLLM: its choice of a path, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from flux.integrations.vllm.check import CheckError, compare_equal, compare_sum
from flux.integrations.vllm.choice import PATHS, TRIALS, WARM_UP, PathTrial


@pytest.mark.parametrize("others", [{"fused": 1.0, "plain": 5.0}, {"fused": 5.0, "plain": 1.0}])
def test_ranks_keep_the_way_that_is_faster_in_sum(others: dict[str, float]) -> None:
    own = {"fused": 2.0, "plain": 3.0}
    asked: list[list[float]] = []

    def add(numbers: list[float]) -> list[float]:
        asked.append(numbers)
        return [number + others[path] for number, path in zip(numbers, PATHS, strict=True)]

    choice = PathTrial(add)
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


@dataclass
class RankGroup:
    """The communicator of rank 1, whose only peer has this summand."""

    others: torch.Tensor
    world_size: int = 2
    rank_in_group: int = 1

    def own_all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        magnitudes = bool((summand >= 0).all())
        others = self.others.abs() if magnitudes else self.others
        return summand + others.to(summand.dtype)


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one element lacks a summand": lambda own, sums: sums.index_put(ZERO, own[0, 0]),
    "one element has one twice": lambda own, sums: sums.index_put(ZERO, own[0, 0], accumulate=True),
    "rows of another call": lambda own, sums: sums.roll(1, 0),
    "NaN": lambda own, sums: sums.index_fill(1, torch.tensor([5]), torch.nan),
}
ZERO = (torch.tensor(0), torch.tensor(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_finds_wrong_sums_and_no_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(2, 96, 512), torch.randn(2, 512, 64)
    own, others = (x @ weights).to(dtype)
    slabs = (torch.cat([slab @ weights[0] for slab in x[0].split(7)]) + others.float()).to(dtype)
    peers = RankGroup(others)
    compare_sum(peers, "layer 3", own.clone(), slabs)
    for name, fault in FAULTS.items():
        with pytest.raises(CheckError, match=r"rank 1, layer 3, shape \[96, 64\]: \d+ elements"):
            compare_sum(peers, "layer 3", own.clone(), fault(own, slabs.clone()))
            raise AssertionError(name)
    compare_equal(peers, "all_gather", own, own.clone())
    with pytest.raises(CheckError, match="rank 1, all_gather"):
        compare_equal(peers, "all_gather", own, own.roll(1))
