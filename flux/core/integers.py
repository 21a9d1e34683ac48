"""Division of integers that rounds up, and checks of integer arguments.

Standard library only: builds of kernels import it.
"""

from __future__ import annotations

import operator
from typing import Any


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer not below a / b, for positive b."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below a."""
    return ceil_div(a, multiple) * multiple


def checked_integer(name: str, value: Any, least: int, end: int | None = None) -> int:
    """Return an argument as an int. Integers of numpy and torch are integers, booleans are not.

    Args:
        name: of the argument, for the message.
        value: the argument.
        least: smallest value.
        end: smallest value that is too large.

    Raises:
        ValueError: it is no integer, or out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (end is not None and number >= end):
        wanted = f"of at least {least}" if end is None else f"in [{least}, {end})"
        raise ValueError(f"{name} must be an integer {wanted}, got {value!r}")
    return number
