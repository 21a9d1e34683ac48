"""Finds built kernels: those that came with the package, then those of the cache.

Nothing is loaded here: csrc/host does that, given a path and a symbol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flux import env
from flux.kernels import manifest, sources, trust
from flux.kernels.config import GemmConfig
from flux.kernels.legality import GemmProblem, is_legal, runs_on
from flux.kernels.manifest import Library
from flux.kernels.ptxas import Usage


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that can be loaded: ``symbol`` of the shared object ``library``.

    ``sha256`` is that of the library as its manifest was read; None compares nothing.
    """

    config: GemmConfig
    library: Path
    symbol: str
    usage: Usage
    sha256: str | None = None


@dataclass(frozen=True)
class Registry:
    """What is built, as it was when this was loaded.

    Attributes:
        roots: the directories looked through, most preferred first.
        kernels: the usable ones by symbol.
        libraries: that hold them.
        stale: libraries made from other sources than those that are here: not used.
        damaged: directories of libraries that were set aside, now or earlier: not used.
        traced: kernels of trace builds, by the symbols that they have in other builds.
        refused: roots, directories and files that another user can write or replace, each with
            the reason: not used.
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
        """Read the manifests and compare the libraries with them: some 10 ms for a default set.

        Of a kernel that is there twice, the first root's counts, and within a root the newest.
        Damaged libraries are set aside with a warning, and those that another user can write or
        replace are not used. Without our headers, which every install has, nothing is known to be
        stale.
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
        refused = [found for root in roots for found in manifest.refused(root)]
        return cls(
            roots, kernels, tuple(usable), tuple(stale), tuple(damaged), traced, tuple(refused)
        )

    def for_traces(self) -> Registry:
        """The same, whose kernels are those of trace builds."""
        return replace(self, kernels=self.traced)

    def find(self, config: GemmConfig) -> BuiltKernel | None:
        """The kernel of exactly this config, if it is built."""
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
        reduce: str | None = "local",
    ) -> list[BuiltKernel]:
        """The kernels that can do ``problem`` on such a GPU, by name; any ``reduce`` if None."""
        wanted = {
            "op": op,
            "dtype": dtype,
            "weight": weight,
            "activation": activation,
            "scaling": scaling,
        }
        if reduce is not None:
            wanted["reduce"] = reduce
        return [
            kernel
            for _, kernel in sorted(self.kernels.items())
            if all(getattr(kernel.config, name) == value for name, value in wanted.items())
            and runs_on(kernel.config, capability)
            and is_legal(kernel.config, problem)
        ]


def _age(library: Library) -> tuple[int, str]:
    """Smaller is newer; by name where a file system is too coarse to tell."""
    try:
        return -library.path.stat().st_mtime_ns, library.name
    except OSError:  # removed since: whoever loads it will see
        return 0, library.name


def is_stale(library: Library, headers: Path) -> bool:
    """Whether it was made from sources other than these."""
    return sources.sources_hash(library.configs, headers, library.traced) != library.sources


def package_root() -> Path:
    """Where kernels are that came with the package, or that CMake built into the checkout."""
    return Path(__file__).resolve().parents[1] / "lib" / "kernels"


def cache_root() -> Path:
    """Where `flux compile` puts kernels: FLUX_KERNEL_CACHE."""
    return Path(env.KERNEL_CACHE.get()).expanduser().absolute()


def default_roots() -> list[Path]:
    """Most preferred first."""
    return [package_root(), cache_root()]
