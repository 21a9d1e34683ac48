"""Adapter for byte-flux, which is also imported as `flux` and so needs its own interpreter.

FLUX_BENCH_BYTE_FLUX_PYTHON names that interpreter. Each rank starts one process of it, which runs
byte_flux_worker.py, joins a group with those of the other ranks, and computes on this rank's GPU.

    rank r (here)                                   its worker (there)
    x, weight -> a file in memory, shared
    {"do": "run"}  ------------------------------>  to its GPU; start together; time one call
    {"ms": ...}    <------------------------------  the result -> the same file
    result, and the time that the worker took: OwnTime

The two processes never work at the same time. The worker measures the time by this benchmark's
method (GPU events behind a collective), so pipes and copies between the processes do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from flux.bench.config import BenchConfig
from flux.bench.methods import LibraryMethod, Method, OwnTime
from flux.bench.peers.base import no_gpu, reason_ranks
from flux.bench.reference import Inputs
from flux.core import env
from flux.core.problem import Problem

WORKER = Path(__file__).with_name("byte_flux_worker.py")
_PROBE_S = 120.0
_START_S = 120.0  # limit for a worker to import torch and byte-flux and join the others
_DTYPES = ("bfloat16", "float16")


def _environment() -> dict[str, str]:
    """Return the environment without variables that lead to this process's packages.

    This flux is among those packages.
    """
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in ours}


class ByteFlux:
    """The adapter."""

    name = "byte_flux"
    about = "ByteDance's flux, in its own interpreter"

    def __init__(self, python: str = "") -> None:
        self._python = python

    @property
    def python(self) -> str:
        """The interpreter; empty if there is none."""
        return self._python or env.BENCH_BYTE_FLUX_PYTHON.get()

    def available(self) -> str | None:
        """Return why byte-flux cannot be used; None if it can."""
        python = self.python
        if not python:
            return (
                f"{env.BENCH_BYTE_FLUX_PYTHON.name} is not set: byte-flux imports as flux too, and "
                "needs an interpreter of its own"
            )
        if shutil.which(python) is None:
            return f"{env.BENCH_BYTE_FLUX_PYTHON.name}={python} is not an executable"
        problem = no_gpu()
        return problem if problem is not None else _probe(python)

    def supports(self, config: BenchConfig) -> str | None:
        """Return why byte-flux does not support this problem; None if it does."""
        problem = config.problem
        if problem.op.all_reduces:
            return "has no dense GEMM with AllReduce"
        if problem.dtype not in _DTYPES:
            return f"computes {' and '.join(_DTYPES)}, not {problem.dtype}"
        if config.hosts != "1":
            return "is started on one host only"
        return reason_ranks(config)

    def make(self, config: BenchConfig, rank: int) -> Method:
        """Return the method."""
        return WorkerMethod(config, rank, self.python, "cuda")


def _probe(python: str) -> str | None:
    """Return why byte-flux cannot be imported by that interpreter; None if it can."""
    try:
        done = subprocess.run(
            [python, str(WORKER), "--probe"],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip() or f"it exited with {done.returncode}").splitlines()[-1]
    return f"{python} has no usable byte-flux: {last}"


class WorkerMethod(LibraryMethod):
    """One worker's op. Collective; `device` is ``cuda`` except in tests."""

    name = ByteFlux.name

    def __init__(self, config: BenchConfig, rank: int, python: str, device: str) -> None:
        self._problem, self._rank = config.problem, rank
        self._timeout_s = config.timeout_s
        self._weight: torch.Tensor | None = None
        meeting = [tempfile.mkdtemp(prefix="flux-byte-flux-") if rank == 0 else ""]
        dist.broadcast_object_list(meeting, src=0)
        self._folder = Path(meeting[0])
        self._worker: _Worker | None = None
        try:
            self._x = self._tensor("x", self._problem.x_shape(rank))
            self._shared_weight = self._tensor("weight", self._problem.weight_shape(rank))
            self._result = self._tensor("result", self._problem.result_shape(rank))
            self._worker = _Worker(python, self._specification(device), self._file("stderr"))
            self._about = self._worker.hear(max(_START_S, self._timeout_s))
        except BaseException:
            self.close()
            raise

    def _file(self, what: str) -> Path:
        return self._folder / f"{self._rank}.{what}"

    def _tensor(self, what: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor in memory shared with the worker."""
        rows, columns = shape
        dtype = self._problem.torch_dtype
        path = self._file(what)
        path.write_bytes(b"")
        os.truncate(path, max(1, rows * columns) * dtype.itemsize)
        flat = torch.from_file(str(path), shared=True, size=rows * columns, dtype=dtype)
        return flat.view(rows, columns)

    def _specification(self, device: str) -> dict[str, Any]:
        problem: Problem = self._problem
        shapes = {
            "x": problem.x_shape(self._rank),
            "weight": problem.weight_shape(self._rank),
            "result": problem.result_shape(self._rank),
        }
        return {
            **problem.as_dict(),
            "rank": self._rank,
            "device": device,
            "gpu": torch.cuda.current_device() if device == "cuda" else 0,
            "store": str(self._folder / "store"),
            "timeout_s": self._timeout_s,
            "tensors": {name: [str(self._file(name)), *shape] for name, shape in shapes.items()},
        }

    def __call__(self, inputs: Inputs) -> OwnTime:
        """Let the worker compute the op and time it."""
        assert self._worker is not None
        if self._weight is not inputs.weight:
            self._shared_weight.copy_(inputs.weight)
            self._weight = inputs.weight
            self._worker.tell("weight")
            self._worker.hear(self._timeout_s)
        self._x.copy_(inputs.x)
        self._result.fill_(float("nan"))  # a missing write of the worker must be detected
        if inputs.x.is_cuda:
            torch.cuda.synchronize(inputs.x.device)  # the worker uses the GPU alone
        self._worker.tell("run")
        answer = self._worker.hear(self._timeout_s)
        return OwnTime(self._result.to(inputs.x.device, copy=True), float(answer["ms"]))

    def knobs(self) -> dict[str, Any]:
        """Return the path and the worker's description."""
        return {"path": "byte_flux", **self._about}

    def close(self) -> None:
        """End the worker and remove its files."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        for file in self._folder.glob(f"{self._rank}.*"):
            file.unlink(missing_ok=True)
        if self._rank == 0:
            with contextlib.suppress(OSError):  # other ranks may still have files in it
                (self._folder / "store").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last rank removes the folder
            self._folder.rmdir()


class _Worker:
    """The process, with lines of JSON on its standard input and output."""

    def __init__(self, python: str, specification: dict[str, Any], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, str(WORKER), json.dumps(specification)],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._buffer = b""

    def tell(self, what: str) -> None:
        """Send a command."""
        stream: IO[bytes] | None = self._process.stdin
        assert stream is not None
        try:
            stream.write(json.dumps({"do": what}).encode() + b"\n")
            stream.flush()
        except OSError:
            raise RuntimeError(f"its process is gone{self._last_words()}") from None

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer.

        Raises:
            RuntimeError: there is no answer in time, it is an error, or the process has ended.
        """
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"no answer within {timeout_s:g} s{self._last_words()}")
            data = os.read(source, 65536)
            if not data:
                raise RuntimeError(f"its process is gone{self._last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def close(self) -> None:
        """Close the pipes, on which the process ends; kill it if it does not."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
