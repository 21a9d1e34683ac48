"""Draw SVG: elements with escaped text, and readable numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

Content = str | Markup | Iterable["Content"]


def tag(name: str, *children: Content, **attributes: object) -> Markup:
    """Return an element.

    ``class_`` is class, other underscores become dashes; attributes of value None are left out.
    """
    parts = [
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _text(value))
        for key, value in attributes.items()
        if value is not None
    ]
    inside = Markup("").join(flat(children))
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(parts), inside)


def flat(children: Iterable[Content]) -> Iterable[Markup]:
    """Yield the markup of nested children, in order, with text escaped."""
    for child in children:
        if isinstance(child, str):  # also Markup, which `escape` leaves unchanged
            yield escape(child)
        else:
            yield from flat(child)


def _text(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def milliseconds(value: float | None) -> str:
    """Format with three digits, or with all digits before the decimal point."""
    if value is None:
        return "–"
    size = abs(value)
    return (
        f"{value:.0f}" if size >= 100 else f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3}f}"
    )


def percent(value: float | None) -> str:
    """Format as a percentage."""
    return "–" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    """Format as a factor."""
    return "–" if value is None else f"{value:.2f}×"


def steps(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` round numbers for grid lines, from ``low`` up to ``high``."""
    span = max(high - low, 1e-12)
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(
        size * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (size * factor) <= most
    )
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(max(count, 0))]


def hatch(name: str) -> Markup:
    """Return a pattern of stripes, to be used as fill by ``url(#name)``."""
    line = tag("line", x1=0, y1=0, x2=0, y2=6, class_="stripe")
    return tag(
        "pattern",
        line,
        id=name,
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )
