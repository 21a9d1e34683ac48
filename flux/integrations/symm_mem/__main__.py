"""``python -m flux.integrations.symm_mem MODULE ARGS``: run a module with the ops enabled."""

from __future__ import annotations

import runpy
import sys

from flux.integrations import symm_mem


def main() -> None:
    """Enable the ops on the CPU, then run the module that the first argument names as a program.

    Raises:
        SystemExit: there is no argument.
    """
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flux.integrations.symm_mem MODULE ARGS")
    del sys.argv[0]
    symm_mem.enable()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
