"""Ops of mixtures of experts on CPU ranks, against float64."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from flux import _C, Knobs, PeerTimeoutError
from flux.core.env import HOST
from flux.moe import (
    DispatchGroupedGemm,
    GroupedGemmAR,
    GroupedGemmCombine,
    expand_tokens,
    product,
)
from harness import BUSY, STRESS, fresh_ranks, more, run_ranks
from moe_cases import MOE_OPS, ROUTINGS, MoeCase, MoeInputs, owner_of, random_moe_case
from op_cases import same_bits

OPS = tuple(MOE_OPS)
SMALL = MoeCase("gather", 24, 12, 10, experts=6, topk=2)


HOSTS = {2: ("aa", "ab"), 3: ("aaa", "aab", "abc"), 4: ("aaaa", "aabb", "abab", "abbb")}
HOSTS[8] = ("a" * 8, "aaaabbbb", "aabbccdd", "aaabbbbb")


def _random(rank: int, world: int, op: str, cases: int, float8: bool = False) -> int:
    calls = 0
    for seed in range(cases):
        rng = random.Random(f"{op} {world} {seed}")
        case = random_moe_case(rng, op, world)
        if float8:
            scaling = rng.choice(("tensor", "row"))
            case = replace(case, dtype=torch.float8_e4m3fn, scaling=scaling)
        several = world > 1 and (MOE_OPS[op].dispatches or rng.random() < 0.4)
        hosts = rng.choice(HOSTS[world]) if several else "a" * world
        if len(set(hosts)) > 1 and isinstance(case.knobs, Knobs):
            case = replace(case, knobs=replace(case.knobs, direction=None))  # no pull
        try:
            with HOST.during(hosts[rank]):
                built = case.build()
        except ValueError as error:
            assert "straddle" in str(error) or "swizzle" in str(error), error
            continue
        blocks = {"SCRATCH_BYTES": 1, "BLOCK_COLUMNS": 5 if seed % 2 else case.n}
        with built, mock.patch.multiple(product, **blocks):
            for _ in range(4):
                m = rng.choice((1, case.max_m, rng.randint(1, case.max_m)))
                inputs = MoeInputs(case, m, world, rng.choice(ROUTINGS), rng.randrange(1 << 20))
                y = inputs.check(built, rank)
                own = [len(inputs.chosen(expert)) for expert in inputs.part(rank)[0]]
                chosen = inputs.experts.to(torch.int16).T.contiguous().T
                assert built.rows_by_expert(chosen).tolist() == own
                x, weights, experts, options = inputs.arguments(rank)
                assert same_bits(y, built(x, weights, experts, **options))
                calls += 2
    return calls


@pytest.mark.parametrize("world", [1, 2, 3, 4, *more(8)])
@pytest.mark.parametrize("op", OPS)
def test_random_routings(op: str, world: int) -> None:
    assert all(calls > 40 for calls in run_ranks(world, _random, op, 9 * STRESS))


def _at_once(rank: int, world: int, op: str) -> list[int]:
    """How many grouped GEMMs of torch calls make, with weights in one tensor and in several."""
    made = []
    for listed in (False, True):
        calls = mock.Mock(wraps=product.grouped_mm)
        with mock.patch.multiple(product, AT_ONCE=("cpu",), grouped_mm=calls):
            for seed, kind in enumerate(("random", "dropped", "few", "random")):
                gated = op == "gather" and seed % 2 == 0
                case = MoeCase(
                    op, 40, 24, 16, experts=5, topk=2, dtype=torch.bfloat16, listed=listed,
                    transpose=seed > 1, bias=seed != 1, gated=gated,
                    activation="silu" if gated else "none",
                )  # fmt: skip
                with case.build() as built:
                    MoeInputs(case, 33, world, kind, seed).check(built, rank)
        made.append(calls.call_count)
    return made


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_random_routings_of_float8(op: str, world: int) -> None:
    assert all(calls > 20 for calls in run_ranks(world, _random, op, 5 * STRESS, True))


@pytest.mark.skipif(product.grouped_mm is None, reason="torch has no grouped GEMM before 2.10")
@pytest.mark.parametrize("op", ["gather", "scatter", "reduce"])
def test_one_rank_multiplies_all_experts_at_once(op: str) -> None:
    """As on a GPU, where a launch for each expert would take longer than its product."""
    assert run_ranks(1, _at_once, op) == [[4, 0]]


def _links(rank: int, world: int, op: str, hosts: str) -> tuple[int, int]:
    """Return the bytes that left this host, and those of the tokens that had to, of all hosts."""
    case = replace(SMALL, op=op, experts=9, ep=world, knobs=Knobs(path="fused", comm_tile_rows=3))
    inputs = MoeInputs(case, 23, world, "random", 3)
    with HOST.during(hosts[rank]), case.build() as built:
        inputs.check(built, rank)
        sent = sum(built._backend.network.bytes_sent.values())
        row = built.spec.travelling_row[0] * 4
    crossing = 0
    for token in range(23):
        chosen = inputs.experts[token].tolist()
        there = {hosts[r] for r in range(world) if set(inputs.part(r)[0]) & set(chosen)}
        crossing += len(there - {hosts[owner_of(23, world, token)]})
    return sent, crossing * row


@pytest.mark.parametrize("hosts", ["aabb", "abb", "abc"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_tokens_cross_to_a_host_once_if_it_has_one_of_their_experts(op: str, hosts: str) -> None:
    results = run_ranks(len(hosts), _links, op, hosts)
    assert sum(sent for sent, _ in results) == results[0][1]


def _gradients(rank: int, world: int, ep: int, ends: str) -> None:
    """One layer of two ops beside the same layer in float64 on one rank, all gradients."""
    torch.manual_seed(world * 10 + ep)
    m, experts, topk, n, k = 29, 4 if world == ep else 7, 3, 12, 10  # of 4, rank 2 of 3 has none
    if ends == "replicated" and ep == 1:
        n = 1  # rank 1 has no column
    choices = torch.rand(m, experts).topk(topk).indices
    choices[torch.rand(m, topk) < 0.2] = -1

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    whole = [draw(m, k), draw(experts, n, k), draw(experts, k, n), draw(experts, n)]
    whole += [draw(experts, k), draw(m, topk).abs()]
    x, w1, w2, b1, b2, p = (t.clone().requires_grad_() for t in whole)
    out = []
    for t in range(m):
        terms = [x.new_zeros(k)]
        for j, e in enumerate(choices[t].tolist()):
            if e >= 0:
                terms.append(p[t, j] * (w2[e] @ torch.tanh(w1[e] @ x[t] + b1[e]) + b2[e]))
        out.append(torch.stack(terms).sum(0))
    wanted, outside = torch.stack(out), draw(m, k)
    (wanted * outside).sum().backward()

    sizes: dict[str, Any] = {"max_m": m, "experts": experts, "topk": topk, "ep": ep}
    sizes["dtype"] = torch.float64
    begins = "dispatch" if ends == "combine" else "gather"
    first = MOE_OPS[begins](n=n, k=k, **sizes)
    second = MOE_OPS["reduce" if ends == "replicated" else ends](
        n=k, k=n, transpose_weight=True, **sizes
    )
    inputs = MoeInputs(MoeCase("gather", m, n, k, experts, topk, ep), m, world, "random", 1)
    here, part = inputs.part(rank)
    e, own = slice(here.start, here.stop), inputs_rows(m, world, rank)
    tokens = slice(None) if ends == "replicated" else own
    local = [x[tokens], w1[e, part], w2[e, :, part].transpose(1, 2), b1[e, part], b2[e], p]
    mine = [t.detach().clone().contiguous().requires_grad_() for t in local]

    def layer(*tensors: torch.Tensor, max_rows: int | None = None) -> torch.Tensor:
        xs, one, two, bias, last, weights = tensors
        if ends == "replicated":
            hidden = expand_tokens(second, xs, one.mT, choices, bias, max_rows=max_rows).tanh()
        else:
            hidden = torch.tanh(first(xs, one, choices, bias, max_rows=max_rows))
        result: torch.Tensor = second(
            hidden, list(two.unbind()), choices, weights, last, max_rows=max_rows
        )
        return result

    rows = own if ends in ("scatter", "combine") else slice(None)
    again = partial(checkpoint, partial(layer, max_rows=m * topk), use_reentrant=False)
    for run in (layer, again):
        for tensor in mine:
            tensor.grad = None
        z = run(*mine)
        torch.testing.assert_close(z, wanted[rows], rtol=1e-10, atol=1e-10)
        (z * outside[rows]).sum().backward()
        grads = [x.grad[tokens], w1.grad[e, part], w2.grad[e, :, part].transpose(1, 2)]
        grads += [b1.grad[e, part], b2.grad[e], p.grad]
        for tensor, grad in zip(mine, grads, strict=True):
            if tensor.numel():  # an empty list of weights has no gradient
                torch.testing.assert_close(tensor.grad, grad, rtol=1e-9, atol=1e-9)
    first.close()
    second.close()


def inputs_rows(m: int, world: int, rank: int) -> slice:
    chunk = -(-m // world)
    return slice(min(m, rank * chunk), min(m, (rank + 1) * chunk))


@pytest.mark.parametrize(
    ("world", "ep", "ends"),
    [
        (1, 1, "scatter"),
        (2, 1, "reduce"),
        (3, 3, "scatter"),
        (4, 2, "reduce"),
        (2, 1, "replicated"),
        (4, 2, "replicated"),
        (3, 3, "replicated"),
        (1, 1, "combine"),
        (3, 3, "combine"),
        (4, 2, "combine"),
    ],
)
def test_gradients_of_a_layer(world: int, ep: int, ends: str) -> None:
    run_ranks(world, _gradients, ep, ends)


def _choices(rank: int, world: int) -> None:
    """What routers chose is gathered; each rank's gradient is that of its own rows."""
    m, sizes = 9, {"n": 4, "k": 4, "experts": 5, "topk": 3}
    whole = torch.arange(m * 3).view(3, m).T  # of four ranks the last has no row, of any stride
    own = inputs_rows(m, world, rank)
    probs = whole[own].double().requires_grad_()
    with MOE_OPS["gather"](max_m=m, **sizes) as op:
        experts, full = op.gather_choices(whole.int()[own], probs, m)
        assert torch.equal(experts, whole) and torch.equal(full, whole.double())
        full.square().sum().backward()
        assert probs.grad is not None and torch.equal(probs.grad, 2 * probs.detach())


