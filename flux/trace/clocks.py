"""How far the clocks of hosts are apart.

Processes of a host share a clock (CLOCK_MONOTONIC); hosts do not. The first rank of every host asks
rank 0 for the time, many times: whatever the answer's way took, rank 0's clock stood at the answer
when this one stood between question and answer. The quickest exchange tells most, and the half of
what it took bounds the error.

    rank r   begin ------------ end        offset = answer - (begin + end) / 2
                  \\          /            uncertainty = (end - begin) / 2
    rank 0         -- answer -
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from flux import _C
from flux.ops import torch_internals
from flux.transport.exchange import Exchange
from flux.transport.shm import host_identity

ROUNDS = 64


class Clock(NamedTuple):
    """What is added to a rank's clock to have rank 0's, and by how much that may be wrong; ns."""

    offset_ns: int
    uncertainty_ns: int


def align_clocks(exchange: Exchange, rounds: int = ROUNDS) -> list[Clock]:
    """By rank, how its clock relates to that of rank 0. Collective."""
    hosts = exchange.all_gather(host_identity())
    mine = Clock(0, 0)
    for speaker in sorted(hosts.index(host) for host in set(hosts)):
        if speaker == 0:
            continue
        if exchange.rank == 0:
            _answer(exchange, speaker, rounds)
        elif exchange.rank == speaker:
            mine = _ask(exchange, rounds)
    clocks = exchange.all_gather(mine)
    return [clocks[hosts.index(host)] for host in hosts]


def _word(exchange: Exchange) -> torch.Tensor:
    on_cpu = torch_internals.serves(exchange.group, "cpu")
    return torch.zeros(1, dtype=torch.int64, device="cpu" if on_cpu else "cuda")


def _answer(exchange: Exchange, peer: int, rounds: int) -> None:
    word = _word(exchange)
    for _ in range(rounds):
        dist.recv(word, group=exchange.group, group_src=peer)
        word.fill_(_C.Lane.now())
        dist.send(word, group=exchange.group, group_dst=peer)


def _ask(exchange: Exchange, rounds: int) -> Clock:
    word = _word(exchange)
    best: Clock | None = None
    for _ in range(rounds):
        begin = _C.Lane.now()
        dist.send(word, group=exchange.group, group_dst=0)
        dist.recv(word, group=exchange.group, group_src=0)
        answer = int(word.item())
        end = _C.Lane.now()
        clock = Clock(answer - (begin + end) // 2, (end - begin + 1) // 2)
        if best is None or clock.uncertainty_ns < best.uncertainty_ns:
            best = clock
    assert best is not None
    return best
