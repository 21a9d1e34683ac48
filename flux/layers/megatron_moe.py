"""Drop-in form of Megatron-core's mixture of experts: grouped products that move the tokens.

    Megatron, dispatcher allgather or alltoall     here
    gather of routing map and probabilities        gather of topk experts and probabilities
    gather (or all-to-all) of tokens, permute      AGGroupedGemm over the ranks of tp * ep;
                                                   with ep > 1 DispatchGroupedGemm
    fc1 of each expert                             inside of it
    activation, probabilities                      the same
    fc2 of each expert                             GroupedGemmRS; with ep > 1 GroupedGemmCombine
    unpermute, ReduceScatter (or all-to-all)       inside of it

It is Megatron's own class except for these steps: router, shared experts, recomputation, parameters
and checkpoints are Megatron's. ``tp_comm_overlap`` switches it on, as for linear layers. A layer
that cannot be fused uses Megatron's path, and the log ("flux.layers") records the reason once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.utils import get_pg_rank, get_pg_size
from torch.nn.utils.parametrize import type_before_parametrizations

from flux.layers.eligible import has_hooks, reason_unsupported, say_once
from flux.moe import AGGroupedGemm, DispatchGroupedGemm, GroupedGemmCombine, GroupedGemmRS
from flux.moe.ops import Weights
from flux.ops.autocast import compute_dtype
from flux.ops.pool import User, pool_of

GROUPED = getattr(megatron_experts, "GroupedMLP", None)
"""Experts whose weights are two tensors. Its own forward needs the package grouped_gemm."""


def chosen(
    routing_map: torch.Tensor, probs: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, [T, topk], and their probabilities.

    Args:
        routing_map: bool [T, experts], of which each token has ``topk`` at most.
        probs: [T, experts].
        topk: of the router. Choices that a capacity has dropped are -1.
    """
    order = routing_map.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :topk]
    present = routing_map.gather(1, order)
    return order.masked_fill(~present, -1), probs.gather(1, order)


