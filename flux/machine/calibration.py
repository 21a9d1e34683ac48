"""Measured times of a device's kernels, from a file of `flux plan calibrate`, at any size.

    GEMMs       operations per second over the logarithms of M, N, K: a plane through the points
                around, of which nearer ones count more
    attention   likewise over the mean length and all queries
    others      microseconds over elements or bytes: lines between points, both logarithmic

On a GPU operations may be those of full waves of tiles: of the candidates in _TILES, the one with
the least error at left-out points. Beyond the measured sizes the rate of the largest one holds, and
smaller ones take what the smallest does. Times include the gap between two kernels of a stream.
They hold for the clocks and the power limit that the card had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import exp, log, prod, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux.core.datafile import Table
from flux.core.problem import DTYPES, ceil_div

FORMAT = 1
_NEAR = 0.5
"""Logarithm of the ratio of sizes at which a point counts 0.6: of 60 left-out GEMMs of a CPU the
median error was 2.3% with it, 2.8% with 1."""
_RIDGE = 1e-3
_TILES = (None, (128, 128), (128, 256))
_MOST_US = 1e9
_DIRECTION = ("forward", "backward")
_FUNCTIONS = ("rms_norm", "layer_norm", "silu_mul", "gelu", "rotary", "cross_entropy")
_NEEDED = {
    "attention": [*product(("attention",), _DIRECTION)],
    "add": [("add", "forward"), ("adamw", "forward"), *product(_FUNCTIONS, _DIRECTION)],
}
"""What must be there for times of attention, and of all others, to be used."""
_LEAST_GEMMS = 8
_SIZES = {"gemm": 3, "attention": 5}
_VARIANTS = ("fwd", "dgrad", "wgrad")


class MeasuredPoint(NamedTuple):
    """One point of a file; see ``flux.bench.calibrate_work.Point``."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    variant: str
    us: float

    @property
    def size(self) -> int:
        """Elements; of a copy, bytes."""
        return prod(self.shape)


class Surface:
    """A rate over the logarithms of sizes.

    Args:
        sizes: of each point.
        rates: of each point.
    """

    def __init__(self, sizes: Sequence[Sequence[float]], rates: Sequence[float]) -> None:
        self._x, self._y = np.log(np.array(sizes, float)), np.log(np.array(rates, float))
        self._least, self._most = self._x.min(axis=0), self._x.max(axis=0)
        self._known: dict[tuple[float, ...], float] = {}  # layouts of a search share many sizes

    def rate(self, *sizes: float) -> float:
        """Return the rate at sizes, which are clipped to those measured."""
        if sizes not in self._known:
            self._known[sizes] = self.rate_without(sizes)
        return self._known[sizes]

    def rate_without(self, sizes: Sequence[float], without: int | None = None) -> float:
        """Return the rate at sizes, without the point of a number."""
        away = self._x - np.clip(np.log(np.array(sizes, float)), self._least, self._most)
        distances = (away**2).sum(axis=1)
        if without is not None:
            distances[without] = np.inf
        weights = np.exp(-(distances - distances.min()) / (2 * _NEAR**2))
        columns = np.column_stack((np.ones(len(away)), away))
        weighted = (columns * weights[:, None]).T
        # Slopes that the points do not determine are 0.
        slack = _RIDGE * np.diag([0.0, *[1.0] * away.shape[1]])
        plane = np.linalg.solve(weighted @ columns + slack, weighted @ self._y)
        near = self._y[weights > 1e-2]
        return exp(min(max(plane[0], near.min()), near.max()))


class Gemms:
    """GEMMs of one dtype.

    Args:
        points: fwd ones, and some dgrad and wgrad.
        units: multiprocessors; 0: waves do not count.
    """

    def __init__(self, points: Sequence[MeasuredPoint], units: int) -> None:
        grid = [point for point in points if point.variant == "fwd"] or list(points)
        least = [min(sizes) for sizes in zip(*(point.shape for point in grid), strict=True)]
        self._least, self._units = least, units
        self.error = float("inf")
        for tile in _TILES if units else _TILES[:1]:
            rates = [self._operations(point.shape, tile) / point.us for point in grid]
            surface = Surface([point.shape for point in grid], rates)
            errors = [
                abs(surface.rate_without(point.shape, number) / rates[number] - 1)
                for number, point in enumerate(grid)
            ]
            if (error := float(np.median(errors))) < self.error:
                self.error, self._surface, self.tile = error, surface, tile
        self._slower = {"fwd": 1.0}
        for variant in _VARIANTS[1:]:
            ratios = [p.us / self.us(p.shape, "fwd") for p in points if p.variant == variant]
            self._slower[variant] = float(np.median(ratios)) if ratios else 1.0

    def us(self, shape: Sequence[int], variant: str) -> float:
        """Return the time of a GEMM (m, n, k)."""
        sizes = [max(size, least) for size, least in zip(shape, self._least, strict=True)]
        operations = self._operations(sizes, self.tile)
        return operations / self._surface.rate(*sizes) * self._slower[variant]

    def _operations(self, shape: Sequence[int], tile: tuple[int, int] | None) -> float:
        m, n, k = shape
        if tile is None:
            return 2.0 * m * n * k
        tiles = ceil_div(m, tile[0]) * ceil_div(n, tile[1])
        return 2.0 * tile[0] * tile[1] * ceil_div(tiles, self._units) * self._units * k


