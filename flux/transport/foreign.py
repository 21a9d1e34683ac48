"""Wrap memory that neither torch nor Python has allocated as tensors."""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import from_dlpack

_CPU, _CUDA = 1, 2  # kDLCPU, kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _Tensor(ctypes.Structure):
    """DLManagedTensor, flat: with its own shape behind it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extent", ctypes.c_int64),
    )


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes at ``address`` as a flat ``uint8`` tensor.

    For the address 0 the tensor is empty, and its address is 0 too. The memory must live as long as
    the tensor.

    This uses DLPack rather than ``__cuda_array_interface__``. With the latter, torch asks the
    driver which device owns the memory, and copies a peer's memory to this device.
    """
    if address == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    # Allocated by the C library, so that its free() can be the deleter: the tensor may outlive this
    # module.
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    place = libc.malloc(ctypes.sizeof(_Tensor))
    if not place:
        raise MemoryError("cannot allocate the description of a tensor")
    described = _Tensor.from_address(place)
    described.data = address
    described.device_type = _CUDA if device.type == "cuda" else _CPU
    described.device_id = device.index or 0
    described.ndim, described.extent = 1, size
    described.code, described.bits, described.lanes = _UNSIGNED, 8, 1
    described.shape = place + _Tensor.extent.offset
    described.strides = described.manager = None
    described.byte_offset = 0
    described.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: torch.Tensor = from_dlpack(capsule(place, b"dltensor", None))
    return tensor
