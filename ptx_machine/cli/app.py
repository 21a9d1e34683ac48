"""The commands. Exit status: 0; 1 a kernel failed; 2 the options do not fit."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ptx_machine.cli.views import PLAIN, complain

if TYPE_CHECKING:
    from ptx_machine import Counters, Device, Trace
    from ptx_machine.cli.arguments import Argument
    from ptx_machine.cli.programs import Program

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="python -m ptx_machine",
    help="Run CUDA kernels on the CPU: see docs/kernels/ptx-machine.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[
    Path, typer.Argument(help="PTX, CUDA source (needs nvcc), or a library that holds PTX.")
]
Kernel = Annotated[
    str | None, typer.Option("--kernel", help="Part of the kernel's name, if there are several.")
]
Grid = Annotated[str, typer.Option("--grid", help="Blocks: one to three sizes, as in 4 or 4,2,1.")]
Block = Annotated[str, typer.Option("--block", help="Threads of a block: one to three sizes.")]
Cluster = Annotated[
    str | None, typer.Option("--cluster", help="Blocks of a cluster: one to three sizes.")
]
Args = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        help="An argument, in the kernel's order: 300, 2.0, true, float32[4,300]=randn (or zeros, "
        "ones, arange, nan, empty, a number), x.npy, bytes=00ff. NAME: in front of it names it.",
    ),
]
Shared = Annotated[int, typer.Option("--shared", help="Bytes of dynamic shared memory.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Decides in which order warps take turns; 0: one by one.")
]
DataSeed = Annotated[int, typer.Option("--data-seed", help="Of random arguments.")]
Model = Annotated[str, typer.Option("--device", help="H200 or A100.")]
Multiprocessors = Annotated[
    int, typer.Option("--multiprocessors", min=0, help="0: as many as the device has.")
]
Statements = Annotated[
    int, typer.Option("--max-statements", help="Of warps, after which a kernel has no end.")
]
Arch = Annotated[str, typer.Option("--arch", help="That nvcc compiles CUDA source for.")]
NvccOption = Annotated[
    list[str] | None, typer.Option("--nvcc", help="A further option of nvcc, as in -Iinclude.")
]


@dataclass
class Request:
    """A launch, as the options describe it."""

    program: Program
    arguments: list[Argument]
    device: Device
    settings: dict[str, Any]

    def run(self, seed: int) -> Counters:
        """Run it in the order of a seed."""
        return self.device.launch(self.program.module, self.program.kernel, **self._all(seed))

    def trace(self, seed: int, most: int) -> Trace:
        """Run it, and record the first ``most`` statements."""
        return self.device.trace(
            self.program.module, self.program.kernel, most_events=most, **self._all(seed)
        )

    def _all(self, seed: int) -> dict[str, Any]:
        for one in self.arguments:
            if not one.written:
                self.device.register(one.value, one.name, written=False)
        return {**self.settings, "args": [a.value for a in self.arguments], "seed": seed}

    def tensors(self) -> dict[str, Any]:
        """Return the arguments that are tensors, by name."""
        return {a.name: a.value for a in self.arguments if hasattr(a.value, "data_ptr")}


def _request(
    file: Path,
    kernel: str | None,
    grid: str,
    block: str,
    cluster: str | None,
    arg: list[str] | None,
    shared: int,
    data_seed: int,
    model: str,
    multiprocessors: int,
    max_statements: int,
    arch: str,
    nvcc: list[str] | None,
) -> Request:
    from ptx_machine import Device
    from ptx_machine.cli.arguments import parse, sizes
    from ptx_machine.cli.programs import load

    settings: dict[str, Any] = {
        "grid": sizes(grid, "--grid"),
        "block": sizes(block, "--block"),
        "cluster": None if cluster is None else sizes(cluster, "--cluster"),
        "dynamic_shared": shared,
        "max_statements": max_statements,
    }
    device = Device(model=model, multiprocessors=multiprocessors or None)
    program = load(file, kernel, arch, nvcc or [])
    return Request(program, parse(arg or [], data_seed), device, settings)


@contextmanager
def _errors() -> Iterator[None]:
    """Print errors in words, and exit."""
    from ptx_machine._machine import PtxError
    from ptx_machine.cli.programs import UsageError

    try:
        yield
    except PtxError as error:
        complain(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    except (UsageError, ValueError) as error:
        complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None


@app.command()
def run(
    file: File,
    kernel: Kernel = None,
    grid: Grid = "1",
    block: Block = "128",
    cluster: Cluster = None,
    arg: Args = None,
    shared: Shared = 0,
    seed: Seed = 0,
    data_seed: DataSeed = 0,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            help="Run in so many orders, from --seed on; stop at the "
            "first that fails or gives other results.",
        ),
    ] = 1,
    save: Annotated[
        list[str] | None, typer.Option("--save", help="NAME=FILE.npy: keep a tensor.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no tensors.")] = False,
    model: Model = "H200",
    multiprocessors: Multiprocessors = 8,
    max_statements: Statements = 10**9,
    arch: Arch = "90a",
    nvcc: NvccOption = None,
) -> None:
    """Run a kernel, with all checks, and print the tensors that it changed."""
    with _errors():
        request = _request(
            file, kernel, grid, block, cluster, arg, shared, data_seed, model, multiprocessors,
            max_statements, arch, nvcc,
        )  # fmt: skip
        targets = _targets(save or [], request)
        before = {name: tensor.clone() for name, tensor in request.tensors().items()}
        counters = _run_orders(request, before, range(seed, seed + seeds))
        console = Console()
        console.print(
            f"{request.program.kernel}: {counters.blocks} blocks, {counters.instructions:,} "
            "instructions of threads" + (f", {seeds} orders" if seeds > 1 else ""),
            **PLAIN,
        )
        _show_changed(console, request, before, quiet)
        for name, target in targets.items():
            _save(request.tensors()[name], target)


def _run_orders(request: Request, before: dict[str, Any], orders: range) -> Any:
    """Run every order from the same memory; return the counters of the last."""
    import torch

    from ptx_machine._machine import PtxError

    first: dict[str, Any] | None = None
    counters = None
    for seed in orders:
        for name, tensor in request.tensors().items():
            tensor.copy_(before[name])
        try:
            counters = request.run(seed)
        except PtxError as error:
            raise PtxError(f"{error}\nrun it again with --seed {seed}") from None
        after = {name: tensor.clone() for name, tensor in request.tensors().items()}
        if first is None:
            first = after
        for name, tensor in after.items():
            same = torch.equal(_bits(tensor), _bits(first[name]))
            if not same:
                raise PtxError(
                    f"{name} differs between the orders of --seed {orders[0]} and --seed {seed}"
                )
    return counters


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _show_changed(console: Console, request: Request, before: dict[str, Any], quiet: bool) -> None:
    import torch

    from ptx_machine.cli.views import show_tensor

    for name, tensor in request.tensors().items():
        if not quiet and not torch.equal(_bits(tensor), _bits(before[name])):
            show_tensor(console, name, tensor)


def _targets(texts: list[str], request: Request) -> dict[str, Path]:
    from ptx_machine.cli.programs import UsageError

    targets = {}
    for text in texts:
        name, _, target = text.partition("=")
        if name not in request.tensors() or not target.endswith(".npy"):
            names = ", ".join(request.tensors()) or "none"
            raise UsageError(f"--save {text}: expected NAME=FILE.npy, NAME one of {names}")
        targets[name] = Path(target)
    return targets


def _save(tensor: Any, target: Path) -> None:
    import numpy as np
    import torch

    # numpy has no bfloat16 or float8: these are saved as their bits.
    try:
        np.save(target, tensor.numpy())
    except TypeError:
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        np.save(target, tensor.view(bits).numpy())


@app.command()
def trace(
    file: File,
    kernel: Kernel = None,
    grid: Grid = "1",
    block: Block = "128",
    cluster: Cluster = None,
    arg: Args = None,
    shared: Shared = 0,
    seed: Seed = 0,
    data_seed: DataSeed = 0,
    out: Annotated[Path, typer.Option("--out", help="JSON, for ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    text: Annotated[
        str | None,
        typer.Option("--text", help="BLOCK:WARP, by order of start: print its statements instead."),
    ] = None,
    most: Annotated[int, typer.Option("--most", help="Statements that are recorded.")] = 2_000_000,
    model: Model = "H200",
    multiprocessors: Multiprocessors = 8,
    max_statements: Statements = 10**9,
    arch: Arch = "90a",
    nvcc: NvccOption = None,
) -> None:
    """Record what each warp executed and when, in statements of the whole kernel."""
    with _errors():
        request = _request(
            file, kernel, grid, block, cluster, arg, shared, data_seed, model, multiprocessors,
            max_statements, arch, nvcc,
        )  # fmt: skip
        place = None if text is None else _place(text)
        trace = request.trace(seed, most)
        console = Console()
        if trace.dropped:
            complain(f"{trace.dropped:,} statements came later and are left out: --most")
        if place is None:
            out.write_text(json.dumps(trace.chrome()), encoding="utf-8")
            console.print(
                f"{out}: {len(trace.spans()):,} spans; open it at ui.perfetto.dev", **PLAIN
            )
            return
        for line in trace.text(*place):
            console.print(line, **PLAIN)


def _place(text: str) -> tuple[int, int]:
    from ptx_machine.cli.programs import UsageError

    block, _, warp = text.partition(":")
    if not block.isdigit() or not warp.isdigit():
        raise UsageError(f"--text {text}: expected BLOCK:WARP, as in 0:3")
    return int(block), int(warp)


@app.command(context_settings={"allow_extra_args": True})
def profile(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(help="As for run; or a Python script, with its arguments behind --.")
    ],
    kernel: Kernel = None,
    grid: Grid = "1",
    block: Block = "128",
    cluster: Cluster = None,
    arg: Args = None,
    shared: Shared = 0,
    seed: Seed = 0,
    data_seed: DataSeed = 0,
    lines: Annotated[int, typer.Option("--lines", help="Source lines in the table.")] = 12,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    model: Model = "H200",
    multiprocessors: Multiprocessors = 8,
    max_statements: Statements = 10**9,
    arch: Arch = "90a",
    nvcc: NvccOption = None,
) -> None:
    """Print what the warps of a kernel executed, by role and by source line.

    Of a Python script, all kernels that it launches, on a Device or by libraries.
    """
    from ptx_machine.cli.views import as_json, show_counters

    with _errors():
        if file.suffix == ".py":
            launches = _of_script(file, context.args, kernel)
        else:
            request = _request(
                file, kernel, grid, block, cluster, arg, shared, data_seed, model, multiprocessors,
                max_statements, arch, nvcc,
            )  # fmt: skip
            launches = [request.run(seed)]
    if json_output:
        print(json.dumps([as_json(counters) for counters in launches]))
        return
    for counters in launches:
        show_counters(Console(), counters, lines)


def _of_script(script: Path, arguments: list[str], kernel: str | None) -> list[Any]:
    import ptx_machine
    from ptx_machine.cli.programs import UsageError

    if not script.exists():
        raise UsageError(f"there is no file {script}")
    launched: list[Any] = []
    device = ptx_machine.cuda_device()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    with ptx_machine.observed(launched.append):
        runpy.run_path(str(script), run_name="__main__")
    launched += ptx_machine.kernel_counters(device)
    return [counters for counters in launched if kernel is None or kernel in counters.kernel]
