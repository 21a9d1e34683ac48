"""The kernel of csrc/cuda/gemm/meet.cuh, a barrier of ranks, on the PTX machine."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from ptx_machine import Device, Module
from ptx_text import compiled

ROOT = Path(__file__).parents[2]

MEET = """
#include "cuda/gemm/meet.cuh"
extern "C" int keep(FluxMeetArgs const* args) { return flux::meet(args, nullptr); }
"""
WORLD = 3
MAX_WORLD = 32
TIMED_OUT_AFTER = 5000  # ns; the machine's clock counts statements


@pytest.fixture(scope="module", params=["80", "90a"])
def meet(request: pytest.FixtureRequest) -> Module:
    return compiled(MEET, f"-arch=compute_{request.param}", f"-I{ROOT / 'csrc'}")


class Rank:
    """Memory of one rank that captured calls meet on, and its FluxMeetArgs."""

    def __init__(self) -> None:
        self.count = torch.full((1,), 4, dtype=torch.int32)
        self.reset = torch.ones(600, dtype=torch.int32)
        self.words = torch.zeros(WORLD, dtype=torch.int32)  # by peer
        self.rows = (0, 0)
        self.status = torch.zeros(8, dtype=torch.int64)

    def args(self, device: Device, rank: int, ranks: list[Rank]) -> bytes:
        def pointers(addresses: list[int]) -> list[int]:
            return addresses + [0] * (MAX_WORLD - len(addresses))

        raised = pointers([device.register(peer.words) + 4 * rank for peer in ranks])
        statuses = pointers([device.register(peer.status) for peer in ranks])
        own = [device.register(t) for t in (self.count, self.reset, self.words, self.status)]
        count, reset, words, status = own
        head = struct.pack("<iiIi", WORLD, rank, 1, 600)
        count_of_words = WORLD if self.rows == (0, 0) else self.words.numel() // self.rows[0] - 1
        waits = struct.pack("<6i", 0, count_of_words, *self.rows, 5, 0)
        body = struct.pack("<35Q", count, reset, *raised, words) + waits
        body += struct.pack("<32Q", *statuses)
        sync = struct.pack("<IIQQQQQ", 0, 0, TIMED_OUT_AFTER, status, 0, 0, 0)
        return head + body + sync


def met(module: Module, ranks: list[Rank], rank: int, seed: int) -> None:
    device = Device()
    (name,) = (kernel for kernel in module.kernels if "meet_kernel" in kernel)
    args = [ranks[rank].args(device, rank, ranks)]
    device.launch(module, name, grid=1, block=256, args=args, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_have_come_meet(meet: Module, seed: int) -> None:
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words[:] = torch.tensor([5, 0, 6])  # one peer is a call ahead
    met(meet, ranks, 1, seed)
    assert ranks[1].count.item() == 5
    assert not ranks[1].reset.any()
    assert [peer.words[1].item() for peer in ranks] == [5, 5, 5]
    assert not any(peer.status.any() for peer in ranks)


@pytest.mark.parametrize("late", [2, 3, 7])
def test_words_in_rows_are_awaited(meet: Module, late: int) -> None:
    """Two words of each three: the third ones are not looked at."""
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words = torch.tensor([5, 5, 0, 5, 5, 0, 5, 6, 0], dtype=torch.int32)
    ranks[1].words[late] = 4
    ranks[1].rows = (3, 3)
    met(meet, ranks, 1, 0)
    assert bool(ranks[1].status.any()) == (late != 2)


def test_a_rank_that_does_not_come_is_given_up(meet: Module) -> None:
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words[:] = torch.tensor([5, 0, 4])  # rank 2 has not entered call 5
    met(meet, ranks, 1, 0)
    code, _, signal, expected, observed = ranks[1].status[:5].tolist()
    assert code != 0 and (signal, expected, observed) == (2, 5, 4)
    for peer in (0, 2):
        assert ranks[peer].status[0] != 0 and ranks[peer].status[2] == 1  # told by rank 1


def test_a_rank_whose_call_has_failed_is_not_done(meet: Module) -> None:
    """Its peers, which may have come all, hear of it instead."""
    ranks = [Rank() for _ in range(WORLD)]
    ranks[1].words[:] = 5
    ranks[1].status[0] = 3
    met(meet, ranks, 1, 0)
    assert not any(ranks[peer].words.any() for peer in (0, 2))
    assert all(ranks[peer].status[2] == 1 for peer in (0, 2))
