"""A plan for a cluster, made small enough to run here: `flux plan run --plan FILE --shrink`.

What the policy does stays the same; sizes do not:

    degrees         those of the plan divided, as many ranks as there are here; of equally many,
                    those with most kinds of parallelism; of these, with most tensor parallelism,
                    then pipeline, context and data parallelism
    layers          the fewest of a stage that the policy takes, at least 2
    width, heads    divided by ``scale``; a power of two that brings the width to WIDTH
    sequence        at most TOKENS
    micro-batches   of at most MOST_SEQUENCES sequences; four for each stage, or the fewest
                    more that the policy takes

Times of a shrunk plan say that it runs, and how its communication overlaps here. They say nothing
of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import gcd, prod
from typing import Any

from flux.bench.model_files import model_of
from flux.bench.shapes import Layer

WIDTH = 512
TOKENS = 256
MOST_SEQUENCES = 4
DEGREES = ("tp", "pp", "cp", "dp")
_MOST_LAYERS = 8
"""Of a stage, that are tried."""


def shrunk(
    plan: Mapping[str, Any], ranks: int, exact: bool, check: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Return what changes of a plan's options, so that it runs on so many ranks.

    ``exact``: all ranks take part, as under torchrun. ``check`` raises ValueError if the plan
    cannot be run with some changes.

    Raise ValueError with the last reason if the policy takes no smaller step.
    """
    layer = model_of(plan["model"]).layer
    why = f"its degrees have no divisors with a product of {ranks}"
    for degrees in _degrees(plan, ranks, exact):
        for changes in _steps(plan, degrees, layer):
            try:
                check(changes)
            except ValueError as error:
                why = str(error)
                continue
            return changes
    raise ValueError(f"the plan cannot be shrunk to {ranks} ranks: {why}")


def changes_of(plan: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [before, after] of everything that shrinking changes, by name."""
    model = model_of(plan["model"])
    before = {**plan, "layers": model.layers, "scale": 1}
    pairs = {key: [before[key], value] for key, value in changes.items()}
    scale = pairs.pop("scale")[1]
    pairs["hidden"] = [model.layer.hidden, model.layer.hidden // scale]
    worlds = [prod(of[key] for key in DEGREES) for of in (before, {**before, **changes})]
    pairs = {"ranks": worlds} | pairs
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _degrees(plan: Mapping[str, Any], ranks: int, exact: bool) -> Iterator[dict[str, int]]:
    """Yield the degrees that are tried, the best first."""
    sizes = [[n for n in range(1, plan[key] + 1) if plan[key] % n == 0] for key in DEGREES]
    least = ranks if exact else 1
    choices = [degrees for degrees in product(*sizes) if least <= prod(degrees) <= ranks]
    choices.sort(key=lambda of: (prod(of), sum(n > 1 for n in of), of), reverse=True)
    for degrees in choices:
        yield dict(zip(DEGREES, degrees, strict=True))


def _steps(
    plan: Mapping[str, Any], degrees: Mapping[str, int], layer: Layer
) -> Iterator[dict[str, Any]]:
    """Yield the changes that are tried with these degrees, the smallest step first."""
    scale = 1
    while layer.hidden // scale > WIDTH and layer.hidden % (2 * scale * degrees["tp"]) == 0:
        scale *= 2
    for per_stage, for_each in product(range(2, _MOST_LAYERS + 1), (4, 5, 6, 8)):
        yield {
            **degrees,
            "ep": gcd(plan["ep"], degrees["dp"]),
            "layers": per_stage * degrees["pp"],
            "scale": scale,
            "sequence": min(plan["sequence"], TOKENS),
            "micro_batch": gcd(plan["micro_batch"], MOST_SEQUENCES),
            "micro_batches": min(plan["micro_batches"], for_each * degrees["pp"]),
        }
