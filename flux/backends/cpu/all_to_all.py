"""Execute the schedule of an all-to-all on one CPU rank (csrc/schedule/exchange.h has the order).

The calling thread writes a block for a rank of this host where that rank reads it, and a block for
another host where the network's threads send it from. There is no second copy, and no worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from flux import _C
from flux.backends.epilogue import spoil
from flux.core.backend import OverlapHooks
from flux.core.recorder import Recorder, Work
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import Blocks
from flux.core.spec import OpSpec

if TYPE_CHECKING:
    from flux.transport.network import Network


class Owner(Protocol):
    """The backend of the op."""

    spec: OpSpec
    engine: _C.Engine
    network: Network | None
    recorder: Recorder | None
    slots: list[torch.Tensor]
    rank: int
    world: int
    timeout_s: float
    spin_s: float
    poison: bool

    def _begin_network(
        self, network: Network, schedule: TileSchedule, digest: int, **sources: torch.Tensor
    ) -> None: ...

    def _await(self, wait: Callable[[float, float], bool]) -> None: ...

    def _raise_failure(self) -> None: ...

    def _finish_network(self, network: Network) -> None: ...


def run_all_to_all(
    backend: Owner,
    schedule: TileSchedule,
    blocks: Blocks,
    digest: int,
    hooks: OverlapHooks | None,
) -> list[torch.Tensor]:
    """Execute a call: see ``Backend.run``. The hooks run when all rows have left."""
    engine, rank = backend.engine, backend.rank
    lane = None if backend.recorder is None else backend.recorder.begin(schedule)
    engine.begin(schedule.native, digest, False, backend.timeout_s)
    if backend.network is not None:
        backend._begin_network(backend.network, schedule, digest)
    backend._await(engine.wait_entries)  # a peer must have finished with the rows written here
    chunk = schedule.shape[0] // backend.world
    blocks.begin()
    for index, visit in enumerate(schedule.visits):
        first, last = (row - visit.owner * chunk for row in (visit.row_begin, visit.row_end))
        arrives = visit.waits[0] < visit.waits[1]
        if arrives:
            if hooks is not None:
                hooks.both()
                hooks = None
            if not engine.wait_visit(index, backend.timeout_s, backend.spin_s):
                backend._raise_failure()
        began = 0 if lane is None else lane.now()
        if visit.owner == rank:
            columns, dtype = backend.spec.travelling(backend.world)
            own = torch.empty(last - first, columns, dtype=dtype, device="cpu")
            blocks.send(rank, first, last, own)
            blocks.receive(rank, first, last, own)
        elif arrives:
            block = _block(backend.slots, schedule.of_rank(visit.owner), rank)
            blocks.receive(visit.owner, first, last, block[first:last])
        else:
            block = _block(backend.slots, schedule, visit.owner)
            blocks.send(visit.owner, first, last, block[first:last])
            engine.visit_done(index)
        if lane is not None:
            copies = visit.col_begin == visit.col_end
            lane.add(Work.copy if copies else Work.gemm, began, index, index + 1)
    if hooks is not None:
        hooks.both()
    backend._await(engine.finish)
    if backend.network is not None:
        backend._finish_network(backend.network)
    if backend.poison:
        spoil(backend.slots[rank])  # nobody writes here before this rank enters again
    return blocks.results()


def _block(slots: Sequence[torch.Tensor], sender: TileSchedule, receiver: int) -> torch.Tensor:
    """Return the memory, [rows, columns], for the block from one rank to another."""
    holder, block = sender.homes[receiver]
    return slots[holder][block]
