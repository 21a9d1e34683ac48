"""GemmAllToAll, AllToAllGemm and their layer on CPU ranks, against float64."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from flux import Knobs, PeerTimeoutError, Topology
from flux.core.knobs import AllToAllOp
from flux.layers import UlyssesAttention
from flux.select.all_to_all import block_schedule
from flux.trace import Kind, record_op
from flux.ulysses import AllToAllGemm, GemmAllToAll
from harness import BUSY, STRESS, fresh_ranks, more, run_ranks
from op_cases import same_bits
from ulysses_cases import CALLS, UlyssesCase, UlyssesInputs, random_case, random_hosts

OPS = pytest.mark.parametrize("kind", CALLS)
SMALL = UlyssesCase((5, 0, 4), heads=(6, 3, 3), options=(("timeout_s", 60.0),))


def _random(rank: int, world: int, kind: Any, cases: int) -> None:
    shared = max(world // 2, 1)  # heads of keys, each of two ranks
    drawn = [
        random_case(random.Random(f"{kind.__name__} {world} {seed}"), world)
        for seed in range(cases)
    ]
    grouped = UlyssesCase((3,) * world, (2 * world, shared, shared))
    for seed, case in enumerate((grouped, *drawn)):
        with case.build(kind) as op:
            first, again = UlyssesInputs(case, seed), UlyssesInputs(case, seed + 1)
            outs = CALLS[kind](first, op, rank)
            CALLS[kind](again, op, rank)
            for one, other in zip(outs, CALLS[kind](first, op, rank), strict=True):
                assert same_bits(one, other)


@pytest.mark.parametrize("world", [1, 2, 3, 4, *more(8)])
@OPS
def test_random_cases(kind: Any, world: int) -> None:
    run_ranks(world, _random, kind, {4: 5, 8: 2}.get(world, 10) * STRESS)


def _schedules(rng: random.Random) -> None:
    world = rng.randint(1, 7)
    rows = [rng.choice((0, rng.randint(1, 40))) for _ in range(world)]
    rows[rng.randrange(world)] += 1
    topology = random_hosts(rng, world) or Topology.flat(world)
    op = rng.choice(tuple(AllToAllOp))
    knobs = Knobs(comm_tile_rows=rng.choice((None, rng.randint(1, 50))))
    first = block_schedule(op, rows, (6, 5), rng.choice((4, 1 << 17)), 0, topology, knobs)
    chunk, schedules = max(rows), [first.of_rank(rank) for rank in range(world)]
    for rank, mine in enumerate(schedules):
        kinds = [(v.owner == rank, v.waits != (0, 0)) for v in mine.visits]
        assert kinds == sorted(kinds, key=lambda kind: (kind[1], kind[0])), "sends, own, receives"
        sent: dict[int, list[tuple[int, ...]]] = {peer: [] for peer in range(world)}
        for visit in mine.visits:
            for t in mine.transfers[slice(*visit.completes)]:
                assert (t.row_begin, t.row_end) == (visit.row_begin, visit.row_end)
                sent[t.dst].append(
                    (t.row_begin - t.dst * chunk, t.row_end - t.dst * chunk, t.signal)
                )
        for peer, theirs in enumerate(schedules):
            size = rows[rank if op is AllToAllOp.gemm_all_to_all else peer]
            own = [
                v for v in theirs.visits if v.owner == rank and (peer == rank or v.waits != (0, 0))
            ]
            received = [
                (v.row_begin - rank * chunk, v.row_end - rank * chunk, v.waits[0]) for v in own
            ]
            covered = [row for begin, end, _ in received for row in range(begin, end)]
            assert covered == list(range(size)), "each row of a block once, in order"
            if peer != rank:
                assert received == sent[peer]
    for rank, mine in enumerate(schedules):  # no two blocks of a rank in one place
        homes = [theirs.homes[rank] for theirs in schedules if theirs is not mine]
        assert len(set(homes)) == world - 1 and all(home[0] == rank for home in homes)
        assert all(0 <= home[1] < world - 1 for home in homes)


def test_every_block_is_sent_and_received_once() -> None:
    for seed in range(1500):
        _schedules(random.Random(seed))


def _gradients(rank: int, world: int, heads: tuple[int, ...], even: bool) -> None:
    """A layer beside the same in float64 on one rank: eager, checkpointed and compiled."""
    lengths = (3,) * world if even else tuple(range(world, 0, -1))
    case = UlyssesCase(lengths, heads, 2, 5, dtype=torch.float64, transpose=not even)
    whole, own = UlyssesInputs(case, 3), case.own(rank)
    tensors = [whole.x, *whole.weights, *whole.biases]
    x, w1, w2, b1, b2 = (t.clone().requires_grad_() for t in tensors)
    full = replace(case, lengths=(sum(lengths),))
    q, k, v = full.heads_of(x @ w1.t() + b1, 0)
    mixed = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    wanted = mixed.transpose(1, 2).flatten(2) @ w2.t() + b2
    outside = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.manual_seed(1))
    (wanted * outside).sum().backward()

    project, output = case.build(GemmAllToAll), case.build(AllToAllGemm)

    def layer(*given: torch.Tensor) -> torch.Tensor:
        xs, one, two, first, second = given
        one, two = (one.t(), two.t()) if case.transpose else (one, two)
        heads = scaled_dot_product_attention(
            *project(xs, one, first, case.seq_lens), enable_gqa=True
        )
        result: torch.Tensor = output(heads, two, second, case.seq_lens)
        return result

    ways = {
        "eager": layer,
        "checkpointed": lambda *t: checkpoint(layer, *t, use_reentrant=False),
        "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
    }
    for run in ways.values():
        mine = [x.detach()[:, own].clone(), *(t.detach().clone() for t in (w1, w2, b1, b2))]
        leaves = [t.requires_grad_() for t in mine]
        z = run(*leaves)
        torch.testing.assert_close(z, wanted[:, own], rtol=1e-10, atol=1e-10)
        (z * outside[:, own]).sum().backward()
        torch.testing.assert_close(leaves[0].grad, x.grad[:, own], rtol=1e-9, atol=1e-9)
        for leaf, grad in zip(leaves[1:], (w1.grad, w2.grad, b1.grad, b2.grad), strict=True):
            dist.all_reduce(leaf.grad)
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-9, atol=1e-9)
    project.close()
    output.close()


@pytest.mark.parametrize(
    ("world", "heads", "even"), [(1, (2, 1, 1), True), (2, (4, 1, 1), False), (3, (6, 3, 3), True)]
)
def test_gradients_of_a_layer(world: int, heads: tuple[int, ...], even: bool) -> None:
    run_ranks(world, _gradients, heads, even)


def _some_gradients(rank: int, world: int) -> None:
    """Only what needs a gradient gets one, and autograd's numbers agree."""
    case = UlyssesCase((2,) * world, (2,), 2, 3, batch=1, dtype=torch.float64, bias=False)
    inputs = UlyssesInputs(case, 5)
    x, (w1, w2) = inputs.x[:, case.own(rank)].contiguous(), inputs.weights
    with case.build(GemmAllToAll) as project, case.build(AllToAllGemm) as output:
        for frozen in range(3):
            leaves = [x.clone(), w1.clone(), w2.clone()]
            for number, leaf in enumerate(leaves):
                leaf.requires_grad_(number != frozen)
            output(project(leaves[0], leaves[1]), leaves[2]).square().sum().backward()
            assert [leaf.grad is None for leaf in leaves] == [n == frozen for n in range(3)]
        # The sum of all ranks' results as a function of this rank's tokens.
        given = x.clone().requires_grad_()
        output(torch.tanh(project(given, w1)), w2).sum().backward()
        for at in ((0, 0, 0), (0, 1, 2)):
            sums = []
            for step in (1e-5, -1e-5):
                moved = x.clone()
                moved[at] += step if rank == 0 else 0
                total = output(torch.tanh(project(moved, w1)), w2).sum()
                dist.all_reduce(total)
                sums.append(total)
            numeric = (sums[0] - sums[1]) / 2e-5
            if rank == 0:
                torch.testing.assert_close(given.grad[at], numeric, rtol=1e-6, atol=1e-6)


