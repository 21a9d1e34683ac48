"""torch.ops.flux: opcheck, torch.compile and autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import flux
from compile_cases import quick_inductor
from flux._C import core
from harness import more, run_ranks


def _opcheck_scaled(world: int) -> None:
    """float8 in, bfloat16 out: fake kernels must know. Other checks cannot compare float8."""

    def check(op: object, args: object) -> None:
        torch.library.opcheck(op, args, test_utils="test_faketensor")

    fp8, m, k = torch.float8_e4m3fn, 2 * world, 8
    options = {"max_m": 16, "n": 8 * world, "k": k * world, "dtype": fp8, "scaling": "row"}
    x, scale = torch.randn(m, k * world).to(fp8), torch.rand(m)
    with flux.AGGemm(**options, activation="gelu") as ag, flux.GemmRS(**options) as rs:
        shard = ag.own_rows(m)
        weight = torch.randn(8, k * world).to(fp8)
        scales = [scale[:shard], torch.rand(8)]
        args = (x[:shard], [weight], [], [False], m, True, ag.handle, scales)
        check(torch.ops.flux.ag_gemm.default, args)
        weight = torch.randn(8 * world, k).to(fp8)
        bias = torch.randn(8 * world, dtype=torch.bfloat16)
        args = (x[:, :k], weight, [bias], rs.handle, [scale, torch.rand(8 * world)])
        check(torch.ops.flux.gemm_rs.default, args)


def _opcheck(rank: int, world: int) -> None:
    check = torch.library.opcheck
    m, n, k = 5, 7, 6
    kw = {"dtype": torch.float64}
    with (
        flux.AGGemm(max_m=16, n=4 * world, k=k, **kw) as ag,
        flux.GemmRS(max_m=16, n=n, k=2 * world, **kw) as rs,
        flux.GemmAR(max_m=16, n=n, k=2 * world, transpose_weight=True, **kw) as ar,
    ):
        x = torch.randn(rs.own_rows(m), k, requires_grad=True, **kw)
        w = torch.randn(4, k, requires_grad=True, **kw)
        b = torch.randn(4, requires_grad=True, **kw)
        for biases, gather in (([b], True), ([], False)):
            check(
                torch.ops.flux.ag_gemm.default,
                (x, [w], biases, [bool(biases)], m, gather, ag.handle, []),
            )
        x = torch.randn(m, 2, requires_grad=True, **kw)
        w = torch.randn(n, 2, requires_grad=True, **kw)
        bias = torch.randn(n, requires_grad=True, **kw)
        check(torch.ops.flux.gemm_rs.default, (x, w, [bias], rs.handle, []))
        check(torch.ops.flux.gemm_ar.default, (x, w.t().contiguous(), [], ar.handle, []))
    _opcheck_scaled(world)
    name = dist.group.WORLD.group_name
    for dim in range(3):
        last = dim == 2
        b_matrix = torch.randn(6 * world if last else 6, 3)
        args = (torch.randn(4, 5, 6), [b_matrix], dim, name)
        check(torch.ops.flux.fused_all_gather_matmul.default, args)
        a = torch.randn(world, 2 * world, 6)
        args = (a, torch.randn(6, world), "sum", dim, name)
        check(torch.ops.flux.fused_matmul_reduce_scatter.default, args)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, *more(1)])
def test_ops_pass_opcheck(world: int) -> None:
    run_ranks(world, _opcheck, timeout=200.0)


def _compiled(rank: int, world: int) -> None:
    torch.manual_seed(0)
    k, h = 8, 4 * world
    kw = {"dtype": torch.float64}
    with (
        flux.AGGemm(max_m=64, n=(h, h), k=k, **kw) as up,
        flux.GemmRS(max_m=64, n=k, k=h, **kw) as down,
        flux.GemmAR(max_m=64, n=k, k=h, **kw) as reduced,
    ):
        gate, value = torch.randn(4, k, **kw), torch.randn(4, k, **kw)
        back = torch.randn(k, 4, **kw)

        def block(x: torch.Tensor, m: int) -> tuple[torch.Tensor, ...]:
            (g, v), full = up(x, [gate, value], m=m, return_gathered=True)
            hidden = torch.nn.functional.silu(g) * v
            return down(hidden, back) + 1, reduced(hidden, back), full * 2

        compiled = torch.compile(block, fullgraph=True, dynamic=True)
        # M = 1 leaves rank 1 without rows: whatever its compiler would make of empty results, the
        # ranks must meet in the same calls (ordered ops).
        with quick_inductor():
            for m in (8, 13, 1):
                x = torch.randn(up.own_rows(m), k, **kw)
                for got, want in zip(compiled(x, m), block(x, m), strict=True):
                    torch.testing.assert_close(got, want)
        name = dist.group.WORLD.group_name

        def functional(x: torch.Tensor) -> torch.Tensor:
            _, [y] = flux.ops.fused_all_gather_matmul(x, [gate.t()], 0, name, return_A=False)
            return flux.ops.fused_matmul_reduce_scatter(y, back.t(), "sum", 0, name)

        x = torch.randn(3, k, **kw)
        traced = torch.compile(functional, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(traced(x), functional(x))

        x = torch.randn(up.own_rows(12), k, requires_grad=True, **kw)
        grads = []
        for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            x.grad = None
            sum(t.square().sum() for t in fn(x, 12)).backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.timeout(300)
def test_compile_fullgraph() -> None:
    run_ranks(2, _compiled, timeout=280.0)


def _owned(tensor: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    total = tensor.shape[0]
    return tensor[core.row_begin(total, world, rank) : core.row_end(total, world, rank)]


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def _gradients(rank: int, world: int, m: int, n: int, k: int, transposed: bool) -> None:
    """Every rank's gradients together against one process that holds everything."""
    torch.manual_seed(0)
    kw = {"dtype": torch.float64}
    x_all, w_all, b_all = torch.randn(m, k, **kw), torch.randn(n, k, **kw), torch.randn(n, **kw)
    weigh = torch.randn(m, n, **kw)

    def turn(w: torch.Tensor) -> torch.Tensor:
        return w.t().contiguous() if transposed else w

    x, w, b = _leaf(x_all), _leaf(w_all), _leaf(b_all)
    ((x @ w.t() + b) * weigh).sum().backward()

    def mine(t: torch.Tensor) -> torch.Tensor:
        return _owned(t, world, rank)

    def check(got: torch.Tensor | None, want: torch.Tensor) -> None:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    with flux.AGGemm(max_m=m, n=n, k=k, transpose_weight=transposed, **kw) as op:
        xs, ws, bs = _leaf(mine(x_all)), _leaf(turn(mine(w_all))), _leaf(mine(b_all))
        (op(xs, ws, bs, m=m) * mine(weigh.t()).t()).sum().backward()
        check(xs.grad, mine(x.grad))
        check(turn(ws.grad) if transposed else ws.grad, mine(w.grad))
        check(bs.grad, mine(b.grad))
        # The gathered x as an output with a gradient of its own: each rank adds one share.
        xs = _leaf(mine(x_all))
        y, full = op(xs, ws, m=m, return_gathered=True)
        ((y * mine(weigh.t()).t()).sum() + full.sum()).backward()
        check(xs.grad, mine(x.grad) + world)
    for reduce, scale in (("sum", 1.0), ("avg", 1.0 / world)):
        options = {"reduce": reduce, "transpose_weight": transposed, **kw}
        xs_all, ws_all = mine(x_all.t()).t(), mine(w_all.t()).t()
        with flux.GemmRS(max_m=m, n=n, k=k, **options) as op:
            xs, ws, bs = _leaf(xs_all), _leaf(turn(ws_all)), _leaf(b_all)
            (op(xs, ws, bs) * mine(weigh)).sum().backward()
            check(xs.grad, scale * mine(x.grad.t()).t())
            check(turn(ws.grad) if transposed else ws.grad, scale * mine(w.grad.t()).t())
            check(_summed(bs.grad), b.grad)
        with flux.GemmAR(max_m=m, n=n, k=k, **options) as op:
            xs, ws, bs = _leaf(xs_all), _leaf(turn(ws_all)), _leaf(b_all)
            (op(xs, ws, bs) * weigh).sum().backward()
            check(xs.grad, scale * mine(x.grad.t()).t())
            check(turn(ws.grad) if transposed else ws.grad, scale * mine(w.grad.t()).t())
            check(bs.grad, b.grad)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("world", "m", "n", "k"),
    [
        (3, 2, 7, 5),  # a rank without rows
        (1, 6, 8, 12),
        *more(*((world, *sizes) for world in (2, 3) for sizes in ((6, 8, 12), (7, 5, 9)))),
    ],
)
def test_gradients(world: int, m: int, n: int, k: int, transposed: bool) -> None:
    run_ranks(world, _gradients, m, n, k, transposed)


