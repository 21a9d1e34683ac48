"""What the package says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import flux

ROOT = Path(__file__).parents[1]


def test_the_version_is_that_of_pyproject() -> None:
    text = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    stated = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert stated is not None
    assert flux.__version__ == stated.group(1)


def test_every_public_name_is_there() -> None:
    for name in flux.__all__:
        assert getattr(flux, name) is not None
    for name in flux.ops.__all__:
        assert getattr(flux.ops, name).__doc__
