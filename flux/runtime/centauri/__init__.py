"""FSDP whose collectives run in parts alongside computation (docs/use/centauri.md)."""

from flux.runtime.centauri.module import parallelize, sharded
from flux.runtime.centauri.plan import RuntimePlan

__all__ = ["RuntimePlan", "parallelize", "sharded"]
