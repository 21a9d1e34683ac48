"""Arguments of kernels, as the command takes them.

Each is ``[NAME:]VALUE``, where VALUE is one of

* ``300``, ``-1``, ``0x10``, ``true``: an integer of the parameter's size;
* ``2.0``, ``1e-3``: a float or double;
* ``float32[4,300]=randn``: a tensor; also zeros, ones, arange, nan, or a number;
* ``float32[4,300]=empty``: a tensor that nobody has written to: to read it first is an error;
* ``x.npy``: a tensor, from a file;
* ``bytes=0102ff``: a struct, its bytes in hexadecimal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptx_machine.cli.programs import UsageError

_TENSOR = re.compile(r"(\w+)\[(\d+(?:,\d+)*)\](?:=(.+))?")
_NAMED = re.compile(r"([A-Za-z_]\w*):(.+)")


@dataclass(frozen=True)
class Argument:
    """An argument, and what it is called in what the command prints."""

    name: str
    value: Any
    written: bool = True


def parse(texts: list[str], seed: int) -> list[Argument]:
    """Return arguments; random ones depend on ``seed`` and their position.

    Raises:
        UsageError: one is not in the grammar, or its file cannot be read.
    """
    arguments = []
    for number, text in enumerate(texts):
        named = _NAMED.fullmatch(text)
        name, value = (named[1], named[2]) if named else (f"arg{number}", text)
        generator = torch.Generator().manual_seed(1000 * seed + number)
        arguments.append(Argument(name, _value(value, generator), not value.endswith("=empty")))
    names = [argument.name for argument in arguments]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two arguments are called {name}")
    return arguments


def _value(text: str, generator: torch.Generator) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("bytes="):
        try:
            return bytes.fromhex(text.removeprefix("bytes="))
        except ValueError as error:
            raise UsageError(f"--arg {text}: {error}") from None
    if text.endswith(".npy"):
        return _from_file(Path(text))
    tensor = _TENSOR.fullmatch(text)
    if tensor:
        shape = [int(size) for size in tensor[2].split(",")]
        return _filled(text, tensor[1], shape, tensor[3] or "zeros", generator)
    for kind in (lambda: int(text, 0), lambda: float(text)):
        try:
            return kind()
        except ValueError:
            continue
    raise UsageError(
        f"--arg {text} is none of 300, 2.0, true, float32[4,300]=randn, x.npy, bytes=00ff"
    )


def _filled(
    text: str, type_name: str, shape: list[int], how: str, generator: torch.Generator
) -> torch.Tensor:
    dtype = getattr(torch, type_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--arg {text}: torch has no type {type_name}")
    if how == "randn":
        return torch.randn(shape, generator=generator).to(dtype)
    if how == "arange":
        count = torch.Size(shape).numel()
        return torch.arange(count).view(shape).to(dtype)
    number = {"zeros": 0.0, "ones": 1.0, "nan": float("nan"), "empty": 0.0}.get(how)
    if number is None:
        try:
            number = float(how)
        except ValueError:
            raise UsageError(
                f"--arg {text}: {how} is none of zeros, ones, arange, randn, nan, empty, a number"
            ) from None
    return torch.full(shape, number).to(dtype)


def _from_file(path: Path) -> torch.Tensor:
    import numpy as np

    try:
        return torch.from_numpy(np.ascontiguousarray(np.load(path)))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def sizes(text: str, option: str) -> tuple[int, ...]:
    """Return "4", "4,2" or "4x2x1" as one to three sizes.

    Raises:
        UsageError: it is none of these.
    """
    parts = re.split("[x,]", text)
    if not 1 <= len(parts) <= 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text}: expected one to three sizes, as in 4 or 4,2,1")
    return tuple(int(part) for part in parts)
