"""The output of `flux bench serve`: one JSON object, and one table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux.bench import metrics
from flux.bench.serve import ServeConfig
from flux.machine import host

_TITLES = {"prefill": "TTFT, prompt {}", "decode": "TPOT, batch {}"}
"""Time to the first token, and per output token: the terms of serving engines."""


def phase_title(kind: str, size: int) -> str:
    """Return the name of a phase in tables."""
    return _TITLES[kind].format(size)


@dataclass(frozen=True)
class PhaseTimes:
    """Times of a phase. ``repeats_ms`` is empty if results were wrong.

    Attributes:
        kind: "prefill" or "decode".
        size: tokens of the prompt, or sequences.
        repeats_ms: by form; of the slowest rank; decoding: per output token.
        max_error: of logits, relative to the largest one; vLLM: the share of other tokens.
        complaint: says what is wrong.
    """

    kind: str
    size: int
    repeats_ms: dict[str, list[float]]
    max_error: float
    complaint: str = ""

    def median_ms(self, form: str) -> float:
        """Return the median time of a form."""
        return metrics.median(self.repeats_ms[form])

    def ratio(self, of: str, to: str) -> float:
        """Return the ratio of two forms' medians."""
        return self.median_ms(of) / self.median_ms(to)

    def interval(self, of: str, to: str) -> tuple[float, float] | None:
        """Return the interval with 95% of resamples of the ratio; None: fewer than 5 repeats."""
        return metrics.ratio_interval(self.repeats_ms[of], self.repeats_ms[to], 0.95)


def document(
    config: ServeConfig, phases: list[PhaseTimes], command: list[str] | None = None
) -> dict[str, Any]:
    """Return all results as one JSON object."""
    settings = asdict(config)
    settings.pop("common_clock")
    return {
        **settings,
        "hosts": len(set(config.host_of)),
        "ranks_of_hosts": config.hosts,
        "config": None if config.has_config else config.llama,
        "device": host.device(),
        "versions": host.versions() | {config.program: program_version(config.program)},
        "phases": [_phase(phase) for phase in phases],
        "command": command,
    }


def program_version(program: str) -> str:
    """Return the version of an installed program; vLLM has another name for CPUs."""
    try:
        return version(program)
    except PackageNotFoundError:
        return version(f"{program}-cpu")


def _phase(phase: PhaseTimes) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": phase.kind, "size": phase.size, "max_error": phase.max_error}
    if phase.complaint:
        return fields | {"wrong": phase.complaint}
    forms = phase.repeats_ms
    fields["median_ms"] = {form: phase.median_ms(form) for form in forms}
    for other in ("stock", "alone"):
        if other in forms:
            fields[f"ratio_to_{other}"] = phase.ratio("flux", other)
            fields[f"ratio_to_{other}_interval"] = phase.interval("flux", other)
    return fields | {"repeats_ms": forms}


def table(content: dict[str, Any]) -> Table:
    """Return a table with one line per phase."""
    shown = Table(title=_title(content), box=box.SIMPLE_HEAD, title_justify="left")
    forms = next((list(p["median_ms"]) for p in content["phases"] if "wrong" not in p), [])
    shown.add_column("ms", no_wrap=True)
    for form in forms:
        shown.add_column(form, justify="right", no_wrap=True)
    ratios = [name for name in ("stock", "alone") if name in forms]
    for name in ratios:
        shown.add_column(f"flux / {name}", justify="right", no_wrap=True)
    for phase in content["phases"]:
        name = phase_title(phase["kind"], phase["size"])
        if "wrong" in phase:
            empty = [""] * len(forms)  # columns of times
            shown.add_row(name, *empty, Text("wrong result", style="bold red"))
            continue
        cells = [f"{phase['median_ms'][form]:.2f}" for form in forms]
        shown.add_row(name, *cells, *(_ratio(phase, other) for other in ratios))
    return shown


def _ratio(phase: dict[str, Any], other: str) -> str:
    interval = phase[f"ratio_to_{other}_interval"] if other == "stock" else None
    scatter = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{phase[f'ratio_to_{other}']:.2f}{scatter}"


def _title(content: dict[str, Any]) -> str:
    where = f"{content['world']} ranks of {content['threads']} threads"
    if content["hosts"] > 1:
        rate = f" of {content['link_rate']}" if content["link_rate"] else ""
        where += f" on {content['hosts']} hosts, links{rate}"
    program = f"{content['program']} {content['versions'][content['program']]}"
    return f"{content['model']} in {program}, {content['dtype']}, {where}"


def show(content: dict[str, Any], console: Console) -> None:
    """Print the table and an explanation of its columns."""
    console.print(table(content))
    console.print(
        "ms to the first token (TTFT) and per output token (TPOT): medians over interleaved "
        "repeats of the slowest rank. stock: the program's own tensor parallelism. alone: the "
        "whole model on one rank. In brackets: 95% of resamples. Tokens of all forms are compared.",
        style="dim",
        highlight=False,
    )
