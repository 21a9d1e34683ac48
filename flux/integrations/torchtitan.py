"""Experts of torchtitan whose tokens travel during the experts' products.

    torchtitan, comm_backend "standard"                 here
    all-to-all of counts, and of tokens once for each   gather_choices, DispatchGroupedGemm
    of their experts, permute
    w1 and w3, or mlp1, of each expert                  inside of it
    activation                                          the same
    w2, or mlp2, of each expert                         GroupedGemmCombine
    unpermute, all-to-all, weighted sum by token        inside of it

``--override.imports flux.integrations.torchtitan.experts`` switches it on. Configurations,
parameters, checkpoints, router, counts of tokens and shared experts are torchtitan's. Products are
in bfloat16, as torchtitan's; the weighted sums are in float32. A call that has no fused form takes
torchtitan's path, and the log ("flux.layers") tells why, once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import spmd_types
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import silu
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu

from flux.core.tensors import address_of
from flux.layers.eligible import has_hooks, reason_unsupported, say_once
from flux.moe import DispatchGroupedGemm, GroupedGemmCombine
from flux.ops import torch_internals
from flux.ops.autocast import autocast_off
from flux.ops.pool import User, pool_of

DTYPE = torch.bfloat16
"""Of torchtitan's grouped products, whatever dtype parameters have."""


_CHANGED = "an operation in place has changed"


