"""A real browser for tests of pages: open_page.py in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BROWSER = Path(__file__).with_name("open_page.py")


def _no_browser() -> str:
    """Return the reason why no browser is available, or ""."""
    if importlib.util.find_spec("PySide6") is None:
        return "PySide6 is not installed: extra browser"
    loads = [sys.executable, "-c", "import PySide6.QtWebEngineWidgets"]
    done = subprocess.run(loads, capture_output=True, text=True, timeout=200)
    errors = done.stderr.strip().splitlines()
    lacks = done.returncode != 0 and "cannot open shared object file" in errors[-1]
    return f"the system lacks a library of Qt's: {errors[-1]}" if lacks else ""


@pytest.fixture(scope="session")
def browser() -> None:
    reason_unsupported = _no_browser()
    if reason_unsupported:
        pytest.skip(reason_unsupported)


def open_page(path: Path, *arguments: str) -> dict[str, Any]:
    """Open a page in a browser; return what it shows."""
    done = subprocess.run(
        [sys.executable, str(BROWSER), str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["loaded"] is True
    return seen
