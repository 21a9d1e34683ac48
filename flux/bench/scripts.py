"""Options of a command line in a text, such as a script that starts a trainer."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from flux.core.datafile import read_bytes, shown

LISTS = (
    *("recompute-modules", "parallelism.module-fqns-per-model-part", "compile.components"),
    "cp-comm-type",
)
"""Options with several values, which are kept with blanks between."""
_CHECKPOINTS = ("activation-checkpoint:", "activation_checkpoint:")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")
_ARITHMETIC = re.compile(r"\$\(\([^()\n]*\)\)")
_PRODUCT = re.compile(r"\$\(\((\w{1,40}(?:\*\w{1,40}){0,7})\)\)")
_SEVERAL = re.compile(r"\s--\w|^--[^=]*$")
"""A quotation with several options, or with an option and its value."""


class CommandOptions(dict[str, str]):
    """Options of a command line by name, with hyphens; "" of those without a value.

    Attributes:
        where: they are from, for errors.
        program: the first word that ends in ``.py``, or "".
        changing: variables of the text that are set to several numbers; the last one counts.
        conditional: options that are first set in a branch: no condition is evaluated.
    """

    program = ""
    changing: tuple[str, ...] = ()
    conditional: tuple[str, ...] = ()

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
        text = read_bytes(file, 1 << 20).decode("utf-8").replace("\\\n", " ")
        text = _ARITHMETIC.sub(lambda it: re.sub(r"\s", "", it[0]), text)
        quoted = shlex.split(text, comments=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    variables: dict[str, str] = {}
    words, changing, before = list[tuple[str, bool]](), dict[str, None](), ""
    depth, opener = 0, ""  # of branches, which Bash opens by if ... then; Python has no "then"
    inside = 0  # parentheses that a list of Bash has opened
    for word in quoted:
        word = _VARIABLE.sub(lambda it: variables.get(it[1], it[2] or it[0]), word).rstrip(";")
        word = _PRODUCT.sub(lambda it: _product(it, variables), word)
        name, equals, value = word.partition("=")
        several = before != "echo" and bool(_SEVERAL.search(word))
        opener = word if word in ("if", "elif") else opener
        opens = word == "case" or (word == "then" and opener == "if")
        depth = max(depth + opens - (word in ("fi", "esac")), 0)
        branch = depth > 0 or before in ("&&", "||")
        before, parts = word, word.split() if several else [word]
        sets = equals and name.removesuffix("+").isidentifier()
        if sets and (inside <= 0 or value.startswith("(")):
            listed = value.removeprefix("(")
            inside = value.count("(") - value.count(")") if listed != value else 0
            parts = [listed] if inside > 0 else parts
            if _SEVERAL.search(listed):  # read where it is set, as Bash's lists are
                parts = listed.split() if inside > 0 else [*listed.split(), ")"]
            elif variables.get(name, value) != value and value.isdecimal():
                changing[name] = None
            if len(value) < 100:
                variables[name] = value
        elif inside > 0:
            inside += word.count("(") - word.count(")")
            if inside <= 0:
                parts = [*parts[:-1], parts[-1].removesuffix(")"), ")"]
            if sets:  # an element; or an assignment behind a list whose parenthesis was quoted
                variables.setdefault(name, value)
        words += [(one, branch) for one in parts if one]
    values: dict[str, list[str]] = {}
    in_branches = list[str]()
    last = ""  # the option whose value may follow
    for word, branch in words:
        if word.startswith("--"):
            word = word if "(" in word else word.removesuffix(")")  # the last of a list
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            if branch and name not in values:  # a variable may bring it again behind the branch
                in_branches.append(name)
            values[name], last = [value] if equals else [], "" if equals else name
        elif word.startswith((")", *_CHECKPOINTS)):
            last = ""
            if word[0] != ")":
                values["activation-checkpoint"] = [word.partition(":")[2]]
        elif last:
            values[last].append(word)
            last = last if last in LISTS else ""
    options = CommandOptions(str(file))
    options.changing = tuple(changing)
    options.conditional = tuple(in_branches)
    options.program = next((word for word, _ in words if word.endswith(".py")), "")
    options.update((name, " ".join(words)) for name, words in values.items())
    return options


def _product(found: re.Match[str], variables: dict[str, str]) -> str:
    """Return the product in ``$((NODES*GPUS))``, or the text where a factor is no number."""
    factors = [variables.get(factor, factor) for factor in found[1].split("*")]
    if not all(re.fullmatch("[0-9]{1,9}", factor) for factor in factors):
        return found[0]
    return str(math.prod(map(int, factors)))