class Products(NamedTuple):
    """Both products of this rank's experts, in DTYPE."""

    up: Callable[[], torch.Tensor]  # makes a copy
    up_bias: torch.Tensor | None
    activate: Callable[[torch.Tensor], torch.Tensor]
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedRoutedExperts(RoutedExperts):  # type: ignore[misc, unused-ignore]
    """torchtitan's RoutedExperts, for expert parallelism by its all-to-all.

    Constructor, ``forward`` and everything else: see torchtitan's class.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's configuration."""

    _flux_user: User | None = None

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Apply the experts to the own tokens. Collective.

        Args:
            x_BLD: tokens, as many on all ranks.
            topk_scores_BLK: factors of a token's experts.
            topk_expert_ids_BLK: a token's experts.
            num_local_tokens_per_expert_E: counts, which the fused path does not need.
        """
        of_tokens = (x_BLD, topk_scores_BLK, topk_expert_ids_BLK)
        if getattr(self.token_dispatcher, "ep_mesh", None) is not None:
            reason = self._reason_unfused(x_BLD)
            if reason is None:
                x, scores, experts = (tensor.flatten(0, 1) for tensor in of_tokens)
                return self._fused(x, scores, experts).view(x_BLD.shape)
            say_once(f"{type(self).__name__}: torchtitan's own path, because {reason}")
        return cast(torch.Tensor, super().forward(*of_tokens, num_local_tokens_per_expert_E))

    def _reason_unfused(self, x: torch.Tensor) -> str | None:
        """Return why torchtitan's own path is used, None if it is not; the same on all ranks."""
        dispatcher, inner = self.token_dispatcher, self.inner_experts
        if type(dispatcher) is not AllToAllTokenDispatcher:
            return f"the dispatcher is {type(dispatcher).__name__}"
        if type(inner) not in _PRODUCTS:
            return f"experts are {type(inner).__name__}"
        if has_hooks(inner):
            return "the experts have hooks, which a fused product does not call"
        if get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking():
            return "types of shards are checked"
        if 0 in x.shape:
            return f"tokens are {list(x.shape)}"
        group, weight = dispatcher.ep_mesh.get_group(), _local(next(inner.parameters()))
        if weight.shape[0] * group.size() != dispatcher.num_experts:
            return f"{group.size()} ranks cannot share {dispatcher.num_experts} experts evenly"
        return reason_unsupported(
            group.group_name, x.new_empty(0, dtype=DTYPE), weight.new_empty(0, dtype=DTYPE)
        )

    def _fused(self, x: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Apply the experts to own tokens [T, D]; scores and experts are [T, topk]."""
        group = self.token_dispatcher.ep_mesh.get_group()
        with autocast_off(x):
            own = _PRODUCTS[type(self.inner_experts)](self.inner_experts)
            weight = own.up()
            of_experts = self.token_dispatcher.num_experts, experts.shape[1]
            sizes = (*x.shape, weight.shape[1], own.down.shape[2], *of_experts)
            if torch.compiler.is_compiling():
                _build_for_graphs(group.group_name, sizes)
                up, down = _of_graphs[group.group_name, sizes]
            else:
                self._flux_user = self._flux_user or User()
                up, down = _ops(group.group_name, self._flux_user, sizes)
            experts, scores = up.gather_choices(experts, scores)
            with self._copied_again(weight, own.up):
                rows = up(x.to(DTYPE), weight, experts, own.up_bias)
            rows = own.activate(rows)
            out: torch.Tensor = down(rows, own.down, experts, scores, own.down_bias)
        return out.to(x.dtype)

    def _copied_again(
        self, weight: torch.Tensor, make: Callable[[], torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context whose backward makes ``weight``, a copy of parameters, again.

        Saved for the backward, the copies of all layers would be all experts once more, and FSDP
        would not free them. A checkpoint, which saves neither, and graphs are left alone.
        """
        plain = not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if not plain or torch_internals.saved_tensors_have_hooks():
            return nullcontext()
        parameters = list(self.inner_experts.parameters())
        versions = [parameter._version for parameter in parameters]
        address, shape = address_of(weight), weight.shape

        def pack(saved: torch.Tensor) -> Any:
            if address_of(saved) == address and saved.shape == shape:
                return None
            return saved.detach(), saved._version

        def unpack(packed: Any) -> torch.Tensor:
            if packed is None:
                if [parameter._version for parameter in parameters] != versions:
                    raise RuntimeError(f"{_CHANGED} experts' parameters before their backward")
                with torch.no_grad():
                    return make()
            saved, version = packed
            if saved._version != version:
                raise RuntimeError(f"{_CHANGED} tensors of experts before their backward")
            return cast(torch.Tensor, saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def close(self) -> None:
        """Free the ops that no other layer needs. Call it on every rank; the layer stays usable."""
        if self._flux_user is not None:
            pool_of(self.token_dispatcher.ep_mesh.get_group().group_name).release(self._flux_user)


def _ops(
    group_name: str, user: User, sizes: tuple[int, ...], stays: bool = False
) -> tuple[DispatchGroupedGemm, GroupedGemmCombine]:
    """Return the ops of both products. Collective if one has to be built.

    Args:
        group_name: of the ranks that share the experts.
        user: of the ops.
        sizes: own tokens, width, columns and depth of both products, experts, topk.
        stays: for a graph.
    """
    tokens, width, columns, depth, experts, topk = sizes
    pool = pool_of(group_name)
    options: Any = {"stays": stays, "experts": experts, "topk": topk, "ep": pool.world}
    m = tokens * pool.world
    kinds: Any = DispatchGroupedGemm, GroupedGemmCombine
    return (
        pool.op(kinds[0], user, m, columns, width, DTYPE, **options),
        pool.op(kinds[1], user, m, width, depth, DTYPE, **options),
    )


_of_graphs: dict[tuple[str, tuple[int, ...]], Any] = {}


@torch_internals.constant_in_graphs
def _build_for_graphs(group_name: str, sizes: tuple[int, ...]) -> None:
    """Build the ops that a graph of torch.compile has as constants, while it is traced."""
    _of_graphs[group_name, sizes] = _ops(group_name, pool_of(group_name).graphs, sizes, True)


class FusedSelectiveAC(SelectiveAC):  # type: ignore[misc, unused-ignore]
    """torchtitan's selective checkpointing, that moves no token again to recompute experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's configuration."""

    def get_save_ops(self) -> set[Any]:
        """Return torchtitan's ops whose results are saved, and those that move tokens."""
        names = ("gather_choices", "ag_grouped_gemm", "grouped_gemm_rs")
        ours = {getattr(torch.ops.flux, name).default for name in names}
        return cast(set[Any], super().get_save_ops()) | ours


@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=RoutedExperts.Config, exact=True, description="Flux: tokens travel in products."
)
def experts(config: RoutedExperts.Config) -> FusedRoutedExperts.Config:
    """Return the configuration of fused experts in place of torchtitan's."""
    return cast(FusedRoutedExperts.Config, derive(config, FusedRoutedExperts.Config))


@override(  # type: ignore[untyped-decorator, unused-ignore]
    target=SelectiveAC.Config, exact=True, description="Flux: saves what has travelled."
)
def selective_ac(config: SelectiveAC.Config) -> FusedSelectiveAC.Config:
    """Return the configuration of checkpointing that saves the results of fused experts."""
    return cast(FusedSelectiveAC.Config, derive(config, FusedSelectiveAC.Config))


def _gated(experts: Any) -> Products:
    def up() -> torch.Tensor:
        return torch.cat([_cast(experts.w1_EFD), _cast(experts.w3_EFD)], dim=1)

    def activate(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=1)
        return silu(gate) * up

    return Products(up, None, activate, _cast(experts.w2_EDF), None)


def _gpt_oss(experts: Any) -> Products:
    biases = (_cast(experts.mlp1_bias_EG), _cast(experts.mlp2_bias_ED))

    def activate(rows: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, swiglu(rows, limit=experts.swiglu_limit))

    up = partial(_cast, experts.mlp1_weight_EGD)
    return Products(up, biases[0], activate, _cast(experts.mlp2_weight_EDF), biases[1])


_PRODUCTS: dict[type, Callable[[Any], Products]] = {
    GroupedExperts: _gated,
    GptOssGroupedExperts: _gpt_oss,
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cast(parameter: torch.Tensor) -> torch.Tensor:
    return _local(parameter).to(DTYPE)
