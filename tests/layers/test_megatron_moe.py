"""Megatron-core's MoELayer beside ours: results and all gradients, for both dispatchers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness import more, run_ranks
from megatron_cases import config, megatron

SIZES: dict[str, Any] = {"moe_ffn_hidden_size": 24, "ffn_hidden_size": 24, "num_moe_experts": 4}


def _layers(
    settings: dict[str, Any], tp: int, change: Callable[[Any], None] | None = None
) -> tuple[Any, Any]:
    """Megatron's layer and ours, with equal values: the router's on all ranks, experts' on none."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from flux.layers.megatron import flux_spec, swap

    made = config(
        tp,
        **{
            **SIZES,
            "moe_router_topk": 2,
            "params_dtype": torch.float64,
            "add_bias_linear": False,
            "sequence_parallel": tp > 1,
            "moe_router_dtype": "fp64",
            "moe_aux_loss_coeff": 0.0,
            "tp_comm_overlap": True,
            **settings,
        },
    )
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=made.moe_grouped_gemm)
    theirs, ours = (MoELayer(made, spec.submodules, layer_number=1) for _ in range(2))
    for layer in (theirs, ours) if change is not None else ():
        change(layer)
    torch.manual_seed(3)
    for name, parameter in theirs.named_parameters():
        if "router" not in name and "shared" not in name:
            torch.manual_seed(len(name) + 17 * dist.get_rank())
        torch.nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(theirs.state_dict())
    swap(ours, overlap=None)
    assert type(ours) is flux_spec(spec).module
    return theirs, ours


