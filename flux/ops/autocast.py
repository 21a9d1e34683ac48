"""What torch.autocast makes of the operands of a layer, or of an op of experts or heads.

torch casts a weight once per autocast region: its cache holds the cast of each parameter, a float32
leaf that needs a gradient, until the outermost region ends. The cache belongs to operators like
``addmm``, and there is no call that only asks it. So ``cast_once`` lets an ``addmm`` begin, and
takes the weight as autocast hands it over. A cast is as old as torch's own: after a step of
an optimizer inside the region, both are the cast of the weight before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flux.ops import torch_internals


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to multiply in: autocast's if that is on and would cast x."""
    if x.is_meta:
        return x.dtype  # autocast does not know the device
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ):
        return torch.get_autocast_dtype(device)
    return x.dtype


def casts_to(dtype: torch.dtype, x: object) -> bool:
    """Return whether autocast is on, and its products of x have this dtype."""
    if not isinstance(x, torch.Tensor) or x.is_meta:
        return False
    return torch.is_autocast_enabled(x.device.type) and compute_dtype(x) == dtype


def as_autocast(
    dtype: torch.dtype,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor | None]:
    """Return operands as autocast would cast them, if its products have ``dtype``, an op's own.

    As those of torch.nn.functional.linear: gradients have the dtypes of the parameters.
    """
    if not casts_to(dtype, x):
        return x, weights, bias
    if bias is not None and casts_to(dtype, bias):
        bias = cast_once(bias, dtype)
    cast = [cast_once(w, dtype) if casts_to(dtype, w) else w for w in weights]
    return x.to(dtype), cast, bias


def autocast_off(x: torch.Tensor) -> Any:
    """Return a context without autocast: the operands have been cast already."""
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def cast_once(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight or bias in the dtype of the product, with its history for autograd.

    The cast is that of torch's cache where torch would take it from there. Call it outside of a
    Function's ``forward``: the cache would keep a cast without history, and torch's own operators
    would find it.
    """
    if parameter.dtype == dtype:
        return parameter
    if (
        not torch.compiler.is_compiling()
        and torch.is_autocast_enabled(parameter.device.type)
        and torch.is_autocast_cache_enabled()
        and not torch_internals.modes_are_active()
    ):
        parameter = torch_internals.behind_autocast(parameter, dtype)
    return parameter.to(dtype)
