"""PyTorch's async-TP ops, ``torch.ops.symm_mem.fused_*``, computed by flux.

PyTorch has kernels of them for CUDA alone. ``enable()`` registers kernels for CPU tensors, so that
torchtitan's fused linears and Inductor's micro-pipeline pass
(``torch._inductor.config._micro_pipeline_tp``) run on ranks without a GPU:

    flux.integrations.symm_mem.enable()
    _, [y] = torch.ops.symm_mem.fused_all_gather_matmul(x_shard, [weight.t()], 0, group.group_name)

A program that cannot be edited runs under ``python -m flux.integrations.symm_mem MODULE ARGS``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from flux.integrations.symm_mem import kernels, scaled
from flux.ops import torch_internals
from flux.ops.transforms import plain_kernel

__all__ = ["EnabledKernels", "disable", "enable", "enabled", "reason_unsupported"]

_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "cpu": {
        "fused_all_gather_matmul": kernels.all_gather_matmul,
        "fused_matmul_reduce_scatter": kernels.matmul_reduce_scatter,
        "fused_all_gather_scaled_matmul": scaled.all_gather_scaled_matmul,
        "fused_scaled_matmul_reduce_scatter": scaled.scaled_matmul_reduce_scatter,
    },
    "cuda": {
        "fused_all_gather_matmul": kernels.gpu_all_gather_matmul,
        "fused_matmul_reduce_scatter": kernels.gpu_matmul_reduce_scatter,
    },
}
_KEYS = {"cpu": ("CPU", "AutogradCPU"), "cuda": ("CUDA", "AutogradCUDA")}
_PASS = "torch._inductor.fx_passes.micro_pipeline_tp"

_libraries: dict[str, list[torch.library.Library]] = {}  # by device; they hold the registrations
_float32_partials: list[bool] = []  # what the CPU's kernels are enabled with
_replaced: dict[str, tuple[ModuleType, Callable[..., Any]]] = {}  # torch's own functions, by name


def enable(
    devices: Collection[str] = ("cpu",), *, float32_partials: bool = False
) -> EnabledKernels:
    """Register flux's kernels of ``torch.ops.symm_mem.fused_*`` until ``disable()``.

    Call it on every rank, before or after ``init_process_group``. It communicates nothing.

    Args:
        devices: ``"cpu"``, ``"cuda"`` or both. On the CPU all four ops get a kernel. On CUDA the
            two ops without scales get one in place of PyTorch's, which still runs what flux has no
            op for; this has not run on a GPU yet.
        float32_partials: on the CPU, fused_matmul_reduce_scatter sends partial results of bfloat16
            and float16 as float32, and rounds their sum once: twice the bytes, but no error where
            large partials cancel. Equal on all ranks. Otherwise partials are rounded before they
            are sent, as PyTorch's are, and summed in float32.

    Returns:
        A context manager whose end is ``disable()``.

    Raises:
        ValueError: another device; or ``float32_partials`` differs from the call before.
        RuntimeError: this torch has no such ops, or defines them in another way.

    A second call adds the devices that are new, and has no other effect. Beside the four ops, with
    ``"cpu"``:

    - ``torch.mm(a, b, out_dtype=...)`` gets a CPU kernel where torch has none. torchtitan's
      row-parallel linear needs it in its backward.
    - ``torch.distributed.is_nccl_available()`` returns True to one caller, Inductor's
      micro-pipeline pass, which does nothing in a torch without NCCL.
    - ``is_symm_mem_enabled_for_group`` of ``torch.distributed._symmetric_memory`` returns True for
      every group where there is no accelerator. Only torch 2.15 and newer need that.

    Before torch 2.15 the pass fuses the groups that ``enable_symm_mem_for_group`` of that module
    was called with, as on GPUs; the call works on CPUs as it is.
    """
    names = (devices,) if isinstance(devices, str) else tuple(devices)
    for device in names:
        if device not in _KERNELS:
            raise ValueError(f"devices must be of {', '.join(_KERNELS)}, got {device!r}")
    reason = reason_unsupported()
    if reason is not None:
        raise RuntimeError(f"flux.integrations.symm_mem: {reason}")
    if "cpu" in names and _float32_partials not in ([], [float32_partials]):
        raise ValueError(f"enabled with float32_partials={_float32_partials[0]}: disable() first")
    for device in names:
        if device not in _libraries:
            _libraries[device] = _registered(device, float32_partials)
    if "cpu" in names:
        _float32_partials[:] = [float32_partials]
    if "cpu" in _libraries and not _replaced:
        _replace(dist, _is_nccl_available)
        if hasattr(_symmetric_memory(), "_is_process_group_registered"):  # since torch 2.15
            _replace(_symmetric_memory(), _is_symm_mem_enabled_for_group)
    return EnabledKernels()


def disable() -> None:
    """Remove everything that ``enable()`` has registered. Idempotent."""
    for libraries in _libraries.values():
        for library in libraries:
            torch_internals.unregister(library)
    _libraries.clear()
    _float32_partials.clear()
    for name, (module, function) in _replaced.items():
        setattr(module, name, function)
    _replaced.clear()


def enabled() -> tuple[str, ...]:
    """Return the devices whose kernels are registered in this process."""
    return tuple(_libraries)


class EnabledKernels:
    """The return value of ``enable()``; usable in a ``with`` statement."""

    def __enter__(self) -> EnabledKernels:
        return self

    def __exit__(self, *exception: object) -> None:
        disable()


def reason_unsupported() -> str | None:
    """Return why this torch cannot have the kernels, or None."""
    if not dist.is_available():
        return f"torch {torch.__version__} is built without torch.distributed"
    try:
        _symmetric_memory()  # defines the ops
    except ImportError as error:
        return f"torch {torch.__version__} has no torch.distributed._symmetric_memory ({error})"
    for name, kernel in _KERNELS["cpu"].items():
        if not hasattr(torch.ops.symm_mem, name):
            return f"torch {torch.__version__} has no torch.ops.symm_mem.{name}"
        schema = getattr(torch.ops.symm_mem, name).default._schema
        arguments = [argument.name for argument in schema.arguments]
        if arguments != list(inspect.signature(kernel).parameters):
            return f"torch {torch.__version__} defines an op that flux does not know: {schema}"
    return None


def _registered(device: str, float32_partials: bool) -> list[torch.library.Library]:
    """Register the kernels of a device; return the libraries that hold them."""
    of_device = dict(_KERNELS[device])
    if device == "cpu" and float32_partials:
        of_device["fused_matmul_reduce_scatter"] = kernels.matmul_reduce_scatter_float32
    library = torch.library.Library("symm_mem", "IMPL")
    own, autograd = _KEYS[device]
    for name, kernel in of_device.items():
        op = getattr(torch.ops.symm_mem, name).default
        library.impl(name, plain_kernel(name, kernel), own)
        gradient = torch_internals.autograd_kernel(op, _raise_in_backward(name))
        library.impl(name, gradient, autograd, with_keyset=True)
    libraries = [library]
    if device == "cpu":
        aten = torch.library.Library("aten", "IMPL")
        for name, kernel in kernels.OUT_DTYPE.items():
            if not torch_internals.has_kernel(f"aten::{name}", "CPU"):
                aten.impl(name, kernel, "CPU")
        libraries.append(aten)
    return libraries


def _raise_in_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"symm_mem::{name} has no backward: call it in an autograd.Function, as torchtitan "
            "does, or use an op of flux or a layer of flux.layers"
        )

    return backward


def _symmetric_memory() -> ModuleType:
    return importlib.import_module("torch.distributed._symmetric_memory")


def _replace(module: ModuleType, function: Callable[..., Any]) -> None:
    """Put a function of this file in the place of one of torch's, until ``disable()``."""
    name = function.__name__.removeprefix("_")
    _replaced[name] = module, getattr(module, name)
    setattr(module, name, function)


def _is_nccl_available() -> bool:
    """Return whether torch has NCCL, and True to Inductor's micro-pipeline pass."""
    caller = sys._getframe(1).f_globals.get("__name__")
    _, original = _replaced["is_nccl_available"]
    return caller == _PASS or bool(original())


def _is_symm_mem_enabled_for_group(group_name: str) -> bool:
    """Return what torch does, and True for any group where there is no accelerator."""
    module, original = _replaced["is_symm_mem_enabled_for_group"]
    if module._is_test_mode or torch.accelerator.is_available():
        return bool(original(group_name))
    return bool(module._is_process_group_registered(group_name))
