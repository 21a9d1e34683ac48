"""Random cases of mixtures of experts: an op, several routings, and results in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from flux import _C, Knobs
from flux.moe import (
    AGGroupedGemm,
    DispatchGroupedGemm,
    GroupedGemmAR,
    GroupedGemmCombine,
    GroupedGemmRS,
)
from op_cases import random_knobs
from reference import ACTIVATIONS, DTYPES, FP8, share

MOE_OPS = {
    "gather": AGGroupedGemm,
    "scatter": GroupedGemmRS,
    "reduce": GroupedGemmAR,
    "dispatch": DispatchGroupedGemm,
    "combine": GroupedGemmCombine,
}
ROUTINGS = ("random", "random", "dropped", "one", "few", "none", "capacity")


@dataclass(frozen=True)
class MoeCase:
    """An op with its sizes; ``n`` and ``k`` are those of all ranks."""

    op: str
    max_m: int
    n: int
    k: int
    experts: int
    topk: int
    ep: int = 1
    dtype: torch.dtype = torch.float32
    knobs: Knobs | str = "cache"
    transport: str | None = None
    transpose: bool = False
    activation: str = "none"
    gated: bool = False
    bias: bool = True
    listed: bool = False
    scaling: str = "none"
    fast: bool = False
    room: int | None = None
    """Rows of ``max_rows`` behind those of the rank that has the most; None: it is not given."""

    @property
    def gathers(self) -> bool:
        return MOE_OPS[self.op].kind.gathers

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    def build(self, **options: Any) -> Any:
        more = {"activation": self.activation, "gated": self.gated} if self.gathers else {}
        sizes = {"max_m": self.max_m, "n": self.n, "k": self.k, "dtype": self.dtype}
        of_experts: dict[str, Any] = {"experts": self.experts, "topk": self.topk, "ep": self.ep}
        of_experts |= {"scaling": self.scaling, "fast_accum": self.fast}
        how = {
            "tuning": self.knobs,
            "transport": self.transport,
            "transpose_weight": self.transpose,
        }
        return MOE_OPS[self.op](**{**sizes, **of_experts, **how, **more, **options})


def routing_of(case: MoeCase, m: int, kind: str, seed: int) -> torch.Tensor:
    """The experts of ``m`` tokens, [m, topk].

    ``dropped``: some choices are; ``one``: all choices are one expert; ``few``: two experts have
    them all; ``none``: all are dropped; ``capacity``: experts take their even share at most.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(m, case.experts, generator=generator)
    experts = scores.topk(case.topk).indices
    if kind == "dropped":
        experts[torch.rand(m, case.topk, generator=generator) < 0.3] = -1
    elif kind == "one":
        experts.fill_(seed % case.experts)
    elif kind == "few":
        experts = (seed + experts % 2) % case.experts
    elif kind == "none":
        experts.fill_(-1)
    elif kind == "capacity":
        room = max(1, m * case.topk // case.experts)
        for expert in range(case.experts):
            late = (experts == expert).nonzero()[room:]
            experts[late[:, 0], late[:, 1]] = -1
    return experts


class MoeInputs:
    """Operands of all ranks for one call, drawn alike on every rank, and its float64 result."""

    def __init__(self, case: MoeCase, m: int, world: int, kind: str, seed: int) -> None:
        self.case, self.m, self.world = case, m, world
        self.experts = routing_of(case, m, kind, seed)
        generator = torch.Generator().manual_seed(seed + 1)

        def draw(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        wide = 2 * case.n if case.gated else case.n
        pairs = [(t, e) for e in range(case.experts) for t, j in self.chosen(e)]
        self.x = draw(m if case.gathers else len(pairs), case.k)
        self.weight = draw(case.experts, wide, case.k)
        self.bias = draw(case.experts, wide, dtype=case.out_dtype) if case.bias else None
        # Scales of what there is none of are 1.
        self.scale_x = torch.ones(len(self.x))
        self.scale_w = torch.ones(case.experts, wide)
        if case.scaling == "row":
            self.scale_x = torch.rand(len(self.x), generator=generator) + 0.5
            self.scale_w = torch.rand(case.experts, wide, generator=generator) + 0.5
        elif case.scaling == "tensor":
            self.scale_x *= 0.75
            self.scale_w = torch.rand(case.experts, 1, generator=generator).add(0.5).repeat(1, wide)
        self.probs = torch.rand(m, case.topk, generator=generator) if seed % 3 else None

    def chosen(self, expert: int) -> list[tuple[int, int]]:
        """Tokens of an expert, in order, each with which of its choices it is."""
        return [(int(t), int(j)) for t, j in (self.experts == expert).nonzero()]

    @property
    def max_rows(self) -> int | None:
        if self.case.room is None:
            return None
        parts = [share(self.case.experts, self.case.ep, p) for p in range(self.case.ep)]
        rows = [sum(len(self.chosen(e)) for e in range(p.start, p.stop)) for p in parts]
        return max(1, max(rows) + self.case.room)

    def part(self, rank: int) -> tuple[range, slice]:
        """Experts of a rank, and its part of n or k."""
        case, parts = self.case, self.world // self.case.ep
        whole = share(case.experts, case.ep, rank // parts)
        size = case.n if case.gathers else case.k
        return range(whole.start, whole.stop), share(size, parts, rank % parts)

    def arguments(self, rank: int) -> tuple[torch.Tensor, Any, torch.Tensor, dict[str, Any]]:
        """x, weights, experts and options of one rank's call."""
        case = self.case
        experts, part = self.part(rank)
        here = slice(experts.start, experts.stop)
        options: dict[str, Any] = {}
        if case.gathers:
            x = self.x[share(self.m, self.world, rank)]
            halves = [part, slice(case.n + part.start, case.n + part.stop)]
            columns = torch.cat([torch.arange(case.n * 2)[h] for h in halves[: 1 + case.gated]])
            weight = self.weight[here][:, columns]
            scales = [self.scale_x[share(self.m, self.world, rank)], self.scale_w[here][:, columns]]
            bias = None if self.bias is None else self.bias[here][:, columns]
        else:
            counts = [len(self.chosen(e)) for e in range(case.experts)]
            begin, end = sum(counts[: experts.start]), sum(counts[: experts.stop])
            x, weight = self.x[begin:end, part], self.weight[here][:, :, part]
            bias = None if self.bias is None else self.bias[here]
            scales = [self.scale_x[begin:end], self.scale_w[here]]
            options["probs"] = self.probs
            if self.max_rows is not None:  # what is behind must not be read
                behind = torch.full((self.max_rows - len(x), x.shape[1]), torch.nan).to(x.dtype)
                scales[0] = torch.cat([scales[0], torch.full((len(behind),), torch.nan)])
                x = torch.cat([x, behind])
        if self.max_rows is not None:
            options["max_rows"] = self.max_rows
        weight = weight.transpose(1, 2).contiguous() if case.transpose else weight.contiguous()
        options["bias"] = bias
        if case.scaling == "tensor":
            scales = [torch.full((1,), 0.75), self.scale_w[here][:, 0]]
        if case.scaling != "none":
            options |= {"scale_x": scales[0], "scale_weight": scales[1]}
        weights = [w.clone() for w in weight] if case.listed else weight
        return x.contiguous(), weights, self.experts, options

    def expected(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The result of one rank in float64, and how far it may be off."""
        case = self.case
        x = self.x.double() * self.scale_x.double()[:, None]
        w = self.weight.double() * self.scale_w.double()[:, :, None]
        b = self.bias.double() if self.bias is not None else w.new_zeros(w.shape[:2])
        unit = torch.finfo(case.out_dtype).eps
        wide = min(unit, torch.finfo(torch.float32).eps)  # sums are not of less
        deep = (case.k + case.topk + self.world + 8) * wide
        if case.gathers:
            experts, part = self.part(rank)
            rows, sizes = [], []
            for e in experts:
                tokens = [t for t, _ in self.chosen(e)]
                y = x[tokens] @ w[e].t() + b[e]
                size = x[tokens].abs() @ w[e].abs().t() + b[e].abs()
                if case.activation != "none":
                    act = ACTIVATIONS[case.activation]
                    if case.gated:
                        up, of_up = y[:, case.n :], size[:, case.n :]
                        y, size = y[:, : case.n], size[:, : case.n]
                        size = (size + 1) * (of_up + 1)
                        y = act(y) * up
                    else:
                        y, size = act(y), size + 1
                rows.append(y[:, part])
                sizes.append(size[:, part])
            behind = 0 if self.max_rows is None else self.max_rows - sum(map(len, rows))
            zeros = x.new_zeros(behind, part.stop - part.start)
            bound = torch.cat([*sizes, zeros]) * 4 * (unit + deep) + 1e-30
            return torch.cat([*rows, zeros]), bound
        total, size = x.new_zeros(self.m, case.n), x.new_zeros(self.m, case.n)
        probs = torch.ones(self.m, case.topk) if self.probs is None else self.probs
        row = 0
        for e in range(case.experts):
            pairs = (self.experts == e).nonzero()
            tokens, p = pairs[:, 0], probs[pairs[:, 0], pairs[:, 1]].double()[:, None]
            routed = x[row : row + len(pairs)]
            total.index_add_(0, tokens, p * (routed @ w[e].t() + b[e]))
            size.index_add_(0, tokens, p * (routed.abs() @ w[e].abs().t() + b[e].abs()))
            row += len(pairs)
        bound = size * 4 * (unit + deep) + 1e-30
        own = share(self.m, self.world, rank) if case.op != "reduce" else slice(None)
        return total[own], bound[own]

    def check(self, op: Any, rank: int) -> torch.Tensor:
        """Call the op with this rank's part, compare with float64, and return the result."""
        x, weights, experts, options = self.arguments(rank)
        y: torch.Tensor = op(x, weights, experts, **options)
        self.compare(y, rank)
        return y

    def compare(self, y: torch.Tensor, rank: int) -> float:
        """Compare a rank's result with float64; return the largest error as a part of the bound."""
        want, bound = self.expected(rank)
        assert y.dtype == self.case.out_dtype and y.shape == want.shape, (y.shape, want.shape)
        error = (y.double() - want).abs()
        wrong = ~(error <= bound)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.numel()} wrong, {self.case}, m {self.m}"
        )
        return float((error / bound).max()) if y.numel() else 0.0


def random_moe_case(rng: random.Random, op: str, world: int) -> MoeCase:
    """One case with odd sizes, any way to divide experts over ranks, and any knobs."""
    experts = rng.choice((1, 2, 3, 5, 8, 13))
    parts = [d for d in range(1, world + 1) if world % d == 0 and d <= experts]
    dispatches = MOE_OPS[op].dispatches
    ep = rng.choice(parts[-2:] if dispatches else parts)
    limit = rng.choice((1, 5, 20, 60))
    n, k = (rng.choice((1, 2, 3, 7, 8, 16, 17, 33, 40)) for _ in range(2))
    gathers = MOE_OPS[op].kind.gathers
    activation = rng.choice(("none", "none", *ACTIVATIONS)) if gathers else "none"
    # No size of a tile: what is legal for the rows of a chunk depends on the op's own columns.
    knobs: Knobs | str = rng.choice(
        ("cache", "off", random_knobs(rng, world, -(-limit // world), max(n, 2)))
    )
    transport = rng.choice((None, None, "send_recv"))
    if transport is not None and isinstance(knobs, Knobs):
        knobs = Knobs(path=rng.choice(("unfused", "fused", "one_shot")))
        if knobs.path == "one_shot" and op == "reduce" and n % 2:  # blocks of columns
            knobs = replace(knobs, tile=(limit, max(n // 3, 1)))
    return MoeCase(
        op,
        limit,
        n,
        k,
        experts,
        topk=rng.randint(1, min(experts, 4)),
        ep=ep,
        dtype=rng.choice(DTYPES),
        knobs=knobs,
        transport=transport if world > 1 else None,
        transpose=rng.random() < 0.4,
        activation=activation,
        gated=activation != "none" and rng.random() < 0.6,
        bias=rng.random() < 0.6,
        listed=rng.random() < 0.4,
        room=rng.choice((None, None, 0, 3, 40)),
    )


def brute_force(
    experts: torch.Tensor, first: int, count: int
) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens and choices of the routed rows, and the row of each choice, by plain loops."""
    m, topk = experts.shape
    tokens, choices = [], []
    rows = [[-1] * topk for _ in range(m)]
    for expert in range(first, first + count):
        for token in range(m):
            for choice in range(topk):
                if int(experts[token, choice]) == expert:
                    rows[token][choice] = len(tokens)
                    tokens.append(token)
                    choices.append(token * topk + choice)
    return tokens, choices, rows


def owner_of(m: int, world: int, token: int) -> int:
    return _C.core.owner_of(m, world, token)
