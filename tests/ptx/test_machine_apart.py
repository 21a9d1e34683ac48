"""The library and the PTX machine do not know of each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".txt", ".toml"}


def mentions(folder: Path, pattern: str) -> Iterator[str]:
    """Yield the lines of source files below a folder that match."""
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SUFFIXES or "tests" in path.relative_to(folder).parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line, re.IGNORECASE):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


@pytest.mark.parametrize("folder", ["flux", "csrc"])
def test_the_library_does_not_know_the_machine(folder: str) -> None:
    assert not [*mentions(ROOT / folder, r"ptx[ _-]?machine|emulat")]


def test_the_machine_does_not_know_the_library() -> None:
    assert not [*mentions(ROOT / "ptx_machine", r"(?<!name = \")\bflux|csrc")]
