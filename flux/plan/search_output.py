"""What `flux plan search` prints and writes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from flux.cli.terminal import PLAIN, new_table
from flux.machine.cluster import Cluster
from flux.plan import page
from flux.plan.model import TrainingStep
from flux.plan.report import document, mfu, tokens_per_s
from flux.plan.search import Query, SearchedPlan, SearchOutcome, plan_of, planned_again, usual

_DEGREES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert"}
_MEANINGS = {
    "sequence parallel": "norms are split over tensor parallel ranks too",
    "regather": "backward gathers inputs again in place of keeping them",
    "zero=2": "gradients and optimizer are sharded",
    "zero=3": "weights, gradients and optimizer are sharded (FSDP)",
    "split": "layers of each stage, else as even as possible",
}
_AS_THEY_ARE = ("micro_batch", "micro_batches", "zero", "regather", "recompute")


def layout_of(step: TrainingStep) -> str:
    """Return degrees and micro-batches of a step, as they are shown."""
    p = step.parallel
    words = [f"{name}={getattr(p, name)}" for name in _DEGREES if getattr(p, name) > 1] or ["1 GPU"]
    words.append(f"{step.micro_batches} x {step.micro_batch}")
    if p.sequence:
        words.append("sequence parallel" + (", regather" if step.regather else ""))
    if step.zero > 1:
        words.append(f"zero={step.zero}")
    if step.recompute != "none":
        words.append(f"recompute={step.recompute}")
    if step.split:
        words.append(f"split={','.join(map(str, step.split))}")
    return " ".join(words)


def title_of(plan: SearchedPlan) -> str:
    """Return policy and layout, as they are shown."""
    return f"{plan.label}, {layout_of(plan.step)}"


def legend(plans: list[SearchedPlan]) -> str:
    """Return what the words in the layouts of these plans mean."""
    layouts, first = ", ".join(layout_of(plan.step) for plan in plans), plans[0].step
    degrees = [f"{name} {word}" for name, word in _DEGREES.items() if f"{name}=" in layouts]
    words = [f"ranks by kind of parallelism ({', '.join(degrees)})"] if degrees else []
    words.append(
        f"{first.micro_batches} x {first.micro_batch}: micro-batches of a data parallel rank, and "
        "sequences of each"
    )
    words += [f"{word}: {meaning}" for word, meaning in _MEANINGS.items() if word in layouts]
    return f"layout: {'; '.join(words)}"


def search_document(query: Query, outcome: SearchOutcome, why: list[str]) -> dict[str, Any]:
    """Return the JSON object of a search, of which ``flux.plan.files`` reads a plan."""
    rows = []
    for plan in outcome.ranked:
        step, p = plan.step, plan.step.parallel
        rows.append(
            document(plan.label, step, query.cluster, plan)
            | {
                "cp": p.cp,
                "ep": p.ep,
                "sequence_parallel": p.sequence,
                **{name: getattr(step, name) for name in _AS_THEY_ARE},
                "split": ",".join(map(str, step.split)),
                "policy_options": {"name": plan.policy, **plan.options},
            }
        )
    return {
        **{key: getattr(query, key) for key in ("model", "gpus", "batch", "sequence", "memory_gb")},
        **{key: getattr(outcome, key) for key in ("layouts", "simulated", "too_large")},
        "refused": dict(outcome.reasons),
        "why": why,
        "plans": rows,
    }


def sections(query: Query, outcome: SearchOutcome, why: list[str], workers: int) -> str:
    """Return the sections of a page: all plans, and the same with a slower link."""
    half, link = page.halved(query.cluster, query.gpus)
    rows, again = [], []
    for plan, then in zip(
        outcome.ranked, planned_again(outcome.ranked, half, workers), strict=True
    ):
        layout = {"layout": layout_of(plan.step)}
        rows.append(document(plan.label, plan.step, query.cluster, plan) | layout)
        if isinstance(then, SearchedPlan):
            again.append(document(then.label, then.step, half, then) | layout)
        else:
            again.append({"error": then})
    notes = [*why, legend(list(outcome.ranked)), page.SHORTENED]
    return page.candidates(rows, notes, list(outcome.reasons)) + page.slower(rows, again, link)


def reasons(outcome: SearchOutcome, cluster: Cluster) -> list[str]:
    """Return where the time of the winner and of plans that came close goes, and why it won."""
    winner = outcome.ranked[0]
    serial = plan_of(cluster, not winner.scaled, (winner.step, "serial", {}))
    rows, sentences = [("the winner", winner)], []
    if isinstance(serial, SearchedPlan) and serial.label != winner.label:
        rows.append(("its layout without overlap", serial))
        sentences.append(f"under serial its layout {_difference(serial, winner)}")
    for plan in outcome.ranked:
        if layout_of(plan.step) != layout_of(winner.step):
            rows.append((f"the next layout, {layout_of(plan.step)}, {plan.label}", plan))
            sentences.append(f"the next layout {_difference(plan, winner)}")
            break
    lines = []
    for name, plan in rows:
        share = mfu(plan.step, cluster, plan.iteration_ms)
        lines.append(
            f"{name}: {tokens_per_s(plan.step, plan.iteration_ms):,.0f} tokens/s"
            + (f", {100 * share:.1f}% MFU" if share is not None else "")
            + f"; {plan.iteration_ms:.1f} ms = {plan.compute_ms:.1f} compute + "
            f"{plan.exposed_comm_ms:.1f} exposed communication (of {plan.comm_ms:.1f}) + "
            f"{_idle_ms(plan):.1f} idle and interference"
        )
    return lines + [f"why: {sentence}" for sentence in sentences]


def _idle_ms(plan: SearchedPlan) -> float:
    return max(plan.iteration_ms - plan.compute_ms - plan.exposed_comm_ms, 0.0)


def _difference(plan: SearchedPlan, winner: SearchedPlan) -> str:
    """Return how much more time a plan takes than the winner, and for what; most of it first."""
    longer = plan.iteration_ms - winner.iteration_ms
    parts = {
        "computing": plan.compute_ms - winner.compute_ms,
        "exposed communication": plan.exposed_comm_ms - winner.exposed_comm_ms,
        "idle time and interference": _idle_ms(plan) - _idle_ms(winner),
    }
    told = [
        f"{abs(ms):.1f} ms {'more' if ms > 0 else 'less'} {name}"
        for name, ms in sorted(parts.items(), key=lambda part: -abs(part[1]))
        if abs(ms) >= 0.05
    ]
    if not told:
        return "takes as long"
    share, way = 100 * longer / winner.iteration_ms, "more" if longer > 0 else "less"
    return f"takes {abs(share):.1f}% {way} time: {', '.join(told)}"


def show(query: Query, outcome: SearchOutcome, top: int, why: list[str], console: Console) -> None:
    """Print the first plans, and what everybody tries first, and where the winner's time goes."""
    plain = usual((plan.step, plan) for plan in outcome.ranked if plan.policy == "serial")
    shown = [plan for at, plan in enumerate(outcome.ranked) if at < top or (top and plan in plain)]
    title = (
        f"{query.model} on {query.gpus} GPUs of {query.cluster.name}: {query.batch} sequences of "
        f"{query.sequence}, {query.memory_gb:g} GB"
    )
    heads = ("step\nms", "ratio", "exposed\nms", "MFU\n%", "GB")
    table = new_table(title, ["policy", "layout"], heads)
    for plan in shown:
        share = mfu(plan.step, query.cluster, plan.iteration_ms)
        table.add_row(
            plan.label,
            layout_of(plan.step),
            f"{plan.iteration_ms:.0f}",
            f"{plan.iteration_ms / outcome.ranked[0].iteration_ms:.2f}",
            f"{plan.exposed_comm_ms:.0f}",
            "-" if share is None else f"{100 * share:.1f}",
            f"{plan.peak_memory_bytes / 1e9:.1f}",
        )
    console.print(table)
    if shown:
        console.print(legend(shown), **PLAIN)
    console.print("\n".join(why), **PLAIN)
    short = sum(plan.scaled for plan in outcome.ranked)
    console.print(
        f"{outcome.layouts} layouts fit; {outcome.simulated} candidates were simulated with few "
        f"layers, {len(outcome.ranked)} of them with all"
        + (f", {short} of these with fewer micro-batches, and scaled" if short else "")
        + f"; {outcome.too_large} need more memory.",
        **PLAIN,
    )
