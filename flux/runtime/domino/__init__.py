"""Slices of a batch that hide each other's collectives (docs/use/domino.md)."""

from flux.runtime.domino.layers import replace
from flux.runtime.domino.module import Domino, Dropout

__all__ = ["Domino", "Dropout", "replace"]
