"""How libraries of kernels are built for the PTX machine of this checkout, not for a GPU.

A library holds PTX as text, with the lines of the source that messages name, and the machine's
stand-in for the CUDA runtime. It holds machine code of the same kernels too, for
tests/kernels/test_built_kernels.py: the machine does not read it. libflux_nvshmem takes NVSHMEM's
headers from the machine too, and is linked with its emulated GPU, which has NVSHMEM's functions.
"""

from __future__ import annotations

from pathlib import Path

from flux.kernels.build import FLAGS, LINK_FLAGS, Target
from flux.kernels.manifest import NOT_FOR_GPUS
from flux.machine.toolchain import Tool

ROOT = Path(__file__).resolve().parents[1]


def ptx_target(checkout: Path = ROOT) -> Target:
    """Return the target for ``compile_kernels.py --emulated``."""
    machine = checkout / "ptx_machine"
    return Target(
        flags=(*FLAGS, "-lineinfo", "--compress-mode=none", NOT_FOR_GPUS),
        code={
            "80": "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]",
            "90a": "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]",
        },
        link_flags=(
            *(flag for flag in LINK_FLAGS if flag != "-cudart=static"),
            "-cudart=none",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            "-ldl",
        ),
        runtime=(machine / "cudart/cudart.cpp", machine / "cudart/ptx_machine_cuda.h"),
        nvshmem=Tool("0.0.0", str(machine / "nvshmem"), "the PTX machine"),
        nvshmem_library=machine / "gpu/libemulated_gpu.so",
        loads_on_gpus=False,
        how_to_get="make emulator",
        families=True,
    )