def _gmm(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """What the package grouped_gemm, which needs CUDA, has for GroupedMLP."""
    assert not trans_b
    parts = x.split(rows.tolist())
    return torch.cat([part @ expert for part, expert in zip(parts, w, strict=True)])


def _compare(
    rank: int, world: int, tp: int, ep: int, etp: int, settings: dict[str, Any], path: str
) -> None:
    options = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    from megatron.core.transformer.moe import grouped_gemm_util

    package = SimpleNamespace(ops=SimpleNamespace(gmm=_gmm))
    changes = mock.patch.multiple(grouped_gemm_util, grouped_gemm=package, ops=package.ops)
    with changes, megatron(tp, **options):
        parallel = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
        theirs, ours = _layers({**settings, **parallel}, tp)
        if path == "fused":
            x, choices = torch.zeros(4, 2, 32, dtype=torch.float64), torch.zeros(8, 4) > 0
            assert ours._reason_unfused(x, choices) is None
        for step in range(2):
            results = []
            for layer in (theirs, ours):
                torch.manual_seed(100 * step + rank)
                x = torch.randn(4, 2, 32, dtype=torch.float64, requires_grad=True)
                y, _ = layer(x)
                (y * torch.randn_like(y)).sum().backward()
                results.append({"y": y.detach(), "dx": x.grad})
                for name, parameter in layer.named_parameters():
                    grad = parameter.grad
                    results[-1][name] = torch.zeros_like(parameter) if grad is None else grad
            for name, wanted in results[0].items():
                off = (results[1][name] - wanted).abs().max()
                assert off <= 1e-9 * (1 + wanted.abs().max()), f"{name} is off by {off:.2e}"
        fused = path == "fused"
        assert (ours._flux_user is not None) == fused
        ours.close()


GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
GROUPED = {"moe_grouped_gemm": True, "bf16": True}  # its forward asks for bf16


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "settings"),
    [
        (1, 2, 1, {"moe_token_dispatcher_type": "alltoall", **GATED}),
        (2, 1, 2, {"moe_token_dispatcher_type": "allgather", **GATED}),
        (2, 2, 1, {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": True}),
        (2, 2, 2, {"moe_token_dispatcher_type": "allgather"}),
        (
            1,
            4,
            1,
            {
                "moe_token_dispatcher_type": "alltoall",
                "moe_expert_capacity_factor": 0.75,
                "moe_shared_expert_intermediate_size": 16,
                **GATED,
            },
        ),
        (
            1,
            2,
            1,
            {
                "moe_token_dispatcher_type": "allgather",
                "recompute_granularity": "selective",
                "recompute_modules": ["moe"],
            },
        ),
        (1, 2, 1, {"moe_token_dispatcher_type": "alltoall", **GROUPED, **GATED}),
        (2, 2, 2, {"moe_token_dispatcher_type": "allgather", **GROUPED, **GATED}),
        *more((2, 4, 1, {"moe_token_dispatcher_type": "allgather", **GATED})),
    ],
)
def test_layer_equals_megatrons(tp: int, ep: int, etp: int, settings: dict[str, Any]) -> None:
    run_ranks(max(tp, ep * etp), _compare, tp, ep, etp, settings, "fused")


@pytest.mark.parametrize(
    ("tp", "ep", "etp", "settings"),
    [
        (
            1,
            2,
            1,
            {
                "moe_token_dispatcher_type": "alltoall",
                "moe_expert_capacity_factor": 1.0,
                "moe_pad_expert_input_to_capacity": True,
            },
        ),
        (1, 2, 1, {"moe_token_dispatcher_type": "alltoall", "tp_comm_overlap": False}),
    ],
)
def test_what_is_not_fused_is_megatrons_own(
    tp: int, ep: int, etp: int, settings: dict[str, Any]
) -> None:
    run_ranks(max(tp, ep * etp), _compare, tp, ep, etp, settings, "own")


def _no_hook(module: Any, inputs: Any, output: Any) -> None: ...


def _subclass(layer: Any) -> None:
    fc1 = layer.experts.local_experts[1].linear_fc1
    kind = type(fc1)

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, bias = super().forward(*args, **kwargs)
            return 3 * out, bias

    fc1.__class__ = Scaled


class _Adapter(torch.nn.Module):
    """A wrapper that has the weight of what it wraps, as LoRA's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + x.sum(-1, keepdim=True), bias


def _adapter(layer: Any) -> None:
    for expert in layer.experts.local_experts:
        expert.linear_fc1 = _Adapter(expert.linear_fc1)


def _patched(layer: Any) -> None:
    expert = layer.experts.local_experts[0]
    own = expert.forward
    expert.forward = lambda x, probs: (2 * own(x, probs)[0], None)


def _activation(layer: Any) -> None:
    for expert in layer.experts.local_experts:
        expert.activation_func = torch.nn.functional.relu


def _always_on(layer: Any) -> None:
    def add(module: Any, inputs: Any, chosen: Any) -> Any:
        probs, routing_map = chosen
        routing_map = routing_map.clone()
        routing_map[:, 0] = True
        return probs + 0.1 * routing_map, routing_map

    layer.router.register_forward_hook(add)


def _hook_on_one_rank(layer: Any) -> None:
    if dist.get_rank() == 0:
        layer.experts.local_experts[0].register_forward_hook(_no_hook)


def _plain_hook_of_router(layer: Any) -> None:
    layer.router.register_forward_hook(_no_hook)


CHANGES = {
    _subclass: False,
    _adapter: False,
    _patched: False,
    _activation: False,
    _always_on: False,
    _hook_on_one_rank: False,
    _plain_hook_of_router: True,
}
"""What users change, and whether the layer is fused with it."""


def _compare_changed(rank: int, world: int) -> None:
    ep = {"expert_model_parallel_size": world}
    for dispatcher in ("alltoall", "allgather"):
        for change, fused in CHANGES.items():
            with megatron(1, **ep):
                settings = {"moe_token_dispatcher_type": dispatcher, **ep}
                theirs, ours = _layers(settings, 1, change)
                x = torch.randn(4, 2, 32, dtype=torch.float64)
                torch.testing.assert_close(ours(x)[0], theirs(x)[0], msg=change.__name__)
                assert (ours._flux_user is not None) == fused, change.__name__
                ours.close()


def test_experts_and_routers_that_users_changed_compute_what_they_do_in_megatron() -> None:
    """The fused path left out what was not in the weights; a hook on one rank ended in an abort."""
    run_ranks(2, _compare_changed)
