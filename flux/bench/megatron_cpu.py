"""Run Megatron-core without a GPU, for tests, benchmarks and examples only.

Megatron puts new tensors on ``torch.cuda.current_device()``; here that is the CPU. It keeps states
of the GPU's random number generators, and waits for the GPU; here both do nothing. The rest of its
tensor parallelism runs unchanged.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from flux.layers import close_pools


@contextlib.contextmanager
def megatron_on_cpu(tensor_parallel: int, **options: Any) -> Iterator[None]:
    """Set up Megatron-core's parallel state over all ranks of the default group. Collective.

    Args:
        tensor_parallel: number of tensor-parallel ranks.
        **options: further arguments of ``parallel_state.initialize_model_parallel``.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # warnings that APEX and Transformer Engine are missing
        for module, name, stand_in in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "current_stream", mock.Mock()),  # to wait for what other streams do
            (torch.cuda, "Stream", mock.Mock()),  # of the dispatcher alltoall
            (random, "_get_cuda_rng_state", lambda *_, **__: torch.zeros(0)),
            (random, "_set_cuda_rng_state", lambda *_, **__: None),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads it, and did not set it
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        exchange = _with_lists(token_dispatcher.all_to_all)
        stack.enter_context(mock.patch.object(token_dispatcher, "all_to_all", exchange))
        groups = stack.enter_context(_collected_groups())
        parallel_state.initialize_model_parallel(tensor_parallel, **options)
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        try:
            yield
            close_pools()
        finally:
            parallel_state.destroy_model_parallel()
            for group in list(groups):
                dist.destroy_process_group(group)


def _with_lists(all_to_all: Any) -> Any:
    """Return Megatron's all_to_all for splits that are tensors, as they stay without a GPU."""

    def exchange(group: Any, x: torch.Tensor, outgoing: Any = None, incoming: Any = None) -> Any:
        splits = (s.tolist() if isinstance(s, torch.Tensor) else s for s in (outgoing, incoming))
        return all_to_all(group, x, *splits)

    return exchange


@contextlib.contextmanager
def _collected_groups() -> Iterator[list[dist.ProcessGroup]]:
    """Collect the groups that are made within the context, and destroy them at its end.

    Megatron drops most of its groups without destroying them. About twenty gloo groups have a
    hundred threads, each of which wakes up every 10 ms.
    """
    groups: list[dist.ProcessGroup] = []
    original, original_destroy = dist.new_group, dist.destroy_process_group

    def new_group(*args: Any, **options: Any) -> Any:
        group = original(*args, **options)
        if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
            groups.append(group)
        return group

    def destroy_process_group(group: Any = None) -> None:
        original_destroy(group)
        groups[:] = [other for other in groups if other is not group]

    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist, "destroy_process_group", destroy_process_group),
    ):
        yield groups


class Norm:
    """A norm that supports sequence parallelism. Megatron-core's own needs APEX for that."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Return torch's norm of the configured name, with marked parameters."""
        norm = getattr(torch.nn, config.normalization)(hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def gpt(
    config: Any, vocab_size: int, sequence: int, *, tied: bool = False, flux_layers: bool = False
) -> Any:
    """Return a GPTModel of local modules; ``flux_layers``: with our linear layers in its spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from flux.layers.megatron import flux_spec

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if flux_layers:
        spec = flux_spec(spec)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([spec] * config.num_layers, Norm),
        vocab_size=vocab_size,
        max_sequence_length=sequence,
        share_embeddings_and_output_weights=tied,
    )


def hybrid(config: Any, vocab_size: int, sequence: int) -> Any:
    """Return a HybridModel (megatron-core 0.17 and newer) of local modules.

    Attention and MLP layers take turns, ``config.num_layers`` in all.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    parts = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    layers = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    with mock.patch.object(hybrid_block, "TENorm", Norm):  # Transformer Engine's, at the end
        return HybridModel(
            config=config,
            hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=layers),
            vocab_size=vocab_size,
            max_sequence_length=sequence,
            hybrid_layer_pattern="*-" * (config.num_layers // 2),
        )


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return Megatron's mean cross entropy of the last tokens of [batch, sequence + 1]."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch, sequence = inputs.shape
    positions = torch.arange(sequence).expand(batch, -1)
    causal = torch.triu(torch.ones(1, 1, sequence, sequence), 1).bool()
    loss: torch.Tensor = model(inputs, positions, causal, labels=labels).mean()
    return loss


def data_parallel(model: Any) -> Any:
    """Wrap a model in Megatron's data parallelism: gradient buffers and final reductions."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, ddp, model)


def step(ddp: Any, tokens: torch.Tensor) -> float:
    """Return the loss of one step.

    Gradients are in ``parameter.grad``, as Megatron's optimizers get them.
    """
    from megatron.core.distributed import finalize_model_grads

    for parameter in ddp.parameters():
        parameter.grad = None  # autograd must not add to Megatron's buffers
    ddp.zero_grad_buffer()
    loss = loss_of(ddp, tokens)
    loss.backward()
    finalize_model_grads([ddp])
    for parameter in ddp.parameters():
        parameter.grad = parameter.main_grad
    return float(loss)
