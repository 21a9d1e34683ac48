"""Behaviour of Megatron-core's layers besides the GEMMs, which flux's layers must copy."""

from __future__ import annotations

import inspect
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import megatron_cases as mc
from harness import more, run_ranks
from megatron_cases import LayerCase


def _ops(layer: Any) -> set[str]:
    """Return the names of the ops that the layer's group has built."""
    from flux.ops.pool import pool_of

    return {f"{op.spec.label} {op.knobs.path}" for op in pool_of(layer.tp_group).ops}


# -- what is fused, and what is kept for the backward ----------------------------------------------

FUSED = {
    ("column", True): {"AGGemm fused", "GemmRS fused"},
    ("column", False): {"GemmAR fused"},
    ("row", True): {"GemmRS fused", "AGGemm fused"},
    ("row", False): {"GemmAR fused"},
}


def _what_is_fused(rank: int, world: int) -> None:
    from flux.layers import close_pools

    with mc.megatron(world):
        for (kind, sp), expected in FUSED.items():
            layer = mc.check_layer(LayerCase(kind, sp), rank, world)
            assert _ops(layer) == expected, (kind, sp)
            layer.close()
            assert _ops(layer) == set()
        for switches, expected in (
            ({"tp_comm_overlap": False}, set()),
            ({"tp_comm_overlap_ag": False}, {"AGGemm unfused", "GemmRS fused"}),
            ({"tp_comm_overlap_rs": False}, {"AGGemm fused", "GemmRS unfused"}),
            ({"tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False}, set()),
        ):
            for kind in ("column", "row"):
                case = LayerCase(kind, True, settings=tuple(switches.items()))
                layer = mc.check_layer(case, rank, world)
                assert _ops(layer) == expected, (kind, switches)
                layer.close()
        off = (("tp_comm_overlap_disable_fc1", True),)
        for name, expected in (("fc1", "AGGemm unfused"), ("qkv", "AGGemm fused")):
            options = (("tp_comm_buffer_name", name),)
            layer = mc.check_layer(
                LayerCase("column", True, settings=off, options=options), rank, world
            )
            assert expected in _ops(layer), name
            layer.close()
        close_pools()


def test_configuration_selects_the_fused_ops() -> None:
    run_ranks(2, _what_is_fused)


def _saved(rank: int, world: int) -> None:
    _, ours = mc.both()
    with mc.megatron(world):
        for frozen in (False, True):
            case = LayerCase("column", True, frozen=frozen)
            layer, x = case.make(ours, world), case.input(rank, world).requires_grad_()
            kept: list[torch.Tensor] = []

            def pack(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                kept.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                layer(x)
            others = [t for t in kept if t is not layer.weight]
            assert [t.data_ptr() for t in others] == ([] if frozen else [x.data_ptr()])
            layer.close()


def test_forward_saves_only_the_shard() -> None:
    run_ranks(2, _saved)


# -- weights, biases, outputs ----------------------------------------------------------------------


def _runtime_arguments(rank: int, world: int) -> None:
    with mc.megatron(world):
        for sp in (False, True):
            case = LayerCase(
                "column", sp, options=(("skip_weight_param_allocation", True), ("bias", False))
            )
            results = []
            for module in mc.both():
                layer, x = case.make(module, world), case.input(rank, world).requires_grad_()
                assert layer.weight is None
                with pytest.raises(RuntimeError, match="weight was not supplied"):
                    layer(x)
                with pytest.raises(RuntimeError, match=r"not .* as expected"):
                    layer(x, weight=torch.zeros(3, case.k))
                torch.manual_seed(29)
                base = torch.randn(case.n // world, case.k, requires_grad=True)
                y, bias = layer(x, weight=base * 2, runtime_gather_output=True)
                assert bias is None and y.shape[-1] == case.n
                torch.manual_seed(31)
                y.backward(torch.randn_like(y))
                results.append((y.detach(), x.grad, base.grad))
            for theirs, mine in zip(*results, strict=True):
                torch.testing.assert_close(mine, theirs)
            layer.close()


def test_runtime_weight_and_runtime_gather_output() -> None:
    run_ranks(2, _runtime_arguments)


def _parameters(rank: int, world: int) -> None:
    with mc.megatron(world):
        for kind in ("column", "row"):
            for stride in (1, 2):
                case = LayerCase(kind, True, options=(("stride", stride),))
                theirs, mine = (case.make(module, world) for module in mc.both())
                assert isinstance(mine, type(theirs)) and type(mine) is not type(theirs)
                for (name, a), (other, b) in zip(
                    theirs.named_parameters(), mine.named_parameters(), strict=True
                ):
                    assert name == other and torch.equal(a, b) and vars(a) == vars(b), name
                    assert vars(a), "there are attributes to compare"
                assert theirs.state_dict().keys() == mine.state_dict().keys()
                assert mine.state_dict()["_extra_state"] is None
                mine.load_state_dict(
                    {k: v for k, v in theirs.state_dict().items() if v is not None}
                )
                metadata = {"dp_cp_group": dist.new_group([dist.get_rank()])}
                for module in (theirs, mine):
                    module.sharded = module.sharded_state_dict("layer.", (), metadata)
                assert theirs.sharded.keys() == mine.sharded.keys()
                for key, a in theirs.sharded.items():
                    b = mine.sharded[key]
                    for field in ("key", "global_shape", "global_offset", "axis_fragmentations"):
                        assert getattr(a, field, 0) == getattr(b, field, 0), (key, field)
                    assert a.replica_id == b.replica_id


def test_parameters_and_checkpoint_axes_are_megatrons() -> None:
    run_ranks(2, _parameters)


@pytest.mark.parametrize("kind", ["Column", "Row"])
def test_signatures_are_megatrons(kind: str) -> None:
    theirs, ours = (getattr(module, f"{kind}ParallelLinear") for module in mc.both())
    for method in ("__init__", "forward", "sharded_state_dict"):
        a, b = (inspect.signature(getattr(cls, method)) for cls in (theirs, ours))
        assert [p.replace(annotation=0) for p in a.parameters.values()] == [
            p.replace(annotation=0) for p in b.parameters.values()
        ]


def _experts(rank: int, world: int) -> None:
    """Expert layers leave communication to the token dispatcher, on a group of their own."""
    from megatron.core import parallel_state

    sizes = {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": world // 2}
    with mc.megatron(world, **sizes):
        settings = (
            ("expert_tensor_parallel_size", 2),
            ("expert_model_parallel_size", world // 2),
            ("num_moe_experts", 4),
            ("add_bias_linear", False),
        )
        for kind in ("column", "row"):
            options = (("is_expert", True), ("bias", False), ("skip_bias_add", True))
            case = LayerCase(kind, True, settings=settings, options=options, k=32, n=48)
            results = []
            for module in mc.both():
                layer = case.make(module, world)
                assert layer.tp_group is parallel_state.get_expert_tensor_parallel_group()
                torch.manual_seed(19 + rank)
                x = torch.randn(8, layer.weight.shape[1], requires_grad=True)
                y, _ = layer(x)
                y.square().sum().backward()
                results.append((y.detach(), x.grad, layer.weight.grad))
                assert layer.weight.allreduce == (world == 2)
            for theirs, mine in zip(*results, strict=True):
                assert torch.equal(theirs, mine)


@pytest.mark.parametrize("world", [2, *more(4)])
def test_expert_layers(world: int) -> None:
    run_ranks(world, _experts)


def _given_group(rank: int, world: int) -> None:
    """A group that is given is used, not the one of parallel state."""
    with mc.megatron(world):
        pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
        for kind in ("column", "row"):
            case = LayerCase(kind, True, options=(("tp_group", pairs[rank // 2]),))
            layer = mc.check_layer(case, rank % 2, 2)
            assert _ops(layer) == FUSED[kind, True]
            layer.close()


def test_given_group_replaces_the_one_of_parallel_state() -> None:
    run_ranks(4, _given_group)


# -- PyTorch's modes -------------------------------------------------------------------------------


def _modes(rank: int, world: int) -> None:
    _, ours = mc.both()
    with mc.megatron(world):
        for kind in ("column", "row"):
            for sp in (False, True):
                case = LayerCase(kind, sp)
                layer, x = case.make(ours, world), case.input(rank, world)
                expected = layer(x)[0].detach()
                for mode in (torch.no_grad, torch.inference_mode):
                    with mode():
                        y, _ = layer(x)
                    assert torch.equal(y, expected) and not y.requires_grad
                    assert y.is_inference() == (mode is torch.inference_mode)
                _changed_in_place(layer, x)
                _recomputed(layer, x)
                _twice(layer, x)
                _autocast(layer, x, sp, world)
                layer.close()


def _changed_in_place(layer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    (y * 2).sum().backward()
    once = x.grad.clone()
    y, _ = layer(x)
    y *= 2
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once)


def _recomputed(layer: Any, x: torch.Tensor) -> None:
    from megatron.core import tensor_parallel

    def plain(x: torch.Tensor) -> torch.Tensor:
        return layer(torch.tanh(x))[0]

    ways = {
        "plain": plain,
        "reentrant": lambda x: checkpoint(plain, x, use_reentrant=True),
        "not reentrant": lambda x: checkpoint(plain, x, use_reentrant=False),
        "Megatron's": lambda x: tensor_parallel.checkpoint(plain, False, x),
    }
    grads = []
    for way, run in ways.items():
        own = x.clone().requires_grad_()
        layer.zero_grad()
        torch.cos(run(own)).sum().backward()
        grads.append([own.grad, layer.weight.grad])
        assert all(map(torch.equal, grads[0], grads[-1])), way


def _twice(layer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    for inputs in (x, layer.weight):
        (first,) = torch.autograd.grad(layer(x)[0].sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match=r"flux\.layers cannot be differentiated twice"):
            first.square().sum().backward()


def _autocast(layer: Any, x: torch.Tensor, sp: bool, world: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
        loss = y.float().square().mean()
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    scaler.scale(loss).backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
    scaler.unscale_(optimizer)
    scaled = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x)[0].square().mean().backward()
    # Operands in bfloat16: every one is off by 2^-9, and so is what comes of them.
    assert (scaled - layer.weight.grad).norm() < 0.02 * layer.weight.grad.norm()
    assert not torch.equal(scaled, layer.weight.grad)
    layer.weight.grad[0, 0] = float("inf")
    scaler.scale(loss.detach())
    found = scaler._check_inf_per_device(optimizer)
    assert [float(f) for f in found.values()] == [1.0]


def test_layers_work_in_modes_of_pytorch() -> None:
    run_ranks(2, _modes)


# -- what is not fused -----------------------------------------------------------------------------


def _fallbacks(rank: int, world: int) -> None:
    from flux.layers import eligible

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    listener = Listener()
    _, ours = mc.both()
    with mc.megatron(world), mock.patch.object(eligible, "_said", set()):
        eligible.logger.addHandler(listener)
        try:
            for kind in ("column", "row"):
                case = LayerCase(kind, True, settings=(("tp_comm_overlap", False),))
                for _ in range(2):
                    mc.check_layer(case, rank, world)
            assert [text.split(":")[0] for text in heard] == [
                "ColumnParallelLinear",
                "RowParallelLinear",
            ]
            assert "tp_comm_overlap is off" in heard[0]
            layer = LayerCase("column").make(ours, world)
            layer.config.fp8 = "hybrid"
            mc.check_layer(LayerCase("column"), rank, world, layer)
            assert "fp8 = hybrid is not supported by flux" in heard[2]
            with mock.patch.object(type(layer), "overlap", True):  # stronger than the configuration
                mc.check_layer(case, rank, world)
            assert len(heard) == 3
        finally:
            eligible.logger.removeHandler(listener)


def test_unfused_layers_are_logged_once() -> None:
    run_ranks(2, _fallbacks)
