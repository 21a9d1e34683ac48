"""Integer division that rounds up. Standard library only: builds of kernels import it."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer not below a / b, for positive b."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below a."""
    return ceil_div(a, multiple) * multiple
