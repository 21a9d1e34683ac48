"""Define winners (knobs, kernel and times of one op at one M), their key, and a file of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch

from flux.core.datafile import MOST_SIZE, one_line, shown
from flux.core.knobs import Knobs
from flux.core.problem import Problem, ceil_div
from flux.core.sparse_problem import NAMES
from flux.core.version import __version__
from flux.kernels.config import GemmConfig
from flux.machine.cluster import digest

# -- keys ------------------------------------------------------------------------------------------

CPU_REVISION = 1
"""Revision of the CPU backend's speed: incremented when a change makes old winners doubtful."""

_FORMS = {
    "op": re.compile("|".join(NAMES)),
    "dtype": re.compile(r"\w{1,40}", re.ASCII),
    "world": re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}|(\+[1-9]\d{0,3}){1,63})", re.ASCII),
    "fingerprint": re.compile(r"[0-9a-f]{16}"),
    "kernels": re.compile(r"[\w.+ ,-]{1,100}", re.ASCII),
    "toolchain": re.compile(r"[\w.+ ,-]{1,100}", re.ASCII),
    "variant": re.compile(r"|[\w.-]{1,200}", re.ASCII),
}


@dataclass(frozen=True)
class Key:
    """Everything that separates winners, except M.

    Attributes:
        op: name of the op.
        dtype: of the operands, as torch names it.
        n: global columns, of all weights together.
        k: global depth.
        world: shape of the world, ``2x4`` (hosts x ranks) or ``3+1``.
        fingerprint: of device and links (flux/machine/cluster.py).
        kernels: version of the code that runs.
        toolchain: version of the tools that built it, or of the library that multiplies.
        variant: other sizes of an op of experts or heads (``Problem.variant``).
    """

    op: str
    dtype: str
    n: int
    k: int
    world: str
    fingerprint: str
    kernels: str
    toolchain: str
    variant: str = ""

    def __post_init__(self) -> None:
        for name in ("n", "k"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST_SIZE:
                raise ValueError(f"{name} must be an integer in [1, 2^30], got {value!r}")
        for name, form in _FORMS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not form.fullmatch(value):
                raise ValueError(f"{name} must look like {form.pattern}, got {value!r}")

    @classmethod
    def of(cls, problem: Problem, shape: str, parts: Mapping[str, object], kind: str) -> Key:
        """Return the key of an op's winners.

        Args:
            problem: the op and its sizes.
            shape: of the world (``flux.machine.cluster.world_shape``).
            parts: inputs of the fingerprint of the machines.
            kind: of device: ``cpu`` | ``cuda``.
        """
        kernels, toolchain = versions(kind)
        return cls(
            op=problem.name,
            dtype=problem.dtype,
            n=problem.n,
            k=problem.k,
            world=shape,
            fingerprint=digest(parts),
            kernels=kernels,
            toolchain=toolchain,
            variant=problem.variant,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON; those of dense ops have no variant."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    @property
    def name(self) -> str:
        """Name of the key's file: readable, and different for different keys."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.op}_{self.dtype}_n{self.n}_k{self.k}_{self.world}_{digest}"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Key:
        """Return the key of these fields; raise ValueError if they are not those of a key."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) | {"variant"} != known:
            raise ValueError(f"expected the fields of a key, got {values!r}")
        return cls(**values)


def bucket(m: int) -> int:
    """Return the M-bucket: the power of two at or above m.

    Its winners serve all M of the bucket.
    """
    return 1 << (m - 1).bit_length()


@lru_cache(maxsize=4)
def versions(kind: str) -> tuple[str, str]:
    """Return (kernels, toolchain): versions of the installed code for this kind of device."""
    if kind == "cpu":
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return f"cpu {__version__} r{CPU_REVISION}", f"torch {release}"
    from flux.kernels import sources
    from flux.kernels.registry import Registry

    root = sources.csrc()
    if root is None:
        kernels = f"cuda {__version__}"
    else:
        headers = sorted(
            path
            for part in ("core", "cuda", "cuda_moe")
            for path in (root / part).rglob("*")
            if path.is_file()
        )
        contents = [
            (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
            for path in headers
            if path.suffix in (".h", ".cuh")
        ]
        kernels = f"cuda abi{sources.abi_version(root)} {sources.digest(contents)[:12]}"
    built = Registry.load().libraries
    nvcc = sorted({".".join(library.nvcc.split(".")[:2]) for library in built})
    cutlass = sorted({library.cutlass for library in built})
    return kernels, f"cutlass {'+'.join(cutlass) or 'none'}, nvcc {'+'.join(nvcc) or 'none'}"


# -- winners ---------------------------------------------------------------------------------------

FORMAT = 1
"""Format of the file; incremented when a field changes its meaning. Also part of its directory."""


MOST_MS = 1e12
"""The longest time that a winner or a round may have: 30 years."""
_MOST_TIME_TEXT = 40


class DamagedEntryError(ValueError):
    """A file of winners differs from what was written."""


@dataclass(frozen=True)
class Winner:
    """The fastest way to run an op at one M.

    Attributes:
        m: rows of the measurement.
        knobs: every field set; for paths without tiles only the path.
        ms: median over rounds of the slowest rank's time.
        unfused_ms: the same of the unfused path in the same rounds; None if it was wrong or
            crashed.
        medium_ms: the same of the medium path.
        rounds: number of rounds in the median.
        tuned_at: UTC, ISO 8601.
        kernel: on a GPU; None on the CPU.
    """

    m: int
    knobs: Knobs
    ms: float
    unfused_ms: float | None = None
    medium_ms: float | None = None
    rounds: int = 0
    tuned_at: str = ""
    kernel: GemmConfig | None = None

    def __post_init__(self) -> None:
        if type(self.m) is not int or not 1 <= self.m <= MOST_SIZE:
            raise ValueError(f"m must be an integer in [1, 2^30], got {self.m!r}")
        if type(self.rounds) is not int or not 0 <= self.rounds < 2**31:
            raise ValueError(f"rounds must be an integer >= 0, got {self.rounds!r}")
        for name in ("ms", "unfused_ms", "medium_ms"):
            value = getattr(self, name)
            if value is None and name != "ms":
                continue
            if not (type(value) in (int, float) and 0 < value <= MOST_MS):
                raise ValueError(f"{name} must be a time in ms, got {value!r}")
        if not isinstance(self.tuned_at, str) or len(self.tuned_at) > _MOST_TIME_TEXT:
            raise ValueError(f"tuned_at must be a time in ISO 8601, got {self.tuned_at!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        knobs = {name: value for name, value in asdict(self.knobs).items() if value is not None}
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["bucket"] = bucket(self.m)
        content["knobs"] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in knobs.items()
        }
        content["kernel"] = None if self.kernel is None else self.kernel.as_dict()
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Winner:
        """Return the winner of these fields; the inverse of ``as_dict``.

        Raises:
            ValueError: the fields are not those of a winner; also as TypeError, KeyError or
                AttributeError.
        """
        values = dict(content)
        kernel = values.pop("kernel")
        knobs: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.pop("knobs").items()
        }
        stated = values.pop("bucket")
        winner = cls(
            **values,
            knobs=Knobs(**knobs),
            kernel=None if kernel is None else GemmConfig.from_dict(kernel),
        )
        if stated != bucket(winner.m):
            raise ValueError(f"bucket {stated!r} is not that of m = {winner.m}")
        return winner


@dataclass(frozen=True)
class Entry:
    """All winners of one key, by M.

    Attributes:
        key: the op and the machine.
        machine: the inputs of the key's fingerprint, for display.
        winners: by M, ascending; one for each M.
    """

    key: Key
    machine: Mapping[str, Any] = field(default_factory=dict)
    winners: tuple[Winner, ...] = ()

    def __post_init__(self) -> None:
        sizes = [winner.m for winner in self.winners]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"winners must be one for each M, ascending, got M = {sizes}")

    def nearest(self, m: int) -> tuple[Winner | None, bool]:
        """Return the winner to use for ``m``, and whether it is from m's own bucket.

        Distance is by ratio: 64 is as far from 32 as from 128. Of two equally near winners, take
        the larger.
        """
        if not self.winners:
            return None, False
        own = [winner for winner in self.winners if bucket(winner.m) == bucket(m)]
        winner = min(own or self.winners, key=lambda w: (abs(math.log(w.m / m)), -w.m))
        return winner, bool(own)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for JSON, with a checksum."""
        content = {
            "format": FORMAT,
            "key": self.key.as_dict(),
            "machine": dict(self.machine),
            "winners": [winner.as_dict() for winner in self.winners],
        }
        return {**content, "sha256": checksum(content)}

    @classmethod
    def from_dict(cls, content: Any) -> Entry:
        """Return the entry of this content; the inverse of ``as_dict``.

        Raises:
            DamagedEntryError: the content is not an entry, or its checksum is wrong.
        """
        if not isinstance(content, Mapping) or "sha256" not in content:
            raise DamagedEntryError("expected an entry of winners")
        rest = {name: value for name, value in content.items() if name != "sha256"}
        if rest.get("format") != FORMAT:
            raise DamagedEntryError(f"format {shown(rest.get('format'))}, expected {FORMAT}")
        try:
            if checksum(rest) != content["sha256"]:
                raise DamagedEntryError("the checksum does not match the contents")
            machine, listed = rest["machine"], rest["winners"]
            if not isinstance(machine, Mapping) or not isinstance(listed, list):
                raise TypeError("machine must be an object, and winners a list")
            winners = tuple(Winner.from_dict(winner) for winner in listed)
            return cls(Key.from_dict(rest["key"]), machine, winners)
        except DamagedEntryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedEntryError(one_line(f"{type(error).__name__}: {error}")) from error


def checksum(content: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON, independent of white space and of the order of names."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def tile_count(rows: int, chunk: int) -> int:
    """Return the number of communication tiles of this many rows in a chunk."""
    return ceil_div(chunk, min(rows, chunk))


def fit(knobs: Knobs, measured_m: int, m: int, world: int) -> Knobs:
    """Scale the tile sizes of knobs from measured_m to m.

    A chunk is cut into no more communication tiles than at ``measured_m``. For fewer rows the
    raster is left open: a lower band would read B from memory too often, and one of the same height
    would reach into more chunks.
    """
    if m == measured_m or knobs.path == "unfused":
        return knobs
    before, now = ceil_div(measured_m, world), ceil_div(m, world)
    comm, tile = knobs.comm_tile_rows, knobs.tile
    if comm is not None:
        comm = ceil_div(now, tile_count(comm, before))
    if tile is not None:
        tile = (_fit_rows(tile[0], before, now, measured_m, m), tile[1])
    raster = knobs.raster if now >= before else None
    return replace(knobs, comm_tile_rows=comm, tile=tile, raster=raster)


def _fit_rows(rows: int, before: int, now: int, measured_m: int, m: int) -> int:
    if rows >= measured_m:
        return m
    if rows % before == 0:
        return min(m, rows // before * now)
    return min(m, ceil_div(now * rows, before))


def most_tiles(winners: Sequence[Winner], world: int) -> int:
    """Return the most communication tiles that any winner cuts a chunk into, at any M.

    Where a winner leaves the rows of one open, they are at least those of its GEMM tile or what the
    heuristic takes without one (``flux.select.heuristic.resolve``).
    """
    counts = [1]
    for winner in winners:
        tile = winner.knobs.tile
        rows = winner.knobs.comm_tile_rows or (tile and tile[0])
        if rows is not None:
            counts.append(tile_count(rows, ceil_div(winner.m, world)))
    return max(counts)
