"""Run another module as the program, with the ops enabled, in processes that it spawns, too.

multiprocessing prepares a spawned process by importing the program's module, by the name in its
``__spec__``. The program gets this module's, which enables the ops and imports the program. (A
module that is called ``__main__`` is not imported there.)
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from flux.integrations import symm_mem

_NAME = "flux.integrations.symm_mem.run"
_WIDE = "--float32-partials"
_USAGE = f"usage: python -m flux.integrations.symm_mem [{_WIDE}] MODULE ARGS"
_PROGRAM = "FLUX_SYMM_MEM_PROGRAM"  # the module, for spawned processes
_PARTIALS = "FLUX_SYMM_MEM_FLOAT32"  # set with --float32-partials, for spawned processes


def main() -> None:
    """Enable the ops on the CPU, then run the module that the first argument names as a program.

    Raises:
        SystemExit: there is no such argument, or no such module.
    """
    arguments = sys.argv[1:]
    wide = arguments[:1] == [_WIDE]
    if wide:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(_USAGE)
    spec, code = _program(arguments[0])
    os.environ[_PROGRAM] = spec.name
    os.environ.pop(_PARTIALS, None)
    if wide:
        os.environ[_PARTIALS] = "1"
    sys.argv[:] = [str(spec.origin), *arguments[1:]]
    program = ModuleType("__main__")
    program.__dict__.update(
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=importlib.util.find_spec(_NAME),
    )
    sys.modules["__main__"] = program
    symm_mem.enable(float32_partials=wide)
    exec(code, program.__dict__)


def _program(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return a module, or the ``__main__`` of a package, as ``python -m`` finds it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        sys.exit(f"python -m flux.integrations.symm_mem: {error}")
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        sys.exit(f"python -m flux.integrations.symm_mem: no module {name} to run")
    return spec, loader.get_code(spec.name)


def _spawned() -> dict[str, Any]:
    """Enable the ops in a spawned process; return what the program's module defines."""
    symm_mem.enable(float32_partials=_PARTIALS in os.environ)
    defined = runpy.run_module(os.environ[_PROGRAM], run_name="__mp_main__", alter_sys=True)
    del defined["__spec__"]  # processes that this one spawns need this module's
    return defined


if __name__ == "__mp_main__":
    globals().update(_spawned())
