"""Detect the hardware of a tuning run: backend, devices, and which ranks share memory.

Supervisors detect GPUs in a process that ends at once. A CUDA context of their own would use memory
on every GPU throughout the search, and a candidate's illegal access could reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from flux.bench.config import ONE_GPU
from flux.bench.places import gpu
from flux.launch.spawn import end_with_parent, forkserver
from flux.launch.supervisors import Launcher
from flux.machine.cluster import Cluster, group_parts, world_shape
from flux.machine.detection import detect
from flux.transport.placement import TRANSPORTS, Placement, RankPlace, place_here

LOOKING_S = 180.0
"""Limit for the driver to report GPUs, in seconds: it takes some seconds for each unused GPU."""

Sight = tuple[Cluster, RankPlace]


@dataclass(frozen=True)
class TuningMachine:
    """The devices of a run's ranks.

    Attributes:
        backend: ``cpu`` | ``cuda``.
        cluster: device and links of this supervisor's first rank.
        placement: which ranks share memory, as ops determine it.
        shape: of the world, as in the key of winners.
        parts: inputs of the fingerprint of the group's winners.
    """

    backend: str
    cluster: Cluster
    placement: Placement
    shape: str
    parts: dict[str, object]


def resolve_backend(backend: str | None, transport: str | None, of_space: str | None) -> str:
    """Return the backend to tune.

    It is the given one, else that of the space or the transport, else ``cuda`` if torch sees a CUDA
    device.

    Raises:
        ValueError: they contradict one another, or such ranks have no winners.
    """
    if backend not in (None, *TRANSPORTS):
        raise ValueError(f"--backend must be cpu or cuda, got {backend!r}")
    if transport in ONE_GPU:
        raise ValueError(
            f"--transport {transport} puts all ranks on one GPU, for which there are no winners: "
            "ops run the heuristic's knobs there. Omit it, and tune with a GPU for each rank"
        )
    can = [name for name, transports in TRANSPORTS.items() if transport in (None, *transports)]
    backend = backend or of_space
    if backend is None:
        backend = can[0] if len(can) == 1 else "cuda" if torch.cuda.is_available() else "cpu"
    if backend not in can:
        known = ", ".join(TRANSPORTS[backend])
        raise ValueError(f"--backend {backend} has the transports {known}, got {transport!r}")
    if of_space is not None and of_space != backend:
        raise ValueError(f"the space is for backend {of_space}, got {backend}")
    return backend


def reason_untunable(world: int, gpus: int, ranks_here: int | None) -> str | None:
    """Return why ranks of this host cannot be tuned on its GPUs, None if they can.

    Args:
        world: as of ``gpu.reason_unsupported``.
        gpus: the same.
        ranks_here: the same.
    """
    if world == 1:
        return "a single rank does not communicate: there is nothing to tune on one GPU"
    problem = gpu.reason_too_few_gpus(world, gpus, ranks_here)
    return problem and f"{problem}; --backend cpu tunes ranks on the CPU"


def survey(launcher: Launcher, backend: str, transport: str | None, threads: int) -> TuningMachine:
    """Detect the devices of all ranks. Collective among supervisors.

    Raises:
        ValueError: a supervisor has no device, or cannot detect it; on all.
    """
    seen: list[Sight] = []
    problem = None
    if backend == "cuda":
        problem = reason_untunable(launcher.world, *gpu.gpus_here())
    if problem is None:
        try:
            on_gpu = backend == "cuda"
            places = [gpu.gpu_of(rank) if on_gpu else 0 for rank in launcher.ranks]
            seen = look(backend, places, threads)
        except (RuntimeError, OSError) as error:
            problem = f"cannot query its {backend} devices: {error}"
    everybody = launcher.gather((backend, problem, seen))
    backends = sorted({of for of, _, _ in everybody})
    if len(backends) > 1:
        raise ValueError(f"ranks chose {' and '.join(backends)}: pass --backend")
    for rank, (_, text, _) in enumerate(everybody):
        if text is not None:
            raise ValueError(text if len(everybody) == 1 else f"rank {rank}: {text}")
    sights = [sight for _, _, of in everybody for sight in of]
    placement = Placement.of_op([place for _, place in sights], backend, transport, None)
    shape = world_shape(placement.nodes)
    parts = group_parts([cluster.parts(shape) for cluster, _ in sights])
    return TuningMachine(backend, seen[0][0], placement, shape, parts)


def look(backend: str, gpus: Sequence[int], threads: int) -> list[Sight]:
    """Return cluster and placement of ranks with these GPUs; on the CPU, of as many ranks.

    Raises:
        RuntimeError: CUDA does not work.
        OSError: CUDA does not answer.
    """
    if backend == "cpu":
        return [(detect("cpu", threads), place_here(None))] * len(gpus)
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_look_at_gpus, args=(tuple(gpus), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LOOKING_S):
            raise RuntimeError(f"the driver did not answer for {LOOKING_S:g} s")
        reply: list[Sight] | str = ours.recv()
    except EOFError:
        raise RuntimeError("the process that queried them died") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(reply, str):
        raise RuntimeError(reply)
    return reply


def _look_at_gpus(gpus: Sequence[int], answer: Connection) -> None:
    end_with_parent()
    sights: list[Sight] = []
    try:
        torch.cuda.init()
        for index in gpus:
            torch.cuda.set_device(index)
            sights.append((detect("cuda"), place_here(index)))
        answer.send(sights)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        answer.send(str(error))
