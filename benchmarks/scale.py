"""Simulate training steps on 8 to 16,384 GPUs under Megatron's and Domino's policies. No GPU.

    python benchmarks/scale.py benchmarks/results/plan/scale.json

It takes some three minutes. Weak scaling: micro-batches of a data parallel rank stay, so the batch
grows with the GPUs. Strong scaling: the batch stays. Across hosts: tensor parallelism on one, two
and four hosts. Clusters are those of tuning/clusters, with as many hosts as it takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, keep, markdown, percent, unbroken

from flux.core.problem import ceil_div
from flux.core.version import __version__
from flux.machine.cluster import load_cluster
from flux.plan.compare import compared
from flux.plan.model import Parallel, TrainingStep, step_of
from flux.plan.simulate import Timeline

RESULT = ROOT / "benchmarks" / "results" / "plan" / "scale.json"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "wgrad overlap": ("serial", {"wgrad_overlap": True}),
    "domino, rows": ("domino", {"slices": 2}),
    "domino, columns": ("domino", {"slices": 1, "columns": 2}),
}


class Case(NamedTuple):
    """One step on a number of GPUs, with sequence parallelism and ZeRO-1.

    ``layers`` is 0 for all of the model; ``sequence`` 0 for that of its training.
    """

    study: str
    model: str
    cluster: str
    tp: int
    pp: int
    dp: int
    micro_batch: int
    micro_batches: int
    layers: int = 0
    sequence: int = 0

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.dp

    def step(self) -> TrainingStep:
        """Return the step."""
        return step_of(
            self.model,
            Parallel(tp=self.tp, pp=self.pp, dp=self.dp, sequence=True),
            layers=self.layers or None,
            sequence=self.sequence or None,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            regather=True,
            head=False,  # layers alone, as when these figures were made
        )


class Series(NamedTuple):
    """A model on a cluster, on more and more GPUs."""

    model: str
    cluster: str
    pp: int
    micro_batch: int
    micro_batches: int
    sequence: int
    dps: tuple[int, ...]


WEAK = (
    Series("llama3-8b", "dhelix-a40", 1, 2, 4, 4096, (1, 4, 16, 64, 256, 1024, 2048)),
    Series("llama3-70b", "dhelix-h100", 4, 2, 16, 4096, (1, 4, 16, 64, 256, 512)),
    Series("gpt3-175b", "flux-h800", 8, 2, 32, 2048, (1, 4, 16, 64, 256)),
)
STRONG = (
    (Series("llama3-8b", "dhelix-a40", 1, 2, 0, 4096, (1, 4, 16, 64)), 128),
    (Series("llama3-70b", "dhelix-h100", 4, 2, 0, 4096, (8, 32, 128, 512)), 1024),
)
"""Series, and the sequences of a batch."""
ACROSS = tuple(
    Case("across", "gpt3-175b", cluster, tp, 1, 1, 4, 1, layers=4)
    for cluster in ("dhelix-h100", "flux-a100-nvlink")
    for tp in (8, 16, 32)
)


def cases() -> Iterator[Case]:
    """Yield everything that is simulated."""
    for case in WEAK:
        for dp in case.dps:
            yield Case(
                *("weak", case.model, case.cluster, 8, case.pp, dp),
                *(case.micro_batch, case.micro_batches, 0, case.sequence),
            )
    for case, batch in STRONG:
        for dp in case.dps:
            micro_batches = batch // (dp * case.micro_batch)
            yield Case(
                *("strong", case.model, case.cluster, 8, case.pp, dp),
                *(case.micro_batch, micro_batches, 0, case.sequence),
            )
    yield from ACROSS


def timelines(case: Case, policies: Sequence[str] = tuple(POLICIES)) -> dict[str, Timeline]:
    """Return the timeline of each policy.

    Raises:
        ValueError: the step does not fit into the memory of a device.
    """
    cluster = load_cluster(case.cluster)
    cluster = replace(cluster, hosts=max(cluster.hosts, ceil_div(case.gpus, cluster.devices)))
    timeline_of = {}
    outcomes = compared([POLICIES[label] for label in policies], case.step(), cluster)
    for label, (_, timeline, reason) in zip(policies, outcomes, strict=True):
        if timeline is None or reason:
            raise ValueError(f"{case}: {label}: {reason}")
        timeline_of[label] = timeline
    return timeline_of


def rows(case: Case) -> list[dict[str, Any]]:
    """Return a row for each policy.

    ``share`` is that of communication in the serial step's operators, and ``bound`` the speed-up
    that no overlap can exceed, min(1 / share, 1 / (1 - share)).
    """
    timeline_of = timelines(case)
    serial = timeline_of["serial"]
    share = serial.comm_ms / (serial.comm_ms + serial.compute_ms)
    out = []
    for label, timeline in timeline_of.items():
        out.append(
            {
                **case._asdict(),
                "gpus": case.gpus,
                "policy": label,
                "share": round(share, 4),
                "bound": round(min(1 / share, 1 / (1 - share)), 4),
                "speedup": round(serial.iteration_ms / timeline.iteration_ms, 4),
                "iteration_ms": round(timeline.iteration_ms, 3),
                "compute_ms": round(timeline.compute_ms, 3),
                "comm_ms": round(timeline.comm_ms, 3),
                "exposed_comm_ms": round(timeline.exposed_comm_ms, 3),
                "peak_memory_gb": round(timeline.peak_memory_bytes / 1e9, 2),
            }
        )
    return out


LARGEST = Case("largest", "llama3-405b", "dhelix-h100", 8, 16, 128, 2, 64, 128, 2048)
"""16,384 GPUs; 128 layers in place of 126, which 16 stages cannot share."""


def largest() -> dict[str, Any]:
    """Return seconds and memory of a process that simulates LARGEST under one policy."""
    begin = time.monotonic()
    (timeline,) = timelines(LARGEST, ["domino, rows"]).values()
    return {
        **LARGEST._asdict(),
        "gpus": LARGEST.gpus,
        "policy": "domino, rows",
        "operators": len(timeline.start),
        "seconds": round(time.monotonic() - begin, 2),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "iteration_ms": round(timeline.iteration_ms, 3),
    }


def document() -> dict[str, Any]:
    """Return everything, as it is written.

    Raises:
        RuntimeError: a speed-up is beyond its bound.
    """
    command = [sys.executable, __file__, "--largest"]
    begin = time.monotonic()
    all_rows = [row for case in cases() for row in rows(case)]
    beyond = [row for row in all_rows if row["speedup"] > row["bound"]]
    if beyond:
        raise RuntimeError(f"a speed-up is beyond what overlap can give: {beyond[0]}")
    alone = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return {
        "command": "python benchmarks/scale.py benchmarks/results/plan/scale.json",
        "versions": {"flux": __version__},
        "largest": json.loads(alone.stdout),
        "seconds": round(time.monotonic() - begin, 1),
        "rows": all_rows,
    }


def by_case(content: dict[str, Any], study: str) -> list[list[dict[str, Any]]]:
    """Return the rows of a study, those of one case together, in the order of POLICIES."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["study"] == study:
            groups.setdefault(tuple(row[name] for name in Case._fields), []).append(row)
    return list(groups.values())


