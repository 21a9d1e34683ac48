"""The callback by which ranks report progress to the process that started them."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called as (description, steps done, steps in all)."""


def silent(what: str, done: int, total: int) -> None:
    """Ignore the report."""
