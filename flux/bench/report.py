"""The output of a measurement: one JSON object, and one table."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flux.bench.config import BenchConfig, link_bytes_minimum
from flux.bench.metrics import CONFIDENCE, ratio_interval
from flux.bench.op import Measurement
from flux.core.datafile import write_output
from flux.core.problem import SCALE_SIZES
from flux.core.sparse_problem import EXPERT_SIZES, HEAD_SIZES
from flux.machine import host

_VIRTUAL = (
    "all ranks take turns on one GPU: results are checked, but times cannot be compared with "
    "those of ranks that have a GPU each"
)
_LOOPBACK = (
    "one rank on the GPU, its peers' memory in the host: times are those of the PCIe link, and "
    "comm is plain copies in both directions at once"
)
LITTLE = 0.1
"""Share of the unfused call. With less communication, overlap efficiency is a quotient of two small
differences, and is not shown."""
FIGURES = (
    "overall_ms",
    "gemm_non_split_ms",
    "comm_ms",
    "ect_ms",
    "overlap_efficiency",
    "bounded_efficiency",
    "speedup_vs_unfused",
)


def document(
    config: BenchConfig,
    measurement: Measurement,
    command: list[str] | None = None,
) -> dict[str, Any]:
    """Return the JSON object of the documented format; missing figures are null."""
    problem = config.problem
    methods: dict[str, Any] = {}
    for method in measurement.methods:
        figures = {name: getattr(method.metrics, name, None) for name in FIGURES}
        error = method.max_abs_err
        methods[method.name] = {
            **figures,
            "overlap_efficiency_interval": method.efficiency_interval,
            "max_abs_err": error if math.isfinite(error) else None,
            "repeats_ms": method.repeats_ms,
            "knobs": method.knobs,
            "comm_cpu_ms": method.comm_cpu_ms,
            "link_bytes": method.link_bytes,
        }
        if method.complaints:
            methods[method.name]["wrong"] = method.complaints
    return {
        **problem.as_dict(),
        **({"skews": list(config.skews)} if problem.topk > 1 else {}),
        "hosts": len(set(config.host_of)),
        "backend": config.backend or "cpu",
        "transport": config.transport or _transports(config),
        "device": measurement.device or host.device(),
        "versions": host.versions(),
        "methods": methods,
        "link_rate": config.link_rate,
        "link_bytes_minimum": link_bytes_minimum(problem, config.host_of),
        "threads": config.threads,
        "repeats": config.repeats,
        "warmup": config.warmup,
        "seed": config.seed,
        "parts_ms": measurement.parts_ms,
        "parts_repeats_ms": measurement.parts_repeats_ms,
        "start_skew_ms": measurement.start_skew_ms,
        "command": command,
    }


def _transports(config: BenchConfig) -> str:
    if config.backend == "cuda":
        return "symm_mem"
    hosts = config.host_of
    if len(set(hosts)) == 1:
        return "shm"
    return "send_recv" if len(set(hosts)) == len(hosts) else "shm+send_recv"


def write_json(content: dict[str, Any], target: str) -> None:
    """Write to a file, or to stdout for '-'. Times keep four digits after the point: 0.1 us."""
    text = json.dumps(rounded(content), indent=1, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, text)


def rounded(value: Any, key: str = "") -> Any:
    """Return the values as written: times with 4 decimals, errors with 4 significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item, name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, key) for item in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if key == "max_abs_err" else round(value, 4)
    return value


def table(content: dict[str, Any]) -> Table:
    """Return the comparison of one document's methods."""
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("method", style="bold", no_wrap=True)
    across = content["hosts"] > 1
    for name in ("overall\nms", "GEMM\nms", "comm\nms", "ECT\nms"):
        view.add_column(name, justify="right", no_wrap=True)
    if across:
        for name in ("comm\nCPU", "bytes\n/least"):
            view.add_column(name, justify="right", no_wrap=True)
    ratios = ("overlap\neff", "bounded\neff", "vs\nunfused", "max\nerror")
    # Two more columns must still fit a terminal; the JSON has the errors too.
    for name in ("over-\nlap", "bound-\ned", "vs un-\nfused") if across else ratios:
        view.add_column(name, justify="right", no_wrap=True)
    share = communication_share(content)
    is_little = share is not None and share < LITTLE
    for name, method in content["methods"].items():
        error = number(method["max_abs_err"], ".1e")
        if method["overall_ms"] is None:
            wrong = [Text("WRONG", "bold red")] + [Text("-")] * (8 if across else 6)
            view.add_row(name, *wrong, *(() if across else (Text(error, "red"),)))
            continue
        view.add_row(
            name,
            *(_milliseconds(method[key]) for key in FIGURES[:4]),
            *((_milliseconds(method["comm_cpu_ms"]), _excess(content, method)) if across else ()),
            "-" if is_little else _efficiency(method),
            "-" if is_little else number(method["bounded_efficiency"], ".0%"),
            number(method["speedup_vs_unfused"], ".2f", "x"),
            *(() if across else (error,)),
        )
    return view


