"""Micro-batches whose forward and backward hide each other's collectives (docs/use/dhelix.md)."""

from flux.runtime.dhelix.schedule import ScheduleDHelix, folded

__all__ = ["ScheduleDHelix", "folded"]
