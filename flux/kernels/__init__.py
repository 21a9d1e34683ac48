"""Kernels: what there can be, how they are written, built, kept and found again.

`config` -> `legality` -> `sets` say which; `generator` -> `build` make them; `manifest` and
`registry` find them. Nothing here needs torch or a GPU, so that a build can run it on its own
(tools/compile_kernels.py).
"""

from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem, is_legal, runs_on, why_illegal, why_not, why_not_on

__all__ = [
    "GemmConfig",
    "GemmProblem",
    "is_legal",
    "runs_on",
    "why_illegal",
    "why_not",
    "why_not_on",
]
