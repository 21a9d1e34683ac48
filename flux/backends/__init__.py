"""Executors of a tile schedule, behind one protocol: flux/core/backend.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flux.core.backend import Backend
from flux.core.knobs import Topology
from flux.core.spec import OpSpec

if TYPE_CHECKING:
    from flux.select.choose import Choice
    from flux.transport.base import DeviceTransport
    from flux.transport.exchange import Exchange
    from flux.transport.placement import Placement


def make_cuda_backend(
    spec: OpSpec,
    exchange: Exchange | None,
    transport: DeviceTransport,
    choice: Choice,
    topology: Topology,
    placement: Placement,
    timeout_s: float,
) -> Backend:
    """Build the GPU executor of an op; its modules load here. Collective.

    Args:
        spec: the op's problem.
        exchange: its ranks; None where all of them are in this process.
        transport: what moves rows between GPUs.
        choice: the knobs and the kernel of its calls.
        topology: the mesh of ranks.
        placement: of the processes, which shows which peers die.
        timeout_s: of each wait, in seconds.

    Raises:
        ValueError: no built kernel can do the op.
        RuntimeError: a kernel cannot be loaded.
    """
    from flux.backends.cuda.backend import CudaBackend
    from flux.transport.watch import Watch

    watch = None if exchange is None else Watch(exchange, placement)
    backend = CudaBackend(spec, transport, choice, topology, timeout_s, watch)
    if exchange is not None:  # one schedule for all, whatever kernels each rank has built
        backend.cluster = exchange.all_gather(backend.cluster)[0]
    return backend