class Curve:
    """Microseconds over one size."""

    def __init__(self, sizes: Iterable[float], us: Iterable[float]) -> None:
        pairs = sorted(zip(sizes, us, strict=True))
        self._x, self._y = np.log(np.array(pairs, float)).T

    def us(self, size: float) -> float:
        """Return the time at a size."""
        at = log(max(size, 1.0))
        return exp(float(np.interp(at, self._x, self._y)) + max(0.0, at - float(self._x[-1])))


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a device was measured to reach.

    Attributes:
        source: the file.
        kind: of the device, as of a cluster's.
        arch: likewise.
        units: likewise.
        points: that were measured.

    Raises:
        ValueError: too few points of a kind.
    """

    source: str
    kind: str
    arch: str
    units: int
    points: tuple[MeasuredPoint, ...]
    gemms: Mapping[str, Gemms] = field(init=False, repr=False)
    attention: Mapping[str, Surface] = field(init=False, repr=False)
    curves: Mapping[tuple[str, str], Curve] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[str, str], list[MeasuredPoint]] = {}
        for point in self.points:
            group = point.dtype if point.kind == "gemm" else point.variant
            groups.setdefault((point.kind, group), []).append(point)
        counts = {key: len(points) for key, points in groups.items()}
        if counts.get(("gemm", self.dtype), 0) < _LEAST_GEMMS:
            raise ValueError(
                f"{self.source} has fewer than {_LEAST_GEMMS} GEMMs: too few for a plan"
            )
        gemms, attention, curves = {}, {}, {}
        for (kind, group), points in groups.items():
            missing = {key for key in _NEEDED.get(kind, _NEEDED["add"]) if counts.get(key, 0) < 2}
            if kind == "gemm":
                gemms[group] = Gemms(points, self.units if self.kind == "cuda" else 0)
            elif missing:
                continue
            elif kind == "attention":
                rates = [_pairs(point.shape) / point.us for point in points]
                attention[group] = Surface([_lengths(point.shape) for point in points], rates)
            elif kind != "launch":
                curves[kind, group] = Curve((p.size for p in points), (p.us for p in points))
        vars(self).update(gemms=gemms, attention=attention, curves=curves)

    @property
    def dtype(self) -> str:
        """Dtype of all but float8 GEMMs, optimizer and copies."""
        return next((point.dtype for point in self.points if point.kind == "gemm"), "")

    @property
    def kinds(self) -> str:
        """What has measured times; the rest are left to shares of data sheets."""
        parts = ["GEMMs", *["attention"] * bool(self.attention), *["others"] * bool(self.curves)]
        return "kernels" if len(parts) == 3 else " and ".join(parts)

    def knows(self, kind: str) -> bool:
        """Return whether operators of a kind have measured times."""
        return bool({"attention": self.attention, "gemm": self.gemms}.get(kind, self.curves))

    def most(self) -> tuple[float, float]:
        """Return operations/s of the fastest GEMM, bytes/s of the largest addition (0: none)."""
        gemms = (p for p in self.points if p.kind == "gemm" and p.dtype == self.dtype)
        add = max((p for p in self.points if p.kind == "add"), key=lambda p: p.size, default=None)
        nbytes = 3e6 * add.size * DTYPES[self.dtype].itemsize / add.us if add else 0.0
        return max(2e6 * point.size / point.us for point in gemms), nbytes

    def gemm_ms(self, shape: Sequence[int], dtype: str, variant: str) -> float:
        """Return the time of a GEMM (m, n, k) that is fwd, dgrad or wgrad of a linear.

        Raises:
            ValueError: none of this dtype was measured.
        """
        if dtype not in self.gemms:
            raise ValueError(
                f"{self.source} has GEMMs of {', '.join(self.gemms)}, not of {dtype}: measure with "
                f"flux plan calibrate --dtype {dtype}"
            )
        return 1e-3 * self.gemms[dtype].us(shape, variant)

    def attention_ms(self, shape: Sequence[int], backward: bool) -> float:
        """Return the time of causal attention (batch, heads, queries, keys, head_dim)."""
        surface = self.attention[_DIRECTION[backward]]
        return 1e-3 * _pairs(shape) / surface.rate(*_lengths(shape))

    def kernel_ms(self, function: str, elements: float, nbytes: float, backward: bool) -> float:
        """Return the time of a function of torch's.

        Args:
            function: that is measured; "": one kernel that streams bytes, as an addition does.
            elements: of one of its tensors.
            nbytes: that it reads and writes.
            backward: of its backward.
        """
        if not function:
            function, backward = "add", False
            elements = nbytes / (3 * DTYPES[self.dtype].itemsize)
        return 1e-3 * self.curves[function, _DIRECTION[backward]].us(elements)


def _lengths(shape: Sequence[int]) -> tuple[float, float, float]:
    batch, heads, queries, keys, dim = shape
    return sqrt(queries * keys), batch * heads * queries, dim


def _pairs(shape: Sequence[int]) -> float:
    batch, heads, queries, keys, dim = shape
    return 1.0 * batch * heads * queries * keys * dim


def read_calibration(path: Path) -> Calibration:
    """Return what is in a file that `flux plan calibrate` has written.

    Raises:
        ValueError: the file cannot be read, is none, or has too few points.
    """
    try:
        top = Table.load_json(path, "a calibration of flux", FORMAT)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    device = top.table("device")
    points = []
    for table in top.tables("points"):
        kind = table.text("kind")
        if kind == "launch":
            continue  # times of others include it
        variant = table.text("variant", choices=_VARIANTS if kind == "gemm" else None)
        shape, us = table.integers("shape"), table.number("us", least=1e-6, most=_MOST_US)
        if kind in _SIZES and len(shape) != _SIZES[kind]:
            table.fail("shape", f"expected {_SIZES[kind]} sizes of {kind}, got {len(shape)}")
        dtype = table.text("dtype", choices=(*DTYPES, "uint8"))
        points.append(MeasuredPoint(kind, shape, dtype, variant, us))
    return Calibration(
        str(path),
        device.text("kind"),
        device.text("arch"),
        device.integer("units"),
        tuple(points),
    )
