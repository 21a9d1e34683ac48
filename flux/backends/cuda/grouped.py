"""Calls of the ops of experts on GPUs: maps of routed rows, operands, and what follows the kernel.

The host makes the maps (csrc/schedule/grouped.h), from experts that it has read: a call waits for
the router's result. With ``DeviceChoices`` a kernel makes them (csrc/cuda/gemm/route.cuh), and the
host waits for nothing. Kernels take them from device memory.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch

from flux import _C
from flux.backends.cuda.op_calls import Empty, OpCalls, OpParts
from flux.backends.cuda.operands import row_step
from flux.backends.epilogue import ACTIVATE
from flux.core.call import Call, DeviceChoices, GroupedProduct, RoutedRows
from flux.core.schedule import TileSchedule
from flux.core.tensors import address_of

POINTER_WORDS = 2  # int32 words of an address


class GroupedCalls(OpCalls):
    """Puts calls of one op of experts on streams.

    Args:
        parts: as ``OpCalls`` takes them.
        kernel: the grouped one.
        tile: rows and columns of a tile of its kernel.
        items: of the kernel, about as many as are in work at once.
        activates: whether the activation is left to a kernel of its own.
    """

    def __init__(
        self,
        parts: OpParts,
        kernel: _C.Kernel,
        tile: tuple[int, int],
        items: int,
        activates: bool,
    ) -> None:
        super().__init__(parts)
        self._kernel = kernel
        self._tile = tile
        self._items = items
        self._activates = activates

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
        out = empty(product.rows, columns)
        kept = product.routed
        full = empty(call.m, spec.k, spec.dtype) if gather or kept is not None else None
        weights = self._weights(product, call, x.shape[1])
        operand = self._operand(schedule, product, weights, columns, out)
        self._workspaces.make_room(self._native, schedule, stream, [operand], spec.k)
        rows = (self._address(x), spec.k, spec.k, 0)
        to = 0 if full is None else address_of(full)
        self._native.ag_gemm(schedule.native, stream, rows, [operand], to, [])
        if full is not None and kept is not None:
            self._device.enqueue(partial(self._keep, full, *self._kept_tokens(product), kept))
        if spec.gated:
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
        weights = self._weights(product, call, depth)
        operand = self._operand(schedule, product, weights, columns, products)
        self._workspaces.make_room(self._native, schedule, stream, [operand], depth)
        a = (self._address(x), row_step(x.shape, x.stride()), depth, 0)
        self._native.gemm_rs(schedule.native, stream, a, operand, address_of(out))
        return out

    def _work(self, schedule: TileSchedule, routing: RoutedRows, columns: int) -> _C.GroupedWork:
        """Make the maps of a call on the host."""
        (tile_m, tile_n), native = self._tile, routing.native
        if self._spec.op.gathers:
            work = native.gather_work(schedule.native, tile_m, -(-columns // tile_n))
            add = work.dispatch
        else:
            work = native.sum_work(schedule.native, tile_m, tile_n, self._items)
            add = work.combine
        if self._spec.dispatches:
            add(schedule.native, *self._choices(routing))
        return work

    def _choices(self, routing: RoutedRows) -> tuple[int, int, int, int]:
        """Return the experts of all tokens, and the parts that experts are split into."""
        return address_of(routing.experts), routing.topk, routing.total, self._spec.ep

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        itemsize = self._spec.dtype.itemsize
        some = self._device.zeros(max(rows, 1) * columns * itemsize, torch.uint8)
        return some.view(self._spec.dtype).view(-1, columns)[:rows]

    def _weights(self, product: GroupedProduct, call: Call, depth: int) -> list[torch.Tensor]:
        """Return the experts' weights as the kernel loads them, all with one distance of rows."""
        kn = self._spec.transpose_weight
        if depth != call.x.shape[1]:
            rows = (depth, self._spec.n[0]) if kn else (self._spec.n[0], depth)
            return [self._zeros(*rows)] * len(product.weights)
        each = [self._fit.tensor(w.t() if kn else w) for w in product.weights]
        if len({row_step(w.shape, w.stride()) for w in each}) > 1:
            each = [w.contiguous() for w in each]
        return each

    def _operand(
        self,
        schedule: TileSchedule,
        product: GroupedProduct,
        weights: list[torch.Tensor],
        columns: int,
        out: torch.Tensor,
    ) -> _C.Operand:
        """Give the kernel its maps; return the weights, and where products go."""
        routing, bias, probs = product.routing, product.biases, product.probs
        bias = None if bias is None else self._fit.tensor(bias.contiguous())
        probs = None if probs is None else probs.to(torch.float32).contiguous()
        at_bias = 0 if bias is None else self._address(bias)
        at_probs = 0 if probs is None else self._address(probs)
        if isinstance(routing, DeviceChoices):
            maps = self._route(schedule, routing, weights, columns, out, at_bias, at_probs)
        else:
            work = self._work(schedule, routing, columns)
            maps = self._set_groups(routing, work, weights, at_bias, at_probs)
        self._kept = (bias, probs, maps)  # until the call is on the stream
        step = row_step(weights[0].shape, weights[0].stride()) if weights else columns
        first = address_of(weights[0] if weights else maps)
        return (first, step, columns, address_of(out), columns, 0, 0)

    def _route(
        self,
        schedule: TileSchedule,
        routing: DeviceChoices,
        weights: list[torch.Tensor],
        columns: int,
        out: torch.Tensor,
        bias: int,
        probs: int,
    ) -> torch.Tensor:
        """Have a kernel make the maps within the call; return the memory that it fills."""
        spec = self._spec
        route = _C.Route(
            schedule=schedule.native,
            kernel=self._kernel,
            experts=self._address(routing.experts),
            expert_bytes=routing.experts.itemsize,
            topk=routing.experts.shape[1],
            total=routing.total,
            ep=spec.ep,
            max_rows=routing.rows,
            n=columns,
            ahead=self._items,
            parallel=spec.dispatches,
        )
        room = torch.empty(route.words, dtype=torch.int32, device=self._device.torch_device)
        addresses = [self._address(weight) for weight in weights]
        tail = address_of(out) if spec.op.gathers else 0
        route.use(self._address(room), addresses, tail, out.itemsize)
        self._native.set_route(route, bias, probs)
        offsets = route.offsets
        self._routed = room[offsets["routed"] :][: routing.rows], room[offsets["totals"] + 1]
        return room

    def _set_groups(
        self,
        routing: RoutedRows,
        work: _C.GroupedWork,
        weights: list[torch.Tensor],
        bias: int,
        probs: int,
    ) -> torch.Tensor:
        """Copy maps of the host to the device; return the memory that they are in."""
        sizes = work.sizes
        pointers = POINTER_WORDS * len(weights)
        maps = self._device.pinned(pointers + sum(sizes) + routing.positions.numel(), torch.int32)
        addresses = [self._address(weight) for weight in weights]
        maps[:pointers].view(torch.int64).copy_(torch.tensor(addresses, dtype=torch.int64))
        work.fill(address_of(maps) + pointers * maps.itemsize)
        maps[pointers + sum(sizes) :] = routing.positions.view(-1)
        on_device = maps.to(self._device.torch_device, non_blocking=True)
        at = self._address(on_device)
        places = [at + (pointers + s) * maps.itemsize for s in accumulate(sizes, initial=0)]
        items, experts, rows, tokens, sources, counts, pushes, pushed, shares, positions = places
        if not (self._spec.dispatches and self._spec.op.gathers):
            pushes = pushed = 0
        if not (self._spec.dispatches and self._spec.op.scatters):
            shares = 0
        if self._spec.op.gathers:
            sources = tokens
        self._native.set_groups(
            maps=[items, experts, rows, tokens, sources, counts, positions, at],
            bias=bias,
            probs=probs,
            items=sizes[0],
            experts=len(weights),
            topk=routing.topk,
            parallel=(pushes, pushed, shares),
        )
        return on_device

    def _kept_tokens(self, product: GroupedProduct) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the token of each routed row, and on the device how many rows there are."""
        if isinstance(product.routing, DeviceChoices):
            return self._routed
        return product.routing.tokens.to(self._device.torch_device), None

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