def _partial_gradients(rank: int, world: int) -> None:
    """Only inputs that require a gradient get one; several weights share one gathered input."""
    kw = {"dtype": torch.float64}
    with flux.AGGemm(max_m=8, n=(world, 2 * world), k=3, **kw) as op:
        x, w1, w2 = torch.ones(4, 3, **kw), torch.ones(1, 3, **kw), torch.ones(2, 3, **kw)
        every = ((True, False, False), (False, True, False), (False, False, True), (True,) * 3)
        for needs in every:
            leaves = [
                _leaf(t).requires_grad_(need) for t, need in zip((x, w1, w2), needs, strict=True)
            ]
            y1, y2 = op(leaves[0], leaves[1:])
            (y1.sum() + 2 * y2.sum()).backward()
            assert [leaf.grad is not None for leaf in leaves] == list(needs)
            if needs[0]:
                assert torch.equal(leaves[0].grad, torch.full((4, 3), 5.0 * world, **kw))
            if needs[1]:
                assert torch.equal(leaves[1].grad, torch.full((1, 3), 4.0 * world, **kw))
            if needs[2]:
                assert torch.equal(leaves[2].grad, torch.full((2, 3), 8.0 * world, **kw))
        y1, _ = op(_leaf(x), [w1, w2])  # one output unused
        y1.sum().backward()


