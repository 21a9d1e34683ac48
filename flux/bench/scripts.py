"""Options of a command line in a text, such as a script that starts a trainer."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from flux.core.datafile import read_bytes, shown

LISTS = (*("recompute-modules", "parallelism.module-fqns-per-model-part", "compile.components"),)
"""Options with several values, which are kept with blanks between."""
_CHECKPOINTS = ("activation-checkpoint:", "activation_checkpoint:")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


class CommandOptions(dict[str, str]):
    """Options of a command line by name, with hyphens; "" of those without a value.

    Attributes:
        where: they are from, for errors.
        program: the first word that ends in ``.py``, or "".
    """

    program = ""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a size; raise ValueError if it is missing, or none."""
        if key not in self and default is not None:
            return default
        text = self.get(key, "")
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= 1 << 30:
            raise ValueError(f"{self.where}: --{key}: expected a size, got {shown(text)}")
        return int(text)


def options_in(file: Path) -> CommandOptions:
    """Return the options in a text, such as a script, with variables that it sets.

    Raises:
        ValueError: the file cannot be read, or a quotation does not end.
    """
    try:
        text = read_bytes(file, 1 << 20).decode("utf-8")
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    # Bash's lists may quote an option with its value: ("--fp8-format hybrid").
    lists = [word.split() if word[:2] == "--" and "=" not in word else [word] for word in words]
    words = [word for several in lists for word in several]
    variables: dict[str, str] = {}
    for place, word in enumerate(words):
        word = _VARIABLE.sub(lambda it: variables.get(it[1], it[2] or it[0]), word).rstrip(";")
        words[place] = word
        name, equals, value = word.partition("=")
        if equals and name.isidentifier() and len(value) < 100:
            variables[name] = value
    values: dict[str, list[str]] = {}
    last = ""  # the option whose value may follow
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            values[name], last = [value] if equals else [], "" if equals else name
        elif word.startswith((")", *_CHECKPOINTS)):
            last = ""
            if word[0] != ")":
                values["activation-checkpoint"] = [word.partition(":")[2]]
        elif last:
            values[last].append(word)
            last = last if last in LISTS else ""
    options = CommandOptions(str(file))
    options.program = next((word for word in words if word.endswith(".py")), "")
    options.update((name, " ".join(words)) for name, words in values.items())
    return options
