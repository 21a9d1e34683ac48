"""NVTX ranges: what a profiler such as Nsight Systems shows of calls on GPUs, by op, M and stage.

    flux AGGemm M=8192 [ flux entry | flux copies | flux kernel .. | flux collect ]
    flux GemmRS M=8192 [ flux entry | flux kernel | flux reduction ]
    flux GemmAR M=8192 [ flux entry | flux kernel | flux reduction | flux collect ]

A range covers what the host puts on streams (csrc/cuda_host/nvtx.h); profilers show from there what
the GPU makes of it. NVTX is a library of its own, and is only loaded where somebody looks. The
header-only nvtx3 would have to be there when ``flux._C`` is built, which needs nothing of CUDA. A
profiler that collects ranges starts the program with NVTX_INJECTION64_PATH, which is also how NVTX
finds it.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

from flux import _C
from flux.core.env import NVTX
from flux.machine import toolchain

INJECTION = "NVTX_INJECTION64_PATH"


def wanted() -> bool:
    """Whether ranges are: as FLUX_NVTX says, else if a profiler has asked for them.

    Raises:
        ValueError: FLUX_NVTX is neither 0 nor 1.
    """
    chosen = NVTX.get()
    return bool(os.environ.get(INJECTION)) if chosen is None else chosen


def switch() -> None:
    """Put ranges around calls from now on, or none, as is wanted now. For the whole process.

    No library is no reason not to run: that is said in a warning, once.
    """
    library = _library() if wanted() else ""
    _C.load_nvtx(library)


@cache
def _library() -> str:
    """Return the first NVTX library that can be loaded; empty if there is none."""
    problems = []
    for path in toolchain.nvtx_libraries():
        try:
            _C.load_nvtx(path)
        except RuntimeError as error:
            problems.append(str(error))
        else:
            return path
    warnings.warn(
        "flux: NVTX ranges are off, because no NVTX library was found: pip install nvidia-nvtx "
        f"({'; '.join(problems)})",
        RuntimeWarning,
        stacklevel=2,
    )
    return ""