@pytest.mark.parametrize("world", [1, 3, 4])
def test_choices_are_gathered(world: int) -> None:
    run_ranks(world, _choices)


def _gathered(rank: int, world: int) -> None:
    """A loss of the gathered tokens as well as of the result."""
    inputs = MoeInputs(replace(SMALL, dtype=torch.float64), 17, world, "dropped", 5)
    x, weights, experts, options = inputs.arguments(rank)
    x.requires_grad_()
    with inputs.case.build() as op:
        y, full = op(x, weights, experts, return_gathered=True, **options)
        assert torch.equal(full, inputs.x)
        (y.sum() * (rank + 1) + (full * full).sum()).backward()
    whole = inputs.x.clone().requires_grad_()
    total = whole.new_zeros(())
    for r in range(world):
        part, columns = inputs.part(r)
        for e in part:
            tokens = [t for t, _ in inputs.chosen(e)]
            total = total + (r + 1) * (whole[tokens] @ inputs.weight[e, columns].t()).sum()
        total = total + (whole * whole).sum()
    (grad,) = torch.autograd.grad(total, whole)
    own = inputs_rows(17, world, rank)
    torch.testing.assert_close(x.grad, grad[own], rtol=1e-9, atol=1e-9)


def test_gathered_tokens_have_gradients() -> None:
    run_ranks(3, _gathered)


