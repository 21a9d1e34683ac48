"""Every environment variable that flux reads, in one typed table.

Variables are read when an op is constructed, never inside a call.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from flux.core.datafile import shown

T = TypeVar("T")

MOST_SECONDS = 1e9
"""The longest time to wait: 32 years. Nanoseconds since boot must fit 64 bits."""
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)


class VariableError(ValueError):
    """An environment variable has a value that is not allowed."""


def user_path(text: str | Path) -> Path:
    """Return an absolute path, of one that may begin with ``~`` or ``~user``.

    Raises:
        ValueError: there is no such user or home, or no current directory.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        user = str(text).partition("/")[0]
        raise ValueError(f"{shown(str(text))}: no home directory is known for {user}") from None
    except OSError as error:
        raise ValueError(f"{shown(str(text))}: no current directory: {error.strerror}") from None


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: name, parser, default and help text."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    def get(self) -> T:
        """Return the parsed value, or the default when unset.

        Raises:
            VariableError: the value cannot be parsed; the message names variable and value.
        """
        text = os.environ.get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise VariableError(
                f"environment variable {self.name}={shown(text)}: {error}"
            ) from None

    def path(self) -> Path:
        """Return the value as an absolute path.

        Raises:
            VariableError: there is no such home directory.
        """
        try:
            return user_path(str(self.get()))  # a default may begin with ~
        except VariableError:
            raise
        except ValueError as error:
            raise VariableError(f"environment variable {self.name}: {error}") from None

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Set the variable to ``text`` for this process, and restore its value at the end."""
        before = os.environ.get(self.name)
        os.environ[self.name] = text
        try:
            yield
        finally:
            if before is None:
                del os.environ[self.name]
            else:
                os.environ[self.name] = before


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _number(text: str, most: float, above: float = -1.0) -> float:
    """Return a number in [0, ``most``] that is larger than ``above``."""
    value = float(text) if _NUMBER.fullmatch(text.strip()) else -1.0
    if not above < value <= most or value < 0:
        least = ">= 0" if above < 0 else f"above {above:g}"
        raise ValueError(f"expected a number {least} and <= {most:g}")
    return value


def _count(text: str, most: int) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,20}", text.strip(), re.ASCII) else 0
    if not 1 <= value <= most:
        raise ValueError(f"expected an integer >= 1 and <= {most}")
    return value


def _model(text: str) -> str:
    if text not in ("flux", "nvidia"):
        raise ValueError("expected flux or nvidia")
    return text


def _name(text: str) -> str:
    if not text.isprintable() or len(text) > 255:
        raise ValueError("expected at most 255 printable characters")
    return text


POISON = Variable(
    "FLUX_POISON",
    _flag,
    False,
    "fill outputs and idle workspaces with NaN, so that a missing write is noticed (0 or 1)",
)
CHECK = Variable(
    "FLUX_CHECK",
    _flag,
    False,
    "compare all calls of a process group before they begin, so that ranks which call different "
    "ops, in another order or with other sizes all raise ValueError; costs a collective per call "
    "(0 or 1)",
)
SPIN_US = Variable(
    "FLUX_SPIN_US",
    partial(_number, most=1e9),
    -1.0,
    "microseconds a CPU rank spins for a signal before it sleeps; unset: 200 when every rank of "
    "the host has a core of its own, else 5",
)
HOST = Variable(
    "FLUX_HOST",
    _name,
    "",
    "name of this host: ranks that give different names share no memory and talk over the network; "
    "unset: found out",
)
WINDOW_MB = Variable(
    "FLUX_WINDOW_MB",
    partial(_number, most=1e6),
    32.0,
    "megabytes in flight to, and from, each peer on another host",
)
WORKSPACE_CACHE = Variable(
    "FLUX_WORKSPACE_CACHE",
    partial(_count, most=1 << 20),
    8,
    "workspaces that the functional ops keep per process group, least recently used dropped first",
)
LAYER_TIMEOUT_S = Variable(
    "FLUX_LAYER_TIMEOUT_S",
    partial(_number, most=MOST_SECONDS, above=0.0),
    600.0,
    "seconds that the ops of flux.layers wait for a peer",
)
KERNEL_CACHE = Variable(
    "FLUX_KERNEL_CACHE",
    user_path,
    Path("~/.cache/flux/kernels"),
    "directory of the CUDA kernels that `flux compile` builds",
)
KERNEL_CHOICE = Variable(
    "FLUX_KERNEL_CHOICE",
    _model,
    "flux",
    "which model ranks the built CUDA kernels for shapes without winners: flux, or nvidia "
    "(nvidia-matmul-heuristics, where it is installed and knows the GPU); the same on all ranks",
)
CCACHE = Variable(
    "FLUX_CCACHE",
    _flag,
    True,
    "compile kernels through ccache where that is on PATH (0 or 1)",
)
TUNE_CACHE = Variable(
    "FLUX_TUNE_CACHE",
    user_path,
    Path("~/.cache/flux/tune"),
    "directory of the winners that `flux tune` finds and ops use",
)
NVTX = Variable[bool | None](
    "FLUX_NVTX",
    _flag,
    None,
    "NVTX ranges around calls on GPUs and their stages, for profilers (0 or 1); unset: when a "
    "profiler collects them",
)
TRACE = Variable(
    "FLUX_TRACE",
    _flag,
    False,
    "ops on GPUs take kernels of a trace build (`flux compile --trace`), which flux.trace can ask "
    "what they did when (0 or 1); `flux trace op` sets it for its ops",
)
GRAPH_OVERLAP = Variable(
    "FLUX_GRAPH_OVERLAP",
    _flag,
    False,
    "run the copies of AllGather calls in a CUDA graph beside the GEMM, as in other calls, and not "
    "ahead of it; needs a driver that runs branches of a graph at the same time (0 or 1)",
)
VLLM = Variable(
    "FLUX_VLLM",
    _flag,
    True,
    "let vLLM use Flux where the two are installed (0 or 1)",
)
VLLM_CHECK = Variable(
    "FLUX_VLLM_CHECK",
    _flag,
    False,
    "inside vLLM, compare every result with vLLM's own path and raise where they differ (0 or 1)",
)
BENCH_BYTE_FLUX_PYTHON = Variable(
    "FLUX_BENCH_BYTE_FLUX_PYTHON",
    str,
    "",
    "Python interpreter that has byte-flux, which imports as flux too; `flux bench suite` compares "
    "with it; unset: it does not",
)

VARIABLES: tuple[
    Variable[bool]
    | Variable[bool | None]
    | Variable[float]
    | Variable[int]
    | Variable[str]
    | Variable[Path],
    ...,
] = (
    POISON,
    CHECK,
    SPIN_US,
    HOST,
    WINDOW_MB,
    WORKSPACE_CACHE,
    LAYER_TIMEOUT_S,
    KERNEL_CACHE,
    KERNEL_CHOICE,
    CCACHE,
    TUNE_CACHE,
    NVTX,
    TRACE,
    GRAPH_OVERLAP,
    VLLM,
    VLLM_CHECK,
    BENCH_BYTE_FLUX_PYTHON,
)
