"""What `flux plan` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from flux.cli.terminal import new_table
from flux.plan.model import TrainingStep
from flux.plan.simulate import Timeline

if TYPE_CHECKING:
    from flux.machine.cluster import Cluster
    from flux.plan.compare import Compared
    from flux.plan.sample import Figures


_TIMES = ("iteration_ms", "compute_ms", "comm_ms", "exposed_comm_ms")
_FIGURES = (*_TIMES, "peak_memory_bytes", "idle_ms")


def tokens_per_s(step: TrainingStep, iteration_ms: float) -> float:
    """Return tokens of all ranks per second."""
    return 1e3 * step.batch_tokens / iteration_ms


def mfu(step: TrainingStep, cluster: Cluster, iteration_ms: float) -> float | None:
    """Return the model FLOPs utilization, at most 1; None if the device's peak is not known.

    As in PaLM (arXiv 2204.02311, appendix B): operations that the model needs, over those that the
    devices could do in that time. See ``TrainingStep.operations`` for what counts.
    """
    tflops = cluster.device.tflops.get(step.dtype)
    if not tflops:
        return None
    return step.operations / (1e9 * tflops * iteration_ms * step.parallel.world)


def document(
    label: str, step: TrainingStep, cluster: Cluster, figures: Timeline | Figures | None
) -> dict[str, Any]:
    """Return the JSON object of one policy: what was planned, times in ms, and bytes.

    ``memory_bytes`` has the peak of a device by kind. ``idle_ms`` is the bubble: the mean time in
    which a device neither computes nor communicates.
    """
    parallel = step.parallel
    row: dict[str, Any] = {"policy": label, "model": step.name, "cluster": cluster.name}
    row |= {degree: getattr(parallel, degree) for degree in ("tp", "dp", "pp")}
    if figures is not None:
        row |= {name: getattr(figures, name) for name in _FIGURES}
        row["tokens_per_s"] = tokens_per_s(step, figures.iteration_ms)
        row["tokens_per_s_per_device"] = row["tokens_per_s"] / parallel.world
        row["mfu"] = mfu(step, cluster, figures.iteration_ms)
        most = max(range(parallel.pp), key=lambda stage: sum(step.resident(stage).values()))
        kinds = step.resident(most)
        held = sum(kinds.values())
        if step.zero == 0 and figures.resident_bytes < held:  # ranks share the optimizer's states
            kinds["optimizer"] += figures.resident_bytes - held
        else:  # or a policy has cut the model into other stages
            kinds = {kind: it * figures.resident_bytes / held for kind, it in kinds.items()}
        row["memory_bytes"] = kinds | {
            "activations": figures.peak_memory_bytes - figures.resident_bytes
        }
    return row


def documents(
    outcomes: Sequence[Compared], step: TrainingStep, cluster: Cluster
) -> list[dict[str, Any]]:
    """Return the JSON object of each policy; ``error`` says why a plan cannot be used."""
    return [
        document(label, step, cluster, timeline) | ({"error": reason} if reason else {})
        for label, timeline, reason in outcomes
    ]


def show(rows: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    """Print a table of policies; the first one that can be used is what others are compared with.

    Rows are of ``document``; those of a run also have ``predicted_ms``, those of plans that cannot
    be used ``error``.
    """
    ran = any("predicted_ms" in row for row in rows)
    caption = "ms; ratio: to the first; exposed: communication beside which nothing is computed"
    if not ran:
        caption += "; tok/s: of a device; idle: share of the bubble"
    heads = ["step", *(["predicted"] if ran else []), "ratio"]
    # A run predicts memory, and does not measure it; and no peak of a CPU core says much.
    middle, memory = (["compute", "comm"], []) if ran else (["tok/s", "MFU", "idle"], ["GB"])
    heads += [*middle, "exposed", "hidden", *memory]
    table = new_table(title, ["policy"], heads, caption)
    first = next((row["iteration_ms"] for row in rows if "error" not in row), None)
    for row in rows:
        if "error" in row:
            table.add_row(f"{row['policy']}: {row['error']}", *["-"] * len(heads))
            continue
        comm, exposed = row["comm_ms"], row["exposed_comm_ms"]
        hidden = f"{max(0.0, 100 * (1 - exposed / comm)):.0f}%" if comm else "-"
        predicted = [f"{row['predicted_ms']:.2f}"] if ran else []
        table.add_row(
            row["policy"],
            _ms(row["iteration_ms"]),
            *predicted,
            f"{row['iteration_ms'] / first:.2f}",
            *([f"{row['compute_ms']:.2f}", f"{comm:.2f}"] if ran else _rates(row)),
            _ms(exposed),
            hidden,
            *([] if ran else [f"{row['peak_memory_bytes'] / 1e9:.2f}"]),
        )
    console.print(table)


def _ms(time: float) -> str:
    """Return a time as it is shown: six digits at most."""
    return f"{time:.2f}" if time < 1000 else f"{time:.0f}"


def _rates(row: dict[str, Any]) -> list[str]:
    """Return tokens per second of a device, MFU and bubble, as they are shown."""
    share = "-" if row["mfu"] is None else f"{100 * row['mfu']:.1f}%"
    idle = f"{100 * row['idle_ms'] / row['iteration_ms']:.0f}%"
    return [f"{row['tokens_per_s_per_device']:.0f}", share, idle]


def explain(timeline: Timeline, most: int = 8) -> list[str]:
    """Return lines that say where a step's exposed communication is."""
    graph = timeline.schedule.graph
    if not graph.ops:
        return []
    exposed = timeline.exposed_by_stage
    stage = max(range(graph.stages), key=exposed.__getitem__)
    comp = sorted(
        (timeline.start[n], timeline.end[n])
        for n, op in enumerate(graph.ops)
        if op.stage == stage and not op.is_collective
    )
    by_part: dict[tuple[str, str], list[float]] = {}
    for number, op in enumerate(graph.ops):
        if op.stage != stage or not op.is_collective:
            continue
        begin, end = timeline.start[number], timeline.end[number]
        hidden = sum(max(0.0, min(e, end) - max(b, begin)) for b, e in comp)
        entry = by_part.setdefault((op.part, "forward" if op.role == "fwd" else op.role), [0, 0, 0])
        entry[0] += 1
        entry[1] += end - begin
        entry[2] += end - begin - hidden
    lines = [f"stage {stage} has most exposed communication: {exposed[stage]:.2f} ms"]
    ranked = sorted(by_part.items(), key=lambda item: -item[1][2])
    for (part, role), (count, total, left) in ranked[: most - 1]:
        share = 1 - left / total if total else 1.0
        lines.append(
            f"  {part} ({role}): {count:.0f} times, {total:.2f} ms, {100 * share:.0f}% hidden, "
            f"{left:.2f} ms exposed"
        )
    return lines
