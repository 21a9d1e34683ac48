"""Choose backend and transport of an op, and check its arguments against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from flux.core.env import MOST_SECONDS, VARIABLES
from flux.core.knobs import Knobs, Topology, check_legal
from flux.core.spec import DTYPES, FP8, OpSpec
from flux.kernels.legality import MAX_WORLD
from flux.ops import torch_internals
from flux.select.all_to_all import reason_illegal
from flux.select.heuristic import IN_KERNEL_ROWS
from flux.select.in_kernel import reason_not_in_kernel
from flux.transport.base import DeviceTransport
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.one_gpu import OneGpuExchange, OneGpuRank
from flux.transport.placement import TRANSPORTS, Placement, RankPlace, place_here

TELL_S = 60.0
"""Seconds to tell others of a failure if ``timeout_s`` itself is invalid."""


def open_exchange(
    group: dist.ProcessGroup | OneGpuRank | str | None, label: str
) -> Exchange | OneGpuExchange:
    """Return the exchange of the ranks that an op's ``group`` argument names.

    Raises:
        ValueError: the stream is captured, on all ranks or on none, so nothing may be exchanged;
            or there is no such group.
    """
    exchange: Exchange | OneGpuExchange
    if isinstance(group, OneGpuRank):
        exchange = OneGpuExchange(group, label)
        device = exchange.device
        capturing = device.driver.capture(device.current_stream()) != 0
    else:
        exchange = Exchange(resolve_group(group), label)
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ValueError(
            f"{label}: an op cannot be built while a CUDA graph is captured, as its ranks meet "
            "then. Build it before; for functional ops, make the call once before"
        )
    return exchange


@contextmanager
def built_together(
    exchange: Exchange | OneGpuExchange, timeout_s: float, give_up: Callable[[], None]
) -> Iterator[None]:
    """Let an op be built on all ranks, or on none. Collective.

    A rank that fails between two exchanges tells the others, which would wait at the next one.

    Args:
        exchange: the ranks.
        timeout_s: seconds that each exchange may take, and that a rank which fails waits for the
            others to hear of it. One that ``check_executor`` will refuse, on all ranks alike, does
            not count: until then the group's own timeout does.
        give_up: gives back what this rank has built.

    Raises:
        PeerFailedError: another rank has failed.
        PeerTimeoutError: a peer did not come to an exchange in time.
    """
    valid = isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MOST_SECONDS
    if isinstance(exchange, Exchange):
        exchange.timeout_s = timeout_s if valid else None
    try:
        yield
        if isinstance(exchange, Exchange):
            exchange.all_gather(None)  # a rank that comes here has built all of it
    except BaseException as error:
        give_up()
        if isinstance(exchange, Exchange) and isinstance(error, Exception):  # no Ctrl-C
            exchange.tell_failure(error, timeout_s if valid else TELL_S)
        raise


def places_of(exchange: Exchange | OneGpuExchange, backend: str | None) -> list[RankPlace]:
    """Return where each rank is, with its GPU if it uses one. Collective."""
    if isinstance(exchange, OneGpuExchange):
        lanes = exchange.world // exchange.nodes
        return [RankPlace(str(rank // lanes)) for rank in range(exchange.world)]
    wants_gpu = (backend or default_backend(exchange)) == "cuda" and torch.cuda.is_available()
    try:
        place = place_here(torch.cuda.current_device() if wants_gpu else None)
    except RuntimeError:  # which symm_mem.own_device meets again, and tells all ranks
        place = place_here(None)
    return exchange.all_gather(place)


def default_backend(exchange: Exchange | OneGpuExchange) -> str:
    """Return ``cuda`` if the group has a backend for CUDA devices, else ``cpu``."""
    if isinstance(exchange, OneGpuExchange):
        return "cuda"
    on_cuda = torch.cuda.is_available() and torch_internals.serves(exchange.group, "cuda")
    return "cuda" if on_cuda else "cpu"


def open_gpus(
    exchange: Exchange, nodes: int, timeout_s: float, transport: str | None
) -> DeviceTransport:
    """Open the GPUs of a process group whose ranks share memory in this many nodes. Collective.

    The modules of the transport load here: the CPU needs none of them.

    Raises:
        ValueError: a rank lacks something; on all ranks.
    """
    if transport == "nvshmem":
        from flux.transport.nvshmem import open_nvshmem

        return open_nvshmem(exchange, nodes=nodes)
    if nodes == 1:
        from flux.transport.symm_mem import open_symm_mem

        return open_symm_mem(exchange)
    from flux.transport.nodes import open_nodes

    return open_nodes(exchange, nodes, timeout_s)


def check_executor(
    label: str,
    spec: OpSpec,
    exchange: Exchange | OneGpuExchange,
    knobs: Knobs,
    backend: str | None,
    transport: str | None,
    timeout_s: float,
) -> str:
    """Return the backend. Raise for options and environment variables that it does not support.

    A rank of a world on one GPU fixes backend and transport itself.
    """
    if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MOST_SECONDS):
        raise ValueError(
            f"{label}: timeout_s must be a positive number up to {MOST_SECONDS:g}, "
            f"got {timeout_s!r}"
        )
    if len(spec.n) > 1 and any(n % exchange.world for n in spec.n):
        raise ValueError(
            f"{label}: with several weights each n must be divisible by the world of "
            f"{exchange.world}, got {spec.n}"
        )
    if spec.experts and exchange.world % spec.ep:
        raise ValueError(
            f"{label}: ep must divide the world of {exchange.world} ranks, got {spec.ep}"
        )
    reason = spec.reason_not_shared(exchange.world) or reason_illegal(knobs)
    if spec.op.exchanges and reason is not None:
        raise ValueError(f"{label}: {reason}")
    for variable in VARIABLES:
        variable.get()
    one_gpu = exchange.of if isinstance(exchange, OneGpuExchange) else None
    where = "a process group" if one_gpu is None else f"a rank of a {type(one_gpu).__name__}"
    backends = tuple(TRANSPORTS) if one_gpu is None else ("cuda",)
    if backend not in (None, *backends):
        raise ValueError(f"{label}: with {where}, backend must be {_or(backends)}, got {backend!r}")
    backend = backend or default_backend(exchange)
    transports = TRANSPORTS[backend] if one_gpu is None else (one_gpu.transport,)
    if transport not in (None, *transports):
        raise ValueError(
            f"{label}: with {where} and backend {backend}, transport must be {_or(transports)}, "
            f"got {transport!r}"
        )
    # What holds for any number of nodes; ``check_mesh`` knows theirs.
    reason = spec.reason_not_on_gpus(knobs, nodes=2) if backend == "cuda" else None
    if reason is not None:
        raise ValueError(f"{label}: {reason}")
    if backend == "cuda" and knobs.path == "one_shot":
        raise ValueError(f"{label}: path = one_shot needs backend cpu, got {where}")
    if knobs.path == "in_kernel":
        reason = "it needs backend cuda" if backend == "cpu" else None
        reason = reason or reason_not_in_kernel(spec, exchange.world, 1)
        if spec.max_m > IN_KERNEL_ROWS:
            reason = reason or f"max_m may be {IN_KERNEL_ROWS} at most, got {spec.max_m}"
        if reason is not None:
            raise ValueError(f"{label}: path = in_kernel is not possible: {reason}")
    if backend == "cpu" and knobs.reduce not in (None, "local"):
        raise ValueError(f"{label}: reduce = {knobs.reduce} needs backend cuda, got {where}")
    if knobs.reduce == "in_kernel" and not (spec.op.scatters and spec.op.reduces):
        raise ValueError(f"{label}: reduce = in_kernel is for GemmRS")
    reason = one_gpu.reason_unsupported(spec, knobs) if one_gpu is not None else None
    if reason is not None:
        raise ValueError(f"{label}: {reason}, got {where}")
    return backend


def reason_unsupported(tensors: Sequence[torch.Tensor]) -> str | None:
    """Return why layers and graphs have no fused form for these operands, or None.

    The first operand has the dtype of the product. torch.compile can trace it.
    """
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in DTYPES or dtype == FP8:
        return f"flux has no ops for {dtype}"
    if device.type not in TRANSPORTS or any(t.device != device for t in tensors):
        return f"operands are on {', '.join(str(t.device) for t in tensors)}"
    return None


def group_unsupported(group: dist.ProcessGroup, device: str) -> str | None:
    """Return why a group has no ops for devices of this type, or None, without communication."""
    served = torch_internals.serves(group, device)
    return None if served else f"the process group has no backend for {device}"


def reason_gpus_unsupported(placement: Placement) -> str | None:
    """Return why GPUs with this placement are unsupported; None if they are supported."""
    world, apart = len(placement.nodes), placement.topology
    if world > MAX_WORLD:
        return f"backend cuda serves up to {MAX_WORLD} ranks, the group has {world}"
    if apart.uneven:
        return (
            "backend cuda needs the same number of ranks on each host, numbered one host after the "
            f"other, got {apart}"
        )
    return None


def _check_nodes(label: str, placement: Placement, topology: Topology, knobs: Knobs) -> None:
    """Raise unless the nodes of the topology are the sets of GPUs that share memory."""
    apart = placement.topology
    if topology.uneven or topology.nodes != apart.nodes:
        raise ValueError(
            f"{label}: ranks share memory in {apart.nodes} nodes of {apart.lanes}, and the "
            f"topology has {topology}"
        )
    if knobs.path == "in_kernel":
        raise ValueError(f"{label}: path = in_kernel is for ranks of one node, got {apart.nodes}")
    if knobs.reduce not in (None, "local"):
        raise ValueError(
            f"{label}: reduce = {knobs.reduce} needs memory that all ranks can address, "
            f"and they are on {apart.nodes} nodes"
        )


def _or(names: Sequence[str]) -> str:
    return " or ".join(["None", *map(repr, names)])


def check_mesh(
    label: str,
    spec: OpSpec,
    placement: Placement,
    topology: Topology | None,
    knobs: Knobs,
    backend: str,
    transport: str | None,
) -> tuple[Topology, Knobs]:
    """Return the mesh of ranks, by default one node per host, and the knobs for it.

    Between hosts rows are pushed, never pulled.
    """
    apart, world = placement.topology, len(placement.nodes)
    hosts = apart.nodes
    if topology is None:
        topology = apart
    elif not isinstance(topology, Topology):
        raise TypeError(f"{label}: topology must be a flux.Topology or None, got {topology!r}")
    elif topology.world != world:
        raise ValueError(
            f"{label}: topology has {topology.world} ranks ({topology}), the group has {world}"
        )
    check_legal(knobs, topology)
    reason = None
    if backend == "cuda":
        reason = reason_gpus_unsupported(placement) or spec.reason_not_on_gpus(knobs, hosts)
    if reason is not None:
        raise ValueError(f"{label}: {reason}")
    if hosts == 1:
        return topology, knobs
    if transport in ("shm", "symm_mem"):
        raise ValueError(
            f"{label}: the ranks of the group are on {hosts} hosts, and transport={transport!r} "
            "serves one; leave transport open"
        )
    if backend == "cuda":
        _check_nodes(label, placement, topology, knobs)
        return topology, knobs
    if knobs.direction == "pull":
        raise ValueError(
            f"{label}: direction = pull needs memory that peers can read, but the ranks are on "
            f"{hosts} hosts; use push"
        )
    return topology, replace(knobs, direction="push")
