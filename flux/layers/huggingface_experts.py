"""Experts of Hugging Face Transformers whose sums over ranks are hidden behind their products.

Transformers keeps all experts of a layer in two parameters of one module. All ranks call it with
the same tokens (its styles ``moe_tp_experts`` and, where experts are split over the ranks of the
tokens' group, ``ep_dispatch_experts``):

    Transformers                                    here
    products of each expert, weighted sum           expand_tokens, the model's gate, GroupedGemmAR
    all-reduce of the sums                          inside of GroupedGemmAR
    backward: all-reduces of gradients              beside the products of both

Parameters stay Transformers'. A call that has no fused form runs Transformers' own forward, and the
log ("flux.layers") tells why, once.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from flux.layers.eligible import reason_unsupported, say_once
from flux.moe import GroupedGemmAR, expand_tokens
from flux.ops.autocast import autocast_off, cast_once, compute_dtype
from flux.ops.pool import User, pool_of

PORTABLE = (None, "eager", "batched_mm", "grouped_mm")
"""Transformers' implementations of experts that compute what ours does, on plain weights."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module keeps its experts as Transformers' interface for them asks."""
    names = ("has_gate", "has_bias", "is_transposed", "down_proj", "config")
    return all(hasattr(module, name) for name in names)


class ExpertsForward:
    """The forward of one module of experts. A deep copy of the module gets its own.

    Args:
        module: whose forward it is; its parameters are sharded.
        own: Transformers' forward, for calls that have no fused form.
        group: of the ranks that the experts are split over; all have the same tokens.
        split_experts: whether each rank has whole experts; else a part of each.
    """

    def __init__(
        self, module: nn.Module, own: Any, group: dist.ProcessGroup, split_experts: bool
    ) -> None:
        self._module: Any = module
        self._own = own
        self._group_name: str = group.group_name
        self._world = group.size()
        self._split = split_experts
        self._user = User()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Apply the experts: hidden states [T, H], experts and weights [T, topk]. Collective."""
        reason = self._reason_unfused(args, kwargs)
        if reason is None:
            return self._fused(*args)
        say_once(f"{type(self._module).__name__}: Transformers' own path, because {reason}")
        out: torch.Tensor = self._own(*args, **kwargs)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsForward:
        twin = copy.copy(self)
        twin._module, twin._own = (copy.deepcopy(o, memo) for o in (self._module, self._own))
        twin._user = User()
        return twin

    def _reason_unfused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why Transformers' own path is used, None if it is not; the same on all ranks."""
        module = self._module
        if torch.compiler.is_compiling():
            return "torch.compile traces it"
        if kwargs or len(args) != 3 or not all(isinstance(a, torch.Tensor) for a in args):
            return "it is not called with hidden states, experts and weights"
        x, experts, _ = (_local(tensor) for tensor in args)
        if x.dim() != 2 or experts.dim() != 2 or 0 in x.shape or 0 in experts.shape:
            return f"hidden states are {list(x.shape)}, experts {list(experts.shape)}"
        kind = getattr(module.config, "_experts_implementation", None)
        if kind not in PORTABLE:
            return f"its implementation of experts is {kind!r}"
        if getattr(module, "has_post_expert_norm", False):
            return "it normalizes each expert's output"
        if module.has_bias and not self._split:
            return "each rank would add the bias of a part of an expert"
        up, down = self._weights()
        own, whole = self._depth(down)
        world = self._world
        # By whole sizes: of 7 rows 2 ranks have 4 and 3, and all have to come to the same answer.
        shared, part = (down.shape[0], whole) if self._split else (whole, whole // world)
        uneven = isinstance(down, DTensor) and shared % world != 0
        if uneven or own != part or not self._fits(up, own, x.shape[1]):
            return f"{world} ranks cannot share its weights evenly"
        return reason_unsupported(self._group_name, x, _local(up))

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        module = self._module
        return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj

    def _depth(self, down: torch.Tensor) -> tuple[int, int]:
        """Return the depth of the second product: this rank's part, and the whole."""
        dim = -2 if self._module.is_transposed else -1
        return _local(down).shape[dim], down.shape[dim]

    def _fits(self, up: torch.Tensor, own: int, width: int) -> bool:
        sizes = list(_local(up).shape[1:])
        if self._module.is_transposed:
            sizes.reverse()
        return sizes == [own * (2 if self._module.has_gate else 1), width]

    def _fused(
        self, hidden: torch.Tensor, experts: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        module, pool = self._module, pool_of(self._group_name)
        hidden, experts, probs = (_local(tensor) for tensor in (hidden, experts, probs))
        dtype = compute_dtype(hidden)
        up, down = self._weights()
        ep = pool.world if self._split else 1
        total = _local(up).shape[0] * ep
        options: Any = {"experts": total, "topk": experts.shape[1], "ep": ep}
        sizes = hidden.shape[0], hidden.shape[1], self._depth(down)[1]
        op: Any = pool.op(
            cast(Any, GroupedGemmAR),
            self._user,
            *sizes,
            dtype,
            transpose_weight=module.is_transposed,
            **options,
        )
        biases: list[Any] = [None, None]
        if module.has_bias:
            first = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
            biases = [getattr(module, name) for name in (first, "down_proj_bias")]
            biases = [cast_once(_local(bias), dtype) for bias in biases]
        up, down = (cast_once(_local(weight), dtype) for weight in (up, down))
        with autocast_off(hidden):
            rows = expand_tokens(op, hidden.to(dtype), up, experts, biases[0])
            rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
            out: torch.Tensor = op(rows, down, experts, probs, biases[1])
        return out.to(hidden.dtype)

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank."""
        pool_of(self._group_name).release(self._user)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part
