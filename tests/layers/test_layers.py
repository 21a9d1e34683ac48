"""The layers for plain PyTorch, and the pool of ops behind all layers."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flux import GemmAR, GemmRS, Knobs, PeerTimeoutError
from flux.backends.unfused import UnfusedBackend
from flux.layers import ColumnParallelLinear, RowParallelLinear, close_pools, replace_linears
from flux.ops.pool import pool_of
from harness import held, more, nothing_left_in_shared_memory, run_ranks
from op_cases import failing_work

S, B, D, F = 24, 2, 16, 48  # divisible by 2, 3 and 4 ranks


def _bound(got: torch.Tensor | None, want: torch.Tensor | None, name: str) -> None:
    """Bound of the error in float64: only the order of at most S * B + F sums differs."""
    assert got is not None and want is not None and got.shape == want.shape, name
    error = (got - want).abs().max()
    assert error <= (S * B + F) * 2.3e-16 * max(1.0, float(want.abs().max()) * 50), (name, error)


def _mlp(rank: int, world: int, sp: bool, fused: bool, recompute: bool) -> None:
    torch.manual_seed(3)
    up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()
    x, dz = torch.randn(S, B, D).double(), torch.randn(S, B, D).double()
    whole = x.clone().requires_grad_()
    expected = down(torch.tanh(up(whole)))
    expected.backward(dz)

    options: dict[str, Any] = {"sequence_parallel": sp, "fused": fused}
    mine = [ColumnParallelLinear.from_linear(up, **options)]
    mine.append(RowParallelLinear.from_linear(down, **options))  # type: ignore[arg-type]
    rows = slice(rank * S // world, (rank + 1) * S // world) if sp else slice(None)
    own = x[rows].clone().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return mine[1](torch.tanh(mine[0](x)))

    z = checkpoint(run, own, use_reentrant=False) if recompute else run(own)
    z.backward(dz[rows])
    features = slice(rank * F // world, (rank + 1) * F // world)
    _bound(z, expected[rows], "z")
    _bound(own.grad, whole.grad[rows], "dx")
    _bound(mine[0].weight.grad, up.weight.grad[features], "dw1")
    _bound(mine[0].bias.grad, up.bias.grad[features], "db1")
    _bound(mine[1].weight.grad, down.weight.grad[:, features], "dw2")
    _bound(mine[1].bias.grad, down.bias.grad, "db2")
    for layer in mine:
        layer.close()
    assert pool_of(None).workspace_bytes == 0 and not pool_of(None).ops


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("sp", [True, False], ids=["sequence_parallel", "replicated"])
@pytest.mark.parametrize("world", [1, 3, *more(2, 4)])
def test_mlp_equals_one_process(world: int, sp: bool, fused: bool) -> None:
    run_ranks(world, _mlp, sp, fused, False)


def _mlp_on_hosts(rank: int, world: int, hosts: int) -> None:
    """Run the MLP on ranks with different host names, which communicate over the network."""
    with mock.patch.dict("os.environ", FLUX_HOST=f"host{rank * hosts // world}"):
        for sp in (True, False):
            _mlp(rank, world, sp, True, False)
        close_pools()  # a pool knows its hosts


@pytest.mark.parametrize(("world", "hosts"), [(2, 2), *more((4, 2))])
def test_mlp_between_hosts_equals_one_process(world: int, hosts: int) -> None:
    run_ranks(world, _mlp_on_hosts, hosts)


def test_recomputed_mlp_equals_one_process() -> None:
    run_ranks(2, _mlp, True, True, True)


def _whole_features(rank: int, world: int) -> None:
    torch.manual_seed(4)
    up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()
    x = torch.randn(S, D).double().requires_grad_()
    expected = down(up(x))
    expected.square().sum().backward()
    own = x.detach().clone().requires_grad_()
    first = ColumnParallelLinear.from_linear(up, gather_output=True)
    second = RowParallelLinear.from_linear(down, input_is_parallel=False)
    y = first(own)
    assert y.shape == (S, F)
    z = second(y)
    z.square().sum().backward()
    _bound(z, expected, "z")
    _bound(own.grad, x.grad, "dx")
    features = slice(rank * F // world, (rank + 1) * F // world)
    _bound(second.weight.grad, down.weight.grad[:, features], "dw2")
    first.close()
    second.close()


def test_gathered_output_and_whole_input() -> None:
    run_ranks(3, _whole_features)


SHAPES = ((), (0,), (4,), (4, 0), (0, 3), (4, 3), (4, 2, 3))
"""Of an input, without its features: also one of one dimension, and some without rows."""


def _shapes(rank: int, world: int) -> None:
    torch.manual_seed(5)
    up, down = nn.Linear(D, F).double(), nn.Linear(F, D).double()
    for sp in (False, True):
        layers = nn.Sequential(
            ColumnParallelLinear.from_linear(up, sequence_parallel=sp),
            RowParallelLinear.from_linear(down, sequence_parallel=sp),
        )
        if sp:
            for layer, features in zip(layers, (D, F // world), strict=True):
                with pytest.raises(ValueError, match=rf"x must have another .* got \[{features}\]"):
                    layer(torch.zeros(features).double())
        for shape in SHAPES[1:] if sp else SHAPES:
            x = torch.randn(*shape, D).double()
            whole = x.clone().requires_grad_()
            expected = down(up(whole))
            expected.square().sum().backward()
            cut = slice(rank * 4 // world, (rank + 1) * 4 // world) if sp and shape[0] else ...
            layers.zero_grad()
            own = x[cut].clone().requires_grad_()
            z = layers(own)
            z.square().sum().backward()
            features = slice(rank * F // world, (rank + 1) * F // world)
            for name, got, want in (
                ("z", z, expected[cut]),
                ("dx", own.grad, whole.grad[cut]),
                ("dw", layers[0].weight.grad, up.weight.grad[features]),
                ("db", layers[0].bias.grad, up.bias.grad[features]),
                ("dw2", layers[1].weight.grad, down.weight.grad[:, features]),
                ("db2", layers[1].bias.grad, down.bias.grad),
            ):
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, msg=f"{name} {shape}")
            _fake_shapes(layers, own, z.shape)
            up.zero_grad()
            down.zero_grad()
        # Ranks that do not agree on having rows all hear of it.
        with pytest.raises(ValueError, match=r"disagree|different calls"):
            layers[1](torch.zeros(4 * rank, F // world).double())
        assert layers[1](torch.zeros(4, F // world).double()).shape[1] == D
    close_pools()


def _fake_shapes(layers: nn.Sequential, x: torch.Tensor, shape: torch.Size) -> None:
    """Check the shape that torch.compile expects of the layers' ops."""
    with FakeTensorMode() as fakes:
        for layer in layers:
            weight, settings = fakes.from_tensor(layer.weight), layer._config().in_graph()
            if isinstance(layer, ColumnParallelLinear):
                x = torch.ops.flux.column_linear(fakes.from_tensor(x), weight, None, *settings)
            else:
                x = torch.ops.flux.row_linear(x, weight, *settings)
    assert x.shape == shape


