"""Measure what a device reaches, for `flux plan`: `flux plan calibrate`.

On a GPU a round is a filler of GEMMs, then the calls between two events:

    host     enqueue filler, event, calls, event | wait
    device   filler ===================| call | call | call |

The filler hides enqueue time from the measurement, leaves other data in L2, and keeps the card as
warm and as short of power as GEMMs of a training step do. If it ends before all is enqueued, the
round is repeated with a longer one. Inputs rotate. Times are medians over rounds, and include the
gap between two kernels of a stream. On a CPU, a round is timed by the clock.

The file is written as points come in; until the last of them it says ``"complete": false``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from flux.bench.calibrate_work import Call, Point, Pool, calls_of, points_of
from flux.bench.gpu_clocks import GpuClocks
from flux.core.datafile import one_line, write_output
from flux.machine.detection import detect

FORMAT = 1
_ROUNDS = {"cuda": 7, "cpu": 5}
_ROUND_US = {"cuda": 500.0, "cpu": 3000.0}
"""Calls of a round take at least so long together, if 32 do."""
_MOST_CALLS = 32
_FILLER = (8192, 4096)
_MOST_FILLERS = 256
_WRITE_S = 3.0
_LAUNCHES = 200
_SUSTAINED = (8192, 8192, 8192)
_SUSTAINED_S = 4.0


class CpuTimer:
    """Times calls on a CPU."""

    seen: Mapping[str, float] = MappingProxyType({})

    def rounds(self, calls: Sequence[Call], rounds: int) -> tuple[list[float], int]:
        """Return us of a call in each round, and the calls of a round."""
        for call in calls:
            call()
        begin = time.perf_counter()
        calls[0]()
        once = (time.perf_counter() - begin) * 1e6
        inner = _inner("cpu", once)
        times = []
        for number in range(rounds if once < 3e5 else 3):
            begin = time.perf_counter()
            for place in range(inner):
                calls[(number * inner + place) % len(calls)]()
            times.append((time.perf_counter() - begin) * 1e6 / inner)
        return times, inner


class CudaTimer:
    """Times calls on the current GPU.

    Args:
        clocks: are read in the last round of each point, while the device works: ``seen``.
    """

    def __init__(self, clocks: GpuClocks) -> None:
        self._clocks = clocks
        self.seen: Mapping[str, float] = {}
        rows, depth = _FILLER
        self._a, self._b = (
            torch.randn(*s, device="cuda", dtype=torch.bfloat16)
            for s in ((rows, depth), (depth, rows))
        )
        self._out = torch.empty(rows, rows, device="cuda", dtype=torch.bfloat16)
        self._fill(2)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._fill(8)
        torch.cuda.synchronize()
        self._filler_us = (time.perf_counter() - begin) * 1e6 / 8

    def _fill(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def rounds(self, calls: Sequence[Call], rounds: int) -> tuple[list[float], int]:
        """Return us of a call in each round, and the calls of a round.

        Raises:
            RuntimeError: the host cannot enqueue the calls of a round before the filler ends.
        """
        for call in calls:
            call()
        tries = [self._round(calls[:1], 0) for _ in range(3)]
        once, host = (min(figures) for figures in zip(*tries, strict=True))
        inner = _inner("cuda", once)
        fillers = min(_MOST_FILLERS, 1 + int(1.5 * host * inner / self._filler_us))
        times: list[float] = []
        first, wanted = 0, rounds if once < 3e5 else 3
        while len(times) < wanted:
            chosen = [calls[(first + place) % len(calls)] for place in range(inner)]
            us, _ = self._round(chosen, fillers, reads=len(times) == wanted - 1)
            if us:
                times.append(us)
                first += inner
                continue
            fillers *= 2
            if fillers > _MOST_FILLERS:
                raise RuntimeError(f"the host is slower than {fillers} GEMMs")
        return times, inner

    def _round(
        self, calls: Sequence[Call], fillers: int, *, reads: bool = False
    ) -> tuple[float, float]:
        """Return us of a call, and us of the host to enqueue one.

        us of a call are 0 if the host was late; without a filler it may be.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._fill(fillers)
        begin = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        host = (time.perf_counter() - begin) * 1e6 / len(calls)
        late = bool(fillers) and start.query()
        if reads:
            self.seen = self._clocks.now()
        end.synchronize()
        return (0.0 if late else start.elapsed_time(end) * 1e3 / len(calls)), host


def _inner(kind: str, once: float) -> int:
    return max(1, min(_MOST_CALLS, int(_ROUND_US[kind] / max(once, 1.0))))


