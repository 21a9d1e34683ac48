"""Options that the commands of `flux plan` share, and the step that they describe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.cli import options

if TYPE_CHECKING:
    from flux.plan.model import TrainingStep

READERS: list[Callable[[Path, int | None, str | None], Any]] = []
"""Of other programs' files, for --plan; ``flux.trainers`` adds one. Each gets a file, the ranks of
the step and its model, if the user says so. It returns a ``FilePlan``, or None for files of a
search."""

Model = Annotated[
    str, typer.Option(help="Model in tuning/shapes or tuning/hub; or a file (plan.md).")
]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policy, with options behind a colon: domino:slices=4,order=blocks. Repeat it to "
        "compare. Default: serial and domino; of search: all.",
    ),
]
CalibrationFile = Annotated[
    str | None, typer.Option("--calibration", metavar="FILE", help="Times of flux plan calibrate.")
]
Hosts = Annotated[
    int | None, typer.Option("--hosts", help="Hosts to assume, in place of the cluster's own.")
]
Tp = Annotated[int, typer.Option(help="Tensor parallel ranks.")]
Layers = Annotated[
    int | None, typer.Option(help="So many layers alone, without embedding and head.")
]
Sequence = Annotated[int | None, typer.Option(help="Tokens of a sequence.")]
PictureFile = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE", help="Draw the timelines: an HTML page, or for *.svg a picture."
    ),
]
PlanFile = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Take step and policy from a file of flux plan search, or a trainer's (plan.md).",
    ),
]


@dataclass(frozen=True)
class SharedModelOptions:
    """A model that ranks share, and the policies that plan it."""

    policy: Policy = None
    model: Model = "gpt3-175b"
    tp: Tp = 8
    dp: Annotated[int, typer.Option(help="Data parallel ranks.")] = 1
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1
    ep: Annotated[int, typer.Option(help="Expert parallel ranks, of tp, cp and dp.")] = 1
    sequence_parallel: Annotated[
        bool, typer.Option(help="AllGather and ReduceScatter in place of AllReduce.")
    ] = False
    layers: Layers = None
    gemm_dtype: Annotated[str, typer.Option(help="float8_e4m3fn: with casts.")] = ""


@dataclass(frozen=True)
class DeviceOptions:
    """A cluster, and the memory of its devices."""

    cluster: options.ClusterName = "flux-h800"
    calibration: CalibrationFile = None
    hosts: Hosts = None
    memory_gb: Annotated[
        float | None,
        typer.Option(help="GB of a device that a plan may use (default: the device's)."),
    ] = None
    headroom: Annotated[float, typer.Option(help="Share of memory that stays free.")] = 0.05


@dataclass(frozen=True)
class RankStepOptions(SharedModelOptions):
    """A step that ranks share, and the policies that plan it."""

    cp: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1
    sequence: Sequence = None
    micro_batch: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 2
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of a step (default: 1, or 4 for each stage).")
    ] = None
    zero: Annotated[int, typer.Option(help="0: AllReduce of gradients; 1, 2: ZeRO; 3: FSDP.")] = 1
    reduce_every: Annotated[
        int, typer.Option(help="With --zero 2: micro-batches whose gradients are reduced together.")
    ] = 1
    regather: Annotated[
        bool | None,
        typer.Option(
            "--regather/--no-regather",
            help="Gather inputs of column-parallel linears again in backward (default: with "
            "--sequence-parallel).",
        ),
    ] = None
    shard: Annotated[
        int, typer.Option(help="With --zero 3: data parallel ranks that share weights (0: all).")
    ] = 0
    recompute: Annotated[
        str,
        typer.Option(
            help="none, selective (attention), act, ops (as torchtitan), full, or layers of each "
            "stage (at most all)."
        ),
    ] = "none"
    split: Annotated[str, typer.Option(help="Layers of each stage: 7,8,8,7; or search.")] = ""
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="adam, adam-bf16, momentum or sgd.")
    ] = "adam"
    fp32_gradients: Annotated[bool, typer.Option(help="Gradients in float32.")] = False
    eager: Annotated[bool, typer.Option(help="Kernels of PyTorch without compiler.")] = False
    unfused_attention: Annotated[bool, typer.Option(help="No FlashAttention.")] = False
    cp_kind: Annotated[str, typer.Option(help="With --cp: ring, all_gather or torch.")] = "ring"
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StepOptions(DeviceOptions, RankStepOptions):
    """A step on a cluster."""

    plan: PlanFile = None
    row: Annotated[int, typer.Option(help="With --plan: which of a search's plans.")] = 1
    gpus: Annotated[
        int | None, typer.Option(help="With --plan: ranks, if the file lacks them.")
    ] = None


@dataclass(frozen=True)
class ServeOptions(DeviceOptions, SharedModelOptions):
    """A model on a cluster, and the requests that it serves."""

    model: Model = "llama2-70b"
    batch: Annotated[int, typer.Option(help="Sequences that a replica decodes at a time.")] = 64
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 256
    prompts: Annotated[int, typer.Option(help="Prompts of a prefill.")] = 1
    kv_dtype: Annotated[str, typer.Option(help="Of the cache (default: the model's).")] = ""


def step_with(options: Any, dtype: str | None = None) -> TrainingStep:
    """Return the step that options describe: ``StepOptions``, or others with a step's fields."""
    from flux.plan.model import Parallel, step_of

    degrees = {name: getattr(options, name) for name in ("tp", "cp", "dp", "pp", "ep")}
    return step_of(
        options.model,
        Parallel(**degrees, sequence=options.sequence_parallel),
        dtype=dtype,
        split=_sizes(options.split) if options.split else (),
        **{name: getattr(options, name) for name in _AS_THEY_ARE},
    )


_AS_THEY_ARE = (
    *("sequence", "micro_batch", "micro_batches", "layers"),
    *("zero", "regather", "shard", "recompute", "optimizer", "fp32_gradients", "eager"),
    *("unfused_attention", "gemm_dtype", "cp_kind", "reduce_every"),
)


def _sizes(text: str) -> tuple[int, ...]:
    """Return the layers of each stage: "7,8,8,7"."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"split must be layers of each stage, as in 7,8,8,7, got {text!r}")
    return tuple(map(int, words))


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, options) of a policy on the command line."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"policy {name}: expected option=value, got {part!r}")
        if key in options:
            raise ValueError(f"policy {name}: {key} is given twice")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> bool | int | float | str:
    """Return the value that a text on the command line stands for."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