def test_inputs_of_every_shape_match_linear() -> None:
    run_ranks(2, _shapes)


def _autocast(rank: int, world: int) -> None:
    """In a region of autocast a weight has one cast: torch's own, which backward uses, too."""
    torch.manual_seed(6)
    styles = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}
    for style, planned in itertools.product(styles, (False, True)):
        layer: Any = nn.Linear(D, D) if planned else styles[style](D, D)
        if planned:
            replace_linears(layer, {"": style}, mesh=dist.group.WORLD)
        weight = layer.weight.to_local() if planned else layer.weight
        x = torch.randn(6, weight.shape[1], requires_grad=True)
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        for _ in range(2):  # regions: a step in between is seen by the second
            saved.clear()
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with torch.autocast("cpu", torch.bfloat16), hooks:
                expected = weight.detach().to(torch.bfloat16)
                for _ in range(2):  # inside of a region torch's casts stay as they are, and ours
                    layer.zero_grad()
                    y = layer(x)
                    assert y.dtype == torch.bfloat16
                    (dw,) = torch.autograd.grad(y.float().sum(), layer.weight)
                    assert dw.dtype == torch.float32
                    with torch.no_grad():
                        layer.weight.add_(1)
                if not planned:
                    nn.functional.linear(x, weight)
            casts = [t for t in saved if t.shape in (expected.shape, expected.t().shape)]
            assert len(casts) == 2 + (not planned) and all(t.dtype == y.dtype for t in casts)
            assert len({t.data_ptr() for t in casts}) == 1 and torch.equal(casts[0], expected)
    close_pools()


def test_autocast_casts_a_weight_once_in_a_region() -> None:
    run_ranks(2, _autocast)