def test_only_inputs_that_require_a_gradient_get_one() -> None:
    run_ranks(2, _partial_gradients)


def _padded(rank: int, world: int) -> None:
    with flux.AGGemm(max_m=8, n=world, k=2, dtype=torch.float64) as op:
        x = torch.ones(
            3, 2, dtype=torch.float64, requires_grad=True
        )  # ceil(5 / 2), last row unused
        op(x, torch.ones(1, 2, dtype=torch.float64), m=5).sum().backward()
        own = op.own_rows(5)
        assert torch.equal(x.grad[:own], torch.full((own, 2), float(world), dtype=torch.float64))
        assert not x.grad[own:].any()


def test_padding_gets_a_zero_gradient() -> None:
    run_ranks(2, _padded)


def _use_after(make: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        make()
    return str(caught.value)


def _closed(rank: int, world: int) -> None:
    ops = [flux.GemmRS(max_m=4, n=2, k=world)]
    handle = ops[0].handle
    ops[0].close()
    args = (torch.ones(2, 1), torch.ones(2, 1))
    assert "closed" in _use_after(lambda: ops[0](*args))
    assert "closed" in _use_after(lambda: torch.ops.flux.gemm_rs(*args, [], handle, []))
    ops.clear()
    gc.collect()  # the exceptions above hold it
    assert str(handle) in _use_after(lambda: torch.ops.flux.gemm_rs(*args, [], handle, []))


def test_closed_op_raises() -> None:
    run_ranks(2, _closed)


def _outlived(rank: int, world: int) -> None:
    for kind, n in ((flux.AGGemm, 48), (flux.GemmRS, 24), (flux.GemmAR, 24)):
        grads = []
        for gone in (False, True):
            generator = torch.Generator().manual_seed(rank)
            x, w = (_leaf(torch.randn(rows, 48, generator=generator)) for rows in (32, 24))
            op = kind(max_m=64, n=n, k=48 if kind is flux.AGGemm else 96)
            out = op(x, w)
            if gone:
                op.close()
                del op
                gc.collect()
            out.square().sum().backward()
            assert x.grad is not None and w.grad is not None
            grads.append((x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_backward_outlives_its_op() -> None:
    """A caller that makes an op for each call may drop it, or close it, before the backward."""
    run_ranks(2, _outlived)
