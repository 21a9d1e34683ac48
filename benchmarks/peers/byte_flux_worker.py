"""Run byte-flux's ops for the benchmark, in the interpreter that has byte-flux (byte_flux.py).

This is a script, not a module of this package: its `flux` is byte-flux. It needs only that and
torch.

Written against byte-flux 1.1.2 (bytedance/flux, commit 19831ca): src/pybind/ag_gemm.cc `AGKernel`,
src/pybind/gemm_rs.cc `GemmRS`, python/flux/testing/utils.py `initialize_distributed`, launch.sh.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Remove this script's folder from the path: its adapters have the names of the packages.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

_SLEEP_CYCLES = 20_000_000  # about 10 ms, in which the host enqueues a call


def load() -> Any:
    """Return byte-flux; exit if `flux` is the package of this benchmark."""
    import flux

    if not hasattr(flux, "AGKernel") or not hasattr(flux, "GemmRS"):
        raise SystemExit(f"the flux at {flux.__file__} is not byte-flux")
    return flux


def prepare(specification: dict[str, Any]) -> None:
    """Set the variables that byte-flux's launch.sh and torchrun would set for this process."""
    rank, world = str(specification["rank"]), str(specification["world"])
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("NVSHMEM_BOOTSTRAP", "UID")
    os.environ.setdefault("NVSHMEM_DISABLE_CUDA_VMM", "1")


class Op:
    """One op at one shape on this rank."""

    def __init__(self, flux: Any, torch: Any, specification: dict[str, Any]) -> None:
        self.torch = torch
        self.spec = specification
        dtype = getattr(torch, specification["dtype"])
        self.cuda = specification["device"] == "cuda"
        self.device = (
            torch.device("cuda", specification["gpu"]) if self.cuda else torch.device("cpu")
        )
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist = torch.distributed
        dist.init_process_group(
            "nccl" if self.cuda else "gloo",
            store=dist.FileStore(specification["store"], specification["world"]),
            rank=specification["rank"],
            world_size=specification["world"],
            timeout=timedelta(seconds=specification["timeout_s"]),
        )
        group = dist.new_group(list(range(specification["world"])))
        if hasattr(flux, "init_flux_shm"):
            flux.init_flux_shm(group)
        self.shared = {
            name: torch.from_file(file, shared=True, size=rows * columns, dtype=dtype).view(
                rows, columns
            )
            for name, (file, rows, columns) in specification["tensors"].items()
        }
        self.x = self.shared["x"].to(self.device)
        self.weight = self.shared["weight"].to(self.device)
        self.together = torch.zeros(1, device=self.device)
        self.forward = self._make(flux, group, dtype)

    def _make(self, flux: Any, group: Any, dtype: Any) -> Callable[[], Any]:
        spec = self.spec
        if spec["op"] == "ag_gemm":
            n = spec["n"] // spec["world"]
            op = flux.AGKernel(group, 1, spec["m"], n, spec["k"], dtype, output_dtype=dtype)
            return lambda: op.forward(self.x, self.weight, transpose_weight=False)
        rows = -(-spec["m"] // 1024) * 1024  # the buffers' size, rounded as in byte-flux's own test
        op = flux.GemmRS(group, 1, rows, spec["n"], dtype, dtype, transpose_weight=False)
        return lambda: op.forward(self.x, self.weight)

    def take_weight(self) -> dict[str, Any]:
        """Copy the shared weight to the device."""
        self.weight.copy_(self.shared["weight"])
        return {}

    def run(self) -> dict[str, Any]:
        """Run one call on the shared input; return its time."""
        self.x.copy_(self.shared["x"])
        result, elapsed = self._on_gpu() if self.cuda else self._on_cpu()
        shape = tuple(self.shared["result"].shape)
        if tuple(result.shape) != shape:
            raise ValueError(f"byte-flux returned {list(result.shape)}, expected {list(shape)}")
        self.shared["result"].copy_(result)
        return {"ms": elapsed}

    def _on_gpu(self) -> tuple[Any, float]:
        cuda = self.torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        cuda._sleep(_SLEEP_CYCLES)
        self.torch.distributed.all_reduce(self.together)  # all ranks start behind it
        begin.record()
        result = self.forward()
        end.record()
        cuda.synchronize()
        return result, begin.elapsed_time(end)

    def _on_cpu(self) -> tuple[Any, float]:
        self.torch.distributed.barrier()
        begin = time.perf_counter()
        result = self.forward()
        return result, (time.perf_counter() - begin) * 1e3


def main() -> None:
    """Answer commands on standard input until it is closed."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps libraries' output apart from the answers

    def answer(content: dict[str, Any]) -> None:
        channel.write(json.dumps(content) + "\n")

    try:
        specification = json.loads(sys.argv[1])
        prepare(specification)
        import torch
        import torch.distributed

        flux = load()
        op = Op(flux, torch, specification)
        answer(
            {"byte_flux": str(getattr(flux, "__version__", "unknown")), "torch": torch.__version__}
        )
        for line in sys.stdin:
            todo = op.run if json.loads(line)["do"] == "run" else op.take_weight
            with torch.no_grad():
                answer(todo())
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        print(getattr(load(), "__version__", "unknown"))
    else:
        main()