def _refusals(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="49 features cannot be split evenly over the 2 ranks"):
        ColumnParallelLinear(D, 49)
    row = RowParallelLinear(F, D, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"divisible by the 2 ranks.*\[3, 4, 24\]"):
        row(torch.zeros(3, 4, F // world))
    column = ColumnParallelLinear(D, F, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"x must be \[rows, 16\], got \[4, 17\]"):
        column(torch.zeros(4, D + 1))
    y = column(torch.zeros(4, D))  # the op has stayed usable
    with pytest.raises(RuntimeError, match=r"flux\.layers cannot be differentiated twice"):
        torch.autograd.grad(y.sum(), column.weight, create_graph=True)[0].sum().backward()
    row.close()
    column.close()


def test_invalid_layer_arguments_raise() -> None:
    run_ranks(2, _refusals)


# -- the pool --------------------------------------------------------------------------------------


def _growth(rank: int, world: int) -> None:
    layer = ColumnParallelLinear(D, F, sequence_parallel=True)
    pool = pool_of(None)
    sizes = []
    for rows in (4, 2, 5, 7, 30, 8):
        x = torch.randn(rows, D, requires_grad=True)
        layer(x).sum().backward()
        assert len(pool.ops) == 2
        sizes.append(pool.ops[0].spec.max_m)
    assert sizes == [8, 8, 16, 16, 60, 60]
    # A graph that was made before its ops grew.
    y = layer(torch.randn(2, D, requires_grad=True))
    layer(torch.randn(50, D))
    y.sum().backward()
    layer.close()
    assert pool.ops == []


def test_ops_grow_with_m() -> None:
    run_ranks(2, _growth)


def _disagreement(rank: int, world: int) -> None:
    for kind in (ColumnParallelLinear, RowParallelLinear):
        column = kind is ColumnParallelLinear
        layer = kind(D, F, sequence_parallel=True)
        features = D if column else D // world
        layer(torch.zeros(4, features))
        for mine in (4, 40):  # rank 0 could make do, rank 1 has to build; both have to build
            rows = mine if rank == 0 else 60
            with pytest.raises(ValueError, match=r"disagree|different calls"):
                layer(torch.zeros(rows, features))
        assert layer(torch.zeros(4, features)).shape[1] == (F // world if column else F)
        layer.close()


def _disagreement_compared(rank: int, world: int) -> None:
    with mock.patch.dict("os.environ", FLUX_CHECK="1"):
        _disagreement(rank, world)


def test_different_m_raises_on_all_ranks() -> None:
    run_ranks(2, _disagreement)
    run_ranks(2, _disagreement_compared)


# -- the end of a GemmRS, hidden behind other work -------------------------------------------------


def _overlapped(rank: int, world: int) -> None:
    for kind in (GemmRS, GemmAR):
        for knobs in (Knobs(), Knobs(copy_streams=1, tile=(4, 8)), Knobs(path="unfused")):
            op = kind(max_m=24, n=16, k=8, tuning=knobs, timeout_s=20)
            x, weight = torch.randn(24, 8 // world), torch.randn(16, 8 // world)
            calls: list[int] = []
            out = op.overlapped(x, weight, lambda calls=calls: calls.append(1))
            assert calls == [1] and torch.equal(out, op(x, weight))
            with pytest.raises(ValueError, match="x must be"):
                op.overlapped(x[:, :1], weight, lambda calls=calls: calls.append(2))
            assert calls == [1] and not op.closed
            failing_work(op, x, weight, rank)


def _not_waited_for(rank: int, world: int) -> None:
    """The work is done while rows are under way: here a peer has not even come."""
    for kind in (GemmRS, GemmAR):
        with kind(max_m=8, n=16, k=8, tuning=Knobs(store="staged"), timeout_s=20) as op:
            x, weight = torch.randn(8, 8 // world), torch.randn(16, 8 // world)
            sign = torch.zeros(1)
            if rank == 1:
                dist.recv(sign, 0)
                op(x, weight)
            else:
                op.overlapped(x, weight, lambda sign=sign: dist.send(sign, 1))


def test_work_is_done_before_peers_are_waited_for() -> None:
    run_ranks(2, _not_waited_for, timeout=60, fresh=True)


def _order_of_backward(rank: int, world: int) -> None:
    events: list[str] = []

    def noting(cls: type, name: str, begin: str, end: str) -> Any:
        original = getattr(cls, name)

        def run(*args: Any, **options: Any) -> Any:
            events.append(begin)
            result = original(*args, **options)
            if not callable(result):
                events.append(end)
                return result
            return lambda: (result(), events.append(end))[0]

        return mock.patch.object(cls, name, run)

    layer = ColumnParallelLinear(D, F, bias=False, sequence_parallel=True)
    x = torch.randn(4, D, requires_grad=True)
    y = layer(x)
    with (
        noting(UnfusedBackend, "start_gather", "x begins to travel", "x is there"),
        noting(GemmRS, "overlapped", "dx begins", "dx is there"),
    ):
        y.sum().backward()
    assert events == ["x begins to travel", "dx begins", "x is there", "dx is there"]
    y = layer(torch.randn(4, D))  # no gradient of the input: nothing but the gather
    y.sum().backward()
    layer.close()


def test_backward_gathers_during_its_gemm() -> None:
    run_ranks(2, _order_of_backward)


def _copied(rank: int, world: int) -> None:
    layer = ColumnParallelLinear(D, F, sequence_parallel=True)
    x = torch.randn(4, D)
    y = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), y)
        twin.close()
    assert torch.equal(layer(x), y)
    layer.close()


def test_layers_can_be_copied() -> None:
    run_ranks(2, _copied)


def test_work_runs_during_a_gemm_rs() -> None:
    run_ranks(2, _overlapped, timeout=60, fresh=True)


def _sharing(rank: int, world: int) -> None:
    layers = [ColumnParallelLinear(D, F, sequence_parallel=True) for _ in range(3)]
    x = torch.zeros(4, D)
    for layer in layers:
        layer(x)
    pool = pool_of(None)
    (op,) = pool.ops
    layers[0].close()
    layers[1].close()
    assert not op.closed
    layers[1](x)  # usable all the same
    layers[2].close()
    assert not op.closed
    layers[1].close()
    assert op.closed and pool.ops == []


def test_layers_of_one_shape_share_an_op() -> None:
    run_ranks(2, _sharing)


def _collected(rank: int, world: int) -> None:
    """Ranks that collect a layer at different times still build and call the same ops."""
    pool = pool_of(None)
    x = torch.zeros(4, D)
    first = ColumnParallelLinear(D, F, sequence_parallel=True)
    first(x)
    (op,) = pool.ops
    kept = first if rank == 0 else None  # rank 1 has no reference any more, rank 0 has
    del first
    gc.collect()
    other = ColumnParallelLinear(D, 2 * F, sequence_parallel=True)
    other(x)  # the ranks meet, and find that the layer lives on rank 0
    same = ColumnParallelLinear(D, F, sequence_parallel=True)
    same(x)
    assert not op.closed and len(pool.ops) == 2
    same.close()
    assert not op.closed
    del kept
    gc.collect()
    third = ColumnParallelLinear(D, 3 * F, sequence_parallel=True)
    third(x)
    assert op.closed and len(pool.ops) == 2
    close_pools()
    assert other(x).shape[1] == 2 * F // world
    close_pools()


def test_collected_layer_is_freed_once_collected_on_all_ranks() -> None:
    with nothing_left_in_shared_memory():
        run_ranks(2, _collected)


def _leaks(rank: int, world: int) -> None:
    def once() -> None:
        layers = [
            ColumnParallelLinear(D, F, sequence_parallel=True),
            RowParallelLinear(F, D, sequence_parallel=True),
        ]
        for rows in (2, 6):
            z = layers[1](layers[0](torch.randn(rows, D, requires_grad=True)))
            z.sum().backward()
        close_pools()

    once()
    gc.collect()
    before = held()
    for _ in range(3):
        once()
    gc.collect()
    assert held() == before


def test_layers_leak_no_resources() -> None:
    with nothing_left_in_shared_memory():
        run_ranks(2, _leaks)


def _stall(rank: int, world: int, timeout_s: float) -> tuple[str, float]:
    with mock.patch.dict("os.environ", FLUX_LAYER_TIMEOUT_S=str(timeout_s)):
        layer = ColumnParallelLinear(D, F, sequence_parallel=True)
        x = torch.randn(4, D, requires_grad=True)
        y = layer(x)
        layer(x).sum().backward()
        if rank == 1:
            return "", 0.0  # never comes to the second backward
        began = time.monotonic()
        try:
            y.sum().backward()
        except PeerTimeoutError as error:
            return str(error), time.monotonic() - began
    return "nothing happened", 0.0


def test_absent_peer_raises_within_the_timeout() -> None:
    text, seconds = run_ranks(2, _stall, 2.0, timeout=60, fresh=True)[0]
    assert "rank 0" in text, text
    assert 1.5 < seconds < 10
