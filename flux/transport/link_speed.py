"""Measure how fast the links between the hosts of a group are, for the cost model.

Cards of virtual machines and containers do not state their speed, and a shaped link is slower than
its card. So the ranks gather a few bytes over the connections that ops use, as often as is needed
to rise above latency and the burst that a shaper lets through: some 50 ms at 1 Gbit/s and more.
"""

from __future__ import annotations

import logging
import time
import weakref

import torch
import torch.distributed as dist

from flux.core.tensors import address_of
from flux.transport.exchange import LEAST_S, Exchange
from flux.transport.host_collectives import Collective, HostCollectives
from flux.transport.placement import Placement

SIZES = (256 << 10, 1 << 20, 4 << 20, 8 << 20)
"""Bytes that a host receives in a trial; later ones only while trials are shorter than ENOUGH_S."""
ENOUGH_S = 2e-3
TRIALS = 4
MOST_S = 25e-3
"""With the last size, trials are repeated until they have taken this long: other programs on the
hosts make some of them slow."""

_log = logging.getLogger("flux.select")
_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], float]] = (
    weakref.WeakKeyDictionary()
)


def measured_gbs(exchange: Exchange, placement: Placement) -> float:
    """Return the GB/s that a host receives from the others, equal on all ranks. Collective.

    The first call for a group and a placement measures: the slowest rank's time of the fastest
    trial counts. Two hosts at least.

    Raises:
        OSError: memory or sockets are refused; on every rank.
        PeerTimeoutError: a peer is late.
    """
    # Equal on all ranks, because all of them made the earlier calls.
    known = _measured.setdefault(exchange.group, {})
    key = tuple(placement.nodes)
    if key not in known:
        known[key] = _measure(exchange, placement)
        if exchange.rank == 0:
            _log.info("between hosts: %.3g Gbit/s, measured", known[key] * 8)
    return known[key]


def _measure(exchange: Exchange, placement: Placement) -> float:
    world = exchange.world
    timeout_s = LEAST_S if exchange.timeout_s is None else max(exchange.timeout_s, LEAST_S)
    nodes = placement.topology.nodes
    lanes = -(-world // nodes)
    ranks = HostCollectives(exchange, placement, timeout_s, most_bytes=max(SIZES))
    failed, number, step, spent = True, 0, 0, 0.0
    speeds: list[float] = []
    try:
        while spent < MOST_S:
            part = SIZES[step] // ((nodes - 1) * lanes)
            source = torch.zeros(part, dtype=torch.uint8, device="cpu")
            out = source.new_empty(part * world)
            addresses = address_of(source), address_of(out)
            offsets = [rank * part for rank in range(world + 1)]
            times = []
            for _ in range(TRIALS):
                number += 1
                begin = time.perf_counter()
                ranks.run(Collective.all_gather, number, part, *addresses, offsets)
                times.append(time.perf_counter() - begin)
            slowest = [max(of_ranks) for of_ranks in zip(*exchange.all_gather(times), strict=True)]
            spent += sum(slowest)
            fastest = min(slowest[1:])  # the first one has what a shaper lets through at once
            speeds.append(SIZES[step] / fastest * 1e-9)
            if fastest < ENOUGH_S and step + 1 < len(SIZES) and spent < MOST_S:
                step += 1
                speeds.clear()
        failed = False
    finally:
        ranks.close(failed)
    return max(speeds)
