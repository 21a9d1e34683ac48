"""The `flux` command. Its commands belong to other packages and are loaded when they are used."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flux.cli.mounting import MountedGroup, check_installed
from flux.cli.terminal import Commands, say


class FluxCommands(Commands, MountedGroup):
    """The commands of all installed packages."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the command line, if this package is installed as its code expects."""
        check_installed()
        return super().make_context(*args, **options)


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
