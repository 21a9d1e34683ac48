"""Steps of a small Llama between hosts with limited links: 1F1B and DHelix.

    python benchmarks/dhelix_hosts.py      # as root, for network namespaces; some 70 minutes

Every rank is a host with a link of its own. Its device has a fixed share of a core's speed: after
each operation the computing thread sleeps for the time that the slower device would need more. So a
rank computes no faster while others wait, and network threads take no time from it, as on a GPU's
host, where they have cores of their own. Methods run by turns in one process group:

    serial    1F1B; every collective is waited for at once
    wgrad     1F1B; AllReduce of an input's gradient beside the weight's, as Megatron-core does
    dhelix    the W-shaped schedule with strands by turns
    compute   wgrad without collectives: its time over that of serial is the share of computation
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import ROOT, compute_below_network, keep, markdown
from llama import Llama, Stage, layer_of, loss_of
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode

from flux.launch.hosts import Hosts
from flux.launch.progress import Progress
from flux.launch.spawn import run_ranks
from flux.runtime.dhelix.schedule import ScheduleDHelix, folded
from flux.runtime.dhelix.strands import Strands
from flux.runtime.domino import linear as domino_linear

RESULT = ROOT / "benchmarks" / "results" / "plan" / "dhelix.json"
METHODS = ("serial", "wgrad", "dhelix", "compute")
PLACES = (
    ("350mbit", 1, 4, 512),
    ("500mbit", 1, 4, 512),
    ("700mbit", 1, 4, 512),
    ("1gbit", 1, 4, 512),
    ("150mbit", 2, 8, 256),
    ("75mbit", 4, 8, 256),
    ("75mbit", 4, 4, 256),
)
"""(link, pipeline ranks, layers of each, tokens of a sequence) of each case."""
MICRO_BATCHES = 16
SIZES = Llama(256, 512, 1408, 8, 4, "float32")
TP = 2
NETWORK = 0.3
"""Of a core: left to the threads of the network."""
SLEEP_S = 0.5e-3
"""Shorter rests are added to the next one."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        link: rate of the hosts' links, in tc's notation.
        pipeline: pipeline ranks.
        sizes: of the model.
        micro_batches: of a step.
        micro_batch: sequences of each.
        sequence: tokens of a sequence.
        repeats: of each method.
        cores: speed of a rank's device, a part of a core.
        script: of the strands.
    """

    link: str
    pipeline: int
    sizes: Llama
    micro_batches: int
    micro_batch: int
    sequence: int
    repeats: int
    cores: float
    script: str


def share_of(world: int) -> float:
    """Return the part of a core that each rank computes on."""
    return (1 - NETWORK) / -(-world // len(os.sched_getaffinity(0)))


class Share(TorchDispatchMode):
    """A device with a part of a core's speed, for the threads that enter it.

    What takes a thread t seconds of the core, operation and Python before it, keeps the device busy
    for t / cores. The thread sleeps for the rest, in which others have the core. A device that has
    waited is not faster afterwards. Threads of the network do not sleep.

    Args:
        cores: speed of the device.
    """

    def __init__(self, cores: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cores = cores
        self._free = 0.0  # when the device has done what it has been given, of time.perf_counter
        self._used = threading.local()  # seconds of the core, so far

    def __enter__(self) -> Share:
        self._used.seconds = time.thread_time()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        result = func(*args, **(kwargs or {}))
        now = time.thread_time()
        used, self._used.seconds = now - self._used.seconds, now
        self._free = max(self._free, time.perf_counter() - used) + used / self.cores
        rest = self._free - time.perf_counter()
        if rest > SLEEP_S:
            time.sleep(rest)
        return result  # type: ignore[no-any-return]

    @contextmanager
    def computes(self, strands: Strands) -> Iterator[None]:
        """Let this thread, and that of the forward strand, compute on the device."""
        run = strands.run

        def run_here(forward: Callable[[], Any], backward: Callable[[], object]) -> Any:
            def forward_here() -> Any:
                with self:
                    return forward()

            return run(forward_here, backward)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the time of others would not count
        try:
            with self, mock.patch.object(strands, "run", run_here):
                yield
        finally:
            torch.set_num_threads(threads)


def groups(pipeline: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's tensor-parallel group and its pipeline."""
    rank = dist.get_rank()
    tensor = [dist.new_group([TP * stage + at for at in range(TP)]) for stage in range(pipeline)]
    along = [dist.new_group([TP * stage + at for stage in range(pipeline)]) for at in range(TP)]
    return tensor[rank // TP], along[rank % TP]


@contextmanager
def at_once() -> Iterator[None]:
    """Let every collective be waited for when it is launched."""
    launch = domino_linear.Channel.launch

    def waited(channel: domino_linear.Channel, *arguments: Any) -> torch.Tensor:
        result = launch(channel, *arguments)
        for work, _ in channel._pending:
            if work is not None:
                work.wait()
        return result

    with mock.patch.object(domino_linear.Channel, "launch", waited):
        yield


@contextmanager
def no_collectives() -> Iterator[None]:
    """Leave collectives out: results are wrong, and the time is that of computation."""

    def left_out(
        channel: domino_linear.Channel, phase: str, call: Any, *tensors: Any
    ) -> torch.Tensor:
        channel._pending.append((None, tensors[0]))
        return tensors[0]  # type: ignore[no-any-return]

    with mock.patch.object(domino_linear.Channel, "launch", left_out):
        yield


CONTEXTS = {"serial": at_once, "compute": no_collectives}


def schedules(case: Case) -> tuple[dict[str, Any], bool, bool]:
    """Return 1F1B and DHelix on this rank, and whether it has the last stage in each."""
    tensor, pipeline = groups(case.pipeline)
    p, rank, sizes = case.pipeline, dist.get_rank(pipeline), case.sizes
    size = sizes.layers // p
    parts = {"wgrad": [list(range(rank * size, (rank + 1) * size))]}
    parts["dhelix"] = list(folded(range(sizes.layers), p, rank))
    by_kind: dict[str, Any] = {}
    for kind, of in parts.items():
        places = [rank] if kind == "wgrad" else [rank, 2 * p - 1 - rank]
        count = p * len(places)
        stages = []
        for place, numbers in zip(places, of, strict=True):
            layers = [layer_of(sizes, number, tensor) for number in numbers]
            stage = Stage(sizes, layers, place == 0, place == count - 1)
            stages.append(PipelineStage(stage, place, count, torch.device("cpu"), group=pipeline))
        if kind == "wgrad":
            by_kind[kind] = Schedule1F1B(stages[0], case.micro_batches, loss_of)
        else:
            by_kind[kind] = ScheduleDHelix(stages, case.micro_batches, loss_of, script=case.script)
    return by_kind, rank == p - 1, rank == 0


def run_case(case: Case, rank: int, progress: Progress) -> dict[str, Any]:
    """Run one rank of a case; return the times of each method in ms, and its losses."""
    schedule_of, last, first = schedules(case)
    cores = sorted(os.sched_getaffinity(0))
    # Ranks of a tensor-parallel group are on different cores.
    os.sched_setaffinity(threading.get_native_id(), [cores[rank % len(cores)]])
    compute_below_network()
    strands = schedule_of["dhelix"].strands
    with Share(case.cores).computes(strands):
        return measured(case, rank, progress, schedule_of, last, first)


def measured(
    case: Case,
    rank: int,
    progress: Progress,
    schedule_of: dict[str, Any],
    last: bool,
    first: bool,
) -> dict[str, Any]:
    """Run the methods by turns on one rank; ``last``, ``first``: as of `schedules`."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, case.micro_batches * case.micro_batch, case.sequence)
    tokens, labels = torch.randint(case.sizes.vocabulary, shape, generator=generator)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    losses: dict[str, list[float]] = {}
    for repeat in range(case.repeats + 1):
        for method in METHODS:
            schedule = schedule_of["dhelix" if method == "dhelix" else "wgrad"]
            has_loss = first if method == "dhelix" else last
            kept: list[torch.Tensor] = []
            dist.barrier()
            begin = time.perf_counter()
            with CONTEXTS.get(method, nullcontext)():
                schedule.step(
                    *((tokens,) if rank < TP else ()),
                    target=labels if has_loss else None,
                    losses=kept if has_loss else None,
                )
            dist.barrier()
            if repeat:  # the first one warms up
                times[method].append(1e3 * (time.perf_counter() - begin))
            losses[method] = [float(loss.detach()) for loss in kept]
        progress("steps", repeat + 1, case.repeats + 1)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, losses)
    last_losses = {
        method: next(of[method] for of in everywhere if of[method])
        for method in METHODS
        if method != "compute"
    }
    for method, values in last_losses.items():
        torch.testing.assert_close(values, last_losses["serial"], rtol=1e-4, atol=1e-5)
        assert len(values) == case.micro_batches, method
    return {"times_ms": times, "losses": last_losses}


def entry_of(case: Case) -> dict[str, Any]:
    """Measure a case with a host for each rank; return its entry of the JSON file."""
    world = TP * case.pipeline
    with Hosts(world, case.link) as hosts:
        outcome = run_ranks(
            run_case,
            case,
            world,
            timeout_s=1800.0,
            places=hosts.placed(range(world)),
        )
    medians = {method: statistics.median(times) for method, times in outcome["times_ms"].items()}
    return {
        **asdict(case),
        "median_ms": medians,
        "communication": 1 - medians["compute"] / medians["serial"],
        "ratio_to_serial": medians["dhelix"] / medians["serial"],
        "ratio_to_wgrad": medians["dhelix"] / medians["wgrad"],
        **outcome,
    }


def table(content: dict[str, Any]) -> str:
    """Return the table of docs/use/dhelix.md."""
    header = [
        "link",
        "pipeline ranks",
        "layers of a rank",
        "cores of a rank",
        "micro-batches",
        "communication",
        "serial",
        "wgrad",
        "DHelix",
        "over serial",
        "over wgrad",
    ]
    lines = [
        [
            case["link"],
            str(case["pipeline"]),
            str(case["sizes"]["layers"] // case["pipeline"]),
            f"{case['cores']:g}",
            str(case["micro_batches"]),
            f"{100 * case['communication']:.0f}%",
            *(f"{case['median_ms'][method]:.0f} ms" for method in ("serial", "wgrad")),
            f"{case['median_ms']['dhelix']:.0f} ms",
            f"**{case['ratio_to_serial']:.2f}**",
            f"**{case['ratio_to_wgrad']:.2f}**",
        ]
        for case in content["cases"]
    ]
    return markdown(header, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=int, metavar="N", help="measure the N-th of PLACES again")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cases = []
    if options.only is not None and options.out.exists():
        cases = json.loads(options.out.read_text())["cases"]
    for number, (link, pipeline, layers, tokens) in enumerate(PLACES):
        if options.only not in (None, number):
            continue
        sizes = replace(SIZES, layers=layers * pipeline)
        share = share_of(TP * pipeline)
        # With one pipeline rank less waits for the link where forward comes first.
        script = "FB" if pipeline == 1 else "BF"
        rest = tokens, options.repeats, share, script
        case = Case(link, pipeline, sizes, MICRO_BATCHES, 1, *rest)
        entry = entry_of(case)
        cases[number : number + 1] = [entry]
        print(
            f"{link}, {pipeline} pipeline ranks, {layers} layers of each: "
            f"communication {entry['communication']:.0%}, "
            f"DHelix {entry['ratio_to_serial']:.2f} of serial, "
            f"{entry['ratio_to_wgrad']:.2f} of wgrad",
            flush=True,
        )
        keep({"torch": torch.__version__, "cases": cases}, options.out)


if __name__ == "__main__":
    main()
