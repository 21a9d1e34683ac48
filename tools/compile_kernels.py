"""`flux compile` for builds, which have no torch: CMake and `make kernels` run it.

    python tools/compile_kernels.py --set minimal --arch 90a --out flux/lib/kernels

With --emulated it builds for the PTX machine (ptx_target.py), not for a GPU.

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

    from flux.kernels.build import GPU
    from flux.kernels.command import compile_kernels
except ModuleNotFoundError as error:
    sys.exit(f"{error}: building kernels needs pip install typer rich filelock nvidia-cutlass")

EMULATED = "--emulated"


def main() -> None:
    """Run the command, with the target that the arguments name."""
    target, arguments = GPU, sys.argv[1:]
    if EMULATED in arguments:
        from ptx_target import ptx_target

        target = ptx_target()
        arguments.remove(EMULATED)
    app = typer.Typer(add_completion=False)
    app.command()(compile_kernels)
    app(arguments, obj=target)


if __name__ == "__main__":
    main()
