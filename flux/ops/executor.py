"""Who executes an op, and what its arguments have to do with that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from flux.kernels.legality import MAX_WORLD
from flux.knobs import Knobs
from flux.ops import torch_internals
from flux.ops.spec import OpSpec
from flux.topology import Topology
from flux.transport import nodes as several_nodes
from flux.transport import nvshmem, symm_mem
from flux.transport.device import DeviceTransport
from flux.transport.exchange import Exchange, resolve_group
from flux.transport.one_gpu import OneGpuExchange, OneGpuRank
from flux.transport.p2p import Place, place_here, sharing

MAX_TIMEOUT_S = 1e9  # 32 years; nanoseconds since boot must fit 64 bits
TELL_S = 60.0
"""How long others are told of a failure where ``timeout_s`` is what was wrong."""
TRANSPORTS = {"cpu": ("shm", "send_recv"), "cuda": ("symm_mem", "send_recv", "nvshmem")}
"""Of the ranks of a process group, by backend."""


def open_exchange(
    group: dist.ProcessGroup | OneGpuRank | str | None, label: str
) -> Exchange | OneGpuExchange:
    """The ranks that an op's ``group`` argument means."""
    if isinstance(group, OneGpuRank):
        return OneGpuExchange(group, label)
    return Exchange(resolve_group(group), label)


@contextmanager
def built_together(
    exchange: Exchange | OneGpuExchange, timeout_s: float, give_up: Callable[[], None]
) -> Iterator[None]:
    """Let an op be built on all ranks, or on none. Collective.

    A rank that fails between two exchanges tells the others, who would wait for it at the next one.

    Args:
        exchange: the ranks.
        timeout_s: how long a rank that fails waits for the others to hear of it.
        give_up: gives back what this rank has built.

    Raises:
        PeerFailedError: another rank has failed.
    """
    try:
        yield
        if isinstance(exchange, Exchange):
            exchange.all_gather(None)  # whoever comes here has built all of it
    except Exception as error:
        give_up()
        if isinstance(exchange, Exchange):
            valid = isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MAX_TIMEOUT_S
            exchange.tell_failure(error, timeout_s if valid else TELL_S)
        raise


def refuse_capture(label: str, exchange: Exchange | OneGpuExchange) -> None:
    """Refuse to build an op while its stream is captured, before its ranks would meet.

    Raises:
        ValueError: it is.
    """
    if isinstance(exchange, OneGpuExchange):
        device = exchange.device
        capturing = device.driver.capture(device.current_stream()) != 0
    else:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ValueError(
            f"{label}: an op cannot be built while a CUDA graph is captured, as its ranks meet "
            "then. Build it before; for functional ops, make the call once before"
        )


