"""Find built kernels: those in the package, then those of the cache.

This module loads nothing: csrc/cuda_host does, given a path and a symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flux.core import env
from flux.kernels import manifest, sources, trust
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem, is_legal, runs_on
from flux.kernels.manifest import Library
from flux.kernels.ptxas import Usage


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that can be loaded: ``symbol`` of the shared object ``library``.

    ``sha256`` is that of the library when its manifest was read; None: no comparison.
    """

    config: GemmConfig
    library: Path
    symbol: str
    usage: Usage
    sha256: str | None = None


@dataclass(frozen=True)
class Registry:
    """The built kernels at the time of loading.

    Attributes:
        roots: the directories searched, most preferred first.
        kernels: the usable ones by symbol.
        libraries: the libraries that hold them.
        stale: libraries built from sources other than the present ones: not used.
        damaged: directories of libraries that were set aside, now or earlier: not used.
        traced: kernels of trace builds, by the symbols that they have in other builds.
        refused: roots, directories and files that another user can write or replace, each with the
            reason: not used.
    """

    roots: tuple[Path, ...]
    kernels: dict[str, BuiltKernel]
    libraries: tuple[Library, ...]
    stale: tuple[Library, ...]
    damaged: tuple[Path, ...]
    traced: dict[str, BuiltKernel] = field(default_factory=dict)
    refused: tuple[tuple[Path, str], ...] = ()

    @classmethod
    def load(cls, roots: Sequence[Path] | None = None) -> Registry:
        """Read the manifests and compare the libraries with them: about 10 ms for a default set.

        If a kernel exists twice, the first root's is used, and within a root the newest. Damaged
        libraries are set aside with a warning, and those that another user can write or replace are
        not used. If our headers are missing (every install has them), no library counts as stale.
        """
        roots = tuple(default_roots() if roots is None else roots)
        headers = sources.csrc()
        kernels: dict[str, BuiltKernel] = {}
        traced: dict[str, BuiltKernel] = {}
        usable, stale = [], []
        for root in roots:
            newest_first = sorted(manifest.scan(root), key=_age)
            for library in newest_first:
                if headers is not None and is_stale(library, headers):
                    stale.append(library)
                    continue
                usable.append(library)
                for symbol, config in library.kernels.items():
                    kernel = BuiltKernel(
                        config, library.path, symbol, library.usage[symbol], library.sha256
                    )
                    (traced if library.traced else kernels).setdefault(config.name, kernel)
        trusted = [root for root in roots if trust.reason_untrusted(root) is None]
        damaged = [path for root in trusted for path in manifest.damaged(root)]
        refused = [refusal for root in roots for refusal in manifest.refused(root)]
        return cls(
            roots, kernels, tuple(usable), tuple(stale), tuple(damaged), traced, tuple(refused)
        )

    def for_traces(self) -> Registry:
        """Return the same registry with the kernels of trace builds."""
        return replace(self, kernels=self.traced)

    def find(self, config: GemmConfig) -> BuiltKernel | None:
        """Return the kernel of exactly this config, if it is built."""
        return self.kernels.get(config.name)

    def candidates(
        self,
        op: str,
        dtype: str,
        capability: tuple[int, int],
        problem: GemmProblem,
        *,
        weight: str = "nk",
        activation: str = "none",
        scaling: str = "none",
        fast_accum: bool = False,
        reduce: str | None = "local",
        tile_scheduler: str | None = "static",
    ) -> list[BuiltKernel]:
        """Return the kernels that can solve ``problem`` on such a GPU, by name.

        ``reduce`` or ``tile_scheduler`` None: any.
        """
        wanted: dict[str, object] = {
            "op": op,
            "dtype": dtype,
            "weight": weight,
            "activation": activation,
            "scaling": scaling,
            "fast_accum": fast_accum,
        }
        optional = {"reduce": reduce, "tile_scheduler": tile_scheduler}
        wanted |= {name: value for name, value in optional.items() if value is not None}
        return [
            kernel
            for _, kernel in sorted(self.kernels.items())
            if all(getattr(kernel.config, name) == value for name, value in wanted.items())
            and runs_on(kernel.config, capability)
            and is_legal(kernel.config, problem)
        ]


def _age(library: Library) -> tuple[int, str]:
    """Return a sort key, smaller for newer libraries; the name if the timestamps are equal."""
    try:
        return -library.path.stat().st_mtime_ns, library.name
    except OSError:  # removed since; loading it will raise
        return 0, library.name


def is_stale(library: Library, headers: Path) -> bool:
    """Return whether the library was built from sources other than these."""
    return sources.sources_hash(library.configs, headers, library.traced) != library.sources


def package_root() -> Path:
    """Return the directory of kernels that came with the package or that CMake built."""
    return Path(__file__).resolve().parents[1] / "lib" / "kernels"


def cache_root() -> Path:
    """Return the directory in which `flux compile` puts kernels: FLUX_KERNEL_CACHE."""
    return env.KERNEL_CACHE.path()


def default_roots() -> list[Path]:
    """Return the directories to search, most preferred first."""
    return [package_root(), cache_root()]
