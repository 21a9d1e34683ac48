"""Which knobs an op runs with, for each M: what was fixed, what was tuned, what the model says.

Rank 0 looks up, once, when the op is built, and tells the others: ranks that read the same file at
different moments would otherwise run different schedules. No call reads a file or asks anybody; the
schedule of an M that was seen before is a dictionary's look-up, as without tuning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from flux.cluster import Cluster, digest, world_shape
from flux.detection import detect
from flux.heuristic import MAX_COMM_TILES
from flux.kernels.config import GemmConfig
from flux.knobs import Knobs, check_legal
from flux.ops.spec import OpSpec
from flux.topology import Topology
from flux.transport.exchange import Exchange
from flux.tune import cost
from flux.tune.cache import look_up
from flux.tune.keys import Key, dtype_text, versions
from flux.tune.winners import Entry, Winner, fit, most_tiles

_said: set[str] = set()


class Choice(Protocol):
    """Knobs by M; equal on all ranks."""

    @property
    def kernel(self) -> GemmConfig | None:
        """Of the GEMM, on a GPU, if one was found to be best."""
        ...

    @property
    def most_tiles(self) -> int:
        """The most communication tiles of a chunk, where ``variants`` leave that open; 0: as many
        as the heuristic makes."""
        ...

    def knobs(self, m: int) -> Knobs:
        """The knobs of a call with ``m`` rows; open fields are the heuristic's."""
        ...

    def variants(self) -> list[Knobs]:
        """All that ``knobs`` may return, as far as memory depends on it."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same knobs for all M: the user's, or none."""

    given: Knobs
    kernel: GemmConfig | None = None
    most_tiles: int = 0

    def knobs(self, m: int) -> Knobs:
        return self.given

    def variants(self) -> list[Knobs]:
        return [self.given]


@dataclass(frozen=True)
class Modelled:
    """Nobody has tuned: what the cost model expects to be fastest."""

    shape: cost.Shape
    cluster: Cluster
    usable: tuple[Knobs, ...]
    kernel: GemmConfig | None = None
    most_tiles: int = MAX_COMM_TILES

    def knobs(self, m: int) -> Knobs:
        return cost.choose(replace(self.shape, m=m), self.cluster, self.usable)

    def variants(self) -> list[Knobs]:
        return list(self.usable)


@dataclass(frozen=True)
class Tuned:
    """Winners, by M; of an M that was not tuned, the nearest one's, fitted to it."""

    entry: Entry
    spec: OpSpec
    topology: Topology
    speaks: bool
    legal: Callable[[int, Knobs], bool]
    kernel: GemmConfig | None = None

    @property
    def most_tiles(self) -> int:
        return max(MAX_COMM_TILES, most_tiles(self.entry.winners, self.topology.world))

    def knobs(self, m: int) -> Knobs:
        winner, close = self.entry.nearest(m)
        assert winner is not None
        if not close and self.speaks:
            self._say_once(m, winner)
        knobs = fit(winner.knobs, winner.m, m, self.topology.world)
        # Rounding may have made tiles straddle owners; then those fields are the heuristic's.
        alternatives = (knobs, replace(knobs, store=None), replace(knobs, store=None, tile=None))
        for candidate in alternatives:
            if self.legal(m, candidate):
                return candidate
        return Knobs(path=knobs.path, direction=knobs.direction, order=knobs.order)

    def variants(self) -> list[Knobs]:
        return [replace(winner.knobs, comm_tile_rows=None) for winner in self.entry.winners]

    def _say_once(self, m: int, winner: Winner) -> None:
        text = (
            f"{self.spec.label}(n={sum(self.spec.n)}, k={self.spec.k}): not tuned for M = {m}; "
            f"that of M = {winner.m} is used for it and others (`flux tune --op "
            f"{self.spec.op.name} --m {m} ...` finds better)"
        )
        if self.entry.key.name not in _said:
            _said.add(self.entry.key.name)
            warnings.warn(text, UserWarning, stacklevel=2)


def forget_what_was_said() -> None:
    """Let every look-up say again what it falls back to."""
    _said.clear()


def key_of(spec: OpSpec, shape: str, parts: dict[str, object], kind: str) -> Key:
    """The key of an op's winners on machines with these parts of a fingerprint."""
    kernels, toolchain = versions(kind)
    return Key(
        op=spec.op.name,
        dtype=dtype_text(spec.dtype),
        n=sum(spec.n),
        k=spec.k,
        world=shape,
        fingerprint=digest(parts),
        kernels=kernels,
        toolchain=toolchain,
    )


