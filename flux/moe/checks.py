"""Checks of the calls of ops of mixtures of experts, before any communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flux.core.call import Call, CallChecker, rows_of_call
from flux.core.sparse_call import DeviceChoices, MadeMaps, RoutedRows
from flux.core.spec import OpSpec
from flux.core.tensors import Matrices
from flux.moe.product import Experts, GatherProduct, SumProduct
from flux.moe.routing import Routing, check_integers, routing_of

MOST_ROWS = 1 << 30
DEVICE_INTEGERS = (torch.int32, torch.int64)
"""What kernels read experts as."""


class Operands:
    """What a call passes beside x: it takes the place of a dense op's weights.

    Attributes:
        weights: one tensor of all of the rank's experts, or one for each.
        bias: [experts, N], or None.
        experts: [M, topk], of all tokens.
        probs: [M, topk], or None.
        keeps: whether the tokens that are multiplied are kept.
        max_rows: routed rows that there is room for; None: as many as there are.
        scales: of x and of the weights, or none.
        on_device: whether kernels make the maps, of experts that the host does not read.
        make_maps: has a kernel make the maps ahead of the call.
        routed: tokens that are kept, [R, K], once the call has been checked.
        rows: R, if the host knows it and there is room for more.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        experts: torch.Tensor,
        probs: torch.Tensor | None = None,
        keeps: bool = False,
        max_rows: int | None = None,
        scales: Sequence[torch.Tensor] = (),
    ) -> None:
        self.weights = weights
        self.bias = bias
        self.experts = experts
        self.probs = probs
        self.keeps = keeps
        self.max_rows = max_rows
        self.scales = scales
        self.on_device = False
        self.make_maps: Callable[[DeviceChoices], MadeMaps] | None = None
        self.routed: torch.Tensor | None = None
        self.rows: int | None = None