def test_frozen_tensors_and_numeric_gradients() -> None:
    run_ranks(2, _some_gradients)


def _refusals(rank: int, world: int) -> None:
    inputs = UlyssesInputs(SMALL, 1)
    own, lens = SMALL.own(rank), list(SMALL.lengths)
    with SMALL.build(GemmAllToAll) as project, SMALL.build(AllToAllGemm) as output:
        x, weight, bias = inputs.x[:, own], inputs.weights[0], inputs.biases[0]
        heads = SMALL.heads_of(torch.zeros(2, 9, SMALL.packed), rank)[0]
        into = heads, inputs.weights[1], inputs.biases[1]
        bad = [
            (project, (x[0], weight, bias, lens), "x must be"),
            (project, (x.double(), weight, bias, lens), "x must be torch.float32"),
            (project, (x, weight[:-1], bias, lens), "weight must be"),
            (project, (x, weight, bias[:-1], lens), "bias must be"),
            (project, (x, weight, bias, lens[:-1]), "a length for each of 3 ranks"),
            (project, (x, weight, bias, [5, 0, -4]), "a length for each of 3 ranks"),
            (project, (x, weight, bias, (4, 0, 5)), "tokens of each"),
            (project, (x, weight, bias, [99, 0, 4]), "must have 1 to ceil"),
            (project, (x, weight, bias, 9), "must be a list of lengths"),
            (project, (x, weight, bias, [5.0, 0, 4]), "must be a list of lengths"),
            (output, (heads[0], *into[1:], lens), "x must be"),
            (output, (heads[:, :1], *into[1:], lens), r"x must be \[batch, 2, sequence, 4\]"),
            (output, (*into, [5, 0, 5]), "add up to 10"),
        ]
        for op, arguments, text in bad:
            good = (x, weight, bias, lens) if op is project else (*into, lens)
            said = text if rank == 0 else "rank 0 refused"
            with pytest.raises((ValueError, TypeError), match=said):
                op(*(arguments if rank == 0 else good))
        other = [4, 0, 5] if rank else lens
        with pytest.raises(ValueError, match="different batches or lengths"):
            project(inputs.x[:, : other[rank]], weight, bias, other)
        with pytest.raises(ValueError, match=r"no multiple of the world"):
            output(into[0][:, :, :7], *into[1:])
        inputs.project(project, rank)
        inputs.output(output, rank)


