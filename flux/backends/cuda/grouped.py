"""Calls of the ops of experts on GPUs: maps of routed rows, operands, and what follows the kernel.

A kernel makes the maps (csrc/cuda_moe/route.cuh): within the call, of ``max_rows``, and the host
waits for nothing; else ahead of it, and the host reads how many routed rows there are, which shapes
depend on. Of unfused calls the host makes them (csrc/schedule/grouped.h).
"""

from __future__ import annotations

import time
from functools import partial

import torch

from flux import _C
from flux.backends.cuda.op_calls import Empty, OpCalls, OpParts
from flux.backends.cuda.operands import row_step
from flux.backends.cuda.waits import StreamWaits
from flux.backends.epilogue import ACTIVATE
from flux.core.call import Call
from flux.core.schedule import TileSchedule
from flux.core.sparse_call import DeviceChoices, GroupedProduct
from flux.core.tensors import Matrices, address_of
from flux.transport.device import Device

SPIN_S = 2e-3
"""How long the host looks for maps again and again, before it sleeps in between."""


class Maps:
    """``MadeMaps`` of one call, which a kernel makes ahead of it.

    Args:
        route: of the call.
        room: memory that it fills.
        device: the GPU.
        stream: the current one.
        totals: pinned, for what the host reads of them.
        waits: of the op.
    """

    def __init__(
        self,
        route: _C.Route,
        room: torch.Tensor,
        device: Device,
        stream: int,
        totals: torch.Tensor,
        waits: StreamWaits,
    ) -> None:
        self.route, self.room = route, room
        self._driver, self._stream = device.driver, stream
        self._totals, self._waits = totals, waits
        self._rows: int | None = None
        begin = address_of(room) + route.totals * room.itemsize
        self._driver.copy(stream, address_of(totals), begin, totals.nbytes)

    def rows(self) -> int:
        """Wait for the maps and return how many routed rows there are: see ``MadeMaps.rows``."""
        if self._rows is None:
            self._await()
            _, rows, refused = self._totals.tolist()
            self._rows = -1 if refused else rows
        return self._rows

    def _await(self) -> None:
        """Wait for what is on the stream: peers may never do what earlier calls on it wait for."""
        until = time.monotonic() + SPIN_S
        while not self._driver.ready(self._stream):
            if time.monotonic() > until:
                if not self._waits.drain(self._stream):
                    self._waits.check(wait=False)
                return


