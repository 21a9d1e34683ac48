"""Steps that run on ranks: in the planned order, with what went wrong said by all."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from flux.bench.shapes import Layer, Moe
from flux.cli.app import app
from flux.machine.cluster import load_cluster
from flux.plan.fabric import Fabric
from flux.plan.model import Parallel, TrainingStep
from flux.runtime.execute import Executor, OperatorWork, coordinates, measured, members
from flux.runtime.run import PlanRun, schedules_of
from harness import more, run_ranks

DENSE = Layer(16, 64, 4, 4, 4, False)
EXPERTS = Layer(16, 0, 4, 4, 4, True, Moe(4, 2, 16))


def config(parallel: Parallel, layer: Layer = DENSE, **options: Any) -> PlanRun:
    policies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("serial", {}),
        ("dhelix", {}),
        ("domino", {"slices": 2}),
        ("serial", {"fused": "row"}),
    )
    if parallel.ep > 1 and parallel.tp == 1:
        policies = (*policies[:2], ("serial", {"fused": "all"}))
    step = TrainingStep("test", layer, 2 * parallel.pp, "float32", parallel, 8, 2, 1 + parallel.pp)
    return PlanRun(
        step=step,
        policies=policies if parallel.tp > 1 or parallel.ep > 1 else policies[:2],
        **options,
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_groups_partition_the_ranks(sequence: bool) -> None:
    parallel = Parallel(tp=2, cp=2, dp=4, pp=2, ep=2, sequence=sequence)
    fabric = Fabric(replace(load_cluster("llama3-h100"), hosts=4), parallel)
    per_host = [fabric.span(kind).per_host for kind in ("dp", "edp", "cp")]
    assert per_host == [4, 4 if sequence else 2, 2]
    for kind in ("tp", "cp", "dp", "ep", "edp", "pp"):
        groups = members(parallel, kind)
        assert sorted(rank for group in groups for rank in group) == list(range(parallel.world))
        assert len({len(group) for group in groups}) == 1
        assert len(groups[0]) == fabric.span(kind).size
    # Context parallel ranks have the same weights, and sum up their gradients as well; so do
    # tensor parallel ones of experts, where they have other tokens.
    copies = list(range(0, 16, 2)) if sequence else [0, 2, 8, 10]
    experts = [0, 1] if sequence else [0, 4]
    assert members(parallel, "ep")[0] == experts and members(parallel, "edp")[0] == copies
    assert members(parallel, "dp")[0] == list(range(0, 16, 2))
    assert coordinates(parallel, 5) == {"tp": 1, "cp": 0, "dp": 1, "pp": 0}


def steps(rank: int, world: int, config: PlanRun) -> None:
    """Run each policy twice and compare with the plan."""
    work = OperatorWork("float32")
    for schedule in schedules_of(config).values():
        executor = Executor(schedule, config.step.parallel, work, 20.0)
        ops = schedule.graph.ops
        for _ in range(2):
            times = executor.run()
            for (stage, _), numbers in schedule.lanes.items():
                if stage == executor.stage:
                    for before, after in pairwise(numbers):
                        assert times[before][1] <= times[after][0]
            for number, (start, _) in times.items():
                for dep in schedule.graph.deps[number]:
                    assert dep not in times or times[dep][1] <= start, ops[number].name
            everywhere: list[Any] = [None] * world
            dist.all_gather_object(everywhere, times)
            together = {number: span for of in everywhere for number, span in of.items()}
            timeline = measured(schedule, together, [0.0] * len(ops))
            assert timeline.iteration_ms > 0 and len(timeline.events()) == len(ops)


@pytest.mark.parametrize(
    "parallel, layer",
    [
        (Parallel(tp=2, cp=2, sequence=True), DENSE),
        (Parallel(tp=2, pp=2), DENSE),
        (Parallel(dp=2, ep=2), EXPERTS),
        (Parallel(tp=2, ep=2, sequence=True), EXPERTS),
        *more((Parallel(tp=2), DENSE), (Parallel(pp=4), DENSE)),
    ],
    ids=str,
)
def test_steps_run_in_the_planned_order(parallel: Parallel, layer: Layer) -> None:
    run_ranks(parallel.world, steps, config(parallel, layer))


def failing(rank: int, world: int, config: PlanRun) -> str:
    """Let an operator of rank 1 fail; return what each rank raises."""
    schedules = schedules_of(config)
    (schedule,) = (schedules[name] for name in schedules if name.startswith("domino slices=2 "))
    executor = Executor(schedule, config.step.parallel, OperatorWork("float32"), 2.0)
    broken = mock.Mock(side_effect=ZeroDivisionError("as planned"))
    if rank == 1:
        executor._calls[len(schedule.graph.ops) // 2] = broken
    with pytest.raises(RuntimeError) as raised:
        executor.run()
    return str(raised.value)


def test_an_operator_that_fails_ends_the_step_on_all_ranks() -> None:
    found = run_ranks(2, failing, config(Parallel(tp=2)))
    assert found[1] == "rank 1: as planned"
    assert found[0].startswith("rank 0: ")


def wrong_world(rank: int, world: int) -> None:
    schedule = schedules_of(config(Parallel(tp=4)))["serial"]
    with pytest.raises(ValueError, match="the step is for 4 ranks, and there are 2"):
        Executor(schedule, Parallel(tp=4), OperatorWork("float32"))
    unequal = list(schedules_of(config(Parallel(tp=2))).values())[rank]
    with pytest.raises(ValueError, match=r"ranks \[1\] have another schedule than rank 0"):
        Executor(unequal, Parallel(tp=2), OperatorWork("float32"))


def test_a_policy_named_twice_is_run_twice() -> None:
    twice = replace(config(Parallel(tp=2)), policies=(("serial", {}), ("serial", {})))
    assert list(schedules_of(twice)) == ["serial", "serial, again"]


def test_wrong_numbers_of_ranks_and_unequal_schedules_are_refused() -> None:
    run_ranks(2, wrong_world)


def test_the_command_predicts_and_runs(tmp_path: Path) -> None:
    run = CliRunner().invoke
    small = ["--layers", "1", "--scale", "64", "--sequence", "16", "--repeats", "1"]
    out, trace = (tmp_path / name for name in ("run.json", "trace.json"))
    words = ["plan", "run", *small, "--warmup", "1", "--json", str(out)]
    result = run(app, [*words, "--trace", str(trace)])
    assert result.exit_code == 0 and "predicted" in result.output, result.output
    serial, domino = json.loads(out.read_text())
    assert serial["policy"] == "serial" and domino["predicted_ms"] > 0
    assert len(serial["times_ms"]) == 1 and serial["iteration_ms"] == serial["times_ms"][0]
    lanes = {
        e["args"]["name"]
        for e in json.loads(trace.read_text())["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert {f"{domino['policy']}, {what}: comp" for what in ("predicted", "run")} <= lanes
    # What these choose by the profile, and sends beside compute, are measured, too.
    words = ["--layers", "4", "--tp", "1", "--pp", "2", "--dp", "2", "--micro-batches", "4"]
    words += ["--policy", "centauri:chunks=2", "--policy", "zbv", "--warmup", "0"]
    result = run(app, ["plan", "run", *small, *words, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [row["predicted_ms"] > 0 for row in json.loads(out.read_text())] == [True, True]
    for words, message in (
        (["--policy", "domino:slices=3"], "3 slices must divide"),
        (["--link-rate", "1gbit"], "a link rate needs at least 2 hosts"),
    ):
        result = run(app, ["plan", "run", *small, *words])
        assert result.exit_code == 2 and message in result.output, result.output