def _refusals(rank: int, world: int) -> None:
    with SMALL.build(timeout_s=20) as op:
        good = MoeInputs(SMALL, 24, world, "random", 1)
        x, weights, experts, options = good.arguments(rank)
        other = experts.clone()
        if rank == 1:
            other[3, 0] = (other[3, 0] + 1) % SMALL.experts
        with pytest.raises(ValueError, match="different tokens, routing"):
            op(x, weights, other, **options)
        bad = [
            (x, weights, experts.to("meta"), "experts must be on the CPU"),
            (x, weights, experts[:, :1], r"experts must be \[M, topk = 2\]"),
            (x, weights, experts + SMALL.experts, "below 6"),
            (x, weights, experts.float(), "must be integers"),
            (x[:, :-1], weights, experts, "x must be"),
            (x, weights[:-1], experts, "weight must be"),
            (x, list(weights)[1:], experts, "6 of"),
            (x, weights.double(), experts, "weight must be torch.float32"),
        ]
        for one in bad:
            *arguments, text = one if rank == 0 else (x, weights, experts, "rank 0 refused")
            with pytest.raises((ValueError, TypeError), match=text):
                op(*arguments, **options)
        few = r"chose 48 rows .* max_rows = 47"
        for most, text in ((0, r"max_rows must be in \[1,"), (47, few)):
            said = text if rank == 0 or most else "rank 0 refused"
            with pytest.raises(ValueError, match=said):
                op(x, weights, experts, max_rows=most if rank == 0 or most else 48, **options)
        own = experts[inputs_rows(24, world, rank)]
        for wrong, text in ((own[:-1], "must have 12 rows"), (own[:, :1], "topk = 2")):
            choices = wrong if rank == 0 else own
            with pytest.raises(ValueError, match=text if rank == 0 else "rank 0 refused"):
                op.gather_choices(choices, choices.float(), 24)
        kind = (torch.bfloat16, torch.float16)[rank]  # of one size
        with pytest.raises(ValueError, match="ranks disagree"):
            op.gather_choices(own, own.to(kind), 24)
        said = "expected a tensor, got list" if rank == 0 else "rank 0 refused"
        with pytest.raises((TypeError, ValueError), match=said):
            op.gather_choices(own.tolist() if rank == 0 else own, own.float())
        said = "experts must be integers" if rank == 0 else "rank 0 refused"
        for bad_kind in (torch.float32, torch.bool):
            with pytest.raises((TypeError, ValueError), match=said):
                op.gather_choices(own.to(bad_kind) if rank == 0 else own, own.float(), 24)
        good.check(op, rank)