class GroupedChecker(CallChecker):
    """Checks the calls of an op of a mixture of experts on one rank."""

    def __init__(self, spec: OpSpec, world: int, rank: int, device: torch.device) -> None:
        super().__init__(spec, world, rank, device)
        (columns,) = self.columns
        self.rows_of_weight = columns * (2 if spec.gated else 1)
        assert spec.experts is not None
        self.total = spec.experts
        self.first, self.count = spec.local_experts(world, rank)
        self.adds_bias = rank % (world // spec.ep) == 0

    def check(
        self,
        x: torch.Tensor,
        weights: Any,
        biases: Sequence[torch.Tensor | None],
        m: int | None,
        scales: Sequence[torch.Tensor] = (),
    ) -> Call:
        """Check a call's arguments: see ``CallChecker.check``; ``weights`` are ``Operands``."""
        operands: Operands = weights
        spec, label = self.spec, self.spec.label
        routing = self._routed(operands)
        x = self._tensor("x", x, spec.dtype)
        scale_x, of_weights = self._expert_scales(operands.scales, x)
        if x.dim() != 2 or x.shape[1] != self.k:
            raise ValueError(f"{label}: x must be [rows, {self.k}], got {list(x.shape)}")
        m = operands.experts.shape[0]
        if spec.op.gathers:
            m, rows = rows_of_call(spec, self.world, self.rank, x.shape[0], m)
            x = x if rows == x.shape[0] else x[:rows]
        else:
            rows_of_call(spec, self.world, self.rank, m, m)
            wanted = operands.max_rows or self._rows(routing, operands)
            if x.shape[0] != wanted:
                what = "max_rows rows" if operands.max_rows else "one row for each token's expert"
                raise ValueError(
                    f"{label}: x must have {what} on this rank, sorted by expert: {wanted}, got "
                    f"{x.shape[0]}"
                )
            x = x[: routing.rows]
        if scale_x is not None and spec.scaling == "row":
            scale_x = scale_x[: x.shape[0]]
        ready = self._weights(operands.weights)
        bias = None if operands.bias is None else self._expert_bias(operands.bias)
        probs = None if operands.probs is None else self._probs(operands.probs, m)
        x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
        digest = (routing.checksum ^ (probs is not None)) & 0x7FFFFFFF
        if spec.op.gathers:
            rows = operands.max_rows or self._rows(routing, operands)
            if operands.keeps:
                operands.routed = x.new_empty(rows, self.k)
            of_experts = Experts(ready, bias, routing, of_weights)
            product: Any = GatherProduct(spec, of_experts, operands.routed, rows)
        else:
            once = bias if self.adds_bias else None
            of_experts = Experts(ready, once, routing, of_weights)
            product = SumProduct(spec, of_experts, probs, scale_x)
            scale_x = None  # of routed rows: a schedule has tokens
        on_host = spec.dispatches and isinstance(routing, Routing)
        needed = routing.needed(spec.ep, self.world) if on_host else None
        call = Call(m, x, (), self.columns, (None,), grouped=product, needed=needed, digest=digest)
        call.scale_x = scale_x
        if scale_x is not None:
            call.digest = self._with_shared_scale(call.digest, scale_x)
        return call

    def _expert_scales(
        self, scales: Sequence[torch.Tensor], x: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of x, [rows] or [1], and of weights, [experts, rows] or [experts]."""
        spec, by_row = self.spec, self.spec.scaling == "row"
        if len(scales) != (0 if spec.scaling == "none" else 2):
            raise ValueError(
                f"{spec.label}: scaling = {spec.scaling} takes "
                f"{'no scales' if spec.scaling == 'none' else 'scale_x and scale_weight'}, "
                f"got {len(scales)}"
            )
        if not scales:
            return None, None
        of_weights = [self.count, self.rows_of_weight] if by_row else [self.count]
        shapes = {"scale_x": [x.shape[0] if by_row else 1], "scale_weight": of_weights}
        ready = []
        for scale, (name, shape) in zip(scales, shapes.items(), strict=True):
            scale = self._tensor(name, scale, torch.float32)
            if list(scale.shape) != shape:
                raise ValueError(
                    f"{spec.label}: with scaling = {spec.scaling}, {name} must be {shape}, "
                    f"got {list(scale.shape)}"
                )
            ready.append(scale.contiguous())
        return ready[0], ready[1]

    def _routed(self, operands: Operands) -> Any:
        """Return the routed rows: as the host knows them, or (``on_device``) ``DeviceChoices``."""
        most, experts = operands.max_rows, operands.experts
        if most is None:
            make_maps = operands.make_maps if operands.on_device else None
            return self._routing(experts) if make_maps is None else self._made(experts, make_maps)
        label = self.spec.label
        if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= MOST_ROWS:
            raise ValueError(f"{label}: max_rows must be in [1, {MOST_ROWS}], got {most!r}")
        if operands.on_device:
            return DeviceChoices(self._readable(experts), self.total, most)
        routing = self._routing(experts)
        rows = routing.rows_of_parts(self.spec.ep)
        if max(rows) > most:  # alike on all ranks
            part = rows.index(max(rows))
            raise ValueError(
                f"{label}: the router chose {max(rows)} rows for ranks with part {part} of the "
                f"experts, more than max_rows = {most}"
            )
        operands.rows = routing.rows
        return routing

    def _made(
        self, experts: torch.Tensor, make_maps: Callable[[DeviceChoices], MadeMaps]
    ) -> DeviceChoices:
        """Return the choices, with maps that a kernel begins to make."""
        choices = DeviceChoices(self._readable(experts), self.total, experts.numel())
        return replace(choices, made=make_maps(choices))

    def _readable(self, experts: object) -> torch.Tensor:
        """Return the experts as kernels read them."""
        checked = self._check_experts(experts)
        kind = checked.dtype if checked.dtype in DEVICE_INTEGERS else torch.int64
        return checked.to(kind).contiguous()

    def _rows(self, routing: RoutedRows | DeviceChoices, operands: Operands) -> int:
        """Return how many routed rows there are; what kernels refuse, the host says why."""
        rows = routing.rows
        return rows if rows >= 0 else self._routing(operands.experts).rows

    def _check_experts(self, experts: object) -> torch.Tensor:
        label, spec = self.spec.label, self.spec
        if not isinstance(experts, torch.Tensor):
            raise TypeError(f"{label}: experts must be a tensor, got {type(experts).__name__}")
        experts = self._tensor("experts", experts, experts.dtype)
        if experts.dim() != 2 or experts.shape[1] != spec.topk:
            raise ValueError(
                f"{label}: experts must be [M, topk = {spec.topk}], got {list(experts.shape)}"
            )
        try:
            check_integers(experts)
        except TypeError as error:
            raise TypeError(f"{label}: {error}") from None
        return experts

    def _routing(self, experts: object) -> Routing:
        checked = self._check_experts(experts)
        try:
            return routing_of(checked, self.total, self.first, self.count, self.world)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.spec.label}: {error}") from None

    def _weights(
        self, weights: Sequence[torch.Tensor], sizes: tuple[int, int] | None = None
    ) -> Sequence[torch.Tensor]:
        """Return each expert's weight as [N, K]; ``sizes``: N and K, if not the op's."""
        spec = self.spec
        shape = list(sizes or (self.rows_of_weight, self.k))
        if spec.transpose_weight:
            shape.reverse()
        one = len(weights) == 1 and isinstance(weights[0], torch.Tensor) and weights[0].dim() == 3
        if not one and len(weights) != self.count:
            raise ValueError(
                f"{spec.label}: weights must be one tensor {[self.count, *shape]}, or "
                f"{self.count} of {shape}, got {len(weights)}"
            )
        ready: list[torch.Tensor] = []
        for weight in weights:
            weight = self._tensor("weight", weight, spec.dtype)
            expected = [self.count, *shape] if one else shape
            if list(weight.shape) != expected:
                raise ValueError(
                    f"{spec.label}: a weight must be {expected}"
                    f"{' (transpose_weight)' if spec.transpose_weight else ''}, "
                    f"got {list(weight.shape)}"
                )
            weight = weight.mT if spec.transpose_weight else weight
            if one:
                return Matrices(weight)
            ready.append(weight)
        return ready

    def _expert_bias(self, bias: torch.Tensor, columns: int | None = None) -> torch.Tensor:
        bias = self._tensor("bias", bias, self.spec.out_dtype)
        expected = [self.count, self.rows_of_weight if columns is None else columns]
        if list(bias.shape) != expected:
            raise ValueError(f"{self.spec.label}: bias must be {expected}, got {list(bias.shape)}")
        return bias

    def _probs(self, probs: torch.Tensor, m: int) -> torch.Tensor:
        label = self.spec.label
        if not isinstance(probs, torch.Tensor) or not probs.dtype.is_floating_point:
            got = probs.dtype if isinstance(probs, torch.Tensor) else type(probs).__name__
            raise TypeError(f"{label}: probs must be a floating-point tensor, got {got}")
        probs = self._tensor("probs", probs, probs.dtype)
        if list(probs.shape) != [m, self.spec.topk]:
            raise ValueError(
                f"{label}: probs must be {[m, self.spec.topk]}, got {list(probs.shape)}"
            )
        return probs
