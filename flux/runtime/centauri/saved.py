"""Weights that autograd saves in forward: gathered again when backward asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flux.runtime.centauri.shards import Managed
from flux.runtime.centauri.units import Unit


class Saved:
    """A weight that autograd has saved."""

    def __init__(
        self, asks: Callable[[Unit], None], tensor: torch.Tensor, unit: Unit, parameter: Managed
    ) -> None:
        self._asks, self._tensor, self._unit, self._parameter = asks, tensor, unit, parameter
        self._version = parameter.version

    def get(self) -> torch.Tensor:
        """Return the weight.

        Raises:
            RuntimeError: it was changed after the forward that has saved it.
        """
        if self._parameter.version != self._version:
            raise RuntimeError(
                f"{self._parameter.name} was changed after the forward that this backward belongs "
                "to, as by an optimizer's step in between"
            )
        self._asks(self._unit)
        self._unit.read(self._parameter)
        # A graph of the backward itself saves the weight once more, without these hooks.
        return self._tensor.detach().clone() if torch.is_grad_enabled() else self._tensor


def saving(
    pack: Callable[[torch.Tensor], Saved | None],
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return hooks for weights; other tensors go to the hooks around these, as checkpoint's."""
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    packs, unpacks = outer or (lambda tensor: tensor, lambda tensor: tensor)

    def save(tensor: torch.Tensor) -> Any:
        saved = pack(tensor)
        return packs(tensor) if saved is None else saved

    def load(saved: Any) -> torch.Tensor:
        tensor: torch.Tensor = saved.get() if isinstance(saved, Saved) else unpacks(saved)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(save, load)
