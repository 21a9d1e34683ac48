"""Built libraries on disk: one directory each, which appears whole or not at all.

<root>/<library>/<library>.so         at most four kernels
                 <library>.json       the manifest
                 <library>.ptxas.txt  what ptxas said of them
                 kernels.cu           the source
<root>/.locks/<library>.lock          held by whoever builds or sets aside that library
<root>/.building-<library>/           by whoever holds the lock; left behind only if killed
<root>/<library>.damaged-<n>/         set aside, never looked at again
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flux.kernels import generator, trust
from flux.kernels.config import GemmConfig
from flux.kernels.ptxas import Usage
from flux.kernels.trust import UntrustedError

FORMAT = 1
"""Of the manifest; raised when a field changes its meaning."""


class DamagedLibraryError(ValueError):
    """A library, or its manifest, is not what was built."""


@dataclass(frozen=True)
class Library:
    """A built library, as its manifest states it.

    Attributes:
        name: of the library, its directory and its files.
        size: bytes of the .so.
        sha256: of the .so.
        abi_version: FLUX_ABI_VERSION that it was built with.
        arch: ``80`` | ``90a``.
        nvcc, cutlass: versions.
        flags: of the compiler.
        sources: hash of the unit and of our headers that it includes.
        key: hash of all that went into it.
        traced: whether it is a trace build, whose kernels put down what they do.
        kernels: config by symbol, in the order of the unit.
        usage: of registers and local memory, by symbol.
        warnings: of nvcc and ptxas.
        seconds: that compiling and linking took.
    """

    name: str
    size: int
    sha256: str
    abi_version: int
    arch: str
    nvcc: str
    cutlass: str
    flags: tuple[str, ...]
    sources: str
    key: str
    kernels: Mapping[str, GemmConfig]
    usage: Mapping[str, Usage]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    traced: bool = False
    directory: Path = field(default=Path(), compare=False)

    @property
    def path(self) -> Path:
        """The shared object."""
        return self.directory / f"{self.name}.so"

    @property
    def configs(self) -> tuple[GemmConfig, ...]:
        return tuple(self.kernels.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "format": FORMAT,
            "library": f"{self.name}.so",
            "bytes": self.size,
            "sha256": self.sha256,
            "abi_version": self.abi_version,
            "arch": self.arch,
            "nvcc": self.nvcc,
            "cutlass": self.cutlass,
            "flags": list(self.flags),
            "sources": self.sources,
            "key": self.key,
            "traced": self.traced,
            "kernels": {symbol: config.as_dict() for symbol, config in self.kernels.items()},
            "ptxas": {symbol: usage.as_dict() for symbol, usage in self.usage.items()},
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 1),
        }


def write(library: Library, directory: Path) -> None:
    """Write the manifest into ``directory``."""
    text = json.dumps(library.as_dict(), indent=1)
    (directory / f"{library.name}.json").write_text(text + "\n", encoding="utf-8")


def read(directory: Path) -> Library:
    """The library in ``directory``; its file is compared with what the manifest says of it.

    Raises:
        DamagedLibraryError: it is not what was built; the message says in which way.
        UntrustedError: another user can write or replace it.
    """
    name = directory.name
    trust.check(directory)
    try:
        with trust.opened(directory / f"{name}.json") as file:
            content = json.loads(file.read().decode("utf-8"))
        library = _parse(name, content, directory)
        with trust.opened(library.path) as file:
            size, sha256 = file.size(), file.sha256()
    except OSError as error:
        raise DamagedLibraryError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedLibraryError(f"bad manifest: {type(error).__name__}: {error}") from error
    if size != library.size:
        raise DamagedLibraryError(f"{name}.so has {size} bytes, the manifest says {library.size}")
    if sha256 != library.sha256:
        raise DamagedLibraryError(f"{name}.so is not the file that the manifest describes")
    return library


def _parse(name: str, content: Mapping[str, Any], directory: Path) -> Library:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, expected {FORMAT}")
    library = Library(
        name=name,
        size=int(content["bytes"]),
        sha256=str(content["sha256"]),
        abi_version=int(content["abi_version"]),
        arch=str(content["arch"]),
        nvcc=str(content["nvcc"]),
        cutlass=str(content["cutlass"]),
        flags=tuple(content["flags"]),
        sources=str(content["sources"]),
        key=str(content["key"]),
        kernels={
            symbol: GemmConfig.from_dict(config) for symbol, config in content["kernels"].items()
        },
        usage={symbol: Usage(**counts) for symbol, counts in content["ptxas"].items()},
        warnings=tuple(content["warnings"]),
        seconds=float(content["seconds"]),
        traced=bool(content.get("traced", False)),  # libraries of earlier versions say nothing
        directory=directory,
    )
    if content["library"] != f"{name}.so" or not name.endswith(f"_{library.key[:12]}"):
        raise ValueError(f"describes {content['library']!r} of key {library.key!r}")
    for symbol, config in library.kernels.items():
        if symbol != generator.symbol(config, library.traced):
            raise ValueError(f"symbol {symbol} has the config of {config.name}")
    if not library.kernels:
        raise ValueError("no kernels")
    return library


def file_hash(path: Path) -> str:
    """sha256, in hexadecimal."""
    with path.open("rb") as file:
        hashed = hashlib.sha256()
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def scan(root: Path) -> Iterator[Library]:
    """The libraries in ``root``, by name. Damaged ones are set aside, with a warning.

    What another user can write or replace is left where it is and not used, with a warning too.
    """
    if not is_trusted(root):
        return
    for directory in _directories(root):
        try:
            yield read(directory)
        except UntrustedError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        except DamagedLibraryError:
            library = _set_aside_unless_mended(root, directory)
            if library is not None:
                yield library


def _directories(root: Path) -> list[Path]:
    try:
        entries = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        entry
        for entry in entries
        if entry.name.startswith("libflux_") and ".damaged-" not in entry.name and entry.is_dir()
    ]


def is_trusted(root: Path) -> bool:
    """Whether no other user can write or replace ``root``; warns if one can."""
    reason = trust.reason_untrusted(root)
    if reason is not None:
        warnings.warn(str(UntrustedError(root, reason)), RuntimeWarning, stacklevel=3)
    return reason is None


def refused(root: Path) -> list[tuple[Path, str]]:
    """What in ``root`` is not used because another user can write or replace it, and how.

    Only ``root`` itself if it is refused, else its libraries, those of runtime.py among them.
    """
    reason = trust.reason_untrusted(root)
    if reason is not None:
        return [(root, reason)]
    found = []
    for directory in [*_directories(root), *sorted(root.glob("nvshmem_*"))]:
        for path in (directory, *sorted(directory.glob("*.so")), *sorted(directory.glob("*.json"))):
            reason = trust.reason_untrusted(path)
            if reason is not None:
                found.append((path, reason))
                break
    return found


def damaged(root: Path) -> list[Path]:
    """What was set aside in ``root``."""
    return sorted(root.glob("libflux_*.damaged-*"))


def lock(root: Path, name: str) -> FileLock:
    """The lock of one library, not yet taken. Ends with the process that holds it.

    Where ``root`` is missing, it is made for this user alone.

    Raises:
        OSError: ``root`` cannot be written.
    """
    directory = root / ".locks"
    trust.make_private(directory)
    return FileLock(directory / f"{name}.lock")


def _set_aside_unless_mended(root: Path, directory: Path) -> Library | None:
    """Set it aside, unless its builder is at it, or has just replaced it by a good one."""
    try:
        with lock(root, directory.name).acquire(timeout=0):
            if not directory.exists():
                return None
            try:
                return read(directory)
            except DamagedLibraryError as error:
                set_aside(directory, str(error))
    except (Timeout, UntrustedError):
        return None
    except OSError as error:
        warnings.warn(
            f"damaged kernel library {directory} is ignored; it cannot be set aside: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def set_aside(directory: Path, reason: str) -> Path:
    """Rename a damaged library, whose lock the caller holds; returns its new name.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while (target := directory.with_name(f"{directory.name}.damaged-{number}")).exists():
        number += 1
    os.rename(directory, target)
    warnings.warn(
        f"damaged kernel library set aside as {target}: {reason}", RuntimeWarning, stacklevel=2
    )
    return target


def remove(root: Path, directory: Path) -> None:
    """Remove a library; processes that have loaded it keep it.

    Raises:
        OSError: it cannot be removed.
    """
    with lock(root, directory.name):
        # Renamed first: half a library must not be seen under its name.
        gone = root / f".building-{directory.name}"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, gone)
            shutil.rmtree(gone)
