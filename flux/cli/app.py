"""The `flux` command. Its commands belong to other packages and are loaded when they are used."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from flux.cli.mounting import MountedGroup, check_installed
from flux.cli.terminal import (
    EXIT_FAILED,
    EXIT_USAGE,
    complain,
    printable,
    say,
    silence,
)
from flux.core.datafile import one_line
from flux.core.env import VariableError


class FluxCommands(MountedGroup):
    """The commands of all installed packages. Each ends with an error message, wherever it goes."""

    _status = EXIT_FAILED
    """With which a command ends that cannot print its error."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command, then flush its output."""
        _open_streams()
        _check_size()
        try:
            try:
                return super().main(*args, **options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except VariableError as error:
            complain(one_line(str(error)))
            sys.exit(EXIT_USAGE)
        except BrokenPipeError:  # `| head` has read enough
            silence(sys.stdout)
            sys.exit(EXIT_FAILED)
        except OSError as error:
            silence(sys.stdout)
            of_stream = "stdout: " if error.errno in (errno.ENOSPC, errno.EIO) else ""
            where = of_stream if error.filename is None else f"{error.filename}: "
            complain(one_line(f"{where}{error.strerror or error}"))
            sys.exit(self._status)
        except MemoryError as error:
            complain(one_line(f"not enough memory: {error}".removesuffix(": ")))
            sys.exit(EXIT_FAILED)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the command line, if this package is installed as its code expects.

        Errors quote the line, control characters escaped.
        """
        check_installed()
        with self._printable_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand; errors quote the command line, control characters escaped."""
        with self._printable_errors():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _printable_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = getattr(error, "message", None)  # of errors in a command line
            if isinstance(message, str):
                self._status = EXIT_USAGE
                error.message = printable(message)  # type: ignore[attr-defined]
            raise


def _check_size() -> None:
    """Forget a size of the terminal in the environment that none has: it is what lines fill."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch(r"[0-9]{0,3}", os.environ.get(name, ""), re.ASCII):
            del os.environ[name]


def _open_streams() -> None:
    """Let every text be written, whatever the encoding, and no file be taken for a stream.

    With a stream closed (``>&-``), the next file that is opened would get its descriptor, and what
    libraries and children print would go there.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


app = typer.Typer(
    name="flux",
    cls=FluxCommands,
    help="Tensor-parallel GEMMs with overlapped communication.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        import flux

        say(f"flux {flux.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