def test_bad_input_is_refused_on_all_ranks_and_the_op_goes_on() -> None:
    run_ranks(3, _refusals)


def _constructors(rank: int, world: int) -> None:
    for heads, more_options, text in (
        ((4,), {}, "a multiple of the world of 3, got 4"),
        ((6, 2, 2), {}, "a multiple of the world of 3, or divide it, got 2"),
        ((1, 1, 1), {}, "a multiple of the world of 3, got 1"),
        ((6,), {"head_dim": 0}, "must be a positive integer|must be positive integers"),
        ((6,), {"n": 5}, "n must be heads"),
        ((6,), {"dtype": torch.float8_e4m3fn}, "float8"),
        ((6,), {"tuning": Knobs(order="ring1d")}, "order = direct, got ring1d"),
        ((6,), {"tuning": Knobs(path="one_shot")}, "path = fused or unfused"),
        ((6 + 3 * (rank % 2),), {}, "heads"),
    ):
        with pytest.raises(ValueError, match=text):
            SMALL.build(GemmAllToAll, heads, **more_options)


def test_constructors_name_what_is_wrong() -> None:
    run_ranks(3, _constructors)


def _killed(rank: int, world: int, kind: Any) -> float:
    inputs = UlyssesInputs(SMALL, 2)
    op = SMALL.build(kind)
    CALLS[kind](inputs, op, rank)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        for _ in range(2):
            CALLS[kind](inputs, op, rank)
    took = time.monotonic() - began
    assert took < BUSY
    return took


@OPS
def test_survivors_of_a_killed_rank_raise(kind: Any) -> None:
    with fresh_ranks(3) as ranks:
        ranks.start(_killed, kind)
        outcomes = ranks.collect(40)
    assert [o is not None and o.ok for o in outcomes] == [True, False, True], outcomes


