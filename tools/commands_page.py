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

GROUPS = {
    "op": (
        "--op --m --n --k --path --order --direction --comm-tile-rows --swizzle",
        "Options of an op",
    ),
    "ranks": ("--hosts --link-rate --threads --seed --timeout", "Options of ranks"),
    "step": (
        "--policy --model --tp --dp --pp --cp --ep --sequence-parallel --layers --sequence"
        " --micro-batch --micro-batches --zero --regather --shard --recompute --split --optimizer"
        " --fp32-gradients --eager --unfused-attention --gemm-dtype --cp-kind",
        "Options of a training step",
    ),
}
"""Options that many commands have together: name in a command's list, options, heading."""

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
    """Return an option as one writes it, with its default; `--[no-]x` for a pair of switches."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    if option.param_type_name == "argument":
        return f"`{option.metavar or option.name.upper()}`"
    if option.secondary_opts == [f"--no-{option.opts[0][2:]}"]:
        names = f"--[no-]{option.opts[0][2:]}"
    if option.is_flag or option.default in (None, ""):
        return f"`{names}`"
    default = option.default
    return f"`{names} {f'{default:g}' if isinstance(default, float) else default}`"


def paragraphs(text: str) -> str:
    """Return a help text with one line for each of its paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def key(option: Any) -> tuple[str, str]:
    """Return what two commands' options have in common if one description serves both."""
    return option.opts[0], option.help


def shared_options(every: list[Any]) -> dict[tuple[str, str], Counter[str]]:
    """Return the options of several commands: how often each is written in which way."""
    uses: dict[tuple[str, str], Counter[str]] = {}
    for option in every:
        uses.setdefault(key(option), Counter())[flag(option)] += 1
    return {name: flags for name, flags in uses.items() if flags.total() > 1}


def grouped(shared: dict[tuple[str, str], Counter[str]]) -> dict[str, list[tuple[str, str]]]:
    """Return the keys of each group; of two with one name the one that more commands have."""
    by_use = sorted(shared, key=lambda name: shared[name].total())
    common = {name: (name, text) for name, text in by_use}
    return {group: [common[name] for name in GROUPS[group][0].split()] for group in GROUPS}


def shared_list(
    options: list[Any],
    shared: dict[tuple[str, str], Counter[str]],
    groups: dict[str, list[tuple[str, str]]],
) -> str:
    """Return a command's shared options: whole groups, and what is not as there."""
    flags = {key(option): flag(option) for option in options}
    links = []
    for group, members in groups.items():
        if flags.keys() >= set(members):
            links.append(f"[{group}](#{GROUPS[group][1].lower().replace(' ', '-')})")
            for member in members:
                if flags[member] == shared[member].most_common(1)[0][0]:
                    del flags[member]
    return ", ".join([*links, *flags.values()])


def reference() -> str:
    """Return all commands with their options; options of several commands are described once."""
    every = list(commands(typer.main.get_command(app)))
    shared = shared_options([option for _, command in every for option in command.params])
    groups = grouped(shared)
    parts = []
    for name, command in every:
        own = [
            f"- {flag(option)}: {option.help}"
            for option in command.params
            if key(option) not in shared
        ]
        others = [option for option in command.params if key(option) in shared]
        parts.append(f"### {name}\n\n{paragraphs(command.help)}")
        if own:
            parts.append("\n".join(own))
        if others:
            label = "Also" if own else "Options"
            parts.append(f"{label}: {shared_list(others, shared, groups)}.")
    in_groups = {member for members in groups.values() for member in members}
    lists = {GROUPS[group][1]: members for group, members in groups.items()}
    lists["Other options of several commands"] = sorted(shared.keys() - in_groups)
    for heading, members in lists.items():
        lines = [f"- {shared[member].most_common(1)[0][0]}: {member[1]}" for member in members]
        parts += [f"### {heading}", "\n".join(lines)]
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
