"""Predict what a model serves on a cluster: `flux plan serve`.

A deployment answers requests of ``prompt`` tokens with ``output`` tokens. Every data parallel
replica decodes ``batch`` sequences at a time. A prefill of ``prompts`` new ones interrupts it.

    time to first token   a prefill, through all stages
    time per token        a decode in the middle of the output. With a pipeline the batch is as many
                          groups as there are stages, one on each: the longer of a group's way
                          through all stages, and of all groups on the slowest stage
    tokens per second     batch * output over the time of their prefills and decodes
    memory                weights, cache of the batch at full length, largest input and output

Times are those of a policy that schedules forward alone: ``serial`` is vLLM, ``serial:fused`` has
Flux's ops, and ``domino`` and ``intra_batch`` cut what they overlap. Few shapes occur, so fused ops
are simulated tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from flux.cli.terminal import new_table
from flux.core.collector import paused_collector
from flux.core.problem import checked_integer
from flux.machine.cluster import Cluster
from flux.opsim.simulator import legal_knobs, simulate
from flux.plan.compare import HEADROOM, usable_gb
from flux.plan.cost import LIBRARY, AnalyticCost
from flux.plan.graph import Operator
from flux.plan.model import ServingStep, TrainingStep, serving_step
from flux.plan.policies import Policies, label_of, policy_of
from flux.plan.report import mfu
from flux.plan.sample import StepLayout
from flux.plan.simulate import Timeline

FORWARD = ("serial", "domino", "intra_batch")
"""Policies that schedule forward alone."""
DEFAULT: Policies = (("serial", {}), ("serial", {"fused": "auto"}))


class ServingCost(AnalyticCost):
    """Times of inference, with what the op simulator exposes of fused ops' communication."""

    def _exposed_ms(self, op: Operator) -> float:
        """Return what a fused op takes beyond its GEMM: at most the library's collective."""
        problem, cluster = self.problem_of(op), self.fabric.cluster
        kind = next(kind for kind, fused in LIBRARY.items() if fused is problem.op)
        width = int(problem.row_bytes // self.itemsize)
        library = self.solo(op._replace(kind=kind, shape=(problem.m, width)))
        if cluster.device.kind != "cuda":
            return min(library, super()._exposed_ms(op))
        runs = [simulate(problem, cluster, knobs) for knobs, _ in legal_knobs(problem, cluster)]
        return min(library, *(run.ect_ms for run in runs))


@dataclass(frozen=True)
class Deployment:
    """Requests of one length that a cluster serves.

    Attributes:
        prefill: of new prompts.
        batch: sequences that a replica decodes at a time.
        output: tokens of an answer.
    """

    prefill: ServingStep
    batch: int
    output: int

    def __post_init__(self) -> None:
        pp = self.prefill.parallel.pp
        checked_integer("output", self.output, 1)
        if checked_integer("batch", self.batch, 1) % pp:
            raise ValueError(f"pp = {pp} must divide batch = {self.batch}: a group on each stage")

    @classmethod
    def of(cls, step: TrainingStep, batch: int, output: int, kv_dtype: str = "") -> Deployment:
        """Return a deployment whose prefills are a step's micro-batches."""
        step = replace(step, micro_batches=1, zero=0)
        return cls(serving_step(step, decodes=False, kv_dtype=kv_dtype), batch, output)

    @property
    def decode(self) -> ServingStep:
        """A decode of one group, in the middle of the output."""
        prefill = self.prefill
        return replace(
            prefill,
            micro_batch=self.batch // prefill.parallel.pp,
            sequence=prefill.sequence + self.output // 2,
            decodes=True,
        )

    def described(self, cluster: Cluster) -> dict[str, Any]:
        """Return model, cluster, degrees and requests as a JSON object."""
        step = self.prefill
        degrees = {part: getattr(step.parallel, part) for part in ("tp", "dp", "pp", "ep")}
        requests = {"prompts": step.micro_batch, "prompt": step.sequence, "output": self.output}
        where = {"model": step.name, "cluster": cluster.name}
        return where | degrees | {"batch": self.batch} | requests

    def title(self, cluster: Cluster) -> str:
        """Return what stands above the table."""
        step = self.prefill
        return (
            f"{step.name}, {step.model.size}, {step.layers} layers; "
            f"{step.parallel.world} ranks of {cluster.name}; {self.batch} sequences of "
            f"{step.sequence} + {self.output} tokens"
        )

    def memory(self, layouts: Sequence[StepLayout]) -> dict[str, float]:
        """Return bytes of the rank with most weights, by kind."""
        stages = range(self.prefill.parallel.pp)
        return {
            "weights": max(self.prefill.resident(stage)["weights"] for stage in stages),
            "cache": self.batch * self.sequence_bytes,
            "activations": max(map(activation_bytes, layouts)),
        }

    @property
    def sequence_bytes(self) -> float:
        """Bytes of a whole sequence in the cache."""
        return self.prefill.cache_bytes(self.prefill.sequence + self.output)


def activation_bytes(layout: StepLayout) -> float:
    """Return bytes of the largest GEMM's input and output beside the residual, at a time."""
    step = layout.step
    rows = max(op.shape[0] * sum(op.shape[1:3]) for op in layout.graph.ops if "gemm" in op.kind)
    return float(rows + step.tokens * step.layer.hidden) * step.itemsize


def rows(
    policies: Policies,
    served: Deployment,
    cluster: Cluster,
    memory_gb: float | None = None,
    headroom: float = HEADROOM,
) -> list[dict[str, Any]]:
    """Return the JSON object of each policy; ``error`` has why one cannot be used."""
    for name, options in policies:
        if policy_of(name, options).name not in FORWARD:
            raise ValueError(f"{name} schedules training; take one of {', '.join(FORWARD)}")
    limit = usable_gb(cluster, memory_gb, headroom) * 1e9
    with paused_collector():
        layouts = [StepLayout(cluster, of, ServingCost) for of in (served.prefill, served.decode)]
        memory = served.memory(layouts)
        others = memory["weights"] + memory["activations"]
        most = max(0, int((limit - others) // served.sequence_bytes)) if limit else None
        common = served.described(cluster) | {"memory_bytes": memory, "most_sequences": most}
        reason = ""
        if most is not None and most < served.batch:
            reason = (
                f"a device has {limit / 1e9:g} GB, and beside {others / 1e9:.1f} GB holds {most} "
                "sequences; use a smaller batch, more tp or pp, or a smaller dtype"
            )
        outcomes = []
        for name, options in policies:
            policy, row = policy_of(name, options), common | {"policy": label_of(name, options)}
            try:
                if reason:
                    raise ValueError(reason)
                timelines = [layout.timeline(policy) for layout in layouts]
                row["policy"] = label_of(name, options, policy)
                row |= _times(served, cluster, timelines)
            except ValueError as error:
                row["error"] = str(error).removeprefix(f"{name}: ")
            outcomes.append(row)
    return outcomes


def _times(served: Deployment, cluster: Cluster, timelines: Sequence[Timeline]) -> dict[str, Any]:
    step, pp = served.prefill, served.prefill.parallel.pp
    prefill, decode = timelines
    per_token = max(decode.iteration_ms, pp * _slowest_ms(decode))
    prefills = served.batch / step.micro_batch * _slowest_ms(prefill)
    answers = prefills + served.output * per_token
    replica = step.parallel.world // step.parallel.dp
    return {
        "first_token_ms": prefill.iteration_ms,
        "token_ms": per_token,
        "tokens_per_s_per_device": 1e3 * served.batch * served.output / answers / replica,
        "prefill_mfu": mfu(step, cluster, prefill.iteration_ms),
        "prefill_exposed_ms": prefill.exposed_comm_ms,
        "decode_exposed_ms": decode.exposed_comm_ms,
    }


def _slowest_ms(timeline: Timeline) -> float:
    """Return the time of a forward on the stage that takes longest."""
    stages: dict[int, tuple[float, float]] = {}
    ops = timeline.schedule.graph.ops
    for op, start, end in zip(ops, timeline.start, timeline.end, strict=True):
        first, last = stages.get(op.stage, (start, end))
        stages[op.stage] = min(first, start), max(last, end)
    return max(last - first for first, last in stages.values())


def show(rows: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    """Print a table of policies, and what is in memory."""
    caption = "ms; exposed: of a prefill and of a decode; tok/s: output tokens of a device"
    heads = ("first token", "MFU", "exposed", "per token", "exposed", "tok/s")
    table = new_table(title, ["policy"], heads, caption)
    for row in rows:
        if "error" in row:
            table.add_row(f"{row['policy']}: {row['error']}", *["-"] * len(heads))
            continue
        share = row["prefill_mfu"]
        table.add_row(
            row["policy"],
            f"{row['first_token_ms']:.1f}",
            "-" if share is None else f"{100 * share:.0f}%",
            f"{row['prefill_exposed_ms']:.1f}",
            f"{row['token_ms']:.2f}",
            f"{row['decode_exposed_ms']:.2f}",
            f"{row['tokens_per_s_per_device']:.0f}",
        )
    console.print(table)
    parts = ", ".join(f"{kind} {size / 1e9:.1f} GB" for kind, size in row["memory_bytes"].items())
    most = row["most_sequences"]
    fits = "" if most is None else f"; {most} sequences of this length fit"
    console.print(f"A device: {parts}{fits}.", soft_wrap=True)
