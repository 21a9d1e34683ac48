"""The output of `flux bench model`: one JSON object, and one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux.bench.model import ModelConfig
from flux.bench.model_run import PhaseResult
from flux.machine import host


def document(
    config: ModelConfig, phases: list[PhaseResult], command: list[str] | None = None
) -> dict[str, Any]:
    """Return all results as one JSON object; ratios are time of our layers over Megatron's."""
    return {
        "model": config.model,
        "scale": config.scale,
        "layer": asdict(config.layer),
        "world": config.world,
        "hosts": len(set(config.host_of)),
        "link_rate": config.link_rate,
        "dtype": config.dtype,
        "sequence": config.sequence,
        "batch": config.batch,
        "decode_batch": config.decode_batch,
        "sequence_parallel": config.sequence_parallel,
        "threads": config.threads,
        "repeats": config.repeats,
        "warmup": config.warmup,
        "seed": config.seed,
        "device": host.device(),
        "versions": host.versions() | {"megatron-core": _megatron_version()},
        "phases": {phase.phase: _phase(phase) for phase in phases},
        "command": command,
    }


def _phase(result: PhaseResult) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "ratio": result.ratio,
        "ratio_interval": result.ratio_interval,
        "compute_ms": result.compute_ms if result.forms else None,
        "max_error": result.max_error,
        "layers": {name: asdict(form) for name, form in result.forms.items()},
    }
    if result.complaint:
        fields["wrong"] = result.complaint
    return fields


def _megatron_version() -> str:
    from importlib.metadata import version

    return version("megatron-core")


def _title(content: dict[str, Any]) -> str:
    layer = content["layer"]
    where = f"{content['world']} ranks"
    if content["hosts"] > 1:
        rate = f" of {content['link_rate']}" if content["link_rate"] else ""
        where += f" on {content['hosts']} hosts, links{rate}"
    return (
        f"{content['model']} / {content['scale']}: width {layer['hidden']}, "
        f"{layer['heads']} heads, {layer['intermediate']} hidden, {content['dtype']}, {where}"
    )


def table(content: dict[str, Any]) -> Table:
    """Return a table with one line per phase and kind of layers."""
    shown = Table(title=_title(content), box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("phase", "linear layers"):
        shown.add_column(name)
    for name in ("ms", "compute", "exposed", "host", "ratio"):
        shown.add_column(name, justify="right")
    for phase, figures in content["phases"].items():
        if "wrong" in figures:
            shown.add_row(phase, Text("wrong result", style="bold red"))
        for number, (name, form) in enumerate(figures["layers"].items()):
            ratio = f"{figures['ratio']:.3f}" if name == "flux" else ""
            times = (form["overall_ms"], figures["compute_ms"], form["exposed_ms"], form["host_ms"])
            cells = [f"{time:.2f}" for time in times]
            shown.add_row(phase if number == 0 else "", name, *cells, ratio)
    return shown


def show(content: dict[str, Any], console: Console) -> None:
    """Print the table and an explanation of its columns."""
    console.print(table(content))
    console.print(
        "ms: median over interleaved repeats of the slowest rank's time. compute: without "
        "communication.\nexposed: communication that nothing hides. host: Python, an upper bound. "
        "ratio: to Megatron's layers.",
        style="dim",
        highlight=False,
    )
