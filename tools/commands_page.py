"""Write the reference part of docs/use/commands.md from the texts of the `flux` command.

    python tools/commands_page.py [--check]

With `--check` it writes nothing, and exits with 1 if the page is out of date. The part stands
between two comments; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from flux.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "commands.md"
BEGIN, END = "<!-- commands -->\n", "<!-- /commands -->\n"


def commands(command: Any, name: str = "flux") -> Iterator[tuple[str, Any]]:
    """Yield (full name, command) of every command, and of every group that is one, too."""
    children = getattr(command, "commands", {})
    if not children or command.invoke_without_command:
        yield name, command
    for child, subcommand in children.items():
        yield from commands(subcommand, f"{name} {child}")


def flag(option: Any) -> str:
    """Return an option as one writes it, with its default."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    if option.is_flag or option.default in (None, ""):
        return f"`{names}`"
    default = option.default
    return f"`{names} {int(default) if isinstance(default, float) else default}`"


def paragraphs(text: str) -> str:
    """Return a help text with one line for each of its paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def reference() -> str:
    """Return all commands with their options; options of several commands are described once."""
    every = list(commands(typer.main.get_command(app)))
    uses = Counter(
        (option.opts[0], option.help) for _, command in every for option in command.params
    )
    shared = {key: None for key, count in uses.items() if count > 1}
    parts = []
    for name, command in every:
        own, others = [], []
        for option in command.params:
            if (option.opts[0], option.help) in shared:
                others.append(flag(option))
            else:
                own.append(f"- {flag(option)}: {option.help}")
        parts.append(f"### {name}\n\n{paragraphs(command.help)}")
        if own:
            parts.append("\n".join(own))
        if others:
            parts.append(f"{'Also' if own else 'Options'}: {', '.join(others)}.")
    parts.append("### Options of several commands")
    parts.append("\n".join(f"- `{option}`: {text}" for option, text in sorted(shared)))
    return "\n\n".join(parts) + "\n"


def with_reference(page: str) -> str:
    """Return a page with the part between the comments written anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{reference()}\n{END}{tail}"


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    current = with_reference(page)
    if check and page != current:
        sys.exit("docs/use/commands.md is out of date: python tools/commands_page.py")
    if not check:
        PAGE.write_text(current, encoding="utf-8")


if __name__ == "__main__":
    main()