def _slow_ranks(rank: int, world: int) -> None:
    """Pauses around every signal change no bit; a rank that never comes is named."""
    case = replace(SMALL, options=(("topology", Topology(3)), ("tuning", Knobs(comm_tile_rows=2))))
    inputs = UlyssesInputs(case, 8)
    for kind, call in CALLS.items():
        with case.build(kind) as op:
            wanted = call(inputs, op, rank)
            op._backend.engine.set_delay(2e-4, rank + 1)
            for number in range(6):  # blocks of the call before are other ones
                call(UlyssesInputs(case, number), op, rank)
                outs = call(inputs, op, rank)
                assert all(map(same_bits, outs, wanted))
        late = case.build(kind, timeout_s=0.3)
        if rank != 2:
            with pytest.raises(PeerTimeoutError, match="rank"):
                call(inputs, late, rank)
        dist.barrier()
        late.close()


def test_late_signals_change_nothing() -> None:
    run_ranks(3, _slow_ranks)


def _traced(rank: int, world: int) -> None:
    """Every raised signal is awaited under its name; copies and GEMMs are told apart."""
    case = replace(SMALL, options=(("topology", Topology(3)), ("tuning", Knobs(comm_tile_rows=4))))
    inputs = UlyssesInputs(case, 4)
    for kind, call in CALLS.items():
        with case.build(kind) as op:
            trace = record_op(op, lambda op=op, call=call: call(inputs, op, rank), calls=2)
        if rank > 0:
            continue
        copies = {event.name for event in trace.events if event.kind is Kind.copy}
        gemms = {event.name for event in trace.events if event.kind is Kind.gemm}
        assert gemms and copies and all(name.startswith("copies tile") for name in copies)
        raised = [name for e in trace.events for name in str(e.details.get("raises", "")).split()]
        assert len(raised) == 2 * 10 and len(set(raised)) == 10, "each tile of each call"


def test_a_trace_names_what_is_copied_and_multiplied() -> None:
    run_ranks(3, _traced)


def _autocast(rank: int, world: int) -> None:
    """Under autocast to an op's dtype float32 operands are those of casts by hand."""
    length, hidden, dtype = 3, 10, torch.bfloat16
    sizes: dict[str, Any] = {"max_m": 2 * length * world, "heads": 4, "head_dim": 4}
    first = GemmAllToAll(k=hidden, dtype=dtype, **sizes)
    second = AllToAllGemm(n=hidden, dtype=dtype, **sizes)
    torch.manual_seed(rank)
    shapes = ((2, length, hidden), (16, hidden), (16,), (hidden, 16), (hidden,))
    drawn = [torch.randn(shape) for shape in shapes]
    results = []
    for casts in (False, True):
        leaves = [t.clone().requires_grad_() for t in drawn]
        x, w1, b1, w2, b2 = [leaf.to(dtype) for leaf in leaves] if casts else leaves
        with torch.autocast("cpu", dtype, enabled=not casts):
            mixed = first(x, w1, b1)
            z = second(mixed if casts else mixed.float(), w2, b2)
            z.square().sum().backward()
        results.append([z.detach(), *(leaf.grad for leaf in leaves)])
        assert z.dtype == dtype and all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))
    first.close()
    second.close()


def test_autocast_casts_as_linear_does() -> None:
    run_ranks(2, _autocast)


def _attention(rank: int, world: int) -> None:
    torch.manual_seed(0)
    batch, length, hidden, heads = 2, 4, 16, 4
    sizes: dict[str, Any] = {"max_tokens": batch * length * world, "bias": True}
    layer = UlyssesAttention(hidden, heads, 1, **sizes)
    twin = UlyssesAttention(hidden, heads, 1, ops=layer.ops, **sizes)
    twin.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(twin)  # as averages of a model's weights are made
    assert twin.ops == layer.ops
    x = torch.randn(batch, length * world, hidden, requires_grad=True)
    q, k, v = (
        part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in layer.qkv(x).split((16, 4, 4), -1)
    )
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = layer.out(mixed.transpose(1, 2).flatten(2))
    (grad,) = torch.autograd.grad(wanted.square().sum(), x)
    own = slice(rank * length, (rank + 1) * length)
    mine = x.detach()[:, own].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # in which attention is bfloat16
        y = twin(mine)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, wanted[:, own], rtol=3e-2, atol=1e-2)
    y = twin(mine)
    torch.testing.assert_close(y, wanted[:, own], rtol=1e-4, atol=1e-4)
    y.square().sum().backward()
    torch.testing.assert_close(mine.grad, grad[:, own], rtol=1e-3, atol=1e-4)
    layer.close()


def test_an_attention_layer() -> None:
    run_ranks(2, _attention)