def places_of(exchange: Exchange | OneGpuExchange, backend: str | None) -> list[Place]:
    """Where each rank is: its GPU, too, if it means to use one. Collective."""
    if isinstance(exchange, OneGpuExchange):
        lanes = exchange.world // exchange.nodes
        return [Place(str(rank // lanes)) for rank in range(exchange.world)]
    wants_gpu = (backend or default_backend(exchange)) == "cuda" and torch.cuda.is_available()
    try:
        place = place_here(torch.cuda.current_device() if wants_gpu else None)
    except RuntimeError:  # which symm_mem.own_device meets again, and tells all ranks
        place = place_here(None)
    return exchange.all_gather(place)


def who_shares_memory(
    places: Sequence[Place], backend: str, transport: str | None, topology: Topology | None
) -> list[str]:
    """By rank, a name that two ranks share if they share memory.

    ``send_recv`` means that nobody does. On GPUs, the ranks of a host do all the same where there
    are several hosts, or a topology has several nodes: then it, or ``nvshmem``, is what moves rows
    between those. GPUs without P2P share nothing unless ``symm_mem`` is asked for.
    """
    hosts = [place.host for place in places]
    if backend == "cuda" and transport != "symm_mem":
        hosts = sharing(places)
    if transport not in ("send_recv", "nvshmem"):
        return hosts
    if backend == "cuda" and isinstance(topology, Topology) and topology.world == len(hosts):
        if topology.nodes > 1 and not topology.placement:
            pairs = zip(hosts, topology.hosts, strict=True)
            return [f"{host}/{node}" for host, node in pairs]
    elif backend == "cuda" and (transport == "nvshmem" or len(set(hosts)) > 1):
        return hosts
    return [str(rank) for rank in range(len(hosts))]


def default_backend(exchange: Exchange | OneGpuExchange) -> str:
    """``cuda`` where the group is one of CUDA devices, else ``cpu``."""
    if isinstance(exchange, OneGpuExchange):
        return "cuda"
    on_cuda = torch.cuda.is_available() and torch_internals.serves(exchange.group, "cuda")
    return "cuda" if on_cuda else "cpu"


def open_gpus(
    exchange: Exchange, nodes: int, timeout_s: float, transport: str | None
) -> DeviceTransport:
    """The GPUs of a process group whose ranks share memory in this many nodes. Collective.

    Raises:
        ValueError: a rank lacks something; on all ranks.
    """
    if transport == "nvshmem":
        return nvshmem.open_nvshmem(exchange, nodes=nodes)
    if nodes == 1:
        return symm_mem.open_symm_mem(exchange)
    return several_nodes.open_nodes(exchange, nodes, timeout_s)


def resolve_knobs(label: str, tuning: str | Knobs) -> Knobs:
    """The knobs that ``tuning`` means."""
    if isinstance(tuning, Knobs):
        return tuning
    if tuning not in ("cache", "off"):
        raise ValueError(f"{label}: tuning must be 'cache', 'off' or flux.Knobs, got {tuning!r}")
    return Knobs()  # what "cache" means is found out once all ranks agree: flux/tune/choice.py


def resolve_topology(label: str, topology: Topology | None, hosts: Sequence[str]) -> Topology:
    """The mesh of ranks: given, or the hosts that they are on."""
    world = len(hosts)
    if topology is None:
        return Topology.of_hosts(hosts)
    if not isinstance(topology, Topology):
        raise TypeError(f"{label}: topology must be a flux.Topology or None, got {topology!r}")
    if topology.world != world:
        raise ValueError(
            f"{label}: topology has {topology.world} ranks ({topology}), the group has {world}"
        )
    return topology


def check_options(label: str, spec: OpSpec, world: int, timeout_s: float) -> None:
    """Refuse options that no executor can do."""
    if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise ValueError(
            f"{label}: timeout_s must be a positive number up to {MAX_TIMEOUT_S:g}, "
            f"got {timeout_s!r}"
        )
    if len(spec.n) > 1 and any(n % world for n in spec.n):
        raise ValueError(
            f"{label}: with several weights each n must be divisible by the world of {world}, "
            f"got {spec.n}"
        )


def check_executor(
    label: str,
    spec: OpSpec,
    exchange: Exchange | OneGpuExchange,
    knobs: Knobs,
    backend: str | None,
    transport: str | None,
) -> str:
    """Who executes; a rank of a world on one GPU decides that, and what moves tiles, by itself."""
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
    if backend == "cpu" and knobs.reduce == "in_flight":
        raise ValueError(f"{label}: reduce = in_flight needs backend cuda, got {where}")
    reason = one_gpu.why_not(spec, knobs) if one_gpu is not None else None
    if reason is not None:
        raise ValueError(f"{label}: {reason}, got {where}")
    return backend


def why_not_gpus(sharing: Sequence[str]) -> str | None:
    """Why the GPUs of ranks that share memory like this cannot be served, or None."""
    if len(sharing) > MAX_WORLD:
        return f"backend cuda serves up to {MAX_WORLD} ranks, the group has {len(sharing)}"
    apart = Topology.of_hosts(sharing)
    if apart.placement:
        return (
            "backend cuda needs the same number of ranks on each host, numbered one host after the "
            f"other, got {apart}"
        )
    return None


def _check_nodes(label: str, sharing: Sequence[str], topology: Topology, knobs: Knobs) -> None:
    """On GPUs, nodes of the topology are what shares memory."""
    apart = Topology.of_hosts(sharing)
    if topology.placement or topology.nodes != apart.nodes:
        raise ValueError(
            f"{label}: ranks share memory in {apart.nodes} nodes of {apart.lanes}, and the "
            f"topology has {topology}"
        )
    if knobs.reduce == "in_flight":
        raise ValueError(
            f"{label}: reduce = in_flight needs memory that all ranks can address, and they are on "
            f"{apart.nodes} nodes"
        )


def _or(names: Sequence[str]) -> str:
    return " or ".join(["None", *map(repr, names)])


def check_hosts(
    label: str,
    sharing: Sequence[str],
    topology: Topology,
    knobs: Knobs,
    backend: str,
    transport: str | None,
) -> Knobs:
    """Knobs that work where these ranks share memory: it cannot be pulled from another host."""
    hosts = len(set(sharing))
    reason = why_not_gpus(sharing) if backend == "cuda" else None
    if reason is not None:
        raise ValueError(f"{label}: {reason}")
    if hosts == 1:
        return knobs
    if transport in ("shm", "symm_mem"):
        raise ValueError(
            f"{label}: the ranks of the group are on {hosts} hosts, and transport={transport!r} "
            "serves one; leave transport open"
        )
    if backend == "cuda":
        _check_nodes(label, sharing, topology, knobs)
        return knobs
    if knobs.direction == "pull":
        raise ValueError(
            f"{label}: direction = pull needs memory that peers can read, but the ranks are on "
            f"{hosts} hosts; use push"
        )
    return replace(knobs, direction="push")
