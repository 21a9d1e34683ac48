"""Parse the report of `nvcc -Xptxas -v` for each kernel: registers, spills, stack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from flux.core.datafile import Table
from flux.kernels.config import GemmConfig
from flux.kernels.generator import mangled_part

_FUNCTION = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$.]+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_WARNING = re.compile(r"warning|Potential Performance Loss", re.IGNORECASE)
_MOST_WARNINGS = 20
_NOBODY = ""


@dataclass(frozen=True)
class Usage:
    """The largest usage among a config's device functions.

    Attributes:
        functions: number of functions, counted once per architecture of the library.
        registers: per thread.
        stack_bytes: of local memory per thread; 0 in a kernel of full speed, like the next two.
        spill_store_bytes: of local memory per thread.
        spill_load_bytes: of local memory per thread.
    """

    functions: int = 0
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")

    def and_one_with(self, stack: int, stores: int, loads: int) -> Usage:
        """Return the usage with one more function, which uses these bytes."""
        return replace(
            self,
            functions=self.functions + 1,
            stack_bytes=max(self.stack_bytes, stack),
            spill_store_bytes=max(self.spill_store_bytes, stores),
            spill_load_bytes=max(self.spill_load_bytes, loads),
        )

    def as_dict(self) -> dict[str, int]:
        """Return the fields, for JSON."""
        return asdict(self)


def read(manifest: Table) -> dict[str, Usage]:
    """Return the usage by name that a manifest has as ``ptxas``."""
    return {name: Usage(**counts) for name, counts in manifest.objects("ptxas").items()}


def usage(report: str, configs: Sequence[GemmConfig]) -> dict[str, Usage]:
    """Return usage by config name. A function belongs to the config whose struct is in its name."""
    return usage_by(report, {mangled_part(config): config.name for config in configs})


def usage_by(report: str, names: Mapping[str, str]) -> dict[str, Usage]:
    """Return usage by name.

    A name without any function gets the largest usage of the functions that match no name, so that
    every spill is reported.

    Args:
        report: the output of ptxas.
        names: name by the part of a mangled function name that identifies it.
    """
    usages = {_NOBODY: Usage(), **{name: Usage() for name in names.values()}}
    current = _NOBODY
    for line in report.splitlines():
        function = _FUNCTION.search(line)
        if function:
            mangled = function.group(1)
            current = next((name for part, name in names.items() if part in mangled), _NOBODY)
        memory = _MEMORY.search(line)
        if memory:
            usages[current] = usages[current].and_one_with(*map(int, memory.groups()))
        registers = _REGISTERS.search(line)
        if registers:
            most = max(usages[current].registers, int(registers.group(1)))
            usages[current] = replace(usages[current], registers=most)
    nameless = usages.pop(_NOBODY)
    return {name: own if own.functions else nameless for name, own in usages.items()}


def warnings(report: str) -> list[str]:
    """Return the tools' warnings, the first 20 lines: for example serialised WGMMA."""
    lines = [line.strip() for line in report.splitlines() if _WARNING.search(line)]
    return lines[:_MOST_WARNINGS]