def test_bad_input_is_refused_on_all_ranks_and_the_op_goes_on() -> None:
    run_ranks(2, _refusals)


def _select_no_float8(
    x: torch.Tensor, *rest: Any, select: Any = torch.index_select, **more: Any
) -> torch.Tensor:
    assert x.dtype != torch.float8_e4m3fn
    selected: torch.Tensor = select(x, *rest, **more)
    return selected


def _scales(rank: int, world: int) -> None:
    """Scales of float8 are checked on all ranks, and are part of graphs."""
    for op in ("gather", "scatter"):
        case = replace(SMALL, op=op, dtype=torch.float8_e4m3fn, scaling="row")
        inputs = MoeInputs(case, 24, world, "random", 1)
        x, weights, experts, options = inputs.arguments(rank)
        scale_x, scale_w = options["scale_x"], options["scale_weight"]
        with case.build(timeout_s=20) as built:
            for change, text in (
                ({"scale_x": None}, "takes scale_x and scale_weight, got 1"),
                ({"scale_x": scale_x[:-1]}, r"scale_x must be \["),
                ({"scale_x": scale_x.double()}, "scale_x must be torch.float32"),
                ({"scale_weight": scale_w[:, 0]}, r"scale_weight must be \[6, "),
                ({"scale_weight": scale_w.clone().requires_grad_()}, "no backward"),
            ):
                said = text if rank == 0 else "rank 0 refused"
                with pytest.raises((TypeError, ValueError), match=said):
                    built(x, weights, experts, **options | (change if rank == 0 else {}))
            # Not every torch selects rows of float8 on GPUs, where this path is the unfused one.
            with mock.patch.object(torch, "index_select", _select_no_float8):
                y = inputs.check(built, rank)
            graph = torch.compile(built, backend="aot_eager", fullgraph=True)
            assert same_bits(graph(x, weights, experts, **options), y)
    with SMALL.build() as built, pytest.raises(ValueError, match="takes no scales, got 1"):
        inputs = MoeInputs(SMALL, 24, world, "random", 1)
        x, weights, experts, options = inputs.arguments(rank)
        built(x, weights, experts, scale_x=torch.ones(1), **options)


def test_scales_of_float8() -> None:
    run_ranks(2, _scales)


def _refused_products(rank: int, world: int) -> None:
    """A first product that is refused on one rank is refused on the others, by the second."""
    m, k = 12, 10
    experts = torch.arange(m * 2).view(m, 2) % 6
    x, up, down = torch.randn(m, k), torch.randn(6, 16, k), torch.randn(6, k, 8)
    with GroupedGemmAR(max_m=m, n=k, k=8 * world, experts=6, topk=2, timeout_s=20) as op:

        def layer(x: torch.Tensor, up: torch.Tensor, most: Any = None) -> torch.Tensor:
            gate, rows = expand_tokens(op, x, up, experts, max_rows=most).chunk(2, dim=1)
            return op(gate * rows, down, experts)

        for bad, text in (
            ((x[:-1], up), r"x must be \[12, 10\]"),
            ((x, up[:, 1:]), "8 columns or a multiple"),
            ((x, up[1:]), "weight must be"),
            ((x.double(), up), "x must be torch.float32"),
            ((x, None), "weights must be a tensor"),
            ((x, up, 24.5), "Expected a value of type"),
        ):
            arguments, said = (bad, text) if rank == 0 else ((x, up), "rank 0 refused")
            with pytest.raises((TypeError, ValueError, RuntimeError), match=said):
                layer(*arguments)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"chose 24 rows .* max_rows = 23"):  # on all ranks
            expand_tokens(op, x, up, experts, max_rows=23)
        experts.copy_(experts.flip(0))
        with mock.patch.object(_C, "Routing", wraps=_C.Routing) as built:
            assert layer(x, up).shape == (m, k)
        assert built.call_count == 1  # of both products


def test_a_first_product_is_refused_on_all_ranks() -> None:
    run_ranks(2, _refused_products)


