"""Named sets of kernels to build ahead of time: `minimal` is in `default`, which is in `full`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from flux.kernels.config import ARCHS, DENSE, GATED, GROUPED, SCHEDULES, GemmConfig
from flux.kernels.legality import reason_illegal

SETS = ("minimal", "default", "full")

FUSED = ("ag_gemm", "gemm_rs")


def config_set(name: str, archs: Sequence[str] = ARCHS) -> list[GemmConfig]:
    """Return the configs of a set for these architectures, always in the same order.

    Raises:
        ValueError: no such set or architecture; the message lists the valid ones.
    """
    if name not in SETS:
        raise ValueError(f"set must be one of {', '.join(SETS)}, got {name!r}")
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown or not archs:
        raise ValueError(f"arch must be of {', '.join(ARCHS)}, got {', '.join(unknown) or 'none'}")
    makers = {
        "90a": {"minimal": _minimal_sm90, "default": _default_sm90, "full": _full_sm90},
        "80": {"minimal": _minimal_sm80, "default": _default_sm80, "full": _full_sm80},
    }
    configs = [config for arch in ARCHS if arch in archs for config in makers[arch][name]()]
    return list(dict.fromkeys(configs))


def _sm90(
    op: str,
    tile: tuple[int, int],
    schedule: str = "cooperative",
    cluster: tuple[int, int] = (1, 1),
    dtype: str = "bf16",
    scaling: str = "none",
    reduce: str = "local",
    promoted: bool = False,
) -> GemmConfig:
    """Return a config whose tile is 128 bytes deep, the width of shared memory's swizzle.

    Kernels of experts have dynamic tile schedulers only.
    """
    depth = 128 if dtype == "e4m3" else 64
    return GemmConfig(
        op=op,
        arch="90a",
        dtype=dtype,
        tile=(*tile, depth),
        schedule=schedule,
        cluster=cluster,
        scaling=scaling,
        reduce=reduce,
        promoted=promoted,
        tile_scheduler="dynamic" if op in GROUPED else "static",
    )


def _minimal_sm90() -> Iterator[GemmConfig]:
    for op in DENSE:
        yield _sm90(op, (128, 256), "cooperative", (2, 1))
    for op in GROUPED:
        yield _sm90(op, (128, 256))


def _default_sm90() -> Iterator[GemmConfig]:
    yield from _forward_sm90()
    yield from _backward_sm90()
    yield from _grouped_sm90()


def _grouped_sm90() -> Iterator[GemmConfig]:
    """Kernels of experts, for many tokens of each and for few."""
    for op, dtype, weight in product(GROUPED, ("bf16", "fp16"), ("nk", "kn")):
        yield replace(_sm90(op, (128, 256), dtype=dtype), weight=weight)
        yield replace(_sm90(op, (64, 128), "pingpong", dtype=dtype), weight=weight)
    for dtype, weight, gate in product(("bf16", "fp16"), ("nk", "kn"), GATED):  # SwiGLU, GeGLU
        for tile, schedule in (((128, 256), "cooperative"), ((64, 128), "pingpong")):
            kernel = _sm90(GROUPED[0], tile, schedule, dtype=dtype)
            yield replace(kernel, weight=weight, activation=gate)
    large, small = ((128, 256), "cooperative"), ((64, 128), "pingpong")
    for scaling, op in product(("tensor", "row"), GROUPED):
        # Twice the accumulators: 128x128 is the largest tile whose registers do not spill.
        for tile, schedule in (((128, 128), "cooperative"), small):
            promoted = _sm90(op, tile, schedule, (1, 1), "e4m3", scaling, promoted=True)
            yield promoted
            if op == GROUPED[0]:
                yield replace(promoted, activation="gated_silu")
        for tile, schedule in (large, small):
            yield _sm90(op, tile, schedule, (1, 1), "e4m3", scaling)


def _backward_sm90() -> Iterator[GemmConfig]:
    """Weights as [K, N]: those of a backward, and of graphs that torch.compile makes."""
    for op, dtype in product(FUSED, ("bf16", "fp16")):
        yield replace(_sm90(op, (128, 256), "cooperative", (2, 1), dtype), weight="kn")
        yield replace(_sm90(op, (64, 128), "pingpong", dtype=dtype), weight="kn")


def _forward_sm90() -> Iterator[GemmConfig]:
    yield from _minimal_sm90()
    for op in FUSED:
        yield _sm90(op, (256, 128), "cooperative", (2, 1))
        # Between the other sizes: for some N fewer SMs idle in the last wave; ag_gemm gets a fifth
        # stage.
        yield _sm90(op, (128, 192), "cooperative", (2, 1))
        yield _sm90(op, (128, 128), "pingpong", (2, 1))
        # For M of 256 to 2048, where whole tiles would leave SMs idle in the last wave.
        yield _sm90(op, (128, 128), "stream_k", (2, 1))
        yield _sm90(op, (128, 128), "stream_k")
        # Decode: 64 rows are the least of one WGMMA; a cluster would have nothing to share.
        yield _sm90(op, (64, 128), "pingpong")
    yield _sm90("ag_gemm", (64, 64), "pingpong")
    yield _sm90("gemm_rs", (128, 256), "cooperative", (2, 1), reduce="in_flight")
    # By itself it keeps a whole tile for the link, which leaves three stages to loads; this one,
    # two of four parts of a tile, and the four stages of ag_gemm. Only measurements choose it.
    yield replace(_sm90("gemm_rs", (128, 256), "cooperative", (2, 1)), stages=4)
    # Where other kernels hold multiprocessors.
    for op, columns in product(FUSED, (256, 192)):
        yield replace(_sm90(op, (128, columns), "cooperative", (2, 1)), tile_scheduler="dynamic")
    # Baselines that the fused kernels are compared with.
    yield _sm90("gemm", (128, 128), "pingpong", (2, 1))
    yield _sm90("gemm", (64, 128), "pingpong")
    for op in FUSED:
        yield _sm90(op, (128, 256), "cooperative", (2, 1), dtype="fp16")
        yield _sm90(op, (64, 128), "pingpong", dtype="fp16")
    for op in FUSED:
        for scaling in ("tensor", "row"):
            yield _sm90(op, (128, 256), "cooperative", (2, 1), dtype="e4m3", scaling=scaling)
            yield _sm90(op, (64, 128), "pingpong", dtype="e4m3", scaling=scaling)
    yield _sm90("gemm", (128, 256), "cooperative", (2, 1), dtype="e4m3", scaling="tensor")
    # Twice the accumulators: 128x192 is the largest tile whose registers do not spill.
    promoted = partial(_sm90, dtype="e4m3", promoted=True)
    for op in FUSED:
        for scaling in ("tensor", "row"):
            yield promoted(op, (128, 192), "cooperative", (2, 1), scaling=scaling)
            yield promoted(op, (128, 128), "cooperative", (2, 1), scaling=scaling)
            yield promoted(op, (64, 128), "pingpong", scaling=scaling)
    yield promoted("gemm", (128, 192), "cooperative", (2, 1), scaling="tensor")


def _full_sm90() -> Iterator[GemmConfig]:
    yield from _forward_sm90()
    shared_tiles = ((128, 256), (256, 128), (256, 192), (128, 192), (128, 128), (128, 64))
    own_tiles = ((64, 64), (64, 128), (64, 256), (128, 128), (128, 64))
    shapes = [
        (schedule, tile, cluster)
        for schedule in SCHEDULES["90a"]
        for tile in (own_tiles if schedule == "pingpong" else shared_tiles)
        for cluster in ((1, 1), (2, 1), (1, 2))
    ]
    for op, dtype, (schedule, tile, cluster) in product(DENSE, ("bf16", "fp16", "e4m3"), shapes):
        for weight, activation, scaling, reduce, promoted in product(
            ("nk", "kn"),
            ("none", "gelu", "silu") if op == "ag_gemm" else ("none",),
            ("tensor", "row") if dtype == "e4m3" else ("none",),
            ("local", "in_flight"),
            (False, True),
        ):
            base = _sm90(op, tile, schedule, cluster, dtype, scaling, reduce, promoted)
            base = replace(base, weight=weight, activation=activation)
            yield from _legal([base])
            if (weight, activation, reduce) == ("nk", "none", "local"):
                yield from _legal([replace(base, tile_scheduler="dynamic")])
    yield from _backward_sm90()
    yield from _grouped_sm90()


def _sm80(
    op: str,
    tile: tuple[int, int, int],
    warps: tuple[int, int],
    stages: int,
    schedule: str = "multistage",
    dtype: str = "bf16",
    alignment: int = 8,
) -> GemmConfig:
    """Return a config; kernels of experts have dynamic tile schedulers only."""
    return GemmConfig(
        op=op,
        arch="80",
        dtype=dtype,
        tile=tile,
        schedule=schedule,
        stages=stages,
        warps=warps,
        alignment=alignment,
        tile_scheduler="dynamic" if op in GROUPED else "static",
    )


def _minimal_sm80() -> Iterator[GemmConfig]:
    for op in (*FUSED, *GROUPED):
        yield _sm80(op, (128, 128, 32), (2, 2), 4)


def _default_sm80() -> Iterator[GemmConfig]:
    yield from _forward_sm80()
    yield from _backward_sm80()


def _any_size(op: str, dtype: str = "bf16") -> GemmConfig:
    """Return the one kernel that supports any K and N."""
    return _sm80(op, (64, 64, 32), (2, 2), 2, dtype=dtype, alignment=1)


def _backward_sm80() -> Iterator[GemmConfig]:
    """Weights as [K, N], as in ``_backward_sm90``."""
    for op, dtype in product((*FUSED, *GROUPED), ("bf16", "fp16")):
        yield replace(_sm80(op, (128, 128, 32), (2, 2), 4, dtype=dtype), weight="kn")
        yield replace(_any_size(op, dtype), weight="kn")


def _forward_sm80() -> Iterator[GemmConfig]:
    yield from _minimal_sm80()
    for op in FUSED:
        large = _sm80(op, (128, 256, 32), (2, 4), 3)
        yield large
        yield replace(large, tile_scheduler="dynamic")
        # Decode: few rows, so parallelism comes from splitting K.
        yield _sm80(op, (64, 128, 32), (2, 2), 4, "stream_k")
        yield _sm80(op, (16, 128, 64), (1, 4), 4, "stream_k")
        yield _any_size(op)
    for op in GROUPED:  # few tokens for each expert
        yield _sm80(op, (64, 128, 32), (2, 2), 4)
        yield _any_size(op)
    for op in (*FUSED, *GROUPED):
        yield _sm80(op, (128, 128, 32), (2, 2), 4, dtype="fp16")
        yield _any_size(op, "fp16")


def _full_sm80() -> Iterator[GemmConfig]:
    yield from _forward_sm80()
    shapes = (
        ((128, 256, 32), (2, 4), 3),
        ((256, 128, 32), (4, 2), 3),
        ((128, 128, 32), (2, 2), 4),
        # Half as many barriers; the stages that fit shared memory cover as much of K.
        ((128, 256, 64), (2, 4), 3),
        ((128, 128, 64), (2, 2), 3),
        ((64, 128, 64), (2, 2), 4),
        ((128, 64, 32), (2, 2), 4),
        ((64, 128, 32), (2, 2), 4),
        ((64, 64, 64), (2, 2), 4),
        ((32, 128, 64), (1, 4), 4),
        ((16, 128, 64), (1, 4), 4),
        ((16, 64, 64), (1, 2), 5),
    )
    for op, dtype, schedule, (tile, warps, stages), weight in product(
        DENSE, ("bf16", "fp16"), SCHEDULES["80"], shapes, ("nk", "kn")
    ):
        base = replace(_sm80(op, tile, warps, stages, schedule, dtype), weight=weight)
        yield from _legal(
            replace(base, activation=activation)
            for activation in (("none", "gelu", "silu") if op == "ag_gemm" else ("none",))
        )
        if weight == "nk":
            yield from _legal([replace(base, tile_scheduler="dynamic")])
        if tile[:2] in ((128, 128), (64, 64)):
            yield from _legal(
                replace(base, alignment=alignment, stages=2 if alignment == 1 else stages)
                for alignment in (4, 2, 1)
            )
    yield from _backward_sm80()


def _legal(configs: Iterable[GemmConfig]) -> Iterator[GemmConfig]:
    return (config for config in configs if reason_illegal(config) is None)
