"""Rules of real GPUs that show between processes with a device each: words of other devices, and
one hardware queue, which is what Megatron's CUDA_DEVICE_MAX_CONNECTIONS=1 leaves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from emulated import EmulatedDevice
from emulated_cases import BF16
from emulated_processes import emulate, run
from flux import Knobs
from flux.transport import symm_mem
from flux.transport.exchange import Exchange
from ptx_machine.gpu import DriverCall
from reference import Inputs, Problem

ROWS, TILE = 16, 4  # of a rank, and of a communication tile


def _forbid_peers(device: EmulatedDevice) -> None:
    """Let no stream wait for words of the peers' memory."""
    mapped = symm_mem._map_everywhere

    def map_and_forbid(exchange: Exchange, *arguments: Any) -> tuple[Any, list[torch.Tensor]]:
        memory, everybody = mapped(exchange, *arguments)
        for rank, data in enumerate(everybody):
            if rank != exchange.rank:
                device.forbid_waits(data.data_ptr(), data.numel() * data.element_size())
        return memory, everybody

    symm_mem._map_everywhere = map_and_forbid  # type: ignore[assignment]


def _calls(rank: int, world: int, library: Path, op: str, direction: str) -> None:
    device = emulate(rank, library)
    _forbid_peers(device)
    p = Problem(op, ROWS * world, (16,), 8, BF16)
    knobs = Knobs(direction=direction, comm_tile_rows=TILE)
    with p.build(tuning=knobs, backend="cuda", transport="symm_mem", timeout_s=2.0) as made:
        for m in (ROWS * world, 5):
            Inputs(p, m, world, seed=m).call_and_check(made, rank)
    if direction == "push":
        _adds_are_refused(rank, world, device)
    device.close()


def _adds_are_refused(rank: int, world: int, device: EmulatedDevice) -> None:
    """Rank 1 alone has a peer over PCIe; all ranks refuse."""
    device.native_peer_atomics(rank != 1)
    p = Problem("gemm_rs", ROWS * world, (16,), 8, BF16)
    options: dict[str, Any] = {"backend": "cuda", "transport": "symm_mem", "timeout_s": 5.0}
    with pytest.raises(ValueError, match=r"on rank 1 there are no native atomic .* GPU of rank 0"):
        p.build(tuning=Knobs(reduce="in_flight"), **options)
    p.build(tuning=Knobs(reduce="local"), **options).close()


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_streams_wait_for_words_of_their_own_device_and_pcie_adds_nothing(
    emulator: Path, direction: str
) -> None:
    run(3, _calls, emulator, "ag_gemm", direction)


def _one_queue(rank: int, world: int, library: Path, direction: str) -> Any:
    """Calls back to back; then one that is recorded, with slow copies."""
    os.environ["PTX_MACHINE_QUEUES"] = "1"
    device = emulate(rank, library)
    p = Problem("ag_gemm", ROWS * world, (16,), 8, BF16)
    knobs = Knobs(direction=direction, comm_tile_rows=TILE)
    with p.build(tuning=knobs, backend="cuda", transport="symm_mem", timeout_s=5.0) as made:
        everything = [Inputs(p, m, world, seed=m) for m in (ROWS * world, 5, 13)]
        outs = [inputs.call(made, rank) for inputs in everything]
        made.wait()
        for inputs, got in zip(everything, outs, strict=True):
            inputs.check(got, rank)
        device.set_copy_delay(3000)
        dist.barrier()
        with device.record_calls():
            got = everything[0].call(made, rank)
            made.wait()
        everything[0].check(got, rank)
        return made._backend.native.copy_stream, device.calls(), device.timeline()


def _first_launch(calls: list[DriverCall]) -> int:
    return next(i for i, call in enumerate(calls) if call.name == "launch")


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_copies_overlap_with_the_kernel_on_one_queue(emulator: Path, direction: str) -> None:
    for copy_stream, calls, timeline in run(2, _one_queue, emulator, direction):
        launch = _first_launch(calls)
        home = [c for c in calls[:launch] if c.stream != copy_stream]
        copies = [c for c in calls[:launch] if c.name == "copy"]
        if direction == "push":  # own rows are read in place, entries come behind the copies
            assert not copies and not any(c.name in ("batch", "write") for c in home)
        else:
            assert [int(c.details["bytes"]) for c in copies] == [ROWS * 8 * 2], "own rows: one copy"
            raised = [c for c in home[home.index(copies[0]) + 1 :] if c.name in ("batch", "write")]
            assert len(raised) == 1 and raised[0].name == "batch", "their signals: one batch"
            assert int(raised[0].details["writes"]) >= ROWS // TILE
        assert [c.name for c in calls[launch:] if c.stream == copy_stream].count("copy") == 4
        first_tile = min(e.start_ns for e in timeline if e.kind == "tile")
        last_copy = max(e.end_ns for e in timeline if e.what == "copy" and e.stream == copy_stream)
        assert first_tile < last_copy, "the kernel starts when all copies are done"
