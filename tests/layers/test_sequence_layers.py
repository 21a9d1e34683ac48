"""Decoders that work on shards of the sequence between their blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import harness
from flux.layers import close_pools, replace_linears, sequence_parallel_plan
from flux.machine.cluster import Cluster, DeviceSpec, Link, NetworkSpec
from flux.ops.pool import pool_of
from flux.select.sequence import BlockSizes, SequenceChoice
from harness import more, run_ranks
from sequence_cases import shards_seen

harness.PRELOAD += ["torch.distributed.tensor.parallel", "torch._dynamo"]

D, HEADS, VOCAB = 16, 8, 24


class Attention(nn.Module):
    """Written as Hugging Face's are: by keyword, shapes from the input, a pair as result."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(D, D)
        self.k_proj, self.v_proj = (nn.Linear(D, D // 2, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(D, D)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> tuple[Any, None]:
        shape = hidden_states.shape[:-1]
        q, k, v = (
            p(hidden_states).view(*shape, -1, D // HEADS).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True) * scale
        return self.o_proj(mixed.transpose(1, 2).reshape(*shape, -1)), None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(D, 2 * D, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * D, D)
        self.late = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.late(self.down_proj(gated))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attn, self.mlp, self.dropout = Attention(), MLP(), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        mixed, _ = self.self_attn(hidden_states=self.before(x), scale=scale)
        x = x + self.dropout(mixed)
        return x + self.mlp(self.between(input=x))


class Model(nn.Module):
    _tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise_rep",
    }

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, VOCAB, bias=False)
        self.recomputes = False

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        x = self.embed_tokens(tokens)
        seen = [x]
        for layer in self.layers:
            x = checkpoint(layer, x, 0.5, use_reentrant=True) if self.recomputes else layer(x, 0.5)
            seen.append(x)
        return self.lm_head(self.norm(x)), tuple(seen)


def _run(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    y, seen = model(tokens)
    (y.square().mean() + sum(x.mean() for x in seen)).backward()
    results = {"y": y, **{f"seen {i}": x for i, x in enumerate(seen)}}
    results |= {name: p.grad for name, p in model.named_parameters()}
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        for name, x in results.items()
    }


def _compare(whole: nn.Module, model: nn.Module, tokens: torch.Tensor) -> None:
    expected, got = _run(whole, tokens), _run(model, tokens)
    assert got.keys() == expected.keys()
    for key, want in expected.items():
        error = (got[key] - want).abs().max()
        assert error <= 1e-12 * want.abs().max(), (tokens.shape, key, error)


def _pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    whole = Model().double()
    model = copy.deepcopy(whole)
    replace_linears(model, mesh=dist.group.WORLD, sequence_parallel=True)
    return whole, model


def _trained(rank: int, world: int) -> None:
    whole, model = _pair()
    seen = shards_seen(model.layers[1].before)
    for batch, length in ((2, 2 * world), (1, world + 1), (3, 3 * world - 1), (2, 1)):
        tokens = torch.randint(VOCAB, (batch, length), generator=torch.manual_seed(length))
        for m in (whole, model):
            m.train(length != world + 1)
        _compare(whole, model, tokens)
    assert seen == [True, True, True, False]
    assert {op.spec.label for op in pool_of(None).ops} == {"AGGemm", "GemmRS", "GemmAR"}
    model.recomputes = True
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.manual_seed(1))
    _compare(whole, model, tokens)
    model.zero_grad()  # torch cannot copy gradients that are DTensors
    _compare(whole, copy.deepcopy(model), tokens)  # hooks go with a copy
    model.recomputes = False
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y, z = (m.float().eval()(tokens)[0].float() for m in (whole, model))
    assert (y - z).abs().max() <= 0.05 * y.abs().max()
    close_pools()


@pytest.mark.parametrize("world", [2, *more(4)])
def test_shards_match_whole_activations(world: int) -> None:
    run_ranks(world, _trained)


def _chosen(rank: int, world: int) -> None:
    """``sequence_parallel="auto"`` shards the calls that the cost model chooses."""
    torch.manual_seed(0)
    whole = Model().double().eval()
    model, mixing = copy.deepcopy(whole), Model(Mixing)
    torch.manual_seed(1)
    replace_linears(mixing, mesh=dist.group.WORLD, sequence_parallel="auto")
    assert not any(type(m) is nn.Linear for m in mixing.modules())
    SequenceChoice.pays, before = (
        lambda self, tokens, gathers=True: tokens >= 12,
        SequenceChoice.pays,
    )
    try:
        replace_linears(model, mesh=dist.group.WORLD, sequence_parallel="auto")
        seen = shards_seen(model.layers[1].before)
        for batch, length in ((2, 5), (2, 6), (1, 12)):
            _compare(whole, model, torch.randint(VOCAB, (batch, length)))
    finally:
        SequenceChoice.pays = before
    assert seen == [False, True, True]
    close_pools()


def test_the_cost_model_chooses_calls() -> None:
    run_ranks(2, _chosen)
    network = NetworkSpec("ethernet", 1, 1.0, 50.0)
    device = DeviceSpec("cpu", "x86_64", 2, memory_gbs=40.0, tflops={"float32": 0.15})
    slow = Cluster("slow", device, 1, 2, 1, Link("memory", 10.0, 20.0), network)
    blocks = [BlockSizes(1024, 3072, 1024), BlockSizes(1024, 5632, 2816)] * 4
    between_hosts = SequenceChoice(blocks, "float32", 2, 2, slow)
    assert between_hosts.pays(2048) and not between_hosts.pays(2)
    assert not SequenceChoice(blocks, "float32", 2, 1, slow).pays(2)


def _kept_whole(rank: int, world: int) -> None:
    """What shards cannot serve takes the way of whole activations, with the same results."""
    whole, model = _pair()
    tokens = torch.randint(VOCAB, (2, 6), generator=torch.manual_seed(1))
    seen = shards_seen(model.layers[1].before)
    inner = model.layers[0].mlp.up_proj

    class Wrapper(nn.Module):  # as PEFT's
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + 0 * x.sum()

    model.layers[0].mlp.up_proj = Wrapper()
    with torch.no_grad():
        torch.manual_seed(3)
        y = whole(tokens)[0]
        torch.manual_seed(3)
        assert (model(tokens)[0] - y).abs().max() <= 1e-12
    model.layers[0].mlp.up_proj = inner
    assert seen == [False]
    # A block whose layers have no fused form for its operands gathers, and shards its result.
    del seen[:]
    row = model.layers[1].mlp.down_proj
    type(row).reason_unsupported, before = (
        lambda self, x, dim: "asked" if self is row else before(self, x, dim),
        type(row).reason_unsupported,
    )
    try:
        _compare(whole, model, tokens)
    finally:
        del type(row).reason_unsupported
    assert seen == [True]
    # A user's hook may read every token, or change one.
    del seen[:]
    changes = [
        m.layers[0].register_forward_hook(lambda _, args, y: y.index_fill(1, torch.tensor(5), 0.5))
        for m in (whole, model)
    ]
    _compare(whole, model, tokens)
    for change in changes:
        change.remove()
    assert seen == [False]
    mlp = model.layers[0].mlp
    mlp.__class__ = type("Other", (MLP,), {"forward": lambda self, x: MLP.forward(self, x + 0)})
    with pytest.raises(RuntimeError, match="something other than its block's input"):
        model(tokens)
    mlp.__class__ = MLP
    _compare(whole, model, tokens)  # nothing stays behind
    assert seen == [False, True]
    close_pools()


def test_what_shards_cannot_serve_keeps_activations_whole() -> None:
    run_ranks(2, _kept_whole)


def _different_on_one_rank(rank: int, world: int) -> None:
    """What one rank has set otherwise, so that it would run other ops, is an error on all."""
    whole, model = _pair()
    tokens = torch.randint(VOCAB, (2, 6), generator=torch.manual_seed(1))
    _compare(whole, model, tokens)
    hooks = []

    def hook() -> None:
        hooks.append(model.layers[0].register_forward_hook(lambda _, args, y: y))

    changes: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (hook, lambda: hooks.pop().remove()),
        (model.layers[1].eval, model.train),
        (
            lambda: model.layers[1].before.requires_grad_(False),
            lambda: model.layers[1].before.requires_grad_(True),
        ),
        (
            lambda: model.embed_tokens.requires_grad_(False),
            lambda: model.embed_tokens.requires_grad_(True),
        ),
        (model.embed_tokens.float, model.embed_tokens.double),
    ]
    for change, undo in changes:
        if rank == 1:
            change()
        with pytest.raises(ValueError, match=r"disagree .* a decoder on (whole|shards of)"):
            model(tokens)
        if rank == 1:
            undo()
    _compare(whole, model, tokens)
    close_pools()


