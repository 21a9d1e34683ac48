"""One op of a mixture of experts, or of sequence parallelism by heads, at one M.

    name                    m        n                  k
    ag_grouped_gemm         tokens   columns of tp      depth              dispatch_grouped_gemm
    grouped_gemm_rs         tokens   columns            depth of tp        grouped_gemm_combine, _ar
    gemm_all_to_all         tokens   heads * head_dim   depth
    all_to_all_gemm         tokens   columns            heads * head_dim

``Problem`` is a dense op. This one has the same fields, so commands, keys of winners and tables
treat both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from flux.core.knobs import OPS, AllToAllOp, Op, OpRow
from flux.core.problem import SCALE_SIZES, Problem, ceil_div

if TYPE_CHECKING:
    from flux.core.spec import OpSpec


class SparseOp(NamedTuple):
    """An op of ``flux.moe`` or ``flux.ulysses``: its class, name in reports, and row of ``Op``."""

    label: str
    title: str
    row: OpRow
    dispatches: bool = False


SPARSE = {
    "ag_grouped_gemm": SparseOp("AGGroupedGemm", "AllGather + grouped GEMM", Op.ag_gemm),
    "grouped_gemm_rs": SparseOp("GroupedGemmRS", "Grouped GEMM + ReduceScatter", Op.gemm_rs),
    "grouped_gemm_ar": SparseOp("GroupedGemmAR", "Grouped GEMM + AllReduce", Op.gemm_ar),
    "dispatch_grouped_gemm": SparseOp(
        "DispatchGroupedGemm", "Dispatch + grouped GEMM", Op.ag_gemm, True
    ),
    "grouped_gemm_combine": SparseOp(
        "GroupedGemmCombine", "Grouped GEMM + combine", Op.gemm_rs, True
    ),
    "gemm_all_to_all": SparseOp("GemmAllToAll", "GEMM + AllToAll", AllToAllOp.gemm_all_to_all),
    "all_to_all_gemm": SparseOp("AllToAllGemm", "AllToAll + GEMM", AllToAllOp.all_to_all_gemm),
}
_NAMES = {(op.row, op.dispatches): name for name, op in SPARSE.items()}
NAMES = (*OPS, *SPARSE)
"""Names of all ops that are measured."""
DISPATCHING = tuple(name for name, op in SPARSE.items() if op.dispatches)
TITLES = {op.name: op.title for op in Op} | {name: op.title for name, op in SPARSE.items()}
EXPERT_SIZES, HEAD_SIZES = ("experts", "topk", "ep"), ("heads", "head_dim")


@dataclass(frozen=True)
class SparseProblem(Problem):
    """An op of experts or heads at one shape; tensors have no fixed shapes by rank.

    Attributes:
        m: tokens.
        experts, topk, ep, dispatches: as ``flux.core.spec.OpSpec`` has them.
        heads, head_dim: the same; empty and 0 of an op of experts.
        local: columns and depth of one expert's GEMM, or of one block of heads.
    """

    ep: int = 1
    dispatches: bool = False
    heads: tuple[int, ...] = ()
    head_dim: int = 0

    def __post_init__(self) -> None:
        _ = self.dense  # checks m, n, k, dtype and world
        self._settle_scaling()
        if not self.op.exchanges and (self.ep < 1 or self.world % self.ep):
            raise ValueError(f"ep must divide the {self.world} ranks, got {self.ep}")
        spec = self.spec()
        if self.op.exchanges:
            reason = spec.reason_not_shared(self.world)
            if reason is not None:
                raise ValueError(reason)
            elements = spec.travelling(self.world)[0]
            local = (elements, self.k)
            if self.name == "all_to_all_gemm":
                local = (self.n, elements)
        else:
            elements = self.k if self.op.gathers else self.n
            local = (spec.local_n(self.world, 0)[0], spec.local_k(self.world, 0))
        vars(self).update(
            itemsize=spec.itemsize,
            row_elements=elements,
            row_bytes=spec.itemsize * elements,
            chunk=ceil_div(self.m, self.world),
            local=local,
        )

    def spec(self) -> OpSpec:
        """Return what the op is constructed with; raise ValueError for sizes that it refuses."""
        from flux.core.spec import OpSpec

        of_op: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim}
        if not self.op.exchanges:
            of_op = {name: getattr(self, name) for name in (*EXPERT_SIZES, "dispatches")}
        of_op |= self.scales
        return OpSpec(self.op, self.m, (self.n,), self.k, self.torch_dtype, False, "sum", **of_op)

    @property
    def name(self) -> str:
        """Name of the op."""
        return _NAMES[self.op, self.dispatches]

    @property
    def label(self) -> str:
        """Name of the op's class."""
        return SPARSE[self.name].label

    @property
    def sparse(self) -> bool:
        """True."""
        return True

    @property
    def variant(self) -> str:
        """As of a dense op, behind other sizes: ``e8t2p1``, ``e8t2p1-row`` or ``h16-4-4d64``."""
        if self.op.exchanges:
            return f"h{'-'.join(map(str, self.heads))}d{self.head_dim}"
        return f"e{self.experts}t{self.topk}p{self.ep}-{super().variant}".removesuffix("-")

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes beside m, n and k, as ``make_problem`` takes them."""
        names = HEAD_SIZES if self.op.exchanges else EXPERT_SIZES
        return {name: getattr(self, name) for name in names} | self.scales

    @property
    def dense(self) -> Problem:
        """A dense op with as many operations and bytes, for cost models."""
        n, k, op = self.n, self.k, self.op
        if op.exchanges:
            op = Op.gemm_rs
        elif op.gathers:
            n *= self.topk
        else:
            k *= self.topk
        return Problem(op, self.m, n, k, self.dtype, self.world, self.nodes, **self.scales)

    @property
    def scheduled(self) -> Problem:
        """A dense op with the schedule of an op of experts."""
        n = self.world * self.local[0] if self.op.gathers else self.n
        return Problem(
            self.op, self.m, n, self.k, self.dtype, self.world, self.nodes, **self.scales
        )

    @property
    def weight_elements(self) -> int:
        """Elements of the weights of all ranks."""
        return self.n * self.k * (self.world if self.op.exchanges else self.experts)

    def as_dict(self) -> dict[str, object]:
        """Return op, sizes, dtype and world, for JSON."""
        of_op = {n: list(v) if isinstance(v, tuple) else v for n, v in self.sizes.items()}
        return {**super().as_dict(), **of_op}

    def result_shape(self, rank: int) -> tuple[int, int]:
        """Return the shape of the result on ``rank`` if tokens are spread evenly."""
        rows = ceil_div(self.m * self.topk, self.ep) if self.op.gathers else self.chunk
        rows = self.m if self.op.all_reduces or self.name == "gemm_all_to_all" else rows
        return rows, self.local[0]


def make_problem(
    name: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    world: int,
    sizes: Mapping[str, Any] | None = None,
    nodes: int = 1,
) -> Problem:
    """Return the problem of an op by its name.

    ``name``: of NAMES. ``sizes``: others of an op of experts (``experts``, ``topk``, ``ep``; by
    default 8, 2, and the world where tokens are dispatched, else 1) or heads (``heads``,
    ``head_dim``; by default as many as there is room for, of 64); of float8 ``scaling`` and
    ``fast_accum``.

    Raises:
        ValueError: an unknown name, or sizes that the op refuses.
    """
    given = dict(sizes or {})
    scales = {size: given.pop(size) for size in SCALE_SIZES if size in given}
    if name in SPARSE:
        op = SPARSE[name]
        known: tuple[str, ...] = HEAD_SIZES if op.row.exchanges else EXPERT_SIZES
        of_op: dict[str, Any] = {"dispatches": op.dispatches}
        if op.row.exchanges:
            width, dim = (n if name == "gemm_all_to_all" else k), given.get("head_dim", 64)
            of_op |= {"heads": (max(1, width // dim),), "head_dim": dim} | given
            of_op["heads"] = tuple(of_op["heads"])
        else:
            of_op |= {"experts": 8, "topk": 2, "ep": world if op.dispatches else 1} | given
    else:
        op, known, of_op = SparseOp("", "", Op.named(name, NAMES)), (), {}
    if unknown := [size for size in given if size not in known]:
        text = ", ".join(known) or "none beside m, n and k"
        raise ValueError(f"sizes of {name} are {text}; got {', '.join(unknown)}")
    made = SparseProblem if of_op else Problem
    return made(cast(Op, op.row), m, n, k, dtype, world, nodes, **of_op, **scales)


def simulated_problem(
    name: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    world: int,
    sizes: Mapping[str, Any],
    nodes: int,
) -> Problem:
    """Return the problem of an op that is simulated.

    An op of experts that moves all tokens is the dense one, of all rows.

    Args:
        name: of NAMES.
        m: tokens.
        n: columns.
        k: depth.
        dtype: of operands.
        world: number of ranks.
        nodes: number of their hosts.
        sizes: experts, topk, ep, heads and head_dim; None: not given.

    Raises:
        ValueError: as ``make_problem``, or a size is missing, or given to another op.
    """
    sparse, experts, topk = SPARSE.get(name), sizes["experts"], sizes["topk"]
    exchanges = sparse is not None and sparse.row.exchanges
    if sparse is not None and experts == 1 and not exchanges:
        raise ValueError(f"{name} needs --experts and --topk")
    if sizes["ep"] is not None and name not in DISPATCHING:
        raise ValueError(f"--ep is of {' and '.join(DISPATCHING)}, got {name}")
    if sizes["heads"] is not None and not exchanges:
        raise ValueError(f"--heads is of all-to-alls of heads, got {name}")
    if name in DISPATCHING or exchanges:
        of_op = HEAD_SIZES if exchanges else EXPERT_SIZES
        given = {size: sizes[size] for size in of_op if sizes[size] is not None}
        return make_problem(name, m, n, k, dtype, world, given, nodes)
    op = Op.named(sparse.row.name if sparse else name)
    return Problem(op, m * topk, n, k, dtype, world, nodes, experts=experts, topk=topk)


def problem_of(spec: OpSpec, world: int, nodes: int) -> Problem:
    """Return the problem of an op at its largest M."""
    from flux.core.spec import DTYPES as BY_TORCH

    n, dtype = sum(spec.n), BY_TORCH[spec.dtype].name
    rest: dict[str, Any] = {}
    if spec.op.exchanges:
        rest = {"heads": spec.heads, "head_dim": spec.head_dim}
    elif spec.experts:
        names = (*EXPERT_SIZES, "dispatches")
        rest = {name: getattr(spec, name) for name in names}
    made = SparseProblem if rest else Problem
    rest |= {name: getattr(spec, name) for name in SCALE_SIZES}
    return made(cast(Op, spec.op), spec.max_m, n, spec.k, dtype, world, nodes, **rest)
