"""FSDP whose collectives run in parts alongside computation (docs/use/centauri.md)."""

from flux.runtime.centauri.module import parallelize, sharded
from flux.runtime.centauri.plan import RuntimePlan
from flux.runtime.centauri.planner import plan_run

__all__ = ["RuntimePlan", "parallelize", "plan_run", "sharded"]