def test_one_rank_that_differs_is_an_error_on_all() -> None:
    run_ranks(2, _different_on_one_rank)


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_names_the_parts_of_a_decoder() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Model()
        state = torch.get_rng_state()
        plan = sequence_parallel_plan(model)
        assert torch.equal(state, torch.get_rng_state())
        assert plan.decoder == "" and plan.layers == ("layers.0", "layers.1")
        attention, mlp = plan.blocks[2:]
        assert attention.columns == tuple(f"layers.1.self_attn.{n}_proj" for n in "qkv")
        assert attention.row == "layers.1.self_attn.o_proj"
        assert (attention.keyword, mlp.keyword) == ("hidden_states", None)
        assert plan.replicated[:2] == ("layers.0.before", "layers.0.between")
        assert set(plan.dropouts[:2]) == {"layers.0.dropout", "layers.0.mlp.late"}
        assert pickle.loads(pickle.dumps(plan)) == plan


class Mixing(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True).mean(1, keepdim=True))


class Drawing(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(functional.dropout(x, 0.1, self.training))


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(D))


class Reading(Layer):
    """The MLP reads its input outside of its column layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp.gate_proj.register_forward_hook(lambda _, args, y: y * args[0].mean())


class Changing(Layer):
    """The MLP changes what its row layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp.late = nn.Sigmoid()


