"""Swapping our layers into models that exist, by torch's tensor-parallel plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import harness
from flux.layers import close_pools, eligible, replace_linears
from flux.ops.pool import pool_of
from harness import more, run_ranks

# DTensors import them at their first use: once, in the server that ranks are forked from.
harness.PRELOAD += ["torch.distributed.tensor.parallel", "torch._dynamo"]

B, S, D, HEADS, VOCAB = 2, 12, 24, 12, 36


class Attention(nn.Module):
    """Written as Hugging Face's are: whatever heads the projections return are this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D, bias=b) for b in (1, 0, 1))
        self.o_proj = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attn = Attention()
        self.up_proj, self.down_proj = nn.Linear(D, 4 * D), nn.Linear(4 * D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        hidden = nn.functional.gelu(self.up_proj(self.post_attention_layernorm(x)))
        return x + self.down_proj(hidden)


class Model(nn.Module):
    """A decoder with a plan such as Hugging Face's models bring."""

    _tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.up_proj": "colwise",
        "layers.*.down_proj": "rowwise",
        "lm_head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def _sequence_plan() -> dict[str, Any]:
    """Sequence parallelism in the whole trunk, as torchtitan has it."""
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.input_layernorm": SequenceParallel(),
        "layers.*.self_attn": gathered,
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.post_attention_layernorm": SequenceParallel(),
        "layers.*.up_proj": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def _plans() -> dict[str, Any]:
    dtensors = {
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.up_proj": ColwiseParallel(use_local_output=False),
        "layers.*.down_proj": RowwiseParallel(),
    }
    return {"own": None, "sequence": _sequence_plan(), "dtensors": dtensors}


def _run(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    y = model(tokens)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    results = {"y": y.detach()}
    y.square().mean().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        results[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return results


def _trained(rank: int, world: int, name: str) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch.manual_seed(0)
    model = Model().double()
    torch.manual_seed(0)
    whole = Model().double()
    tokens = torch.randint(VOCAB, (B, S))
    expected = _run(whole, tokens)
    plan = _plans()[name]
    assert replace_linears(model, plan, mesh=mesh if rank % 2 else mesh.get_group()) is model
    got = _run(model, tokens)
    used = {op.spec.label for op in pool_of(None).ops}
    assert used == ({"AGGemm", "GemmRS"} if name == "sequence" else {"GemmAR"})
    assert got.keys() == expected.keys()
    for key, want in expected.items():
        error = (got[key] - want).abs().max()
        assert error <= 1e-12 * want.abs().max(), (key, error)
    # Checkpoints are those of torch's own parallel form.
    torch.manual_seed(1)
    theirs = Model().double()
    parallelize_module(theirs, mesh, plan or _dtensor_styles())
    state = theirs.state_dict()
    for key, tensor in model.state_dict().items():
        assert type(tensor) is type(state[key]), key
        assert getattr(tensor, "placements", 0) == getattr(state[key], "placements", 0), key
    model.load_state_dict(state)
    with torch.no_grad():
        y, z = (m(tokens) for m in (model, theirs))
        assert (y - z).abs().max() <= 1e-12
    close_pools()


def _dtensor_styles() -> dict[str, Any]:
    return {
        "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "layers.*.self_attn.o_proj": RowwiseParallel(),
        "layers.*.up_proj": ColwiseParallel(),
        "layers.*.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


@pytest.mark.parametrize("name", list(_plans()))
@pytest.mark.parametrize("world", [2, *more(4)])
def test_planned_model_matches_torch(world: int, name: str) -> None:
    run_ranks(world, _trained, name)


def _odd_layouts(rank: int, world: int) -> None:
    """Layouts without a fused form give torch's results."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    torch.manual_seed(5)
    for style, x in (
        (ColwiseParallel(input_layouts=Shard(-1)), torch.randn(3, D // world)),
        (RowwiseParallel(output_layouts=Shard(1)), torch.randn(3, D // world)),
        (RowwiseParallel(output_layouts=Shard(0)), torch.randn(5, D // world)),
        (RowwiseParallel(input_layouts=Replicate()), torch.randn(3, D)),
        (ColwiseParallel(), DTensor.from_local(torch.randn(3, D // world), mesh, [Shard(1)])),
        (ColwiseParallel(input_layouts=Shard(0)), torch.randn(3, 5, D)),
        (RowwiseParallel(output_layouts=Shard(0)), torch.randn(4, 5, D // world)),
    ):
        layers = [nn.Linear(D, D) for _ in range(2)]
        layers[1].load_state_dict(layers[0].state_dict())
        parallelize_module(layers[0], mesh, style)
        replace_linears(layers[1], {"": style}, mesh=mesh)
        results = []
        for layer in layers:
            own = x.detach().clone().requires_grad_()
            y = layer(own)
            y.square().sum().backward()
            grads = [own.grad, layer.weight.grad, layer.bias.grad]
            results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (y, *grads)])
        for want, got in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert any("features of the input are sharded" in text for text in eligible._said)
    close_pools()


def test_layouts_without_a_fused_form_match_torch() -> None:
    run_ranks(2, _odd_layouts)


def _refused(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for arguments, options, error, match in (
        ((Model(), {"lm_head": "colwise"}), {}, ValueError, "a plan needs a mesh"),
        ((Model(),), {}, ValueError, "no ColumnParallelLinear or Row"),
        ((nn.Linear(2, 2),), {"mesh": group}, ValueError, "has no tensor-parallel plan"),
        ((Model(), {"lm_head": "sideways"}), {"mesh": group}, ValueError, "unknown .* 'sideways'"),
        ((Model(), {"lm_head": 3}), {"mesh": group}, TypeError, "ParallelStyle objects"),
        ((Model(),), {"mesh": group, "overlap": True}, ValueError, "overlap is for Megatron"),
        (([3],), {}, TypeError, "must be a module"),
        (
            (Model(), {"norm": SequenceParallel()}),
            {"mesh": group},
            ValueError,
            "names no linear layer",
        ),
    ):
        with pytest.raises(error, match=match):
            replace_linears(*arguments, **options)


def test_invalid_plan_or_model_raises() -> None:
    run_ranks(2, _refused)