def hidden(row: dict[str, Any]) -> float:
    """Return the share of communication beside which something is computed."""
    return max(0.0, 1.0 - row["exposed_comm_ms"] / row["comm_ms"])


def table(content: dict[str, Any], study: str) -> str:
    """Return a line for each number of GPUs: speed-up over serial; in brackets what is hidden."""
    header = ["model, cluster", "GPUs", "tp, pp, dp", "batch", "comm.", "bound"]
    header += [label for label in POLICIES if label != "serial"]
    lines = []
    for group in by_case(content, study):
        serial, *others = group
        batch = serial["dp"] * serial["micro_batch"] * serial["micro_batches"]
        lines.append(
            [
                unbroken(f"{serial['model']}, {serial['cluster']}"),
                f"{serial['gpus']:,}",
                unbroken(f"{serial['tp']}, {serial['pp']}, {serial['dp']}"),
                f"{batch:,}",
                percent(serial["share"]),
                f"{serial['bound']:.2f}",
                *(unbroken(f"{row['speedup']:.2f} ({percent(hidden(row))})") for row in others),
            ]
        )
    return markdown(header, lines)


def largest_sentence(content: dict[str, Any]) -> str:
    """Return what the largest simulation takes."""
    step = content["largest"]
    return (
        f"A step of {step['gpus']:,} GPUs ({step['model']} with {step['layers']} layers; "
        f"tp, pp, dp = {step['tp']}, {step['pp']}, {step['dp']}; {step['micro_batches']} "
        f"micro-batches; Domino by rows) has {step['operators']:,} operators, one rank of each "
        f"stage. Simulating it took {step['seconds']:.1f} s and {step['memory_gib']:.1f} GiB."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--largest", action="store_true", help="simulate the largest case alone")
    options = parser.parse_args()
    if options.largest:
        print(json.dumps(largest()))
        return
    keep(document(), options.target)


if __name__ == "__main__":
    main()
