"""Prints what .venv must hold, one requirement per line, read from pyproject.toml.

With arguments: only what those extras of the package need; ``build`` stands for what the package
needs to be built, ``run`` for what it needs to run.

The Makefile builds without pip's build isolation (so that a rebuild compiles only what changed) and
therefore installs the build requirements itself. Reading them here keeps one list of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

EXTRAS = ("test", "browser", "charts", "megatron", "lint")

config = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
project = config["project"]
for extra in sys.argv[1:] or ("build", "run", *EXTRAS):
    if extra == "build":
        print(*config["build-system"]["requires"], sep="\n")
    elif extra == "run":
        print(*project["dependencies"], sep="\n")
    else:
        print(*project["optional-dependencies"][extra], sep="\n")
