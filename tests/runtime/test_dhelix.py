"""DHelix on ranks: gradients of 1F1B, its order, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dhelix_hosts
import dhelix_paper
import dhelix_parts
import pytest
import torch
import torch.distributed as dist
from llama import Llama, Stage, layer_of, loss_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

from flux.runtime import slices
from flux.runtime.dhelix.schedule import ScheduleDHelix, folded
from flux.runtime.dhelix.strands import StrandEnded, Strands
from harness import BUSY, PRELOAD, fresh_ranks, more, run_ranks
from scripts import ROOT

PRELOAD.append("torch.distributed.pipelining")
RUNTIME = schedules._PipelineScheduleRuntime
takes_functions = pytest.mark.skipif(
    not hasattr(RUNTIME, "register_custom_function"), reason="DHelix needs PyTorch 2.10"
)
SIZES = Llama()
BATCH, SEQUENCE = 12, 6


def groups(tp: int, timeout_s: float = 60.0) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's tensor-parallel group, of neighbours, and its pipeline."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, dist.ProcessGroup] = {}
    for first in range(0, world, tp):
        group = dist.new_group(range(first, first + tp), timedelta(seconds=timeout_s))
        found |= {"tp": group} if first <= rank < first + tp else {}
    for first in range(tp):
        group = dist.new_group(range(first, world, tp), timedelta(seconds=timeout_s))
        found |= {"pp": group} if rank % tp == first else {}
    return found["tp"], found["pp"]


def schedule_of(
    kind: str, tp: dist.ProcessGroup, pp: dist.ProcessGroup, micro_batches: int, **options: Any
) -> tuple[Any, dict[int, torch.nn.Module]]:
    """Return a schedule, and this rank's layers by number (-1: embedding, -2: head)."""
    p, rank = dist.get_world_size(pp), dist.get_rank(pp)
    numbers = list(range(SIZES.layers))
    count = p if kind == "1f1b" else 2 * p
    parts = [numbers[rank * len(numbers) // p :][: len(numbers) // p]]
    if kind == "dhelix":
        parts = list(folded(numbers, p, rank))
    places = [rank] if kind == "1f1b" else [rank, 2 * p - 1 - rank]
    stages, modules = [], {}
    for place, part in zip(places, parts, strict=True):
        layers = {number: layer_of(SIZES, number, tp) for number in part}
        stage = Stage(SIZES, list(layers.values()), place == 0, place == count - 1)
        modules |= layers
        if stage.embedding is not None:
            modules[-1] = stage.embedding
        if stage.head is not None:
            modules[-2] = torch.nn.ModuleList([stage.norm, stage.head])
        stages.append(PipelineStage(stage, place, count, torch.device("cpu"), group=pp))
    if kind == "1f1b":
        return Schedule1F1B(stages[0], micro_batches, loss_of), modules
    return ScheduleDHelix(stages, micro_batches, loss_of, **options), modules


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    both = torch.randint(SIZES.vocabulary, (2, BATCH, SEQUENCE), generator=generator)
    return both[0], both[1]


def step(kind: str, schedule: Any, pp: dist.ProcessGroup, number: int = 0) -> list[float]:
    """Run a step; return the losses of the micro-batches where the last stage is."""
    p, rank = dist.get_world_size(pp), dist.get_rank(pp)
    tokens, labels = batch_of(number)
    losses: list[torch.Tensor] = []
    inputs = (tokens,) if rank == 0 else ()
    last = rank == (p - 1 if kind == "1f1b" else 0)
    schedule.step(*inputs, target=labels if last else None, losses=losses if last else None)
    return [float(loss.detach()) for loss in losses]


# -- gradients -------------------------------------------------------------------------------------


def gradients(rank: int, world: int, tp: int, script: str) -> dict[str, Any]:
    """Return losses of 1F1B and DHelix, this rank's gradients by layer, and the order of turns."""
    before = threading.active_count()
    tensor, pipeline = groups(tp)
    found: dict[str, Any] = {}
    receivers = set()
    wait = schedules._wait_batch_p2p

    def received(work: list[dist.Work]) -> None:
        receivers.add(threading.current_thread().name)
        wait(work)

    schedules._wait_batch_p2p = received
    for kind in ("1f1b", "dhelix"):
        options = {"script": script} if kind == "dhelix" else {}
        schedule, modules = schedule_of(kind, tensor, pipeline, 6, **options)
        losses = [step(kind, schedule, pipeline) for _ in range(2)]  # gradients of both add up
        grads = {
            (number, name): p.grad
            for number, module in modules.items()
            for name, p in module.named_parameters()
        }
        found[kind] = losses, grads
        if kind == "dhelix":
            found["order"] = "".join(schedule.strands.order)
    schedules._wait_batch_p2p = wait
    # Each strand waits for its own input: the other one computes beside that.
    assert ("flux-forward-strand" in receivers) == (dist.get_world_size(pipeline) > 1)
    assert threading.active_count() == before and slices._before_wait is None
    return found


@takes_functions
@pytest.mark.parametrize("pp, tp", [(1, 2), (2, 2), (4, 1), *more((2, 1), (4, 2))])
def test_gradients_are_those_of_1f1b(pp: int, tp: int) -> None:
    found = run_ranks(pp * tp, gradients, tp, "BF" if pp < 4 else "FBBFFB")
    for at in range(tp):  # ranks of one place in their tensor-parallel group hold a whole model
        of = [result for rank, result in enumerate(found) if rank % tp == at]
        losses, grads = [], []
        for kind in ("1f1b", "dhelix"):
            losses.append([loss for r in of for of_step in r[kind][0] for loss in of_step])
            grads.append({k: grad for result in of for k, grad in result[kind][1].items()})
        assert losses[0] == pytest.approx(losses[1], rel=1e-12) and len(losses[0]) == 12
        assert set(grads[0]) == set(grads[1]) and len(grads[0]) == SIZES.layers * 6 + 3
        for key, grad in grads[0].items():
            assert torch.isfinite(grad).all() and grad.abs().max() > 0
            torch.testing.assert_close(grads[1][key], grad, rtol=1e-12, atol=1e-14)
    for result in found:
        layers = SIZES.layers // (2 * pp)
        places = 2 * 2 * layers if tp > 1 else 0  # a layer waits twice forward, twice backward
        assert len(result["order"]) == places
        if pp < 4 and tp > 1:
            assert result["order"] == "BF" * (places // 2)


# -- strands ---------------------------------------------------------------------------------------


def test_strands_follow_their_script_and_end_each_other() -> None:
    seen: list[str] = []

    def body(name: str, count: int) -> str:
        for number in range(count):
            seen.append(f"{name}{number}")
            assert slices._before_wait is not None
            slices._before_wait()
        seen.append(f"{name} ends")
        return name

    strands = Strands("BFF", 5.0)
    assert strands.run(lambda: body("F", 4), lambda: body("B", 2)) == "F"
    assert "".join(strands.order) == "BFFBFF"
    assert seen == ["B0", "F0", "B1", "F1", "F2", "B ends", "F3", "F ends"]

    def fails() -> None:
        body("B", 1)
        raise ZeroDivisionError("as planned")

    with pytest.raises(ZeroDivisionError, match="as planned"):
        strands.run(lambda: body("F", 9), fails)
    with pytest.raises(ZeroDivisionError, match="as planned"):
        strands.run(fails, lambda: body("F", 9))
    assert slices._before_wait is None
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"has waited 0\.1 s for the other one"):
        Strands("FB", 0.1).run(lambda: time.sleep(0.3), lambda: None)
    assert time.monotonic() - begin < 5 * BUSY
    assert issubclass(StrandEnded, RuntimeError)
    for script, timeout_s, message in (
        ("", 1.0, "script must consist of F and B, got ''"),
        ("FX", 1.0, "script must consist of F and B, got 'FX'"),
        ("FB", 0.0, "timeout_s must be a positive time, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Strands(script, timeout_s)


def test_the_forward_strand_has_the_stream_of_its_caller(monkeypatch: Any) -> None:
    entered = []
    streams = {"MainThread": "the caller's"}

    def set_stream(stream: str) -> None:
        name = threading.current_thread().name
        entered.append((stream, name))
        streams[name] = stream

    def current_stream() -> str:
        return streams.get(threading.current_thread().name, "the default one")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    assert Strands().run(current_stream, lambda: None) == "the caller's"
    assert entered[0] == ("the caller's", "flux-forward-strand")


# -- bad input, and ranks that stop ----------------------------------------------------------------


def refused(rank: int, world: int) -> None:
    tensor, pipeline = groups(1)
    for micro_batches in (2, True, 3.5):
        with pytest.raises(ValueError, match="n_microbatches must be more than the 2 pipeline"):
            schedule_of("dhelix", tensor, pipeline, micro_batches)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="script must consist of F and B"):
        schedule_of("dhelix", tensor, pipeline, 3, script="BX")
    stages = schedule_of("dhelix", tensor, pipeline, 3)[0]._stages
    for wrong in (stages[::-1], stages[:1]):
        with pytest.raises(ValueError, match=rf"rank {rank} of 2 needs stages {rank} and"):
            ScheduleDHelix(wrong, 3, loss_of)
    with pytest.raises(ValueError, match="a rank has two stages of a folded model, got none"):
        ScheduleDHelix([], 3, loss_of)
    schedule, _ = schedule_of("dhelix", tensor, pipeline, 5)
    tokens, labels = batch_of(0)
    with pytest.raises(ValueError, match="5 micro-batches must divide the batch of 12"):
        schedule.step(tokens, target=labels)
    for layers, p, at, message in (
        (list(range(6)), 2, 0, "4 stages must divide 6 layers"),
        (list(range(8)), 2, 2, r"rank must be in \[0, 2\), got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            folded(layers, p, at)


@takes_functions
def test_bad_input_is_refused_on_every_rank() -> None:
    run_ranks(2, refused)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RUNTIME, "register_custom_function", raising=False)
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.10"):
        ScheduleDHelix([], 4, torch.nn.functional.mse_loss)


def train(
    rank: int, world: int, folder: str, steps: int, stop: tuple[str, int, int]
) -> list[float]:
    """Train from the last checkpoint; return the loss of each step on rank 0.

    Args:
        rank: of this process.
        world: number of ranks.
        folder: of the checkpoints.
        steps: to train in all.
        stop: ("kill" or "stall" or "", rank, step): what happens in the middle of a step.
    """
    tensor, pipeline = groups(1, 1.5 * BUSY)
    schedule, modules = schedule_of("dhelix", tensor, pipeline, 4, timeout_s=3.0 * BUSY)
    every = torch.nn.ModuleDict({str(n): module for n, module in modules.items()})
    optimizer = torch.optim.Adam(every.parameters(), 1e-2)
    path = Path(folder) / f"{rank}.pt"
    begin = 0
    if path.exists():
        saved = torch.load(path)
        begin = saved["steps"]
        every.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    losses = []
    for number in range(begin, steps):
        if stop[0] and stop[1:] == (rank, number):
            how = stop[0]
            calls = iter(range(100))

            def hook(*_: Any, how: str = how, calls: Any = calls) -> None:
                if next(calls) == 3:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(60)

            next(iter(every.values())).register_forward_pre_hook(hook)
        found = step("dhelix", schedule, pipeline, number)
        losses.append(sum(found) / max(1, len(found)))
        optimizer.step()
        optimizer.zero_grad()
        state = {"steps": number + 1, "model": every.state_dict()}
        torch.save({**state, "optimizer": optimizer.state_dict()}, path)
    return losses


@takes_functions
@pytest.mark.parametrize("how", ["kill", "stall"])
def test_survivors_raise_and_training_goes_on_from_its_checkpoint(how: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    whole = run_ranks(2, train, str(folders[0]), 4, ("", 0, 0))[0]
    with fresh_ranks(2) as ranks:
        ranks.start(train, str(folders[1]), 4, (how, 1, 2))
        first, second = ranks.collect(25.0 * BUSY, grace=1.0)
    assert first is not None and "Error" in first.error, first
    assert second is None if how == "stall" else second is not None and second.signal == 9
    parts = run_ranks(2, train, str(folders[1]), 4, ("", 0, 0))[0]
    assert len(whole) == 4 and parts == whole[2:]
    assert len(set(whole)) == 4


# -- the page --------------------------------------------------------------------------------------


def test_the_page_has_the_figures_of_the_committed_files() -> None:
    page = (ROOT / "docs" / "use" / "dhelix.md").read_text()
    assert dhelix_hosts.table(json.loads(dhelix_hosts.RESULT.read_text())) in page


def test_a_gain_inside_of_the_papers_range_is_not_off() -> None:
    for gain, points in ((1.5, -0.5), (3.0, 0.0), (9.0, 4.0)):
        made_up = {"paper": {"dhelix": [2, 5]}, "gains": {"dhelix": gain}}
        assert dhelix_paper.off(made_up, "dhelix") == points


def test_volumes_of_the_papers_table_1_follow_from_sizes_of_the_model() -> None:
    for degrees, sequence, micro_batches, (local, _, between, _) in dhelix_parts.TABLE_1:
        found = dhelix_parts.volumes(degrees, sequence, micro_batches)
        assert found["whole_tp"] == pytest.approx(local, rel=5e-3)
        assert "cp" not in degrees or found["cp_all_heads"] == pytest.approx(between, rel=0.07)


def test_context_parallelism_sends_all_heads_and_again_in_backward() -> None:
    case = dhelix_parts.LONG
    sent = [
        {
            op.role: op.shape[1]
            for op in dhelix_paper.planner_of(replace(case, sent_heads=heads), 1)[3].ops
            if op.part == "ag_kv"
        }
        for heads in (None, 8)
    ]
    assert sent[0]["dgrad"] == 2 * sent[0]["fwd"] and sent[0]["fwd"] == 16 * sent[1]["fwd"]
