"""`flux compile` for builds, which have no torch: CMake and `make kernels` run it.

    python tools/compile_kernels.py --set minimal --arch 90a --out flux/lib/kernels

Importing flux imports torch. So this puts a bare package of that name in its place, through which
the modules that need no torch (flux.kernels and what it uses) are found as ever.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

bare = types.ModuleType("flux")
bare.__path__ = [str(Path(__file__).resolve().parents[1] / "flux")]
sys.modules["flux"] = bare

try:
    import typer

    from flux.kernels.command import compile_kernels
except ModuleNotFoundError as error:
    sys.exit(f"{error}: building kernels needs pip install typer rich filelock nvidia-cutlass")

if __name__ == "__main__":
    typer.run(compile_kernels)