def group_parts(clusters: Sequence[dict[str, object]]) -> dict[str, object]:
    """The parts of a group's fingerprint: what its ranks have, each kind once."""
    first = clusters[0]
    if all(other == first for other in clusters):
        return first
    kinds = sorted({repr(sorted(other.items())) for other in clusters})
    return {**first, "mixed": kinds}


def choose(
    spec: OpSpec,
    exchange: Exchange,
    hosts: Sequence[Hashable],
    topology: Topology,
    kind: str,
    legal: Callable[[int, Knobs], bool],
) -> Choice:
    """What an op with ``tuning="cache"`` runs with. Collective.

    Args:
        spec, exchange: the op, and its ranks.
        hosts: the host of each rank, as it is for the op.
        topology: of the group.
        kind: of device: ``cpu`` | ``cuda``.
        legal: whether a schedule can be made for (M, knobs).
    """
    if exchange.world == 1:
        return Fixed(Knobs())  # nothing is communicated
    shape = world_shape(hosts)
    cluster = _detected(kind)
    everybody = exchange.all_gather(None if cluster is None else cluster.parts(shape))
    found: Entry | None = None
    known = [parts for parts in everybody if parts is not None]
    if exchange.rank == 0 and len(known) == exchange.world:
        found = _look_up(key_of(spec, shape, group_parts(known), kind), topology, kind)
    found, cluster = exchange.all_gather((found, cluster))[0]
    if found is not None:
        kernel = None
        if kind == "cuda":
            found, kernel = _one_kernel(found, spec.max_m)
        return Tuned(found, spec, topology, exchange.rank == 0, legal, kernel)
    if kind == "cuda" or cluster is None:
        return Fixed(Knobs())  # flux/kernels/choice.py has the model of its kernels
    return modelled(spec, topology, cluster)


def _look_up(key: Key, topology: Topology, kind: str) -> Entry | None:
    """The winners that this group can run; none, and a warning, where they cannot be read."""
    try:
        found = look_up(key)
    # No home directory, numbers and nesting beyond what Python takes: ops run without winners.
    except (OSError, RuntimeError, ValueError, ArithmeticError) as error:
        warnings.warn(
            f"tuned winners cannot be read, so none are used: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return None if found is None else usable(found, topology, kind)


def _detected(kind: str) -> Cluster | None:
    """This rank's host; None where the device cannot be looked at, as those that tests emulate."""
    if kind == "cuda" and not torch.cuda.is_available():
        return None
    return detect(kind)


def modelled(spec: OpSpec, topology: Topology, cluster: Cluster) -> Modelled:
    """The cost model's choice for an op of which there are no winners."""
    shape = cost.Shape(
        spec.op,
        spec.max_m,
        sum(spec.n),
        spec.k,
        dtype_text(spec.dtype),
        spec.itemsize,
        topology.world,
        topology.nodes,
    )
    paths = ("fused", "medium", "unfused") if topology.nodes == 1 else ("fused", "unfused")
    return Modelled(shape, cluster, tuple(Knobs(path=path) for path in paths))


def usable(entry: Entry, topology: Topology, kind: str) -> Entry | None:
    """The winners that this group can run at all; the others are left out, and it is said."""
    kept = []
    for winner in entry.winners:
        reason = _why_not(winner, topology, kind)
        if reason is None:
            kept.append(winner)
        else:
            warnings.warn(
                f"tuned knobs of {entry.key.name} for M = {winner.m} are ignored: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
    return replace(entry, winners=tuple(kept)) if kept else None


def _why_not(winner: Winner, topology: Topology, kind: str) -> str | None:
    try:
        check_legal(winner.knobs, topology)
    except ValueError as error:
        return str(error)
    if winner.knobs.direction == "pull" and topology.nodes > 1 and winner.knobs.path != "unfused":
        return "direction = pull needs memory that peers can read, but there are several hosts"
    if kind == "cpu" and winner.knobs.reduce == "in_flight":
        return "reduce = in_flight needs backend cuda"
    if kind == "cuda" and winner.kernel is None and winner.knobs.path != "unfused":
        return "no kernel is named"
    return None


def _one_kernel(entry: Entry, max_m: int) -> tuple[Entry, GemmConfig | None]:
    """On GPUs an op has one kernel and one way for tiles to go: a call may overtake the last one of
    a peer, and what orders their writes depends on the direction. Those of the winner nearest max_m
    decide, and winners that differ are left out."""
    base, _ = entry.nearest(max_m)
    assert base is not None

    def way(winner: Winner) -> tuple[object, ...]:
        k = winner.knobs
        return (k.direction, k.order, k.reduce, winner.kernel)

    same = tuple(w for w in entry.winners if w.knobs.path == "unfused" or way(w) == way(base))
    return replace(entry, winners=same), base.kernel