class GroupedCalls(OpCalls):
    """Puts calls of one op of experts on streams.

    Args:
        parts: as ``OpCalls`` takes them.
        kernel: the grouped one.
        tile: rows and columns of a tile of its kernel.
        items: of the kernel, about as many as are in work at once.
        activates: whether the activation is left to a kernel of its own.
        nodes: of the ranks. Kernels reach the ranks of one node alone, so with several all tokens
            travel as in AGGroupedGemm and GroupedGemmRS: one time to each other node.
    """

    def __init__(
        self,
        parts: OpParts,
        kernel: _C.Kernel,
        tile: tuple[int, int],
        items: int,
        activates: bool,
        nodes: int,
    ) -> None:
        super().__init__(parts)
        self._selects = self._spec.dispatches and nodes == 1
        self._kernel = kernel
        self._tile = tile
        self._items = items
        self._activates = activates
        self._scales: list[torch.Tensor] = []  # of the last call
        # Now: to get pinned memory may wait for kernels, which in a call wait for peers.
        self._totals = self._device.pinned(3, torch.int32) if self._spec.experts else None

    def make_maps(
        self,
        schedule: TileSchedule,
        stream: int,
        choices: DeviceChoices,
        columns: int,
        waits: StreamWaits,
    ) -> Maps:
        """Put the kernel on a stream that makes a call's maps: see ``RoutingBackend``."""
        assert self._totals is not None
        route, room = self._route_of(schedule, choices, columns)
        route.make(self._kernel, self._address(room), stream)
        return Maps(route, room, self._device, stream, self._totals, waits)

    def run(
        self,
        schedule: TileSchedule,
        stream: int,
        call: Call,
        own_rows: int,
        gather: bool,
        empty: Empty,
    ) -> list[torch.Tensor]:
        """Put a call on a stream: see ``Backend.run``.

        ``own_rows``: tokens of this rank. ``empty`` allocates tensors: kept here, it would keep the
        backend and its kernels until garbage is collected.
        """
        self._scales.clear()
        if self._spec.op.gathers:
            return self._gather(schedule, stream, call, gather, empty)
        return [self._sum(schedule, stream, call, own_rows, empty)]

    def _gather(
        self, schedule: TileSchedule, stream: int, call: Call, gather: bool, empty: Empty
    ) -> list[torch.Tensor]:
        spec, product = self._spec, call.grouped
        assert product is not None
        columns = call.columns[0] * (2 if spec.gated else 1)
        x = self._fit.call(call, gathers=True).x
        out = empty(product.rows, columns if self._activates else call.columns[0])
        kept = product.routed
        full = empty(call.m, spec.k, spec.dtype) if gather or kept is not None else None
        weights = self._weights(product, call, x.shape[1], columns)
        operand = self._operand(schedule, product, weights, columns, out)
        self._workspaces.make_room(self._native, schedule, stream, [operand], spec.k)
        rows = (self._address(x), spec.k, spec.k, self._scale(call.scale_x))
        to = 0 if full is None else address_of(full)
        self._native.ag_gemm(schedule.native, stream, rows, [operand], to, [])
        if full is not None and kept is not None:
            self._device.enqueue(partial(self._keep, full, *self._routed, kept))
        if spec.gated and self._activates:
            wide, out = out, empty(product.rows, call.columns[0])
            self._device.enqueue(partial(self._gate, wide, out))
        elif self._activates:
            self._device.enqueue(partial(self._activate, out))
        return [out, full] if gather and full is not None else [out]

    def _sum(
        self, schedule: TileSchedule, stream: int, call: Call, own_rows: int, empty: Empty
    ) -> torch.Tensor:
        spec, product = self._spec, call.grouped
        assert product is not None
        rows = call.m if spec.op.all_reduces else own_rows
        (columns,) = spec.n
        out = empty(rows, columns)
        products = empty(product.rows, columns)
        x = self._fit.tensor(call.x)
        if x.shape[1] == 0:  # a rank without a part of K: zeros, as wide as one load
            x = self._zeros(product.rows, self._fit.elements)
        depth = x.shape[1]
        weights = self._weights(product, call, depth, columns)
        operand = self._operand(schedule, product, weights, columns, products)
        self._workspaces.make_room(self._native, schedule, stream, [operand], depth)
        scale = self._scale(product.scale_x)
        a = (self._address(x), row_step(x.shape, x.stride()), depth, scale)
        self._native.gemm_rs(schedule.native, stream, a, operand, address_of(out))
        return out

    def _scale(self, scale: torch.Tensor | None) -> int:
        """Return where scales are, 0 if there is no scaling: none of those of no rows is read."""
        if scale is None:
            return 0
        self._scales.append(self._fit.tensor(scale) if scale.numel() else scale.new_empty(1))
        return self._address(self._scales[-1])

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        itemsize = self._spec.dtype.itemsize
        some = self._device.zeros(max(rows, 1) * columns * itemsize, torch.uint8)
        return some.view(self._spec.dtype).view(-1, columns)[:rows]

    def _weights(
        self, product: GroupedProduct, call: Call, depth: int, columns: int
    ) -> tuple[list[int], int, object]:
        """Return where the kernel loads the experts' weights, and the one distance of their rows.

        The last one is to be kept until the call is on the stream.
        """
        kn, weights = self._spec.transpose_weight, product.weights
        if len(weights) == 0:
            return [], columns, None
        if depth != call.x.shape[1]:
            rows = (depth, self._spec.n[0]) if kn else (self._spec.n[0], depth)
            zeros = self._zeros(*rows)
            return [self._address(zeros)] * len(weights), rows[1], zeros
        if isinstance(weights, Matrices):
            whole = weights.whole.mT if kn else weights.whole
            first, step = whole[0], whole.stride(0) * whole.itemsize
            if self._fit.fits(first) and step % self._fit.unit(first) == 0:
                at = self._address(whole)
                places = [at + expert * step for expert in range(len(weights))]
                return places, row_step(first.shape, first.stride()), whole
        each = [self._fit.tensor(w.t() if kn else w) for w in weights]
        if len({row_step(w.shape, w.stride()) for w in each}) > 1:
            each = [w.contiguous() for w in each]
        places = [self._address(weight) for weight in each]
        return places, row_step(each[0].shape, each[0].stride()), each

    def _operand(
        self,
        schedule: TileSchedule,
        product: GroupedProduct,
        weights: tuple[list[int], int, object],
        columns: int,
        out: torch.Tensor,
    ) -> _C.Operand:
        """Give the kernel its maps; return the weights, and where products go."""
        choices, bias, probs = product.routing, product.biases, product.probs
        assert isinstance(choices, DeviceChoices)
        bias = None if bias is None else self._fit.tensor(bias.contiguous())
        probs = None if probs is None else probs.to(torch.float32).contiguous()
        at_bias = 0 if bias is None else self._address(bias)
        at_probs = 0 if probs is None else self._address(probs)
        made = choices.made
        if isinstance(made, Maps):
            route, maps, tail = made.route, made.room, 0
        else:
            route, maps = self._route_of(schedule, choices, columns)
            tail = address_of(out) if self._spec.op.gathers else 0
        addresses, step, _ = weights
        # Of columns of the weight: a gated result has half as many.
        element_bytes = out.shape[1] * out.itemsize // max(columns, 1)
        route.use(self._address(maps), addresses, tail, element_bytes)
        self._native.set_route(route, at_bias, at_probs)
        rows = None if made is not None else maps[route.totals + 1]
        self._routed = maps[route.routed :][: choices.rows], rows
        self._kept = (bias, probs, maps)  # until the call is on the stream
        self._route = route
        first = addresses[0] if addresses else address_of(maps)
        scale = self._scale(product.scale_weights)
        return (first, step, columns, address_of(out), out.shape[1], 0, scale)

    def tile_experts(self) -> torch.Tensor:
        """Return the experts of the last call's tiles, -1 behind them, once the stream is done."""
        offsets, maps = self._route.offsets, self._kept[2]
        return maps[offsets["experts"] : offsets["rows"]]

    def _route_of(
        self, schedule: TileSchedule, choices: DeviceChoices, columns: int
    ) -> tuple[_C.Route, torch.Tensor]:
        """Return what makes the maps of a call, and memory that it fills."""
        spec = self._spec
        route = _C.Route(
            schedule=schedule.native,
            kernel=self._kernel,
            experts=self._address(choices.experts),
            expert_bytes=choices.experts.itemsize,
            topk=choices.experts.shape[1],
            total=choices.total,
            ep=spec.ep,
            max_rows=choices.most,
            n=columns,
            ahead=self._items,
            parallel=self._selects,
        )
        room = torch.empty(route.words, dtype=torch.int32, device=self._device.torch_device)
        return route, room

    def _keep(
        self,
        full: torch.Tensor,
        tokens: torch.Tensor,
        rows: torch.Tensor | None,
        kept: torch.Tensor,
    ) -> None:
        torch.index_select(full, 0, tokens, out=kept)
        if rows is not None:
            behind = torch.arange(len(kept), device=kept.device) >= rows
            kept.masked_fill_(behind[:, None], 0)

    def _activate(self, out: torch.Tensor) -> None:
        out.copy_(ACTIVATE[self._spec.activation](out))

    def _gate(self, wide: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = wide.chunk(2, dim=1)
        torch.mul(ACTIVATE[self._spec.activation](gate), up, out=out)
