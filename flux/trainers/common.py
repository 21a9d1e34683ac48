"""Plans on their way to a trainer, and from one."""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any, NamedTuple

from flux.bench.scripts import CommandOptions
from flux.plan.model import TrainingStep, even_split

RELEASES = {
    "megatron": "megatron-core 0.19.2",
    "torchtitan": "torchtitan 0.3.0",
    "deepspeed": "deepspeed 0.19.8",
}
"""Whose options are written."""

_FLUX = {
    "domino": "docs/use/domino.md has the runtime for it",
    "centauri": "docs/use/centauri.md has the runtime for it",
    "dhelix": "docs/use/dhelix.md has the runtime for it",
}


class Planned(NamedTuple):
    """A step, and the policy that schedules it."""

    step: TrainingStep
    policy: str
    options: dict[str, Any]
    devices: int = 8
    """Of a host."""

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.step.parallel.dp * self.step.micro_batches * self.step.micro_batch

    @property
    def chunks(self) -> int:
        """Stages of the model on each pipeline rank."""
        folded = self.policy in ("zbv", "dualpipev")
        return 2 if folded else self.options.get("chunks", 2) if self.policy == "interleaved" else 1

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage of the model."""
        step, chunks = self.step, self.chunks
        return step.stages if chunks == 1 else even_split(step.layers, chunks * step.parallel.pp)

    @property
    def overlaps(self) -> bool:
        """Whether collectives of data parallelism run beside computation."""
        hides = self.options.get("wgrad_overlap", False)
        return self.policy != "serial" or bool(self.options.get("overlap_grad_reduce", hides))

    def for_trainer(self, trainer: str, known: Iterable[str]) -> tuple[Planned, list[str]]:
        """Return the plan as the trainer can schedule it, and notes on what it does not have."""
        plan, notes = self, []
        if self.policy not in known:
            plan = self._replace(policy="serial", options={"overlap_grad_reduce": self.overlaps})
            more = _FLUX.get(self.policy, "--policy serial says how long that takes")
            notes.append(f"{trainer} has no {self.policy}, and runs 1F1B without it; {more}")
        if self.options.get("fused", "none") != "none":
            notes.append(
                "fused linear layers are Flux's (docs/use/layers.md); else the trainer's own"
            )
        stages, layers = plan.chunks * plan.step.parallel.pp, plan.step.layers
        uneven = plan.policy == "interleaved" and layers + 2 >= stages
        if plan.chunks > 1 and layers % stages and not uneven:
            problem = f"{plan.policy}: {stages} stages must divide {layers} layers"
            raise ValueError(f"{trainer} cannot run {problem}")
        every = plan.step.reduce_every
        if every > 1:
            notes.append(
                f"{trainer} reduces gradients of each micro-batch or of all, not of {every} at once"
            )
        return plan, notes

    def launch(self, program: str) -> str:
        """Return how torchrun starts a program on the plan's ranks."""
        world = self.step.parallel.world
        here = gcd(world, self.devices)
        return f"torchrun --nnodes {world // here} --nproc-per-node {here} {program}"


def serial_policy(*, hides_tp: bool, hides_dp: bool) -> tuple[str, dict[str, Any]]:
    """Return 1F1B whose collectives of tensor and of data parallelism run beside computation."""
    options = {"wgrad_overlap": True} if hides_tp else {}
    return "serial", options | ({"overlap_grad_reduce": hides_dp} if hides_dp != hides_tp else {})


class Exported(NamedTuple):
    """What a trainer is started with: options or a file, and notes on what differs."""

    text: str
    notes: list[str]


def gpus_in(options: CommandOptions, gpus: int | None, where: str) -> int:
    """Return the ranks of a step: ``gpus``, or those that torchrun's options say."""
    if gpus is None and "nproc-per-node" not in options:
        raise ValueError(
            f"{where} does not say how many GPUs: give --gpus, or add torchrun's --nnodes and "
            "--nproc-per-node"
        )
    return gpus or options.size("nnodes", 1) * options.size("nproc-per-node")


def quotient(whole: int, what: str, part: int, of: str, where: str) -> int:
    """Return a whole number; raise ValueError, with the names, if it is none."""
    if whole % part or not whole:
        raise ValueError(f"{where}: {of} = {part} must divide {what} = {whole}")
    return whole // part


def split_of(counts: tuple[int, ...] | list[int]) -> str:
    """Return the option for these layers of each stage."""
    even = tuple(counts) == even_split(sum(counts), len(counts))
    return "" if even else ",".join(map(str, counts))
