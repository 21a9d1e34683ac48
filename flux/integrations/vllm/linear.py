"""vLLM's RowParallelLinear as GemmAR: rows leave for the other ranks slab by slab.

vLLM packs weights, so the product of a slab is the layer's own: its ``quant_method``. In compiled
models the layer is one custom op, which finds it by its name.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group, split_tensor_along_last_dim
from vllm.model_executor.layers.linear import RowParallelLinear

from flux.core.env import LAYER_TIMEOUT_S, VLLM_CHECK
from flux.core.spec import DTYPES, FP8
from flux.integrations.vllm.check import compare_sum
from flux.integrations.vllm.choice import PathTrial
from flux.ops import GemmAR
from flux.ops.transforms import define

logger = logging.getLogger("vllm.flux")

ROWWISE_METHODS = ("UnquantizedLinearMethod", "AutoAWQMarlinLinearMethod", "AutoGPTQLinearMethod")
"""Products of vLLM's whose rows do not depend on each other."""
ROWWISE_SCHEMES = ("CompressedTensorsW8A8Int8", "CompressedTensorsWNA16")
"""The same, of its method for compressed tensors: activations are scaled row by row, or not."""

SMALL_ROWS = 64
"""Up to so many rows a product hides nothing: the communicator's shared memory, or one message
between hosts, is faster."""

_layers: weakref.WeakValueDictionary[str, FusedRowParallelLinear] = weakref.WeakValueDictionary()
_ops: dict[tuple[object, ...], GemmAR] = {}
_choices: dict[tuple[object, ...], PathTrial] = {}
_named: set[str] = set()  # reasons that are in the log


class FusedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's row-parallel layer, whose AllReduce runs beside its product.

    Arguments and results are those of vLLM's layer. Where the product cannot be cut into slabs the
    layer runs as vLLM's own does, and the log says so once.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._flux_name = ""
        if not self.reduce_results or self.tp_size == 1:
            return
        reason = _reason_unfused(self)
        if reason is not None:
            if reason not in _named:
                _named.add(reason)
                logger.warning(
                    "flux: %s and layers like it run without Flux: %s", self.prefix, reason
                )
            return
        config = get_current_vllm_config()
        self._flux_rows = config.scheduler_config.max_num_batched_tokens
        self._flux_check = VLLM_CHECK.get()
        name, number = self.prefix, 0
        while name in _layers:  # some models give several layers one name
            number += 1
            name = f"{self.prefix}#{number}"
        self._flux_name = name
        _layers[name] = self
        reference = weakref.ref(self)  # no circle: a layer that is dropped is gone at once

        def product(rows: torch.Tensor) -> torch.Tensor:
            layer = reference()
            assert layer is not None  # it is calling
            bias = None if layer.tp_rank > 0 or layer.skip_bias_add else layer.bias
            partial: torch.Tensor = layer.quant_method.apply(layer, rows, bias)
            return partial

        self._flux_product = product

    def forward(self, input_: torch.Tensor) -> Any:
        """Return the reduced result and, where it is not added, the bias, as vLLM's layer does."""
        if not self._flux_name:
            return super().forward(input_)
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(x, num_partitions=self.tp_size)[self.tp_rank]
        if torch.compiler.is_compiling():
            output = torch.ops.flux.vllm_row_parallel(x, self.output_size, self._flux_name)
        else:
            output = _run(self, x)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


def _reason_unfused(layer: RowParallelLinear) -> str | None:
    """Return why a layer stays vLLM's, or None; the same on all ranks."""
    method = type(layer.quant_method).__name__
    scheme = type(getattr(layer, "scheme", None)).__name__
    if method == "CompressedTensorsLinearMethod":
        if scheme not in ROWWISE_SCHEMES:
            return f"rows of {scheme} may depend on each other"
    elif method not in ROWWISE_METHODS:
        return f"rows of {method} may depend on each other"
    dtype = layer.params_dtype
    if dtype not in DTYPES or dtype == FP8:
        return f"flux has no ops for {dtype}"
    return None


def _op_of(layer: FusedRowParallelLinear, x: torch.Tensor) -> GemmAR:
    """Return the op that layers of this size share. Collective at its first use."""
    group = get_tp_group()
    key = (group.unique_name, layer.input_size, layer.output_size, x.dtype)
    op = _ops.get(key)
    if op is None or op.closed:
        if not _ops:
            logger.info(
                "flux: row-parallel layers run as GemmAR, for up to %d rows", layer._flux_rows
            )
        op = _ops[key] = GemmAR(
            group.device_group,
            max_m=layer._flux_rows,
            n=layer.output_size,
            k=layer.input_size,
            dtype=x.dtype,
            timeout_s=LAYER_TIMEOUT_S.get(),
        )
    return op


def _fused(layer: FusedRowParallelLinear, rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks, [M, N], of the layer's products of any number of rows."""
    op = _op_of(layer, rows)
    parts = rows.split(op.spec.max_m)
    sums = [op(part, None, gemm=layer._flux_product) for part in parts]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def _plain(layer: FusedRowParallelLinear, rows: torch.Tensor) -> torch.Tensor:
    """Return what ``_fused`` does, by the product of all rows and one all_reduce."""
    total: torch.Tensor = get_tp_group().device_communicator.all_reduce(layer._flux_product(rows))
    return total


def _choice_of(layer: FusedRowParallelLinear, rows: torch.Tensor) -> PathTrial:
    """Return the choice that layers of this size share, for about so many rows."""
    group = get_tp_group()
    bucket = rows.shape[0].bit_length()
    key = (group.unique_name, layer.input_size, layer.output_size, rows.dtype, bucket)
    choice = _choices.get(key)
    if choice is None:

        def add(numbers: list[float]) -> list[float]:
            summand = torch.tensor(numbers, dtype=torch.float32)
            sums: list[float] = group.device_communicator.all_reduce(summand).tolist()
            return sums

        choice = _choices[key] = PathTrial(add)
    return choice


def _run(layer: FusedRowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over ranks of the layer's products. Collective."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= SMALL_ROWS:
        out = _plain(layer, rows)
    else:
        choice = _choice_of(layer, rows)
        path = choice.next()
        began = time.perf_counter()
        peers = get_tp_group().device_communicator
        out = _plain(layer, rows) if path == "plain" else peers.watched(lambda: _fused(layer, rows))
        choice.note(path, time.perf_counter() - began)
    if layer._flux_check:
        peers = get_tp_group().device_communicator
        compare_sum(peers, f"layer {layer._flux_name}", layer._flux_product(rows), out)
    return out.view(*x.shape[:-1], layer.output_size)


def _row_parallel(x: torch.Tensor, columns: int, name: str) -> torch.Tensor:
    layer = _layers.get(name)
    if layer is None:
        raise RuntimeError(f"flux: the layer {name} of a compiled model no longer exists")
    return _run(layer, x)


def _row_parallel_fake(x: torch.Tensor, columns: int, name: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], columns)


define(
    "vllm_row_parallel(Tensor x, int columns, str name) -> Tensor",
    _row_parallel,
    _row_parallel_fake,
    ordered=True,
)
