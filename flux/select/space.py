"""The candidates of a search: `tuning/spaces/*.toml`, pruned by legality and by the model.

declared        every combination of the space's values
- illegal       no schedule or no kernel supports it          (with the reason)
- duplicate     makes the same schedule as another one
- too slow      the cost model predicts prune_above times the least or more
= candidates    with `unfused`, `medium` and the default, which are never pruned
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from flux import _C
from flux.core.datafile import MOST_SIZE, Table, find, shown
from flux.core.knobs import ClusterTile, Knobs, Topology
from flux.core.problem import DTYPES, Problem, ceil_div
from flux.core.sparse_problem import DISPATCHING, NAMES, SparseProblem
from flux.kernels.config import GROUPED, GemmConfig
from flux.kernels.legality import GemmProblem, reason_not_summing, reason_unsupported
from flux.machine.cluster import Cluster
from flux.select.all_to_all import predicted_ms
from flux.select.choose import ways_of_rows
from flux.select.cost import gemm_ms
from flux.select.cycles import cost
from flux.select.dispatching import predict_sparse
from flux.select.heuristic import (
    dispatching,
    kernels_can_push,
    make_schedule,
    reason_one_buffer,
    resolve,
    untuned,
)
from flux.select.kernel import best_of, family_of, gemm_of
from flux.select.one_shot import ONE_SHOTS
from flux.select.share import gemm_units

ALWAYS = ("unfused", "medium", "default")
"""Candidates that are always measured, so that the winner is never slower than not fusing."""

_SIZES = ("tile_rows", "tile_columns", "comm_tile_rows")
_CHOICES = (
    "direction",
    "order",
    "swizzle",
    "store",
    "reduce",
    "copy_streams",
    "raster",
    "buffers",
    "sends",
)
_SIZE = re.compile(r"(m|chunk|n)(?:([*/])([1-9]\d{0,5}))?", re.ASCII)


@dataclass(frozen=True)
class Space:
    """A space file.

    Attributes:
        file: its path.
        backend: ``cpu`` | ``cuda``.
        prune_above: largest ratio of a prediction to the least one.
        ops: values of each knob, by op.
        between_hosts: the same for several hosts.
        kernels: values of each field of GemmConfig; empty on the CPU.
        arch: of the kernels; empty on the CPU.
    """

    file: Path
    backend: str
    prune_above: float
    ops: dict[str, dict[str, list[Any]]]
    between_hosts: dict[str, dict[str, list[Any]]]
    kernels: dict[str, list[Any]]
    arch: str = ""


@dataclass(frozen=True)
class Candidate:
    """One way to run the op.

    Attributes:
        name: short, unique among the candidates of a shape, the same in every process.
        knobs: all fields set; open where a name stands for whatever the op resolves.
        kernel: on a GPU.
        predicted_ms: by the model.
    """

    name: str
    knobs: Knobs
    kernel: GemmConfig | None = None
    predicted_ms: float = 0.0


@dataclass(frozen=True)
class Pruned:
    """A combination that is not measured, and the reason."""

    name: str
    reason: str


def space_for(cluster: Cluster) -> str:
    """Return the name of the shipped space for such devices."""
    if cluster.device.kind == "cpu":
        return "cpu"
    return "sm90a" if cluster.device.arch == "sm_90" else "sm80"


def load_space(name: str | Path) -> Space:
    """Return a space: a path, or the name of one in `tuning/spaces`.

    Raises:
        ValueError: no such file, or wrong contents; the message names file and key.
    """
    file = find("spaces", name)
    top = Table.load(file)
    backend = top.text("backend", choices=("cpu", "cuda"))
    space = Space(
        file=file,
        backend=backend,
        prune_above=top.number("prune_above", least=1.0),
        ops=_ops(top),
        between_hosts=_ops(top.table("hosts")) if "hosts" in top.keys else {},
        kernels=_kernel_values(top.table("kernel")) if backend == "cuda" else {},
        arch=top.text("arch", choices=("80", "90a")) if backend == "cuda" else "",
    )
    top.done()
    return space


def _ops(table: Table) -> dict[str, dict[str, list[Any]]]:
    by_op = {}
    for op in [op for op in table.keys if op in NAMES]:
        values, part = {}, table.table(op)
        for name in part.keys:
            if name not in (*_SIZES, *_CHOICES):
                continue
            values[name] = part.values(name)
            for value in values[name]:
                _check_value(part, name, value)
        part.done()
        by_op[op] = values
    if table.keys and not by_op:
        table.fail(table.keys[0], f"expected one of {', '.join(NAMES)}")
    return by_op


def _check_value(table: Table, name: str, value: Any) -> None:
    if name in _SIZES:
        good = type(value) is int and 1 <= value <= MOST_SIZE
        if not good and not (isinstance(value, str) and _SIZE.fullmatch(value)):
            table.fail(
                name, f"expected m, chunk or n (with *2 or /2) or a number, got {shown(value)}"
            )
        return
    try:
        Knobs(**{name: value})
    except ValueError as error:
        table.fail(name, str(error))


def _kernel_values(table: Table) -> dict[str, list[Any]]:
    known = {field.name for field in fields(GemmConfig)} - {"op", "arch", "dtype", "weight"}
    any_kernel = GemmConfig("gemm", "80", "bf16", (128, 128, 64), "multistage")
    by_field = {}
    for name in table.keys:
        if name not in known:
            table.fail(name, f"not a field of a kernel: {', '.join(sorted(known))}")
        values = table.values(name)
        by_field[name] = [tuple(v) if isinstance(v, list) else v for v in values]
        for value in by_field[name]:
            field: dict[str, Any] = {name: value}
            try:  # each alone; legal combinations depend on the shape
                replace(any_kernel, **field)
            except (ValueError, TypeError) as error:
                table.fail(name, str(error))
    for name in ("tile", "schedule"):
        if name not in by_field:
            table.fail(name, "missing")
    return by_field


def extent(value: int | str, problem: Problem) -> int:
    """Return the rows or columns that a size in a space file stands for.

    Raises:
        ValueError: it is not a size.
    """
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"not a size: {value!r}")
    base = {"m": problem.m, "chunk": problem.chunk, "n": problem.local[0]}[match[1]]
    by = int(match[3] or 1)
    return min(MOST_SIZE, base * by if match[2] == "*" else ceil_div(base, by))


def combinations(space: Space, problem: Problem) -> Iterator[Knobs]:
    """Yield every declared combination, legal or not, in the order of the file."""
    by_op = space.between_hosts if problem.nodes > 1 and space.between_hosts else space.ops
    values = by_op.get(problem.name) or by_op.get(problem.op.name, {})
    for chosen in product(*values.values()):
        named = dict(zip(values, chosen, strict=True))
        rows, columns = named.pop("tile_rows", None), named.pop("tile_columns", "n")
        if rows is not None:
            named["tile"] = (extent(rows, problem), extent(columns, problem))
        if "comm_tile_rows" in named:
            named["comm_tile_rows"] = extent(named["comm_tile_rows"], problem)
        yield Knobs(**named)


def kernels(space: Space, problem: Problem) -> tuple[list[GemmConfig], list[Pruned]]:
    """Return the kernels of a space for GPUs that support the shape, and those that do not.

    Those of experts claim their tiles, whatever tile scheduler the space names. A tile's depth is
    that of 16-bit elements: of float8 twice as many fit the same bytes.
    """
    dtype = DTYPES[problem.dtype]
    if not dtype.in_kernels or (problem.scaling and space.arch != "90a"):
        raise ValueError(f"there are no kernels for {problem.dtype} on sm_{space.arch}")
    family, gemm = family_of(problem), gemm_of(problem)
    values = space.kernels
    if family in GROUPED:
        values = values | {"tile_scheduler": ["dynamic"]}
    of_dtype: dict[str, Any] = {"dtype": dtype.short}
    if problem.scaling:
        of_dtype |= {"scaling": problem.scaling, "promoted": not problem.fast_accum}
        deep = [(*tile[:2], tile[2] * 2 // dtype.itemsize) for tile in values["tile"]]
        values = values | {"tile": deep}
    kept, pruned = [], []
    for chosen in product(*values.values()):
        named = dict(zip(values, chosen, strict=True))
        try:
            config = GemmConfig(op=family, arch=space.arch, **{**named, **of_dtype})
            reason = reason_unsupported(config, gemm)
            name = config.name
        except ValueError as error:
            name, reason = str(named), str(error)
        if reason is None:
            kept.append(config)
        else:
            pruned.append(Pruned(name, f"illegal: {reason}"))
    return kept, pruned


def _name(knobs: Knobs, kernel: GemmConfig | None = None) -> str:
    """Return a unique name: values that a space varies, and those that distinguish schedules."""
    if kernel is None:
        shown = replace(knobs, raster=None, swizzle=None, reduce=None)
        return str(shown).removeprefix("path=fused ")
    shown = replace(knobs, tile=None, store=None, copy_streams=None)  # set by the kernel, or unused
    return f"{kernel.name} {shown}".replace(" path=fused", "")


def _schedule_identity(
    problem: Problem, topology: Topology, knobs: Knobs, kernel: GemmConfig | None = None
) -> object:
    """Return a value that identifies a schedule's effect; raise ValueError if there is none.

    A GPU has thousands of tiles, whose order follows from the transfers and a few knobs. Its
    schedule is built with one tile across all columns: that leaves the same chunks, peers and rows
    of the transfers apart that the kernel's own tiles do, and takes a hundredth of the time.
    """
    sizes = (problem.m, problem.n, problem.k)
    raster, tile, columns = knobs.raster, knobs.tile, problem.local[0]
    if kernel is not None and tile is not None:
        tiles = ceil_div(problem.m, tile[0]) * ceil_div(columns, tile[1])
        if tiles <= _C.core.max_tiles:  # else building the schedule raises
            knobs = replace(knobs, tile=(tile[0], columns), raster=1)
    of_ranks = []
    for rank in sorted({0, problem.world - 1}):
        schedule = make_schedule(
            problem.op.name, sizes, problem.world, rank, topology, knobs, itemsize=problem.itemsize
        )
        native = schedule.native
        visits = native.visits if kernel is None else ()
        of_ranks.append((visits, native.transfers, native.results))
    final = schedule.knobs
    if kernel is not None:
        rows = ceil_div(problem.m, kernel.cluster_tile[0])
        # Sums of a node leave by communication tiles.
        leaves = final.comm_tile_rows if problem.nodes > 1 and problem.op.reduces else None
        order = (min(raster or 1, rows), final.swizzle, final.reduce, final.sends, leaves)
        return (tuple(of_ranks), final.direction, final.buffers, order, kernel)
    how = (final.direction, final.store, final.copy_streams, final.reduce)
    return (tuple(of_ranks), how if problem.op.reduces else (how[0], how[2]))


def candidates(
    space: Space, problem: Problem, topology: Topology, cluster: Cluster
) -> tuple[list[Candidate], list[Pruned]]:
    """Return the candidates to measure, and the pruned ones with reasons.

    Candidates that are always measured come first, then the others by predicted time. Pure: the
    same on all ranks and in every run.
    """
    configs: list[GemmConfig] = []
    pruned: list[Pruned] = []
    best_kernel = None
    speeds: dict[str, float] = {}
    if problem.op.exchanges:
        return block_candidates(space, problem, cluster)
    combined = list(combinations(space, problem))
    if space.backend == "cuda":
        configs, pruned = kernels(space, problem)
        best_kernel, speeds = _kernel_speeds(configs, problem, cluster)
    if space.backend == "cpu" and problem.nodes > 1:
        combined += [knobs for knobs in ways_of_rows(problem) if knobs.path == "fused"]
    if space.backend == "cuda" and isinstance(problem, SparseProblem):
        combined, refused = _for_experts(problem, combined)
        pruned += refused
    tile = None if best_kernel is None else best_kernel.cluster_tile
    fixed = _fixed(space, problem, cluster, tile)
    model, problem = problem, problem.scheduled
    kept = []
    seen: dict[object, str] = {}
    for name, knobs in fixed.items():
        kernel = best_kernel if knobs.is_tiled else None
        ms = sum(predict_sparse(model, cluster, knobs, kernel))
        kept.append(Candidate(name, knobs, kernel, ms))
    if problem.world > 1:
        seen[_schedule_identity(problem, topology, fixed["default"], best_kernel)] = "default"
    declared: list[Candidate] = []
    for knobs in combined:
        for kernel in configs or [None]:  # type: ignore[list-item]
            of = (problem, model)
            candidate, reason = _examine(knobs, kernel, of, topology, cluster, speeds, seen)
            if reason is None:
                declared.append(candidate)
            else:
                pruned.append(Pruned(candidate.name, reason))
    limit = space.prune_above * min(candidate.predicted_ms for candidate in (*kept, *declared))
    for candidate in declared:
        if candidate.predicted_ms <= limit:
            kept.append(candidate)
        else:
            predicted = f"predicted {candidate.predicted_ms:.3g} ms"
            pruned.append(Pruned(candidate.name, f"too slow: {predicted}, limit {limit:.3g} ms"))
    fast = sorted(kept[len(fixed) :], key=attrgetter("predicted_ms"))
    return [*kept[: len(fixed)], *fast], pruned


def _fixed(
    space: Space, problem: Problem, cluster: Cluster, tile: ClusterTile | None
) -> dict[str, Knobs]:
    """Return the knobs of the candidates that no space declares, by name."""
    dispatches, experts = problem.name in DISPATCHING, problem.sparse
    problem = problem.scheduled
    unfused, on_gpus = Knobs(path="unfused"), space.backend == "cuda"
    default = untuned(problem, cluster) if on_gpus else Knobs()
    if on_gpus and experts:  # their kernels have no other path
        default = dispatching(problem) if dispatches else default
        return {"unfused": unfused, "default": resolve(problem, default, tile)}
    fixed = {
        "unfused": unfused,
        "medium": resolve(problem, Knobs(path="medium"), tile),
        "default": resolve(problem, default, tile),
    }
    if on_gpus and kernels_can_push(problem):
        fixed["in_kernel"] = resolve(problem, Knobs(path="in_kernel"), tile)
        if problem.op.reduces and cluster.switch_adds:
            by_switch = Knobs(path="in_kernel", reduce="in_flight")
            fixed["in_kernel_by_switch"] = resolve(problem, by_switch, tile)
    if not on_gpus and problem.nodes > 1:
        fixed["one_shot"] = Knobs(path="one_shot")
        ways = [resolve(problem, knobs) for knobs in ONE_SHOTS]
        if ways[1] != ways[0]:
            fixed["one_round"] = ways[1]
        if ways[2] not in ways[:2]:
            fixed["one_gemm"] = ways[2]
        for knobs in ways_of_rows(problem):
            if knobs.path == "one_shot" and knobs.tile is not None:
                fixed[f"columns={knobs.tile[1]}"] = resolve(problem, knobs)
    return fixed


def _for_experts(
    problem: SparseProblem, combined: Sequence[Knobs]
) -> tuple[list[Knobs], list[Pruned]]:
    """Return the knobs that kernels of experts can run with, and the others."""
    spec = problem.spec()
    reasons = {knobs: spec.reason_not_on_gpus(knobs, problem.nodes) for knobs in combined}
    kept = [knobs for knobs, reason in reasons.items() if reason is None]
    pruned = [
        Pruned(_name(knobs), f"illegal: {reason}") for knobs, reason in reasons.items() if reason
    ]
    return kept, pruned


def block_candidates(
    space: Space, problem: Problem, cluster: Cluster
) -> tuple[list[Candidate], list[Pruned]]:
    """Return the candidates of an all-to-all: its paths, sizes of communication tiles, kernels.

    On CPUs there is no model of it: all have the predicted time of the GEMM.
    """
    assert isinstance(problem, SparseProblem)
    ms, combined = gemm_ms(problem.dense, cluster), list(combinations(space, problem))
    if space.backend == "cpu":
        tile = Knobs(comm_tile_rows=problem.chunk)
        by_name = {"unfused": Knobs(path="unfused"), "default": Knobs(), _name(tile): tile}
        by_name |= {_name(knobs): knobs for knobs in combined}
        return [Candidate(name, knobs, None, ms) for name, knobs in by_name.items()], []
    configs, pruned = kernels(space, problem)
    best, speeds = _kernel_speeds(configs, problem, cluster)
    unfused, fused = (predicted_ms(problem, cluster, path) for path in ("unfused", "fused"))
    kept = [
        Candidate("unfused", Knobs(path="unfused"), None, unfused),
        Candidate("default", Knobs(), best, fused),
    ]
    for knobs, config in product(combined, configs):
        predicted = fused + (speeds[config.name] - 1) * ms
        name = _name(knobs, config)
        if predicted <= space.prune_above * min(unfused, fused):
            kept.append(Candidate(name, knobs, config, predicted))
        else:
            pruned.append(Pruned(name, f"too slow: predicted {predicted:.3g} ms"))
    return [*kept[:2], *sorted(kept[2:], key=attrgetter("predicted_ms"))], pruned


def _examine(
    knobs: Knobs,
    kernel: GemmConfig | None,
    of: tuple[Problem, Problem],
    topology: Topology,
    cluster: Cluster,
    speeds: dict[str, float],
    seen: dict[object, str],
) -> tuple[Candidate, str | None]:
    """Return a candidate, and the reason to prune it; None if there is none.

    ``of``: the problems that schedules and the model take.
    """
    problem, model = of
    full = resolve(problem, knobs, None if kernel is None else kernel.cluster_tile)
    name = _name(full, kernel)
    candidate = Candidate(name, full, kernel)
    try:
        identity = _schedule_identity(problem, topology, full, kernel)
    except ValueError as error:
        return candidate, f"illegal: {error}"
    if full.reduce == "in_flight" and cluster.link.kind == "pcie":
        return candidate, "illegal: reduce = in_flight needs atomics between GPUs, PCIe has none"
    if full.reduce == "in_kernel" and kernel is not None:
        reason = reason_not_summing(kernel)
        if reason is not None:
            return candidate, f"illegal: {reason}"
    one_buffer = reason_one_buffer(problem.op, problem.nodes, full)
    if full.buffers == 2 and one_buffer is not None:
        return candidate, f"illegal: buffers = 2: {one_buffer}"
    if problem.nodes > 1 and full.direction == "pull":
        return candidate, "illegal: direction = pull needs memory that peers can read"
    if identity in seen:
        return candidate, f"the same schedule as {seen[identity]}"
    seen[identity] = name
    predicted = predict_sparse(model, cluster, full, kernel)
    slower = speeds.get(kernel.name, 1.0) if kernel is not None else 1.0
    total = predicted.gemm_ms * slower + predicted.exposed_ms
    return replace(candidate, predicted_ms=total), None


def _kernel_speeds(
    configs: Sequence[GemmConfig], problem: Problem, cluster: Cluster
) -> tuple[GemmConfig | None, dict[str, float]]:
    """Return the kernel that the model chooses, and each kernel's time relative to it."""
    if not configs:
        return None, {}
    gemm = GemmProblem.of(problem)
    best = best_of(configs, [cost(c, gemm, gemm_units(problem, cluster, None, c)) for c in configs])
    # On all multiprocessors: ``predict`` counts the margin.
    costs = [cost(config, gemm, cluster.device.units) for config in configs]
    speeds = {c.name: value / costs[best] for c, value in zip(configs, costs, strict=True)}
    return configs[best], speeds
