"""Figures of runs on the PTX machine: JSON with versions of the tools, a row a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flux.kernels.build import find_tools


def write_figures(out: Path, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file, whose folder is made if it is missing."""
    tools = find_tools()
    head = {"command": command, "nvcc": tools.nvcc.version, "cutlass": tools.cutlass.version}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1).removesuffix("\n}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')
