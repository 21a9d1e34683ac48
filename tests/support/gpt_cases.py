"""A small GPT of Megatron-core's, with its own linear layers or with ours, trained on the CPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_cases as mc
from flux.bench.megatron_cpu import data_parallel, gpt, hybrid, step
from harness import STRESS

ALL = STRESS > 1
VOCAB, SEQUENCE, BATCH = 64, 16, 2
LAYERS, STEPS = (4, 30) if ALL else (2, 6)


@dataclass(frozen=True)
class GPTCase:
    """A model and how it is trained; ``ours`` says how our layers get into it."""

    sequence_parallel: bool = False
    tied: bool = False
    accumulate: bool = False
    recompute: str = ""
    swiglu: bool = False
    hybrid: bool = False  # a HybridModel, which takes the place of GPTModel in newer releases

    def settings(self) -> dict[str, Any]:
        """What the configuration says of it."""
        settings: dict[str, Any] = {
            # Attention and MLP are layers of their own in a hybrid model.
            "num_layers": 2 * LAYERS if self.hybrid else LAYERS,
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


def build(case: GPTCase, tp: int, ours: str = "") -> Any:
    """The model, with values that depend on the case alone.

    ``ours``: "" for Megatron's linear layers, "spec" for ours in the layers by specification, and
    "replace" for ours everywhere, the output layer included.
    """
    from flux.layers import replace_linears

    config = mc.config(tp, **case.settings())
    torch.manual_seed(41)
    if case.hybrid:
        model = hybrid(config, VOCAB, SEQUENCE)
    else:
        model = gpt(config, VOCAB, SEQUENCE, tied=case.tied, flux_layers=ours == "spec")
    return replace_linears(model) if ours == "replace" else model


def batches(count: int) -> list[torch.Tensor]:
    """Tokens [BATCH, SEQUENCE + 1] that can be learnt: each follows from the one before."""
    generator = torch.Generator().manual_seed(43)
    starts = torch.randint(VOCAB, (count, BATCH, 1), generator=generator)
    steps = torch.arange(SEQUENCE + 1) * 5
    return list((starts + steps) % VOCAB)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step, by name."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train(case: GPTCase, tp: int, ours: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and the gradients of the first."""
    with mc.apex() if case.accumulate else contextlib.nullcontext():
        ddp = data_parallel(build(case, tp, ours))
        optimizer = torch.optim.Adam(ddp.parameters(), 2e-3)
        losses, first = [], {}
        for tokens in batches(STEPS):
            losses.append(step(ddp, tokens))
            first = first or gradients(ddp.module)
            optimizer.step()
    return losses, first


def true_gradients(case: GPTCase, tp: int) -> dict[str, torch.Tensor]:
    """Gradients of the first step in float64, by Megatron's own layers."""
    plain = replace(case, accumulate=False, recompute="")
    model = build(plain, tp).double()
    ddp = data_parallel(model)
    step(ddp, batches(1)[0])
    return gradients(ddp.module)


def check_training(rank: int, world: int, case: GPTCase, ours: str) -> tuple[float, float]:
    """Train both; the first and the last loss."""
    from flux.layers import close_pools
    from flux.layers.megatron import ColumnParallelLinear, RowParallelLinear

    with mc.megatron(world):
        plain = replace(case, accumulate=False)
        types = [type(m) for m in build(plain, world, ours).modules()]
        counts = [types.count(cls) for cls in (ColumnParallelLinear, RowParallelLinear)]
        assert counts == [2 * LAYERS + (ours == "replace"), 2 * LAYERS], counts
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
def _saving() -> Iterator[None]:
    """Megatron-core's way of writing checkpoints, in a rank that is to leave no process behind.

    It starts writers, which daemons such as ranks may not, and a server for a queue between them
    and itself, which outlives a rank that is ended by a signal. A queue of this process will do.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with (
        mock.patch.dict(config, daemon=False),
        mock.patch.object(filesystem_async, "_results_queue", queue.Queue()),
    ):
        yield


def _state(model: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def save(rank: int, world: int, case: GPTCase, ours: str, folder: Path) -> torch.Tensor:
    """Save a model that differs from what ``build`` makes; its logits."""
    from megatron.core import dist_checkpointing

    with mc.megatron(world), _saving():
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

    with mc.megatron(world), _saving():
        model = build(case, world, ours)
        state = dist_checkpointing.load(_state(model), str(source))
        model.load_state_dict(state)
        dist_checkpointing.save(_state(model), str(target))
        logits = _logits(model)
        close_pools()
    dist.barrier()
    return logits
