"""The command `flux plan calibrate`.

Also `python -m flux.plan.command_calibrate`, for machines where flux is not installed.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from flux.cli import options
from flux.cli.ranks import check_writable, progress_bar
from flux.cli.terminal import EXIT_FAILED, complain, open_console, refuse, say, writing


def calibrate_command(
    out: Annotated[str, typer.Option(metavar="FILE", help="Write FILE.")],
    device: Annotated[
        str | None, typer.Option(help="cuda | cpu (default: a GPU if there is one).")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of operands (default: bfloat16; float32 on a CPU).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="After which it ends.")] = 60.0,
    small: Annotated[bool, typer.Option("--small", help="Small sizes, as a trial.")] = False,
    threads: options.Threads = 1,
    quiet: options.QuietTable = False,
) -> None:
    """Measure GEMMs, attention and other kernels of a device, for --calibration.

    A run cut short can be used.
    """
    check_writable(out)
    import torch

    from flux.bench.calibrate import CalibrationRun

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        refuse(f"device must be cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        refuse("torch finds no GPU")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    if dtype not in ("bfloat16", "float16", "float32"):
        refuse(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    if not seconds > 0 or threads < 1:
        refuse(f"seconds and threads must be positive, got {seconds:g} and {threads}")
    console = open_console(stderr=True)
    with writing(out), progress_bar(console, shown=console.is_terminal and not quiet) as progress:
        run = CalibrationRun(
            *(device, dtype, Path(out)),
            seconds=seconds,
            small=small,
            threads=threads,
            progress=progress,
        )
        content = run.run()
    left, failed = content["settings"]["left"], content["failed"]
    if not quiet:
        rest = f"; {left} left out after {seconds:g} s" if left else ""
        say(f"wrote {out}: {len(content['points'])} points of {content['device']['name']}{rest}")
        say(_reached(content))
    for point in failed:
        complain(f"{point['kind']} {point['variant']} {point['shape']}: {point['error']}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _reached(content: dict[str, Any]) -> str:
    """Return what the fastest GEMM reaches, and one that runs on: power limits lower clocks."""
    rates = [
        2e-6 * prod(point["shape"]) / point["us"]
        for point in content["points"]
        if point["kind"] == "gemm"
    ]
    text = f"GEMMs: up to {max(rates, default=0.0):.3g} TFLOP/s"
    if lasting := content.get("sustained"):
        rate, seen = 2e-6 * prod(lasting["shape"]) / lasting["us"], lasting["clocks"][-1]
        limit = content["device"].get("limit_watts", "?")
        text += f"; for seconds on end {rate:.3g}, at {seen.get('sm_mhz', '?')} MHz and "
        text += f"{seen.get('watts', '?')} of {limit} W"
    return text


if __name__ == "__main__":
    typer.run(calibrate_command)
