"""Options of several commands, and the conversion of their texts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from flux.core.datafile import shown
from flux.core.env import MOST_SECONDS

Op = Annotated[str, typer.Option(help="Op: ag_gemm | gemm_rs | gemm_ar | grouped_gemm_rs | ...")]
OF_OP = typer.Option(
    "--sizes", help="Of experts: experts=8,topk=2,ep=1,skew=0; of heads: heads=8/2,head_dim=64."
)
Sizes = Annotated[str | None, OF_OP]
M = Annotated[int, typer.Option("--m", help="Rows M of the global problem.")]
N = Annotated[
    int, typer.Option("--n", help="Columns N of the global problem; ag_gemm splits N over ranks.")
]
K = Annotated[
    int,
    typer.Option(
        "--k", help="Depth K of the global problem; gemm_rs and gemm_ar split K over ranks."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32 | bfloat16 | float16 | float64 | e4m3 (float8). Default: float32 on CPUs, "
        "bfloat16 on GPUs."
    ),
]
Scaling = Annotated[str | None, typer.Option(help="Of float8: tensor | row (default: tensor).")]
FastAccum = Annotated[bool, typer.Option("--fast-accum", help="Of float8: fast_accum=True.")]
Nproc = Annotated[
    int | None, typer.Option(help="Number of ranks to start (default: 2, or torchrun's).")
]
Hosts = Annotated[
    str,
    typer.Option(
        help="Hosts to create (network namespaces): 2, or ranks on each: 3+1. Needs root."
    ),
]
LinkRate = Annotated[
    str | None, typer.Option(help="Speed of the link of each host, such as 500mbit or 1gbit.")
]
Backend = Annotated[str | None, typer.Option(help="Backend: cpu | cuda (default: cpu).")]
Transport = Annotated[
    str | None,
    typer.Option(
        help="On cpu: shm | send_recv. On cuda: symm_mem, or on one GPU virtual | loopback."
    ),
]
Repeats = Annotated[int, typer.Option(help="Timed repeats of every method.")]
Warmup = Annotated[int, typer.Option(help="Untimed repeats before the timed ones.")]
Threads = Annotated[int, typer.Option(help="GEMM threads of each rank.")]
Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a peer before failing.")]
PathKnob = Annotated[
    str | None,
    typer.Option("--path", help="Knob path: fused | medium | in_kernel | unfused | one_shot."),
]
Order = Annotated[
    str | None, typer.Option(help="Knob order, of communication: direct | ring1d | ring2d | ...")
]
Direction = Annotated[str | None, typer.Option(help="Knob direction, of copies: push | pull.")]
CommTileRows = Annotated[
    int | None, typer.Option(help="Knob comm_tile_rows: rows of a communication tile.")
]
Tile = Annotated[str | None, typer.Option(help="Knob tile: size of a GEMM tile, ROWSxCOLUMNS.")]
Store = Annotated[str | None, typer.Option(help="Knob store, of GEMM results: direct | staged.")]
Swizzle = Annotated[
    str | None,
    typer.Option(help="Knob swizzle, of the GEMM's tile order: none | rank_shift | xor."),
]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write results as JSON to FILE; - is stdout."),
]
ClusterName = Annotated[
    str, typer.Option(help="Name of a cluster in tuning/clusters, or a file in that format.")
]
TraceFile = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write timelines for ui.perfetto.dev.")
]
QuietTable = Annotated[bool, typer.Option("--quiet", help="Print no table and no progress bar.")]

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h)?")


def parse_duration(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``10m`` or ``2h``.

    Raises:
        ValueError: another format, or a duration of 0.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"a duration must look like 90s, 10m or 2h, got {shown(text)}")
    return seconds


def sizes_of(text: str | None) -> dict[str, Any]:
    """Return the numbers of ``--sizes``; raise ValueError for another format."""
    sizes: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\w{1,20})=([0-9./]{1,60})\s*", part, re.ASCII)
        try:
            if match is None:
                raise ValueError(part)
            name, value = match.groups()
            if name == "heads":
                sizes[name] = tuple(int(count) for count in value.split("/"))
            else:
                sizes[name] = float(value) if name == "skew" else int(value)
        except ValueError:
            raise ValueError(
                f"--sizes must look like experts=8,topk=2 or heads=8/2, got {shown(text)}"
            ) from None
    return sizes


def scales_of(scaling: str | None, fast_accum: bool) -> dict[str, Any]:
    """Return what ``--scaling`` and ``--fast-accum`` add to the sizes of a problem."""
    of_rows = {} if scaling is None else {"scaling": scaling}
    return of_rows | ({"fast_accum": True} if fast_accum else {})


def integers(name: str, text: str) -> list[int]:
    """Return positive integers with commas between; raise ValueError for anything else."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*[0-9]{1,20}\s*", part) and int(part) >= 1 for part in parts):
        raise ValueError(f"{name} must be integers >= 1 with commas between, got {shown(text)}")
    return [int(part) for part in parts]


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which options take the place of parameters that are dataclasses.

    Each field of such a dataclass is annotated as an option. So several commands share a group of
    options, with their texts and defaults; a subclass changes some defaults. A field ``given`` is
    no option: it gets the names of those that the command line has.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            group: Any = parameter.annotation
            groups[name] = group
            hints = get_type_hints(group, include_extras=True)  # each in its class's module
            options = dict(inspect.signature(group).parameters)
            if options.pop("given", None):
                parameters.append(inspect.Parameter("context", _KEYWORD, annotation=typer.Context))
            parameters += [one.replace(annotation=hints[name]) for name, one in options.items()]
        else:
            parameters.append(parameter)

    def run(**values: Any) -> None:
        if "context" in values:
            source = values.pop("context").get_parameter_source
            there = {name: source(name) for name in values}
            values["given"] = frozenset(
                n for n, s in there.items() if s and s.name == "COMMANDLINE"
            )
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    keyword_only = [p.replace(kind=_KEYWORD) for p in parameters]
    run.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return run
