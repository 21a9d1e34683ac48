"""Random cases of sequence parallelism by heads: both ops, and their results in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from flux import Knobs, Topology
from flux.ulysses import AllToAllGemm, GemmAllToAll

TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


@dataclass(frozen=True)
class UlyssesCase:
    """Sizes of a pair of ops; ``lengths`` are of the parts of the sequence.

    ``heads`` are of the packed tensors: one number, or queries, keys and values.
    """

    lengths: tuple[int, ...]
    heads: tuple[int, ...] = (4,)
    head_dim: int = 4
    hidden: int = 10
    batch: int = 2
    dtype: torch.dtype = torch.float32
    heads_first: bool = True
    transpose: bool = False
    bias: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def packed(self) -> int:
        return sum(self.heads) * self.head_dim

    def build(self, kind: Any, heads: tuple[int, ...] | None = None, **more: Any) -> Any:
        """Build ``GemmAllToAll`` of all packed tensors, or ``AllToAllGemm`` of the first."""
        world = len(self.lengths)
        heads = heads or (self.heads if kind is GemmAllToAll else self.heads[:1])
        options: dict[str, Any] = {
            "max_m": world * self.batch * max(self.lengths),
            "heads": heads if len(heads) > 1 else heads[0],
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "heads_first": self.heads_first,
            "transpose_weight": self.transpose,
            **dict(self.options),
        }
        options["k" if kind is GemmAllToAll else "n"] = self.hidden
        return kind(**{**options, **more})

    @property
    def seq_lens(self) -> list[int] | None:
        return None if len(set(self.lengths)) == 1 else list(self.lengths)

    def own(self, rank: int) -> slice:
        first = sum(self.lengths[:rank])
        return slice(first, first + self.lengths[rank])

    def heads_of(self, whole: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return a rank's heads of [batch, sequence, packed], in the case's layout."""
        parts, base, world = [], 0, len(self.lengths)
        for heads in self.heads:
            each = whole[..., base * self.head_dim : (base + heads) * self.head_dim]
            each = each.unflatten(-1, (heads, self.head_dim))
            first = rank * heads // world
            part = each[:, :, first : first + max(heads // world, 1)]
            parts.append(part.transpose(1, 2) if self.heads_first else part)
            base += heads
        return parts


class UlyssesInputs:
    """Inputs of one call of both ops, the same on all ranks."""

    def __init__(self, case: UlyssesCase, seed: int) -> None:
        self.case, self.worst = case, 0.0
        generator = torch.Generator().manual_seed(seed)
        query = case.heads[0] * case.head_dim

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator).to(case.dtype)

        total = sum(case.lengths)
        self.x = draw(case.batch, total, case.hidden)
        self.weights = draw(case.packed, case.hidden), draw(case.hidden, query)
        biases = draw(case.packed), draw(case.hidden)
        self.biases = biases if case.bias else (None, None)
        self.heads = draw(case.batch, total, query)

    def project(self, op: Any, rank: int) -> list[torch.Tensor]:
        """Make the call of ``GemmAllToAll`` and compare its result."""
        return self.check_projected(op(*self.projected(rank)), rank)

    def projected(self, rank: int) -> tuple[Any, ...]:
        """The arguments of a rank's call of ``GemmAllToAll``."""
        case, weight, bias = self.case, self.weights[0], self.biases[0]
        given = weight.t().contiguous() if case.transpose else weight
        return self.x[:, case.own(rank)], given, bias, case.seq_lens

    def check_projected(self, result: Any, rank: int) -> list[torch.Tensor]:
        """Compare the result of ``GemmAllToAll`` with float64."""
        case, weight, bias = self.case, self.weights[0], self.biases[0]
        outs = [result] if isinstance(result, torch.Tensor) else list(result)
        whole = self.x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        for out, wanted in zip(outs, case.heads_of(whole, rank), strict=True):
            self._compare(out, wanted, TOLERANCE[case.dtype])
            assert out.is_contiguous()
        return outs

    def output(self, op: Any, rank: int) -> list[torch.Tensor]:
        """Make the call of ``AllToAllGemm`` and compare its result."""
        return self.check_output(op(*self.given(rank)), rank)

    def given(self, rank: int) -> tuple[Any, ...]:
        """The arguments of a rank's call of ``AllToAllGemm``."""
        case, weight, bias = self.case, self.weights[1], self.biases[1]
        given = weight.t().contiguous() if case.transpose else weight
        query = UlyssesCase(
            case.lengths, case.heads[:1], case.head_dim, heads_first=case.heads_first
        )
        return query.heads_of(self.heads, rank)[0], given, bias, case.seq_lens

    def check_output(self, y: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Compare the result of ``AllToAllGemm`` with float64."""
        case, weight, bias = self.case, self.weights[1], self.biases[1]
        whole = self.heads.double() @ weight.double().t() + (0 if bias is None else bias.double())
        self._compare(y, whole[:, case.own(rank)], 2 * TOLERANCE[case.dtype])
        return [y]

    def _compare(self, out: torch.Tensor, wanted: torch.Tensor, apart: float) -> None:
        """Compare with float64, and note the largest error as a part of what is allowed."""
        relative = TOLERANCE[self.case.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=relative, atol=apart)
        if out.numel() > 0:
            error = (out.double() - wanted).abs() / (apart + relative * wanted.abs())
            self.worst = max(self.worst, float(error.max()))


CALLS = {GemmAllToAll: UlyssesInputs.project, AllToAllGemm: UlyssesInputs.output}


def random_case(rng: random.Random, world: int) -> UlyssesCase:
    query = world * rng.randint(1, 3)
    fits = [d for d in range(1, query + 1) if query % d == 0 and (d % world == 0 or world % d == 0)]
    key = rng.choice(fits)
    even = [rng.randint(1, 9)] * world
    uneven = [rng.choice((0, 1, rng.randint(1, 9))) for _ in range(world)]
    uneven[rng.randrange(world)] += 1
    knobs = Knobs(
        path=rng.choice(("fused", "fused", "unfused")),
        comm_tile_rows=rng.choice((None, 1, 2, 3)),
    )
    options: dict[str, Any] = {"tuning": knobs, "topology": random_hosts(rng, world)}
    if rng.random() < 0.4:
        options["transport"] = "send_recv"
    return UlyssesCase(
        tuple(rng.choice((even, uneven))),
        rng.choice(((query,), (query, key, key))),
        rng.choice((1, 4, 8)),
        rng.randint(1, 20),
        rng.randint(1, 3),
        rng.choice(tuple(TOLERANCE)),
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.random() < 0.5,
        tuple(options.items()),
    )


def random_hosts(rng: random.Random, world: int) -> Topology | None:
    """Return hosts for the ranks; blocks between them travel in tiles."""
    if world == 1 or rng.random() < 0.3:
        return None
    hosts = [rng.randrange(min(world, 3)) for _ in range(world)]
    return Topology.of_hosts(hosts)
