"""Define `GemmConfig`, the template parameters of a kernel.

This module uses only the standard library, so that builds, which have no torch, can import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from flux.core.knobs import REDUCES, TILE_SCHEDULERS, ClusterTile
from flux.core.problem import ACTIVATIONS, BY_SHORT, SCALINGS
from flux.core.problem import DTYPES as DTYPES_BY_NAME

DENSE = ("gemm", "ag_gemm", "gemm_rs")
GATED = ("gated_gelu", "gated_silu")
"""Of the first half of the columns, which multiplies the second half."""
GROUPED = ("ag_grouped_gemm", "grouped_gemm_rs")
OPS = (*DENSE, *GROUPED)
ARCHS = ("80", "90a")
DTYPES = tuple(dtype.short for dtype in BY_SHORT.values() if dtype.in_kernels)
WEIGHTS = ("nk", "kn")
SCHEDULES = {"80": ("multistage", "stream_k"), "90a": ("cooperative", "pingpong", "stream_k")}

TMA_BYTES = 16
"""TMA needs every address and row to be a multiple of this."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "op": OPS,
    "arch": ARCHS,
    "dtype": DTYPES,
    "weight": WEIGHTS,
    "schedule": ("cooperative", "pingpong", "stream_k", "multistage"),
    "activation": (*ACTIVATIONS, *GATED),
    "scaling": SCALINGS,
    "reduce": REDUCES,
    "tile_scheduler": TILE_SCHEDULERS,
}
_EXTENTS = {"tile": 3, "cluster": 2, "warps": 2}


@dataclass(frozen=True)
class GemmConfig:
    """One kernel. Parameters that can be run-time arguments are not fields.

    Run-time arguments are raster, order, swizzle and communication tile rows. The constructor
    checks each field alone; ``flux.kernels.legality`` defines the combinations that kernels
    support.

    Attributes:
        op: ``gemm`` (plain, the baseline) | ``ag_gemm`` | ``gemm_rs`` | ``ag_grouped_gemm`` |
            ``grouped_gemm_rs`` (of experts: flux.moe).
        arch: ``80`` (CUTLASS 2.x; also runs on newer GPUs) | ``90a`` (Hopper: TMA, WGMMA).
        dtype: of both operands: ``bf16`` | ``fp16`` | ``e4m3``. The result of e4m3 is bf16, that of
            the others has their own dtype.
        weight: ``nk`` ([N, K], as PyTorch's Linear) | ``kn`` ([K, N]).
        tile: (m, n, k) of a thread block, in elements.
        schedule: 90a: ``cooperative`` (two consumer warp groups share a tile) | ``pingpong`` (each
            has its own) | ``stream_k``. 80: ``multistage`` | ``stream_k``.
        cluster: (m, n) thread blocks that share their loads; (1, 1) on 80.
        stages: of the shared-memory pipeline. 90a: 0 means as many as fit; 80: 2 to 5.
        activation: applied after scaling and bias.
        scaling: of e4m3 operands: one factor per ``tensor``, or one per ``row`` of x and of the
            weight's [N, K].
        reduce: ``local`` (the owner sums, in rank order) | ``in_flight`` (memory sums, in the order
            of arrival).
        warps: (m, n) of a thread block on 80; None on 90a, where the schedule implies them.
        alignment: on 80, addresses and rows must be multiples of this many elements; 0 on 90a,
            where TMA needs 16 bytes.
        promoted: of e4m3, whose sums a tensor core keeps to some 14 bits: whether they are added to
            float32 registers after every 128 of K. Other dtypes are summed in float32 anyway.
        tile_scheduler: ``static`` (a block's tiles follow from its number) | ``dynamic`` (running
            blocks claim tiles one by one). Stream-K has a scheduler of its own.
    """

    op: str
    arch: str
    dtype: str
    tile: tuple[int, int, int]
    schedule: str
    weight: str = "nk"
    cluster: tuple[int, int] = (1, 1)
    stages: int = 0
    activation: str = "none"
    scaling: str = "none"
    reduce: str = "local"
    warps: tuple[int, int] | None = None
    alignment: int = 0
    promoted: bool = False
    tile_scheduler: str = "static"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        for name, length in _EXTENTS.items():
            value = getattr(self, name)
            if value is None and name == "warps":
                continue
            if not (
                isinstance(value, tuple)
                and len(value) == length
                and all(type(extent) is int and 1 <= extent < 2**31 for extent in value)
            ):
                raise ValueError(f"{name} must be {length} positive integers, got {value!r}")
        for name in ("stages", "alignment"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**31:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        if type(self.promoted) is not bool:
            raise ValueError(f"promoted must be true or false, got {self.promoted!r}")

    @property
    def name(self) -> str:
        """A C identifier, unique per config; fields with default values are left out."""
        parts = ["flux", self.op, f"sm{self.arch}", self.dtype, self.weight, _by_x(self.tile)]
        if self.arch == "90a":
            parts.append(_by_x(self.cluster))
        parts.append(self.schedule)
        if self.stages:
            parts.append(f"s{self.stages}")
        if self.warps is not None:
            parts.append(f"w{_by_x(self.warps)}")
        if self.alignment:
            parts.append(f"a{self.alignment}")
        for value, default in (
            (self.activation, "none"),
            (self.scaling, "none"),
            (self.reduce, "local"),
            (self.tile_scheduler, "static"),
        ):
            if value != default:
                parts.append(value)
        if self.promoted:
            parts.append("promoted")
        # 80 does not offer clusters, but such a config can be constructed, and it needs a name of
        # its own.
        if self.arch == "80" and self.cluster != (1, 1):
            parts.append(f"c{_by_x(self.cluster)}")
        return "_".join(parts)

    @property
    def fast_accum(self) -> bool:
        """Whether sums stay in the tensor core's own precision of float8."""
        return self.dtype == "e4m3" and not self.promoted

    @property
    def output(self) -> str:
        """Dtype of the result."""
        return DTYPES_BY_NAME[BY_SHORT[self.dtype].result].short

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the operands."""
        return BY_SHORT[self.dtype].itemsize

    @property
    def output_itemsize(self) -> int:
        """Bytes of an element of the result."""
        return BY_SHORT[self.output].itemsize

    @property
    def cluster_tile(self) -> ClusterTile:
        """Rows and columns of the result that a cluster computes: the unit of the tile order."""
        return ClusterTile(self.tile[0] * self.cluster[0], self.tile[1] * self.cluster[1])

    @property
    def alignment_elements(self) -> int:
        """Addresses and rows of the operands must be multiples of this many elements."""
        return self.alignment or TMA_BYTES // self.itemsize

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GemmConfig:
        """Return the config of these fields; the inverse of ``as_dict``.

        A field with a default may be missing: earlier versions did not write all of them.

        Raises:
            ValueError: a field is missing, unknown, or has an impossible value.
        """
        known = {field.name: field.default is MISSING for field in fields(cls)}
        missing = {name for name, needed in known.items() if needed} - set(values)
        if wrong := sorted(missing | (set(values) - set(known))):
            raise ValueError(f"unknown or missing fields of a GemmConfig: {', '.join(wrong)}")
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**arguments)


def _by_x(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))
