"""The command `flux plan search`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flux.cli import options
from flux.cli.options import with_options
from flux.cli.ranks import check_writable, progress_bar
from flux.cli.terminal import open_console, refuse, write_json
from flux.plan import options as plan_options
from flux.plan.command import draw, write_trace

if TYPE_CHECKING:
    from flux.plan.search import Query


@dataclass(frozen=True)
class SearchOptions:
    """A model on a cluster, and what is tried."""

    gpus: Annotated[int, typer.Option(help="Ranks of the step.")]
    policy: plan_options.Policy = None
    model: plan_options.Model = "gpt3-175b"
    cluster: options.ClusterName = "flux-h800"
    calibration: plan_options.CalibrationFile = None
    hosts: plan_options.Hosts = None
    memory: Annotated[
        float | None, typer.Option(help="GB of a device (default: the cluster's).")
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Sequences of a step (default: four for each GPU).")
    ] = None
    sequence: plan_options.Sequence = None
    beam: Annotated[
        int, typer.Option(help="Layouts on which all policies are tried: more take longer.")
    ] = 12


@with_options
def search_command(
    asked: SearchOptions,
    *,
    top: Annotated[int, typer.Option(help="Plans to print.")] = 10,
    trace: options.TraceFile = None,
    picture: plan_options.PictureFile = None,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Find the fastest policy and degrees of parallelism for a model on a cluster.

    Without --policy all policies are tried. What does not fit into memory is left out. --json
    writes the plans for `flux plan run --plan`. --trace has the best three. --html has all plans,
    the first ones drawn with few layers and micro-batches, and all again at half the link's speed.
    """
    check_writable(trace, picture, json_target)
    from flux.plan import search as searching
    from flux.plan import search_output as output

    silent, workers = quiet or json_target == "-", os.cpu_count() or 1
    try:
        query = _query(asked)
        with progress_bar(open_console(stderr=True), shown=not silent) as progress:
            outcome = searching.search(query, progress, workers)
    except ValueError as error:
        refuse(str(error))
    why = output.reasons(outcome, query.cluster)
    of_device = {
        "cluster": asked.cluster,
        "calibration": asked.calibration or "",
        "hosts": query.cluster.hosts,
        "memory_gb": query.memory_gb,
    }
    write_json(output.search_document(query, outcome, why) | {"device": of_device}, json_target)
    best = outcome.ranked[:3]
    if trace is not None:
        write_trace([(output.title_of(p), p.timeline(query.cluster)) for p in best], trace)
    if picture is not None:
        from flux.plan.picture import drawable

        small = [(output.title_of(p), p.small_timeline(query.cluster)) for p in best]
        while len(small) > 1 and not drawable(small):
            small.pop()
        title = f"{query.model} on {query.gpus} GPUs of {query.cluster.name}"
        svg = picture.endswith(".svg")
        draw(title, small, picture, "" if svg else output.sections(query, outcome, why, workers))
    if not silent:
        output.show(query, outcome, top, why, open_console())


def _query(asked: SearchOptions) -> Query:
    from flux.bench.model_files import model_of
    from flux.machine.cluster import load_cluster
    from flux.plan.compare import HEADROOM, usable_gb
    from flux.plan.policies import policy_of
    from flux.plan.search import Query, default_policies

    policies = tuple(map(plan_options.parse_policy, asked.policy or ()))
    for name, policy_options in policies:
        policy_of(name, policy_options)  # raises, if there is none
    described = load_cluster(asked.cluster, asked.calibration)
    gpus, hosts, memory = asked.gpus, asked.hosts, asked.memory
    wanted = -(-gpus // described.devices) if hosts is None else hosts
    if wanted < 1:
        raise ValueError(f"gpus and hosts must be at least 1, got {gpus} and {hosts}")
    described = replace(described, hosts=max(described.hosts, wanted) if hosts is None else wanted)
    limit = usable_gb(described, memory, HEADROOM)
    if memory is None and not limit:
        raise ValueError(
            f"{described.source} does not say how much memory a device has: give --memory"
        )
    return Query(
        model=asked.model,
        cluster=described,
        gpus=gpus,
        batch=4 * gpus if asked.batch is None else asked.batch,
        sequence=model_of(asked.model).sequence if asked.sequence is None else asked.sequence,
        memory_gb=limit,
        policies=policies or default_policies(),
        beam=asked.beam,
    )
