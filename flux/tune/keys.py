"""What a winner is a winner of: an op on a kind of machine, with certain kernels."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch

import flux
from flux.kernels import sources
from flux.kernels.registry import Registry
from flux.knobs import Op

CPU_REVISION = 1
"""Of the CPU backend's speed: raised when a change to it makes old winners doubtful."""

_FORMS = {
    "dtype": re.compile(r"\w{1,40}"),
    "world": re.compile(r"\d+(x\d+|(\+\d+)+)"),
    "fingerprint": re.compile(r"[0-9a-f]{16}"),
    "kernels": re.compile(r"[\w.+ ,-]{1,100}"),
    "toolchain": re.compile(r"[\w.+ ,-]{1,100}"),
}


@dataclass(frozen=True)
class Key:
    """Everything that winners are kept apart by, but M.

    Attributes:
        op: ``ag_gemm`` | ``gemm_rs`` | ``gemm_ar``.
        dtype: of the operands, as torch names it.
        n, k: global sizes; n of all weights together.
        world: shape of it, ``2x4`` (hosts x ranks) or ``3+1``.
        fingerprint: of device and links (flux/cluster.py).
        kernels: version of what runs.
        toolchain: version of what it was made with, or of the library that multiplies.
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
        if self.op not in Op.__members__:
            raise ValueError(f"op must be one of {', '.join(Op.__members__)}, got {self.op!r}")
        for name in ("n", "k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name, form in _FORMS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not form.fullmatch(value):
                raise ValueError(f"{name} must look like {form.pattern}, got {value!r}")

    @property
    def name(self) -> str:
        """Of its file: readable, and different for different keys."""
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{self.op}_{self.dtype}_n{self.n}_k{self.k}_{self.world}_{digest}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Key:
        """The inverse of ``as_dict``; raises ValueError for anything else."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise ValueError(f"not the fields of a key: {values!r}")
        return cls(**values)


def bucket(m: int) -> int:
    """M-bucket: the power of two at or above m. Winners serve all M of their bucket alike."""
    return 1 << (m - 1).bit_length()


def dtype_text(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=4)
def versions(kind: str) -> tuple[str, str]:
    """(kernels, toolchain) of what runs on this kind of device here and now."""
    if kind == "cpu":
        release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
        return f"cpu {flux.__version__} r{CPU_REVISION}", f"torch {release}"
    root = sources.csrc()
    if root is None:
        kernels = f"cuda {flux.__version__}"
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
