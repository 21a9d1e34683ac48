"""The command `flux bench model`."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.bench.command_options import report_phases
from flux.cli import options
from flux.cli.options import with_options
from flux.cli.ranks import torchrun_or_own
from flux.cli.terminal import command_line, refuse

if TYPE_CHECKING:
    from flux.bench.model_run import PhaseResult
    from flux.launch.progress import Progress


def _entry(job: Any, rank: int, progress: Progress) -> list[PhaseResult]:
    from flux.bench.model_run import measure_model

    return measure_model(job, rank, progress)


@dataclass(frozen=True)
class ModelOptions:
    """A layer of a model, and how it runs."""

    model: Annotated[
        str, typer.Option(help="Name of a model in tuning/shapes, or a file in that format.")
    ] = "gpt3-175b"
    scale: Annotated[int, typer.Option(help="Divisor of the model's sizes.")] = 16
    phases: Annotated[str, typer.Option(help="Phases to measure, separated by commas.")] = (
        "train,prefill,decode"
    )
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512
    batch: Annotated[int, typer.Option(help="Sequences per batch in training and prefill.")] = 1
    decode_batch: Annotated[int, typer.Option(help="Sequences per batch in decoding.")] = 8
    dtype: Annotated[str, typer.Option(help="Data type: float32 | bfloat16.")] = "float32"
    sequence_parallel: Annotated[
        bool, typer.Option(help="Use sequence parallelism in training and prefill.")
    ] = True
    nproc: options.Nproc = None
    hosts: options.Hosts = "1"
    link_rate: options.LinkRate = None
    repeats: Annotated[int, typer.Option(help="Timed repeats; decoding takes 8 times as many.")] = (
        15
    )
    warmup: options.Warmup = 3
    threads: options.Threads = 1
    seed: Annotated[int, typer.Option(help="Seed of the random weights and inputs.")] = 0
    timeout: options.Timeout = 60.0


@with_options
def bench_model(
    what: ModelOptions,
    *,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Time a layer of a model with Megatron-core's linear layers and with ours, interleaved.

    Runs on the CPU; needs megatron-core. Both must give the same results, before and after, or the
    exit status is 1.
    """
    from flux.bench import model_report
    from flux.bench.launch import on_ranks
    from flux.bench.model import ModelConfig

    if importlib.util.find_spec("megatron") is None:
        refuse('needs megatron-core: pip install "flux-overlap[megatron]"')
    settings = asdict(what)
    nproc = settings.pop("nproc")
    world = torchrun_or_own(nproc, what.hosts) or nproc or 2
    settings |= {"timeout_s": settings.pop("timeout"), "phases": tuple(what.phases.split(","))}
    try:
        config = ModelConfig(world=world, **settings)
    except (ValueError, TypeError) as error:
        refuse(str(error))
    report_phases(
        lambda progress: on_ranks(_entry, config, None, progress),
        lambda results: model_report.document(config, results, command_line()),
        model_report.show,
        json_target,
        quiet,
    )