class MoELayer(moe_layer.MoELayer):  # type: ignore[misc, unused-ignore]
    """Megatron-core's MoELayer whose tokens travel during the experts' products.

    Constructor, ``forward`` and everything else: see Megatron's class.
    """

    overlap: bool | None = None
    """True or False override the configuration's tp_comm_overlap; None follows it."""

    _flux_user: User | None = None
    _routing_map: torch.Tensor | None = None  # of the call that is inside, if it is fused

    def _reason_unfused(self, hidden: torch.Tensor, routing_map: torch.Tensor) -> str | None:
        """Return why Megatron's own path is used, None if it is not; on all ranks or on none.

        Collective, unless the configuration, which is the same on all ranks, rules it out.
        """
        config, experts = self.config, self.experts
        on = config.tp_comm_overlap if self.overlap is None else self.overlap
        if not on:
            return "tp_comm_overlap is off in the configuration"
        if config.moe_token_dispatcher_type not in ("allgather", "alltoall"):
            return f"the dispatcher is {config.moe_token_dispatcher_type}"
        if type(experts) not in (megatron_experts.SequentialMLP, GROUPED):
            return f"experts are {type(experts).__name__}, not SequentialMLP or GroupedMLP"
        for name in _UNSUPPORTED:
            if getattr(config, name, None):
                return f"{name} = {getattr(config, name)} is not supported by flux"
        if self.shared_expert_overlap:
            return "moe_shared_expert_overlap is not supported by flux"
        if getattr(experts, "activation_recompute", False):
            return "recompute_modules has moe_act, which flux does not support"
        parts = get_pg_size(experts.tp_group)
        group = self.token_dispatcher.tp_ep_group
        rank = get_pg_rank(self.ep_group) * parts + get_pg_rank(experts.tp_group)
        if rank != get_pg_rank(group) or get_pg_size(group) != parts * get_pg_size(self.ep_group):
            return "ranks of a tensor-parallel group of experts are not neighbours"
        weight = next(experts.parameters())
        reason = reason_unsupported(group.group_name, hidden, weight)
        if reason is not None:  # the same on all ranks, and their group may have no collective
            return reason
        reason = _reason_own_forward(experts) or self._reason_choices(routing_map)
        return self._agreed(hidden, reason)

    def _reason_choices(self, routing_map: torch.Tensor) -> str | None:
        """Return why a product for ``moe_router_topk`` experts of each token is not what is asked.

        Megatron's router chooses so many. Others may choose more, and its dispatchers take them.
        """
        router, topk = self.router, self.config.moe_router_topk
        hooked = getattr(router, "_forward_hooks", None) or _is_patched(router)
        if type(router) is megatron_router.TopKRouter and not hooked:
            return None
        if bool((routing_map.sum(dim=1) > topk).any()):
            return f"the router chose more than moe_router_topk = {topk} experts of a token"
        return None

    def _agreed(self, hidden: torch.Tensor, reason: str | None) -> str | None:
        """Return the reason of this rank, or that another one has one. Collective.

        Dispatcher allgather gathers equal shares, and Megatron does not check them.
        """
        group = self.token_dispatcher.tp_ep_group
        own = torch.tensor([hidden.numel(), reason is None], device=hidden.device)
        everybody = own.new_empty(2 * get_pg_size(group))
        dist.all_gather_into_tensor(everybody, own, group=group)
        counts, fused = everybody.view(-1, 2).unbind(1)
        if reason is None and not bool(fused.all()):
            return "another rank uses it"
        alltoall = self.config.moe_token_dispatcher_type == "alltoall"
        if reason is None and alltoall and bool((counts != own[0]).any()):
            return "ranks have different numbers of tokens"
        return reason

    def _fuses(self, hidden: torch.Tensor, routing_map: torch.Tensor) -> bool:
        """Return whether to use the fused path; log the reason once if not."""
        if get_pg_size(self.token_dispatcher.tp_ep_group) == 1:
            return False  # no communication: nothing to fuse or to log
        reason = self._reason_unfused(hidden, routing_map)
        if reason is not None:
            say_once(f"{type(self).__name__}: Megatron's own path, because {reason}")
        return reason is None

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the tokens where they are until the first product gathers them."""
        self._routing_map = None
        if not self._fuses(hidden_states, routing_map):
            plain: tuple[torch.Tensor, torch.Tensor]
            plain = super().preprocess(hidden_states, probs, routing_map)
            return plain
        self._routing_map, self._shape = routing_map, hidden_states.shape
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Do nothing: the first product gathers the tokens."""
        if self._routing_map is None:
            return super().dispatch(hidden_states, probs)
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """Gather, multiply and sum tokens. Collective.

        Args:
            hidden_states: own tokens, [T, hidden].
            probs: [T, experts].

        Returns:
            The own tokens' sums, [T, hidden], and None.
        """
        if self._routing_map is None:
            return super().routed_experts_compute(hidden_states, probs)
        w1, w2 = self._weights()
        up, down = self._ops(hidden_states, w1)
        experts, weights = chosen(self._routing_map, probs, self.config.moe_router_topk)
        experts, weights = up.gather_choices(experts, weights)
        b1, b2 = (_biases(self.experts, name) for name in ("linear_fc1", "linear_fc2"))
        hidden = self._activated(up(hidden_states, w1, experts, b1))
        return down(hidden, w2, experts, weights, b2), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Do nothing: the second product has scattered the sums."""
        if self._routing_map is None:
            return cast(torch.Tensor, super().combine(output))
        return output

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """Restore the shape and add the shared experts' output."""
        if self._routing_map is None:
            return cast(torch.Tensor, super().postprocess(output, shared_expert_output))
        self._routing_map = None
        output = output.reshape(self._shape)
        return output if shared_expert_output is None else output + shared_expert_output

    def _weights(self) -> tuple[Weights, Weights]:
        """Return both products' weights: of each expert [N, K], or of GroupedMLP [E, K, N]."""
        experts, width = self.experts, self.config.hidden_size
        if type(experts) is GROUPED:
            count = experts.num_local_experts
            first, second = experts.weight1, experts.weight2
            return first.view(count, width, -1), second.view(count, -1, width)
        layers = experts.local_experts
        return [e.linear_fc1.weight for e in layers], [e.linear_fc2.weight for e in layers]

    def _ops(self, hidden: torch.Tensor, w1: Weights) -> tuple[AGGroupedGemm, GroupedGemmRS]:
        """Return the ops of both products. Collective if one has to be built."""
        config, pool = self.config, pool_of(self.token_dispatcher.tp_ep_group)
        if self._flux_user is None:
            self._flux_user = User()
        parts = get_pg_size(self.experts.tp_group)
        grouped = type(self.experts) is GROUPED
        wide = w1[0].shape[1 if grouped else 0] * parts
        deep = wide // 2 if config.gated_linear_unit else wide
        m = hidden.shape[0] * get_pg_size(self.token_dispatcher.tp_ep_group)
        sizes = {"experts": config.num_moe_experts, "topk": config.moe_router_topk}
        options: Any = {"transpose_weight": grouped, **sizes, "ep": get_pg_size(self.ep_group)}
        width, dtype = hidden.shape[1], compute_dtype(hidden)
        first: Any = AGGroupedGemm if options["ep"] == 1 else DispatchGroupedGemm
        second: Any = GroupedGemmRS if options["ep"] == 1 else GroupedGemmCombine
        up = pool.op(first, self._flux_user, m, wide, width, dtype, **options)
        down = pool.op(second, self._flux_user, m, width, deep, dtype, **options)
        return cast(AGGroupedGemm, up), cast(GroupedGemmRS, down)

    def _activated(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the activation of Megatron's MLP to the first product, [rows, columns]."""
        config = self.config
        if type(self.experts) is GROUPED:
            return cast(torch.Tensor, self.experts.activation_func(hidden))
        if not config.gated_linear_unit:
            return cast(torch.Tensor, config.activation_func(hidden))
        gate, up = hidden.chunk(2, dim=-1)
        limit = getattr(config, "activation_func_clamp_value", None)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        offset = getattr(config, "glu_linear_offset", 0.0)
        return cast(torch.Tensor, config.activation_func(gate) * (up + offset if offset else up))

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank; the layer stays usable."""
        if self._flux_user is not None:
            pool_of(self.token_dispatcher.tp_ep_group).release(self._flux_user)


_UNSUPPORTED = (
    "fp8",
    "fp4",
    "moe_apply_probs_on_input",
    "moe_pad_expert_input_to_capacity",
    "moe_latent_size",
    "gradient_accumulation_fusion",
    "use_te_activation_func",
    "delay_wgrad_compute",
    "overlap_dispatch_backward_with_experts_wgrad",
)
"""Settings with which Megatron's own path is used, if they are on."""
_LINEAR = "ColumnParallelLinear", "RowParallelLinear"
_PLAIN = {
    "megatron.core.transformer.mlp": ("MLP",),
    "megatron.core.tensor_parallel.layers": _LINEAR,
    "megatron.core.extensions.transformer_engine": tuple(f"TE{name}" for name in _LINEAR),
    "flux.layers.megatron": _LINEAR,
}
"""Modules and their classes that compute no more than a product with their weight, as experts."""


def _is_patched(module: torch.nn.Module) -> bool:
    """Return whether an instance has a forward of its own, or a router its own way to choose."""
    return not {"forward", "routing"}.isdisjoint(vars(module))


def _reason_own_forward(experts: torch.nn.Module) -> str | None:
    """Return why products of the experts' weights are not what their modules compute."""
    for module in experts.modules():
        if has_hooks(module):
            return "the experts have hooks, which a grouped product does not call"
        if _is_patched(module):
            return f"forward of a {type(module).__name__} of the experts was replaced"
    for expert in getattr(experts, "local_experts", ()):
        for module in (expert, expert.linear_fc1, expert.linear_fc2):
            kind = type_before_parametrizations(module)
            if kind.__name__ not in _PLAIN.get(kind.__module__, ()):
                return f"experts have a {kind.__name__}, which may compute something else"
        if expert.activation_func is not expert.config.activation_func:
            return "activation_func of an expert is not that of the configuration"
    return None


def _biases(experts: Any, name: str) -> torch.Tensor | None:
    """Return the biases of all experts, [experts, columns], or None."""
    if type(experts) is GROUPED:
        return None
    biases = [getattr(layer, name).bias for layer in experts.local_experts]
    return None if biases[0] is None else torch.stack(biases)
