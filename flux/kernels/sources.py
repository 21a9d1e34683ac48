"""Where flux's CUDA headers are, and what a library's key is made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from flux.kernels.config import GemmConfig
from flux.kernels.generator import translation_unit

_PACKAGE = Path(__file__).resolve().parents[1]
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_ABI_VERSION = re.compile(r"^#define FLUX_ABI_VERSION (\d+)$", re.MULTILINE)
_ABI_HEADER = "cuda/abi.h"


def csrc() -> Path | None:
    """The directory that units include from: of the checkout, else what the wheel brought."""
    for candidate in (_PACKAGE.parent / "csrc", _PACKAGE / "csrc"):
        # Another package's csrc may lie beside ours in site-packages; it has no such header.
        if (candidate / _ABI_HEADER).is_file() and (candidate / "core").is_dir():
            return candidate
    return None


def abi_version(root: Path) -> int:
    """FLUX_ABI_VERSION of these sources.

    Raises:
        ValueError: the header does not state it.
    """
    stated = _ABI_VERSION.search(_read(root / _ABI_HEADER))
    if stated is None:
        raise ValueError(f"{root / _ABI_HEADER} does not define FLUX_ABI_VERSION")
    return int(stated.group(1))


def headers(text: str, root: Path) -> list[str]:
    """Headers under ``root`` that ``text`` includes, directly or not, relative to ``root``.

    Includes in quotes are looked up beside the file that has them, then in ``root``. What is in
    neither is somebody else's (CUTLASS), or missing, which the compiler will say.
    """
    root = root.resolve()
    found: set[Path] = set()
    waiting = [(name, root) for name in _INCLUDE.findall(text)]
    while waiting:
        name, directory = waiting.pop()
        for candidate in ((directory / name).resolve(), (root / name).resolve()):
            if candidate.is_file() and candidate.is_relative_to(root):
                if candidate not in found:
                    found.add(candidate)
                    included = _INCLUDE.findall(_read(candidate))
                    waiting += [(other, candidate.parent) for other in included]
                break
    return sorted(path.relative_to(root).as_posix() for path in found)


def sources_hash(configs: Sequence[GemmConfig], root: Path, traced: bool = False) -> str:
    """Of a unit and all headers of ours that it includes. A library with another one is stale."""
    text = translation_unit(configs, traced)
    parts = [("unit", text)]
    parts += [(name, _read(root / name)) for name in headers(text, root)]
    # Kernels are launched through it whether or not a unit includes it (yet).
    parts.append(("abi", str(abi_version(root))))
    return digest(parts)


def library_key(sources: str, cutlass: str, nvcc: str, flags: Iterable[str]) -> str:
    """Of all that goes into a library: two with the same key are the same."""
    return digest([sources, cutlass, nvcc, *flags])


def digest(parts: Sequence[object]) -> str:
    """sha256 of a list of texts, in hexadecimal; where one ends and the next begins matters."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path) -> str:
    status = path.stat()
    return _contents(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=512)
def _contents(path: Path, modified_ns: int, size: int) -> str:
    # Every unit includes the same headers; the arguments beside the path tell when they changed.
    return path.read_text(encoding="utf-8")