def communication_share(content: dict[str, Any]) -> float | None:
    """Return the share of the unfused call that is not its GEMM; None if that is unknown."""
    unfused = content["methods"].get("unfused", {})
    if not unfused.get("overall_ms") or unfused.get("gemm_non_split_ms") is None:
        return None
    return max(0.0, 1.0 - float(unfused["gemm_non_split_ms"]) / float(unfused["overall_ms"]))


def conclusion(content: dict[str, Any]) -> str:
    """Return a sentence about the gain and its certainty; "" if it was not measured."""
    fused, unfused = (content["methods"].get(name) for name in ("flux", "unfused"))
    share = communication_share(content)
    if share is None or not fused or not fused["overall_ms"]:
        return ""
    if content["transport"] in ("virtual", "loopback"):
        return ""
    ours = fused["repeats_ms"]
    interval = ratio_interval(ours, unfused["repeats_ms"])
    least, most = (1.0, 1.0) if interval is None else interval
    time = float(fused["overall_ms"]) / float(unfused["overall_ms"])
    sure = f"{least:.2f} to {most:.2f} with {CONFIDENCE:.0%} confidence"
    if interval is None:
        text = (
            f"flux took {time:.2f} of the unfused time; {len(ours)} repeats are too few to compare"
        )
    elif least <= 1.0 <= most:
        text = f"{len(ours)} repeats show no difference: {time:.2f} of the time, {sure}"
    else:
        change = f"{abs(1 - time):.0%} {'less' if time < 1 else 'more'}"
        text = f"flux took {change} time than the unfused path ({time:.2f} of it, {sure})"
    said = f"Communication is {share:.0%} of the unfused call"
    hidden = fused["overlap_efficiency"]
    if share < LITTLE:
        said += ", so there is little to hide"
    elif hidden is not None:
        some = f"{hidden:.0%} of that" if hidden < 1 else "all of it"
        said += f"; flux hid {some if hidden > 0 else 'none of it'}"
    return f"{text}. {said}."


def _excess(content: dict[str, Any], method: dict[str, Any]) -> str:
    """Return bytes between hosts over the op's minimum; headers make it more than 1."""
    sent = method["link_bytes"]
    least = content["link_bytes_minimum"]
    return number(None if sent is None or not least else sent / least, ".2f")


def _headline(content: dict[str, Any]) -> Text:
    m, n, k = content["m"], content["n"], content["k"]
    ranks, threads = content["world"], content["threads"]
    each = f" x {threads} thread{'s' if threads > 1 else ''}" if content["backend"] == "cpu" else ""
    where = ""
    if content["hosts"] > 1:
        rate = f" at {content['link_rate']}" if content["link_rate"] else ""
        where = f", {content['hosts']} hosts{rate}"
    sizes = ""
    for name in (*EXPERT_SIZES, *HEAD_SIZES, "skews", *SCALE_SIZES):
        if name in content:
            sizes += f"{name}={shown_size(content[name])}, "
    return Text(
        f"{content['op']} {m} x {n} x {k} (M x N x K) {sizes}{content['dtype']}, "
        f"{ranks} rank{'s' if ranks > 1 else ''}{each}, "
        f"{content['backend']}/{content['transport']}{where}",
        "bold",
    )


def shown_size(value: Any) -> str:
    """Return a size, or several with slashes between."""
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _footer(content: dict[str, Any]) -> Text:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    repeats = f"median of {content['repeats']} interleaved repeats"
    text = Text(f"{content['device']}; {versions}\n", "dim")
    if content["transport"] == "virtual":
        return text.append(f"{repeats}\n").append(_VIRTUAL, "yellow")
    if content["transport"] == "loopback":
        return text.append(f"{repeats}; ±: {CONFIDENCE:.0%} of resamples\n{_LOOPBACK}")
    skew = content["start_skew_ms"]
    start = "after a collective" if skew is None else f"within {skew:.3f} ms"
    return text.append(
        f"{repeats}, slowest rank of each; ranks start {start}; ±: {CONFIDENCE:.0%} of resamples"
    )


def _efficiency(method: dict[str, Any]) -> str:
    """Return the efficiency with half the width of its interval, the larger half if asymmetric."""
    value, interval = method["overlap_efficiency"], method["overlap_efficiency_interval"]
    text = number(value, ".0%")
    if value is None or interval is None:
        return text
    return f"{text} ±{100 * max(value - interval[0], interval[1] - value):.0f}"


def _milliseconds(value: float | None) -> str:
    size = 0.0 if value is None else abs(value)
    return number(value, ".3f" if size < 10 else ".2f" if size < 100 else ".1f")


def number(value: float | None, form: str, unit: str = "") -> str:
    """Return a value in a format, with its unit; "-" if there is none."""
    return "-" if value is None else format(value, form) + unit


def _knobs_text(knobs: dict[str, Any]) -> str:
    parts = []
    for name, value in knobs.items():
        text = "x".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        parts.append(text if name == "path" else f"{name}={text}")
    return " ".join(parts)


def show(content: dict[str, Any], console: Console) -> None:
    """Print headline, table, settings of each method, and the machine."""
    console.print(_headline(content))
    console.print(table(content))
    for name, method in content["methods"].items():
        console.print(Text(f"{name}: {_knobs_text(method['knobs'])}", "dim"))
    console.print(_footer(content))
    if said := conclusion(content):
        console.print(Text(said, "bold"))
