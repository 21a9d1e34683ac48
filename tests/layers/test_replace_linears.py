"""Swapping our layers into models that exist, by torch's tensor-parallel plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import harness
from flux.layers import close_pools, eligible, replace_linears
from flux.layers.huggingface_experts import ExpertsForward
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
    close_pools()  # tests of other files, on these ranks before, may have left ops
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
        _both_equal(layers, x, f"{style}")
    assert any("features of the input are sharded" in text for text in eligible._said)
    close_pools()


def test_layouts_without_a_fused_form_match_torch() -> None:
    run_ranks(2, _odd_layouts)


def _uneven(rank: int, world: int) -> None:
    """Numbers of features that the ranks do not divide, or that leave some ranks without any."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    whole, rows = Replicate(), Shard(0)
    for features in (1, 5, 7):
        for style in (
            ColwiseParallel(output_layouts=whole),
            ColwiseParallel(input_layouts=rows, output_layouts=rows),
            ColwiseParallel(use_local_output=False),
            RowwiseParallel(input_layouts=whole),
            RowwiseParallel(input_layouts=rows, output_layouts=rows),
            RowwiseParallel(input_layouts=whole, output_layouts=rows, use_local_output=False),
        ):
            torch.manual_seed(5)
            sizes = (6, features) if isinstance(style, ColwiseParallel) else (features, 6)
            layers = [nn.Linear(*sizes) for _ in range(2)]
            layers[1].load_state_dict(layers[0].state_dict())
            x = torch.randn(2 * world, 3, sizes[0])
            x = x.chunk(world)[rank] if style.input_layouts[0] == rows else x
            parallelize_module(layers[0], mesh, style)
            replace_linears(layers[1], {"": style}, mesh=mesh)
            _both_equal(layers, x, f"{features} features, {style}")
    # Features of the input, of which torch cannot know that ranks have different numbers.
    for style in (
        RowwiseParallel(),
        ColwiseParallel(input_layouts=Shard(-1), output_layouts=whole),
    ):
        torch.manual_seed(6)
        one = nn.Linear(7, 6)
        x = torch.randn(4, 7)
        want = one(x)
        replace_linears(one, {"": style}, mesh=mesh)
        torch.testing.assert_close(one(x.chunk(world, 1)[rank]), want)
    close_pools()


def _both_equal(layers: list[nn.Linear], x: torch.Tensor, name: str) -> None:
    """Check that torch's form of a layer and ours agree in results and gradients."""
    results, kinds = [], []
    for layer in layers:
        own = x.detach().clone().requires_grad_()
        y = layer(own)
        y.square().sum().backward()
        grads = [own.grad, layer.weight.grad, layer.bias.grad]
        results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (y, *grads)])
        kinds.append(isinstance(y, DTensor))
    assert kinds[0] == kinds[1], name
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, msg=name)


@pytest.mark.parametrize("world", [2, *more(3)])
def test_features_that_ranks_do_not_divide_match_torch(world: int) -> None:
    run_ranks(world, _uneven)


# -- parameters that modules share -----------------------------------------------------------------


class Sharing(nn.Module):
    """Two blocks of linear layers between an embedding and a head; ``share`` makes them one."""

    def __init__(self, share: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, D), nn.Linear(D, 11, bias=False)
        self.up, self.up2, self.down, self.down2 = (nn.Linear(D, D) for _ in range(4))
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        for pair in share.split():
            one, _, other = pair.partition("=")
            module, _, name = one.rpartition(".")
            value = self.get_submodule(other) if not module else self.get_parameter(other)
            setattr(self.get_submodule(module), name, value)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        x = x + self.down2(torch.tanh(self.up2(self.norm2(x))))
        return self.head(x)