def _constructors(rank: int, world: int) -> None:
    for change, text in (
        ({"ep": 2}, "ep must divide the world of 3"),
        ({"topk": 7}, "at most experts = 6"),
        ({"experts": 0}, "experts must be a positive integer up to .*, got 0"),
        ({"experts": 1 << 31}, "experts must be a positive integer up to "),
        ({"op": "scatter", "activation": "silu"}, "activation and gated are for ops that gather"),
        ({"gated": True}, "needs an activation"),
        ({"dtype": torch.float8_e4m3fn}, "needs scaling = tensor or row"),
        ({"fast_accum": True}, "fast_accum is for float8_e4m3fn"),
    ):
        fields = {k: v for k, v in change.items() if k in ("op", "knobs")}
        options = {k: v for k, v in change.items() if k not in fields}
        with pytest.raises(ValueError, match=text):
            replace(SMALL, **fields).build(**options)
    with pytest.raises(ValueError, match=r"topk|experts"):
        SMALL.build(topk=1 + rank % 2)


def test_constructors_name_what_is_wrong() -> None:
    run_ranks(3, _constructors)


def _killed(rank: int, world: int, op: str) -> float:
    case = replace(SMALL, op=op, ep=3 if MOE_OPS[op].dispatches else 1)
    inputs = MoeInputs(case, 24, world, "random", 2)
    built = case.build(timeout_s=60)
    x, weights, experts, options = inputs.arguments(rank)
    total = built(x.requires_grad_(), weights, experts, **options).sum()
    total.backward(retain_graph=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        for _ in range(2):
            inputs.check(built, rank)
    said = rf"the backward of {type(built).__name__}: rank {rank}, .*rank 1"
    if op != "reduce":  # the gradient of x is local there
        with pytest.raises(PeerTimeoutError, match=said):
            total.backward()
    took = time.monotonic() - began
    assert took < BUSY
    return took


@pytest.mark.parametrize("op", OPS)
def test_survivors_of_a_killed_rank_raise(op: str) -> None:
    with fresh_ranks(3) as ranks:
        ranks.start(_killed, op)
        outcomes = ranks.collect(40)
    assert [o is not None and o.ok for o in outcomes] == [True, False, True], outcomes


def _compiled(rank: int, world: int) -> None:
    m, sizes = 18, {"max_m": 18, "experts": 6, "topk": 2, "timeout_s": 60.0}
    sizes["ep"] = world
    first, second = (
        DispatchGroupedGemm(n=12, k=10, **sizes),
        GroupedGemmCombine(n=10, k=12, **sizes),
    )
    a = MoeInputs(replace(SMALL, bias=False, ep=world), m, world, "random", 4)
    x, w1, experts, _ = a.arguments(rank)
    w2 = w1.transpose(1, 2).contiguous()
    probs = torch.rand(m, 2, generator=torch.Generator().manual_seed(1))

    def layer(*tensors: torch.Tensor, room: int | None = None) -> torch.Tensor:
        xs, one, two, choices, p = tensors
        hidden = torch.nn.functional.silu(first(xs, one, choices, max_rows=room))
        assert room is None or hidden.shape == (room, 12)  # in graphs, too
        return second(hidden, two, choices, p, max_rows=room)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    in_parts = torch.compile(layer, backend="aot_eager")  # a graph ends where sizes are data
    for run in (layer, in_parts, compiled, partial(compiled, room=2 * m)):
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        z = run(*leaves, experts, probs)
        z.square().sum().backward()
        results.append([z.detach(), *(leaf.grad for leaf in leaves)])
        torch.compiler.reset()
    for graphs in results[1:]:
        for eager, graph in zip(results[0], graphs, strict=True):
            torch.testing.assert_close(eager, graph)
    first.close()
    second.close()


def test_a_layer_compiles_into_one_graph_or_parts() -> None:
    run_ranks(2, _compiled)


def _slow_ranks(rank: int, world: int, op_name: str) -> None:
    """Pauses around every move and signal change no bit."""
    tiles = Knobs(tile=(7, 12), comm_tile_rows=5)
    case = replace(SMALL, op=op_name, max_m=60, ep=world, experts=9, knobs=tiles)
    inputs = MoeInputs(case, 60, world, "random", 8)
    with HOST.during("aab"[rank]), case.build() as op:
        wanted = inputs.check(op, rank)
        op._backend.engine.set_delay(2e-4, rank + 1)
        for _ in range(5):
            assert same_bits(inputs.check(op, rank), wanted)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_late_signals_change_nothing(op: str) -> None:
    run_ranks(3, _slow_ranks, op)
