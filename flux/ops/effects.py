"""The one place that touches torch.compile's effect system, which has moved between releases."""

from __future__ import annotations

from typing import Any

import torch._higher_order_ops.effects as _effects

try:
    from torch._library.effects import EffectType
except ImportError:  # torch < 2.10
    EffectType = _effects._EffectType  # type: ignore[misc]


def register(op: Any) -> None:
    """Mark an operator overload as ordered: see ``flux.ops._library.keep_in_order``."""
    _effects._register_effectful_op(op, EffectType.ORDERED)
