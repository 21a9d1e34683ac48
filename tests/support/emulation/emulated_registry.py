"""The kernels of emulated_kernels.cpp, as a registry that has them for every problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flux.kernels.config import GemmConfig
from flux.kernels.ptxas import Usage
from flux.kernels.registry import BuiltKernel, Registry

_VARIANTS: dict[str, dict[str, Any]] = {
    "ag_gemm": {},
    "ag_gemm_silu": {"activation": "silu"},
    "ag_gemm_tensor": {"dtype": "e4m3", "promoted": True, "scaling": "tensor"},
    "ag_gemm_row": {"dtype": "e4m3", "promoted": True, "scaling": "row"},
    "gemm_rs": {},
    "gemm_rs_in_flight": {"reduce": "in_flight"},
    "gemm_rs_tensor": {"dtype": "e4m3", "promoted": True, "scaling": "tensor"},
    "gemm_rs_row": {"dtype": "e4m3", "promoted": True, "scaling": "row"},
}


def hopper_kernels(library: Path, build: str = "") -> dict[str, BuiltKernel]:
    """Kernels that go by configs of sm_90a; ``build`` is the suffix of trace builds."""
    kernels = {}
    for name, options in _VARIANTS.items():
        for weight in ("nk", "kn"):
            op, rest = name[:7], name[7:]
            # Loads are of single elements, so addresses may be any.
            fields = {"dtype": "bf16", "weight": weight, "alignment": 1, **options}
            config = GemmConfig(op, "90a", tile=(64, 64, 64), schedule="pingpong", **fields)
            symbol = f"flux_emulated_{op}_{weight}{rest}"
            kernels[symbol] = BuiltKernel(config, library, symbol + build, Usage())
    return kernels


class EmulatedRegistry(Registry):
    """Kernels that do every problem."""

    def candidates(self, op: str, dtype: str, *_: object, **wanted: object) -> list[BuiltKernel]:
        wanted = {name: value for name, value in wanted.items() if value is not None}
        wanted |= {"op": op, "dtype": dtype}
        return [
            kernel
            for kernel in self.kernels.values()
            if all(getattr(kernel.config, name) == value for name, value in wanted.items())
        ]
