"""Built libraries on disk: one directory each, which appears atomically.

<root>/<library>/<library>.so         at most four kernels
                 <library>.json       the manifest
                 <library>.ptxas.txt  ptxas's report
                 kernels.cu           the source
<root>/.locks/<library>.lock          held while a process builds or sets aside that library
<root>/.building-<library>/           written under the lock; remains only if the process is killed
<root>/<library>.damaged-<n>/         set aside, and ignored from then on
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

from flux.core import datafile
from flux.core.datafile import Table, one_line, parse_json
from flux.kernels import generator, ptxas, trust
from flux.kernels.config import GemmConfig
from flux.kernels.legality import reason_illegal
from flux.kernels.ptxas import Usage
from flux.kernels.trust import UntrustedError

FORMAT = 1
"""Format of the manifest; incremented when a field changes its meaning."""
NOT_FOR_GPUS = "-DFLUX_NOT_FOR_GPUS"
"""Flag of targets other than GPUs whose libraries hold machine code all the same."""

LOCK_S = 60.0
"""Seconds to wait for the lock of a library, where the caller sets no other limit."""
MOST_BYTES = 8 << 20
"""Largest size of a manifest."""


class DamagedLibraryError(ValueError):
    """A library, or its manifest, differs from what was built."""


@dataclass(frozen=True)
class Library:
    """A built library, as its manifest describes it.

    Attributes:
        name: of the library, its directory and its files.
        size: bytes of the .so.
        sha256: of the .so.
        abi_version: FLUX_ABI_VERSION that it was built with.
        arch: ``80`` | ``90a``.
        nvcc: version.
        cutlass: version.
        flags: of the compiler.
        sources: hash of the unit and of our headers that it includes.
        key: hash of all inputs of the build.
        traced: whether it is a trace build, whose kernels record what they do.
        kernels: config by symbol, in the order of the unit.
        usage: of registers and local memory, by symbol.
        warnings: of nvcc and ptxas.
        seconds: duration of compiling and linking.
        directory: the library's directory.
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
        """The configs of its kernels, in the order of the unit."""
        return tuple(self.kernels.values())

    @property
    def loads_on_gpus(self) -> bool:
        """Whether it has machine code of a GPU, and was not built for another machine."""
        code = any("code=sm_" in flag or "code=[sm_" in flag for flag in self.flags)
        return code and NOT_FOR_GPUS not in self.flags

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest, for JSON."""
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
    """Return the library in ``directory``, after comparing its file with the manifest.

    Raises:
        DamagedLibraryError: it differs from what was built; the message says how.
        UntrustedError: another user can write or replace it.
    """
    name = directory.name
    trust.check(directory)
    with reading():
        library = _parse(name, load(directory / f"{name}.json", FORMAT), directory)
        with trust.opened(library.path) as file:
            size, sha256 = file.size(), file.sha256()
    if size != library.size:
        raise DamagedLibraryError(f"{name}.so has {size} bytes, the manifest says {library.size}")
    if sha256 != library.sha256:
        raise DamagedLibraryError(f"{name}.so is not the file that the manifest describes")
    return library


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn the errors of files and of their contents into DamagedLibraryError."""
    try:
        yield
    except OSError as error:
        raise DamagedLibraryError(f"{error.filename}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise DamagedLibraryError(f"bad manifest: {one_line(str(error))}") from error


def load(path: Path, form: int) -> Table:
    """Return the contents of a manifest; raise ValueError if it is not of this format."""
    with trust.opened(path) as file:
        return Table.of_json(Path(path.name), parse_json(file.read(MOST_BYTES)), form=form)


def _parse(name: str, content: Table, directory: Path) -> Library:
    # Keys that are not read here may be of a later version, and change nothing.
    library = Library(
        name=name,
        size=content.integer("bytes", least=0, most=2**63),
        sha256=content.text("sha256"),
        abi_version=content.integer("abi_version", least=0),
        arch=content.text("arch"),
        nvcc=content.text("nvcc"),
        cutlass=content.text("cutlass"),
        flags=content.texts("flags"),
        sources=content.text("sources"),
        key=content.text("key"),
        kernels={
            symbol: GemmConfig.from_dict(config)
            for symbol, config in content.objects("kernels").items()
        },
        usage=ptxas.read(content),
        warnings=content.texts("warnings"),
        seconds=content.number("seconds", most=1e9),
        traced=content.flag("traced"),
        directory=directory,
    )
    file = content.text("library")
    if file != f"{name}.so" or not name.endswith(f"_{library.key[:12]}"):
        raise ValueError(f"describes {file!r} of key {library.key!r}")
    for symbol, config in library.kernels.items():
        if symbol != generator.symbol(config, library.traced):
            raise ValueError(f"symbol {symbol} has the config of {config.name}")
        reason = "of another arch" if config.arch != library.arch else reason_illegal(config)
        if reason is not None:
            raise ValueError(f"kernel {symbol}: {reason}")
    if not library.kernels:
        raise ValueError("no kernels")
    if set(library.usage) != set(library.kernels):
        raise ValueError("ptxas: expected one report per kernel")
    return library


def file_hash(path: Path) -> str:
    """Return a file's sha256, in hexadecimal."""
    with path.open("rb") as file:
        hashed = hashlib.sha256()
        while block := file.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def scan(root: Path) -> Iterator[Library]:
    """Yield the libraries in ``root``, by name. Damaged ones are set aside, with a warning.

    A library that another user can write or replace stays in place, is not used, and causes a
    warning.
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
    """Return whether no other user can write or replace ``root``; warn if one can."""
    reason = trust.reason_untrusted(root)
    if reason is not None:
        warnings.warn(str(UntrustedError(root, reason)), RuntimeWarning, stacklevel=3)
    return reason is None


def refused(root: Path) -> list[tuple[Path, str]]:
    """Return directories in ``root`` that another user can write or replace, each with the reason.

    The list has only ``root`` itself if that is refused. Else it has libraries, including those of
    runtime.py.
    """
    reason = trust.reason_untrusted(root)
    if reason is not None:
        return [(root, reason)]
    refused_paths = []
    for directory in [*_directories(root), *sorted(root.glob("nvshmem_*"))]:
        for path in (directory, *sorted(directory.glob("*.so")), *sorted(directory.glob("*.json"))):
            reason = trust.reason_untrusted(path)
            if reason is not None:
                refused_paths.append((path, reason))
                break
    return refused_paths


def damaged(root: Path) -> list[Path]:
    """Return the libraries that were set aside in ``root``."""
    return sorted(root.glob("libflux_*.damaged-*"))


def lock(root: Path, name: str) -> FileLock:
    """Return the lock of one library, not yet acquired. It ends with the process that holds it.

    If ``root`` is missing, it is created for this user alone.

    Raises:
        OSError: ``root`` cannot be written.
    """
    directory = root / ".locks"
    trust.make_private(directory)
    return FileLock(directory / f"{name}.lock", timeout=LOCK_S)


def _set_aside_unless_mended(root: Path, directory: Path) -> Library | None:
    """Set a library aside, unless it is being built, or has just been replaced by a good one."""
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


def set_aside(directory: Path, reason: str) -> None:
    """Rename a damaged library, whose lock the caller holds, with a warning.

    Raises:
        OSError: it cannot be renamed.
    """
    target = datafile.set_aside(directory)
    warnings.warn(
        f"damaged kernel library set aside as {target}: {reason}", RuntimeWarning, stacklevel=2
    )


def remove(root: Path, directory: Path) -> None:
    """Remove a library; processes that have loaded it keep it.

    Raises:
        OSError: it cannot be removed.
    """
    with lock(root, directory.name):
        # Renamed first, so that no process sees an incomplete library under its name.
        gone = root / f".building-{directory.name}"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, gone)
            shutil.rmtree(gone)