class CalibrationRun:
    """One run of `flux plan calibrate`.

    Args:
        device: cuda | cpu.
        dtype: of the operands.
        out: file to write.
        seconds: after which no further point begins.
        small: measure few and small points.
        threads: of the CPU.
        progress: is told (what, points done, points in all).
    """

    def __init__(
        self,
        device: str,
        dtype: str,
        out: Path,
        *,
        seconds: float,
        small: bool = False,
        threads: int = 1,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        self._begin = self._written = time.monotonic()
        self.device, self.out, self.seconds = torch.device(device), out, seconds
        self.gpu, self._progress = device == "cuda", progress
        if not self.gpu:
            torch.set_num_threads(threads)
        self.spec = detect(device, None if self.gpu else threads).device
        place = torch.cuda.get_device_properties(self.device) if self.gpu else None
        float8 = place is not None and (place.major, place.minor) >= (8, 9)
        self.points = list(points_of(device, dtype, float8=float8, small=small))
        cache = place.L2_cache_size if place is not None else 1 << 25
        elements = 1 << 22 if small else 1 << 25
        if place is not None and not small:
            elements = min(1 << 30, place.total_memory // 32)
        self.pool = Pool(self.device, elements, 1 << 16 if small else cache)
        self.clocks = GpuClocks(str(place.uuid)) if place is not None else None
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "complete": False,
            "device": {
                "kind": device,
                "name": self.spec.name,
                "arch": self.spec.arch,
                "units": self.spec.units,
                "memory_gb": self.spec.memory_gb,
                "memory_gbs": self.spec.memory_gbs,
                "tflops": dict(self.spec.tflops),
                "cache_bytes": cache,
                "torch": torch.__version__,
                "cuda": torch.version.cuda or "",
            },
            "settings": {"seconds": seconds, "small": small, "rounds": _ROUNDS[device]},
            "points": [],
            "failed": [],
        }
        if self.clocks is not None:
            self.content["device"] |= self.clocks.limits() | {"no_clocks": self.clocks.problem}

    def run(self) -> dict[str, Any]:
        """Measure all points that the time allows; return what the file holds."""
        try:
            timer = CpuTimer() if self.clocks is None else CudaTimer(self.clocks)
            kinds = [point.kind for point in self.points]
            sustained = kinds.index("attention") if "attention" in kinds else -1
            for number, point in enumerate(self.points):
                if time.monotonic() - self._begin > self.seconds:
                    break
                if self.gpu and number == sustained and not self.content["settings"]["small"]:
                    self.content["sustained"] = self._sustained()
                self._measure(timer, point)
                self._progress(point.kind, number + 1, len(self.points))
                if time.monotonic() - self._written > _WRITE_S:
                    self._write()
            else:
                self.content["complete"] = True
            return self.content
        finally:
            self._write()

    def _measure(self, timer: CpuTimer | CudaTimer, point: Point) -> None:
        """Add a point. One that fails is kept with its error, and leaves the others as they are."""
        record = {**point._asdict(), "shape": list(point.shape)}
        try:
            if point.kind == "launch":
                times, inner = _launch_rounds(timer, point, self.pool)
            else:
                times, inner = timer.rounds(calls_of(point, self.pool), _ROUNDS[self.device.type])
        except (RuntimeError, ValueError, NotImplementedError) as error:
            self.content["failed"].append(record | {"error": one_line(str(error), 300)})
            if self.gpu:
                torch.cuda.empty_cache()
            return
        found = {"us": statistics.median(times), "least_us": min(times), "most_us": max(times)}
        rounded = {name: float(f"{us:.5g}") for name, us in found.items()}
        counts = {"calls": inner, "rounds": len(times)}
        self.content["points"].append(record | rounded | counts | dict(timer.seen))

    def _sustained(self) -> dict[str, Any]:
        """Return times of one GEMM that runs for seconds on end, as power limits let it."""
        m, n, k = _SUSTAINED
        a, b = (self.pool.take(torch.bfloat16, *s) for s in ((m, k), (n, k)))
        out = torch.empty(m, n, dtype=torch.bfloat16, device=self.device)
        times, seen, begin = [], [], time.monotonic()
        assert self.clocks is not None
        while time.monotonic() - begin < _SUSTAINED_S:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(40):
                torch.mm(a, b.t(), out=out)
            end.record()
            seen.append(self.clocks.now())
            end.synchronize()
            times.append(start.elapsed_time(end) * 25)
        late = statistics.median(times[len(times) // 2 :])
        return {"shape": [m, n, k], "us": late, "first_us": times[:3], "clocks": seen[::5]}

    def _write(self) -> None:
        self._written = time.monotonic()
        self.content["settings"]["took_s"] = round(self._written - self._begin, 1)
        self.content["settings"]["left"] = (
            len(self.points) - len(self.content["points"]) - len(self.content["failed"])
        )
        points = ",\n  ".join(json.dumps(point) for point in self.content["points"])
        text = json.dumps(self.content | {"points": []}, indent=1)
        text = text.replace('"points": []', f'"points": [\n  {points}\n ]', 1)
        write_output(self.out, text + "\n")


def _launch_rounds(
    timer: CpuTimer | CudaTimer, point: Point, pool: Pool
) -> tuple[list[float], int]:
    """Return us between two small kernels: as the host enqueues them, in a stream, in a graph."""
    call = calls_of(point, pool)[0]
    if point.variant == "stream":
        return timer.rounds([call], 9)
    if point.variant == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_LAUNCHES):
                call()
        times, inner = timer.rounds([graph.replay], 9)
        return [us / _LAUNCHES for us in times], inner
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            call()
        if pool.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / _LAUNCHES)
    return times[1:], _LAUNCHES
