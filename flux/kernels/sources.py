"""Find flux's CUDA headers, and compute the key of a library."""

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
    """Return the include directory of units: of the checkout, or else the copy in the wheel."""
    for candidate in (_PACKAGE.parent / "csrc", _PACKAGE / "csrc"):
        # Another package may have a directory csrc in site-packages, but without this header.
        if (candidate / _ABI_HEADER).is_file() and (candidate / "core").is_dir():
            return candidate
    return None


def abi_version(root: Path) -> int:
    """Return FLUX_ABI_VERSION of these sources.

    Raises:
        ValueError: the header does not define it.
    """
    stated = _ABI_VERSION.search(_read(root / _ABI_HEADER))
    if stated is None:
        raise ValueError(f"{root / _ABI_HEADER} does not define FLUX_ABI_VERSION")
    return int(stated.group(1))


def headers(text: str, root: Path) -> list[str]:
    """Return the headers under ``root`` that ``text`` includes, also indirectly, relative to it.

    Includes in quotes are looked up beside the including file, then in ``root``. A header in
    neither place belongs to CUTLASS, or is missing, which the compiler will report.
    """
    root = root.resolve()
    headers: set[Path] = set()
    waiting = [(name, root) for name in _INCLUDE.findall(text)]
    while waiting:
        name, directory = waiting.pop()
        for candidate in ((directory / name).resolve(), (root / name).resolve()):
            if candidate.is_file() and candidate.is_relative_to(root):
                if candidate not in headers:
                    headers.add(candidate)
                    included = _INCLUDE.findall(_read(candidate))
                    waiting += [(other, candidate.parent) for other in included]
                break
    return sorted(path.relative_to(root).as_posix() for path in headers)


def sources_hash(configs: Sequence[GemmConfig], root: Path, traced: bool = False) -> str:
    """Return the hash of a unit and all our headers that it includes.

    A library with another hash is stale.
    """
    text = translation_unit(configs, traced)
    parts = [("unit", text)]
    parts += [(name, _read(root / name)) for name in headers(text, root)]
    # Kernels are launched through the ABI whether or not a unit includes it (yet).
    parts.append(("abi", str(abi_version(root))))
    return digest(parts)


def library_key(sources: str, cutlass: str, nvcc: str, flags: Iterable[str]) -> str:
    """Return the hash of all build inputs: libraries with the same key are identical."""
    return digest([sources, cutlass, nvcc, *flags])


def digest(parts: Sequence[object]) -> str:
    """Return the sha256 of a list of texts, in hexadecimal; the borders between them count too."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path) -> str:
    status = path.stat()
    return _contents(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=512)
def _contents(path: Path, modified_ns: int, size: int) -> str:
    # Cached, because every unit includes the same headers. Time and size invalidate the entry.
    return path.read_text(encoding="utf-8")
