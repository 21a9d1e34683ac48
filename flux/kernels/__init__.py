"""Kernels: which configs exist, and how they are generated, built, stored and found.

`config` -> `legality` -> `sets` define the configs; `generator` -> `build` make the libraries;
`manifest` and `registry` find them. Nothing here needs torch or a GPU, so that a build can import
it alone (tools/compile_kernels.py).
"""

from flux.kernels.config import GemmConfig
from flux.kernels.legality import (
    GemmProblem,
    is_legal,
    reason_illegal,
    reason_unsupported,
    reason_wrong_gpu,
    runs_on,
)

__all__ = [
    "GemmConfig",
    "GemmProblem",
    "is_legal",
    "reason_illegal",
    "reason_unsupported",
    "reason_wrong_gpu",
    "runs_on",
]
