"""Define the key of a winner: an op on a kind of machine, with certain kernels."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from flux.core.datafile import MOST_SIZE
from flux.core.knobs import Op
from flux.core.version import __version__

CPU_REVISION = 1
"""Revision of the CPU backend's speed: incremented when a change makes old winners doubtful."""

_FORMS = {
    "dtype": re.compile(r"\w{1,40}", re.ASCII),
    "world": re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}|(\+[1-9]\d{0,3}){1,63})", re.ASCII),
    "fingerprint": re.compile(r"[0-9a-f]{16}"),
    "kernels": re.compile(r"[\w.+ ,-]{1,100}", re.ASCII),
    "toolchain": re.compile(r"[\w.+ ,-]{1,100}", re.ASCII),
}


@dataclass(frozen=True)
class Key:
    """Everything that separates winners, except M.

    Attributes:
        op: ``ag_gemm`` | ``gemm_rs`` | ``gemm_ar``.
        dtype: of the operands, as torch names it.
        n: global columns, of all weights together.
        k: global depth.
        world: shape of the world, ``2x4`` (hosts x ranks) or ``3+1``.
        fingerprint: of device and links (flux/machine/cluster.py).
        kernels: version of the code that runs.
        toolchain: version of the tools that built it, or of the library that multiplies.
    """

    op: str
    dtype: str
    n: int
    k: int
    world: str
    fingerprint: str
    kernels: str
    toolchain: str

    def __post_init__(self) -> None:
        Op.named(self.op)
        for name in ("n", "k"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST_SIZE:
                raise ValueError(f"{name} must be an integer in [1, 2^30], got {value!r}")
        for name, form in _FORMS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not form.fullmatch(value):
                raise ValueError(f"{name} must look like {form.pattern}, got {value!r}")

    @property
    def name(self) -> str:
        """Name of the key's file: readable, and different for different keys."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.op}_{self.dtype}_n{self.n}_k{self.k}_{self.world}_{digest}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Key:
        """Return the key of these fields; raise ValueError if they are not those of a key."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise ValueError(f"expected the fields of a key, got {values!r}")
        return cls(**values)


def bucket(m: int) -> int:
    """Return the M-bucket: the power of two at or above m.

    Its winners serve all M of the bucket.
    """
    return 1 << (m - 1).bit_length()


@lru_cache(maxsize=4)
def versions(kind: str) -> tuple[str, str]:
    """Return (kernels, toolchain): versions of the installed code for this kind of device."""
    if kind == "cpu":
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return f"cpu {__version__} r{CPU_REVISION}", f"torch {release}"
    from flux.kernels import sources
    from flux.kernels.registry import Registry

    root = sources.csrc()
    if root is None:
        kernels = f"cuda {__version__}"
    else:
        headers = sorted(
            path for part in ("core", "cuda") for path in (root / part).rglob("*") if path.is_file()
        )
        contents = [
            (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
            for path in headers
            if path.suffix in (".h", ".cuh")
        ]
        kernels = f"cuda abi{sources.abi_version(root)} {sources.digest(contents)[:12]}"
    built = Registry.load().libraries
    nvcc = sorted({".".join(library.nvcc.split(".")[:2]) for library in built})
    cutlass = sorted({library.cutlass for library in built})
    return kernels, f"cutlass {'+'.join(cutlass) or 'none'}, nvcc {'+'.join(nvcc) or 'none'}"
