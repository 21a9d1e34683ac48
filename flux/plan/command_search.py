"""The command `flux plan search`, and reading what it has found."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options
from flux.cli.ranks import check_writable, progress_bar
from flux.cli.terminal import PLAIN, open_console, refuse
from flux.plan.command import (
    ClusterName,
    Hosts,
    Model,
    PictureFile,
    Policy,
    Sequence,
    TraceFile,
    draw,
    parsed,
    write,
    write_trace,
)

if TYPE_CHECKING:
    from flux.machine.cluster import Cluster
    from flux.plan.search import Found, Query, SearchedPlan


def search_command(
    gpus: Annotated[int, typer.Option(help="Ranks of the step.")],
    policy: Policy = None,
    model: Model = "gpt3-175b",
    cluster: ClusterName = "flux-h800",
    hosts: Hosts = None,
    memory: Annotated[
        float | None, typer.Option(help="GB of a device (default: the cluster's).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step (default: four for each GPU).")
    ] = None,
    sequence: Sequence = None,
    beam: Annotated[
        int, typer.Option(help="Layouts on which all policies are tried: more take longer.")
    ] = 12,
    top: Annotated[int, typer.Option(help="Plans to print.")] = 10,
    trace: TraceFile = None,
    picture: PictureFile = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Find the fastest policy and degrees of parallelism for a model on a cluster.

    Without --policy all policies are tried. What does not fit into memory is left out. --json
    writes the plans for `flux plan run --plan`. --trace has the best three. --html has them with
    few layers and micro-batches, as many as a picture can hold.
    """
    for target in (trace, picture, json_target):
        if target not in (None, "-"):
            check_writable(str(target))
    from flux.plan import search as searching

    silent = quiet or json_target == "-"
    try:
        query = _query(policy, model, cluster, hosts, memory, batch, sequence, gpus, beam)
        with progress_bar(open_console(stderr=True), shown=not silent) as progress:
            found = searching.search(query, progress, workers=os.cpu_count() or 1)
    except ValueError as error:
        refuse(str(error))
    content = _document(query, found)
    write(content, json_target)
    best = found.ranked[:3]
    if trace is not None:
        write_trace([(_shown(one), one.timeline(query.cluster)) for one in best], trace)
    if picture is not None:
        from flux.plan.picture import MOST_OPS

        small = [(_shown(one), one.small_timeline(query.cluster)) for one in best]
        while len(small) > 1 and sum(len(timeline.start) for _, timeline in small) > MOST_OPS:
            small.pop()
        draw(f"{query.model} on {gpus} GPUs: few layers and micro-batches", small, picture)
    if not silent:
        _show(query, found, top, content["why"])


def _query(
    policies: list[str] | None,
    model: str,
    cluster: str,
    hosts: int | None,
    memory: float | None,
    batch: int | None,
    sequence: int | None,
    gpus: int,
    beam: int,
) -> Query:
    from flux.bench.shapes import model_of
    from flux.machine.cluster import load_cluster
    from flux.plan.policies import policy_of
    from flux.plan.search import Query, default_policies

    asked = tuple(map(parsed, policies or ()))
    for name, policy_options in asked:
        policy_of(name, policy_options)  # raises, if there is none
    found = load_cluster(cluster)
    wanted = -(-gpus // found.devices) if hosts is None else hosts
    if wanted < 1:
        raise ValueError(f"gpus and hosts must be at least 1, got {gpus} and {hosts}")
    found = replace(found, hosts=max(found.hosts, wanted) if hosts is None else wanted)
    limit = found.device.memory_gb if memory is None else memory
    if memory is None and not limit:
        raise ValueError(f"{found.source} does not say how much memory a device has: give --memory")
    return Query(
        model=model,
        cluster=found,
        gpus=gpus,
        batch=4 * gpus if batch is None else batch,
        sequence=model_of(model).sequence if sequence is None else sequence,
        memory_gb=limit,
        policies=asked or default_policies(),
        beam=beam,
    )


def _shown(one: SearchedPlan) -> str:
    from flux.plan.search import layout_of

    return f"{one.label}, {layout_of(one.step)}"


def _document(query: Query, found: Found) -> dict[str, Any]:
    from flux.plan.report import document

    rows = []
    for one in found.ranked:
        step, p = one.step, one.step.parallel
        rows.append(
            document(one.label, step, query.cluster.name, one)
            | {
                "cp": p.cp,
                "ep": p.ep,
                "sequence_parallel": p.sequence,
                "micro_batch": step.micro_batch,
                "micro_batches": step.micro_batches,
                "zero": step.zero,
                "regather": step.regather,
                "policy_options": {"name": one.policy, **one.options},
            }
        )
    return {
        "model": query.model,
        "gpus": query.gpus,
        "batch": query.batch,
        "sequence": query.sequence,
        "memory_gb": query.memory_gb,
        "layouts": found.layouts,
        "simulated": found.simulated,
        "too_large": found.too_large,
        "refused": dict(found.reasons),
        "why": _reasons(found, query.cluster),
        "plans": rows,
    }


def _reasons(found: Found, cluster: Cluster) -> list[str]:
    """Return lines that say where the winner's time goes, beside what came close.

    Args:
        found: a search's outcome.
        cluster: of the search.
    """
    from flux.plan.search import SearchedPlan, layout_of, plan_of

    winner = found.ranked[0]
    serial = plan_of(cluster, not winner.scaled, (winner.step, "serial", {}))
    rows = [("the winner", winner)]
    if isinstance(serial, SearchedPlan):
        rows.append(("its layout without overlap", serial))
    other = next((p for p in found.ranked if layout_of(p.step) != layout_of(winner.step)), None)
    if other is not None:
        rows.append((f"the next layout, {layout_of(other.step)}, {other.label}", other))
    lines = []
    for what, one in rows:
        idle = one.iteration_ms - one.compute_ms - one.exposed_comm_ms
        lines.append(
            f"{what}: {one.iteration_ms:.1f} ms = {one.compute_ms:.1f} compute + "
            f"{one.exposed_comm_ms:.1f} exposed communication (of {one.comm_ms:.1f}) + "
            f"{max(idle, 0.0):.1f} idle and interference"
        )
    return lines


def _show(query: Query, found: Found, top: int, why: list[str]) -> None:
    from rich.table import Table

    from flux.plan.search import layout_of

    console = open_console()
    title = (
        f"{query.model} on {query.gpus} GPUs of {query.cluster.name}: {query.batch} sequences of "
        f"{query.sequence}, {query.memory_gb:g} GB"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold")
    table.add_column("layout", overflow="fold")
    for head in ("step\nms", "ratio", "exposed\nms", "GB"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in found.ranked[:top]:
        table.add_row(
            one.label,
            layout_of(one.step),
            f"{one.iteration_ms:.0f}",
            f"{one.iteration_ms / found.ranked[0].iteration_ms:.2f}",
            f"{one.exposed_comm_ms:.0f}",
            f"{one.peak_memory_bytes / 1e9:.1f}",
        )
    console.print(table)
    for line in why:
        console.print(line, **PLAIN)
    short = sum(plan.scaled for plan in found.ranked)
    console.print(
        f"{found.layouts} layouts fit; {found.simulated} candidates were simulated with few "
        f"layers, the best {len(found.ranked)} with all"
        + (f", {short} of these with fewer micro-batches, and scaled" if short else "")
        + f"; {found.too_large} need more memory.",
        **PLAIN,
    )
