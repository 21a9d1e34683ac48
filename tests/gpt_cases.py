"""A small GPT of Megatron-core's, with its own linear layers or with ours, trained on the CPU."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_cases as mc

VOCAB, SEQUENCE, BATCH, STEPS = 64, 16, 2, 30


@dataclass(frozen=True)
class GPTCase:
    """A model and how it is trained; ``ours`` says how our layers get into it."""

    sequence_parallel: bool = False
    tied: bool = False
    accumulate: bool = False
    recompute: str = ""
    swiglu: bool = False

    def settings(self) -> dict[str, Any]:
        """What the configuration says of it."""
        settings: dict[str, Any] = {
            "num_layers": 4,
            "sequence_parallel": self.sequence_parallel,
            "gradient_accumulation_fusion": self.accumulate,
        }
        if self.recompute == "full":
            settings |= {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        elif self.recompute:
            modules = self.recompute.split(",")
            settings |= {"recompute_granularity": "selective", "recompute_modules": modules}
        if self.swiglu:
            silu = torch.nn.functional.silu
            settings |= {"gated_linear_unit": True, "activation_func": silu}
            settings |= {"normalization": "RMSNorm", "add_bias_linear": False}
        return settings


class Norm:
    """A norm that sequence parallelism knows of, which in Megatron-core is one that needs APEX."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        made = getattr(torch.nn, config.normalization)(hidden_size, eps)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


def build(case: GPTCase, tp: int, ours: str = "") -> Any:
    """The model, with values that depend on the case alone.

    ``ours``: "" for Megatron's linear layers, "spec" for ours in the layers by specification, and
    "replace" for ours everywhere, the output layer included.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from flux.layers import megatron as flux_layers
    from flux.layers import replace_linears

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if ours == "spec":
        spec = flux_layers.flux_spec(spec)
    config = mc.config(tp, **case.settings())
    torch.manual_seed(41)
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([spec] * config.num_layers, Norm),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=case.tied,
    )
    return replace_linears(model) if ours == "replace" else model


def batches(count: int) -> list[torch.Tensor]:
    """Tokens [BATCH, SEQUENCE + 1] that can be learnt: each follows from the one before."""
    generator = torch.Generator().manual_seed(43)
    starts = torch.randint(VOCAB, (count, BATCH, 1), generator=generator)
    steps = torch.arange(SEQUENCE + 1) * 5
    return list((starts + steps) % VOCAB)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, by Megatron's own vocabulary-parallel form."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    causal = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    return model(inputs, positions, causal, labels=labels).mean()


def wrapped(model: Any, accumulate: bool) -> Any:
    """Megatron's data parallelism around the model: its gradient buffers, its final reductions."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, ddp, model)


def gradients(ddp: Any, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step, as Megatron's optimizers would get them."""
    from megatron.core.distributed import finalize_model_grads

    ddp.zero_grad_buffer()
    loss = loss_of(ddp, tokens)
    loss.backward()
    finalize_model_grads([ddp])
    grads = {name: p.main_grad for name, p in ddp.module.named_parameters()}
    return float(loss), grads


def train(case: GPTCase, tp: int, ours: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the gradients of the first."""
    with mc.apex() if case.accumulate else contextlib.nullcontext():
        ddp = wrapped(build(case, tp, ours), case.accumulate)
        optimizer = torch.optim.Adam(ddp.parameters(), 2e-3)
        losses, first = [], {}
        for tokens in batches(STEPS):
            loss, grads = gradients(ddp, tokens)
            first = first or {name: grad.clone() for name, grad in grads.items()}
            for name, parameter in ddp.module.named_parameters():
                parameter.grad = grads[name]
            optimizer.step()
            optimizer.zero_grad()  # Megatron's buffers are not to be what autograd adds to
            losses.append(loss)
    return losses, first


def true_gradients(case: GPTCase, tp: int) -> dict[str, torch.Tensor]:
    """Gradients of the first step in float64, by Megatron's own layers."""
    plain = replace(case, accumulate=False, recompute="")
    model = build(plain, tp).double()
    ddp = wrapped(model, False)
    return gradients(ddp, batches(1)[0])[1]


def check_training(rank: int, world: int, case: GPTCase, ours: str) -> tuple[float, float]:
    """Train both; the first and the last loss."""
    from flux.layers import close_pools
    from flux.layers.megatron import ColumnParallelLinear, RowParallelLinear

    with mc.megatron(world):
        plain = replace(case, accumulate=False)
        found = [type(m) for m in build(plain, world, ours).modules()]
        counts = [found.count(cls) for cls in (ColumnParallelLinear, RowParallelLinear)]
        assert counts == [8 + (ours == "replace"), 8], counts
        theirs, their_grads = train(case, world, "")
        mine, grads = train(case, world, ours)
        for step, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            assert abs(a - b) <= 1e-5 * abs(a), f"{case}: step {step}: {a} and {b}"
        truth = true_gradients(case, world)
        assert grads.keys() == their_grads.keys() == truth.keys()
        for name, right in truth.items():
            # No further from the truth than twice what Megatron's own are, but for roundings.
            scale = float(right.abs().max())
            allowed = 2 * float((their_grads[name] - right).abs().max()) + 2e-6 * scale
            error = float((grads[name] - right).abs().max())
            assert error <= allowed, f"{case}: {name} is off by {error:.1e}, of {scale:.1e}"
        close_pools()
    return mine[0], mine[-1]


# -- checkpoints -----------------------------------------------------------------------------------


def _logits(model: Any) -> torch.Tensor:
    """All logits [sequence, batch, VOCAB] for some tokens."""
    tokens = batches(1)[0][:, :-1].contiguous()
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    causal = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    model.output_layer.gather_output = True
    with torch.no_grad():
        return model(tokens, positions, causal)


@contextlib.contextmanager
def _may_have_children() -> Iterator[None]:
    """Megatron writes checkpoints with a process of its own, which those of tests may not start."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = True


def _state(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def save(rank: int, world: int, case: GPTCase, ours: str, folder: Path) -> torch.Tensor:
    """Save a model that differs from what ``build`` makes; its logits."""
    from megatron.core import dist_checkpointing

    with mc.megatron(world), _may_have_children():
        model = build(case, world, ours)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        dist_checkpointing.save(_state(model), str(folder))
        return _logits(model)


def reload(
    rank: int, world: int, case: GPTCase, ours: str, source: Path, target: Path
) -> torch.Tensor:
    """Load a checkpoint, save it once more, and return the logits."""
    from megatron.core import dist_checkpointing

    from flux.layers import close_pools

    with mc.megatron(world), _may_have_children():
        model = build(case, world, ours)
        state = dist_checkpointing.load(_state(model), str(source))
        model.load_state_dict(state)
        dist_checkpointing.save(_state(model), str(target))
        logits = _logits(model)
        close_pools()
    dist.barrier()
    return logits