class Uncalled(Layer):
    """The layer applies a norm's parameters without calling the norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = self.between
        self.mlp.register_forward_pre_hook(
            lambda _, args: (functional.layer_norm(args[0], (D,), norm.weight, norm.bias),)
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = x + self.self_attn(hidden_states=self.before(x))[0]
        return x + self.mlp(x)


class Routed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mlp.router = nn.Linear(D, 2)


class Skipping(Model):
    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed_tokens(tokens)
        return self.layers[1](x + self.layers[0](x))


class Failing(Model):
    def forward(self, tokens: torch.Tensor) -> Any:
        raise KeyError("pixels")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Model(Mixing), "layers.0 mixes tokens"),
        (lambda: Model(Drawing), "layers.0 draws random numbers"),
        (lambda: Model(Scaled), "layers.0 has parameters of its own"),
        (lambda: Model(Reading), "layers.0.mlp reads its input outside"),
        (lambda: Model(Changing), "layers.0.mlp does not return the result"),
        (lambda: Model(Uncalled), "layers.0.between has parameters, and is not called"),
        (lambda: Model(Routed), "router.weight is in layers.0.mlp"),
        (Skipping, "layers.1 does not read what"),
        (Failing, "a trace of the model failed: KeyError"),
        (lambda: nn.Linear(2, 2), "has no tensor-parallel plan"),
    ],
)
def test_no_plan_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ValueError, match=f"no sequence-parallel plan: .*{reason}"):
        sequence_parallel_plan(make())


def _refused(rank: int, world: int) -> None:
    """A model without a plan raises on all ranks and stays as it was."""
    model = Model(Mixing)
    with pytest.raises(ValueError, match="mixes tokens"):
        replace_linears(model, mesh=dist.group.WORLD, sequence_parallel=True)
    assert type(model.layers[0].mlp.up_proj) is nn.Linear
    odd = Model()
    for layer in odd.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(D, 9) for _ in range(2))
        layer.mlp.down_proj = nn.Linear(9, D)
    with pytest.raises(ValueError, match="gate_proj has 9 features, which 2 ranks do not divide"):
        replace_linears(odd, mesh=dist.group.WORLD, sequence_parallel=True)
    with pytest.raises(ValueError, match="needs a mesh"):
        replace_linears(odd, sequence_parallel=True)
    assert type(odd.lm_head) is nn.Linear


def test_models_without_a_plan_stay_as_they_were() -> None:
    run_ranks(2, _refused)