def _losses(model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    tokens = torch.randint(11, (2, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


TIED = "head.weight=embed.weight"
LAYERS = {"up": "colwise", "down": "rowwise", "up2": "colwise", "down2": "rowwise"}
HEAD = {"head": "colwise_rep"}
SHARED: list[tuple[str, dict[str, Any]]] = [
    (TIED, HEAD),  # the embedding is not in the plan
    (TIED, LAYERS | HEAD | {"embed": "embedding_rowwise"}),
    (TIED, LAYERS | {"embed": ColwiseParallel(output_layouts=Replicate())}),  # the head is not
    (f"{TIED} up2.weight=up.weight up2.bias=up.bias down2.weight=down.weight", LAYERS | HEAD),
    ("up2=up down2=down", {"up*": "colwise", "down*": "rowwise"}),  # modules, in two places
    ("up2.weight=up.weight up2.bias=down.bias", {"up": "colwise_rep", **HEAD}),
    ("up2.bias=up.bias", {"up": "rowwise_rep"}),
    ("norm2.weight=norm.weight", LAYERS),  # neither is in the plan
]


def _shared(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for share, plan in SHARED:
        model, whole = Sharing(share).double(), Sharing(share).double()
        names, keys = [name for name, _ in model.named_parameters()], list(model.state_dict())
        expected = _losses(whole)
        replace_linears(model, plan, mesh=group)
        assert [name for name, _ in model.named_parameters()] == names, share
        assert list(model.state_dict()) == keys, share
        for got, want in zip(_losses(model), expected, strict=True):
            assert abs(got - want) <= 1e-12 * want, (share, plan, got, want)
    close_pools()


def test_modules_that_share_parameters_still_share_them() -> None:
    run_ranks(2, _shared)


def _parts(model: nn.Module) -> list[Any]:
    """Return all that a plan changes of a model."""
    return [
        (type(m), m._forward_hooks.copy(), m._parameters.copy(), "style" in vars(m))
        for m in model.modules()
    ]


def _cannot_share(rank: int, world: int) -> None:
    whole = Replicate()
    hooks = {"embed": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)}
    for share, plan, match in (
        (TIED, HEAD | {"embed": "colwise_rep"}, r"embed.weight becomes .*1.*head.weight becomes"),
        (
            "up2.weight=up.weight",
            {"up": "colwise", "up2": "rowwise_rep"},
            "does not shard it alike",
        ),
        (
            "up2=up",
            {"up": "colwise", "up2": "rowwise_rep"},
            "'up2' leads to a module that the plan",
        ),
        (TIED, HEAD | hooks, "embed.weight is not sharded"),
        ("norm2.weight=norm.weight", LAYERS | {"norm": SequenceParallel()}, "norm2.weight is not"),
        ("", LAYERS | {"norm": ColwiseParallel()}, "only support nn.Linear"),
        ("", {"norm": SequenceParallel()}, "names no linear layer"),
    ):
        model = Sharing(share)
        before = _parts(model)
        with pytest.raises((ValueError, NotImplementedError), match=match):
            replace_linears(model, plan, mesh=dist.group.WORLD)
        for was, now in zip(before, _parts(model), strict=True):
            assert was[:2] == now[:2] and was[3] == now[3]
            assert was[2].keys() == now[2].keys()
            assert all(was[2][name] is now[2][name] for name in was[2])
    model = Sharing()
    model.head.weight.data = model.embed.weight.data
    with pytest.raises(ValueError, match="two parameters in the same memory"):
        replace_linears(model, HEAD, mesh=dist.group.WORLD)
    model = Sharing(TIED)
    model.embed.max_norm = 1.0
    with pytest.raises(ValueError, match=r"embed.weight is not sharded"):
        replace_linears(model, HEAD, mesh=dist.group.WORLD)
    nn.utils.parametrizations.weight_norm(model.up)
    with pytest.raises(ValueError, match="whose weight is computed from other parameters"):
        replace_linears(model, LAYERS, mesh=dist.group.WORLD)


def test_plan_that_cannot_keep_sharing_raises_and_changes_nothing() -> None:
    run_ranks(2, _cannot_share)


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


def _uneven_experts(rank: int, world: int) -> None:
    """Both of Transformers' ways to split experts: 7 rows of each, and 5 experts."""
    mesh, width = init_device_mesh("cpu", (world,)), 6
    for split, experts, depth in ((False, 4, 7), (True, 5, 8)):
        down = torch.zeros(experts, width, depth)
        shared = distribute_tensor(down, mesh, [Shard(0 if split else 2)])
        local = shared.to_local()
        up = torch.zeros(len(local), 2 * local.shape[2], width)
        module: Any = torch.nn.Module()
        module.gate_up_proj, module.down_proj = up, shared
        module.has_gate, module.has_bias, module.is_transposed = True, False, False
        module.config = SimpleNamespace(_experts_implementation="eager")
        forward = ExpertsForward(module, None, dist.group.WORLD, split)
        args = torch.zeros(3, width), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
        reason = forward._reason_unfused(args, {})
        assert reason is not None and "evenly" in reason, (split, reason)


def test_ranks_agree_that_experts_are_not_shared_evenly() -> None:
    """Rank 1 of 2 had 3 = 7 // 2 rows, and waited for rank 0 in an op that this never built."""
    run_ranks(2, _uneven_experts)
