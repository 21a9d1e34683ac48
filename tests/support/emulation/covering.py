"""Configs that together have every value of every template parameter of flux's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations

from flux.kernels.config import GemmConfig
from flux.kernels.sets import FUSED, config_set

_FIELDS = [field.name for field in fields(GemmConfig) if field.name not in ("op", "arch")]


def values_of(config: GemmConfig) -> set[tuple[str, ...]]:
    """(op, architecture, parameter, value) of each parameter.

    The depth of a tile for sm_90a follows from the dtype, so it is no parameter of its own.
    """
    fields = {name: getattr(config, name) for name in _FIELDS}
    if config.arch == "90a":
        fields["tile"] = fields["tile"][:2]
    return {(config.op, config.arch, name, str(value)) for name, value in fields.items()}


def covering(arch: str, ops: Sequence[str] = FUSED, of: str = "full") -> list[GemmConfig]:
    """Return few configs of a set that have all values which any of them has.

    The one with the most new values comes next; of equal ones that with the most new pairs of
    values, and of these that which the set lists first, which is the more common one. Those that
    differ from others in one part alone come last: promoted ones in the mainloop, dynamic ones in
    the tile scheduler.
    """
    configs = [config for config in config_set(of, [arch]) if config.op in ops]
    values = {config: values_of(config) for config in configs}
    pairs = {config: set(combinations(sorted(fields), 2)) for config, fields in values.items()}
    missing: set[tuple[str, ...]] = set()
    seen: set[tuple[tuple[str, ...], ...]] = set()
    chosen = []

    def gain(config: GemmConfig) -> tuple[int, int]:
        return len(values[config] & missing), len(pairs[config] - seen)

    static = [config for config in configs if config.tile_scheduler == "static"]
    for candidates in ([config for config in static if not config.promoted], static, configs):
        missing = set().union(*[values[config] for config in candidates])
        missing.difference_update(*[values[config] for config in chosen])
        while missing:
            best = max(candidates, key=gain)
            chosen.append(best)
            missing -= values[best]
            seen |= pairs[best]
    return chosen
