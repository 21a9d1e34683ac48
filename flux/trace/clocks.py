r"""Measure the offsets between the clocks of hosts.

Processes of a host share a clock (CLOCK_MONOTONIC); hosts do not. The first rank of every host asks
rank 0 for the time, many times. Rank 0 reads its clock at some moment between question and answer,
however long either message takes. The fastest exchange gives the best estimate, and half its
duration bounds the error.

    rank r   begin ------------ end        offset = answer - (begin + end) / 2
                  \          /            uncertainty = (end - begin) / 2
    rank 0         -- answer -
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from flux import _C
from flux.machine.host import host_identity
from flux.ops import torch_internals
from flux.transport.exchange import Exchange

ROUNDS = 64


class Clock(NamedTuple):
    """The offset to add to a rank's clock to get rank 0's, and the bound of its error; ns."""

    offset_ns: int
    uncertainty_ns: int


def align_clocks(exchange: Exchange, rounds: int = ROUNDS) -> list[Clock]:
    """Return the relation of each rank's clock to rank 0's, by rank. Collective."""
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
