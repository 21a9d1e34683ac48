"""Memory of tensors, for native code: one check before a call, and the only way to an address.

A tensor of PyTorch need not have its values in memory. Some have no memory (meta and fake tensors,
wrappers of tensor subclasses, tensors whose storage was freed by ``resize_(0)``), some less than
their shape needs, and lazy ones stand for other values than their memory holds: negated,
conjugated, or all zero. Native code would read through a null pointer, beyond the end, or the wrong
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def bytes_needed(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a strided tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


def reason_without_memory(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor cannot be addressed, or None."""
    if tensor.is_nested:
        return "it is nested"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of wrappers, for example those of torch.func
        return "it is a wrapper of another tensor" if tensor.numel() else None
    has = storage.nbytes() - tensor.storage_offset() * tensor.itemsize
    needed = tensor.nbytes if tensor.is_contiguous() else bytes_needed(tensor)
    if type(tensor) in _PLAIN and has >= needed and tensor.data_ptr() != 0:
        return None  # nearly every tensor; what follows takes as long again
    if tensor.numel() == 0 or tensor._is_zerotensor():  # ``settled`` gives the latter memory
        return None
    if storage.device.type == "meta":
        return "it is a meta or fake tensor"
    if has < needed:
        return (
            f"it needs {needed} bytes and its storage has {max(has, 0)}: the storage was freed or "
            "resized"
        )
    if tensor.data_ptr() == 0:
        return f"it is a {type(tensor).__name__} without data, such as a wrapper of another tensor"
    return None


def check_memory(label: str, **tensors: Any) -> None:
    """Check tensors that PyTorch itself is to read; its kernels fault where there is no memory.

    Lazy tensors are PyTorch's to resolve, subclasses and torch.func know what they wrap, and a
    kernel of another device refuses meta tensors. None may stand for a tensor that is absent.

    Raises:
        ValueError: the elements of one are not in memory.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if type(tensor) not in _PLAIN or tensor.is_meta or is_functorch_wrapped_tensor(tensor):
            continue
        reason = reason_without_memory(tensor)
        if reason is not None:
            raise ValueError(f"{label}: {name} must be a dense tensor in memory, but {reason}")


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or if it is lazy a copy whose memory holds its values."""
    if tensor._is_zerotensor():
        return tensor.new_zeros(tensor.shape)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.resolve_conj() if tensor.is_conj() else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor for native code, which it has checked the size of.

    Arguments of users have passed ``reason_without_memory`` and ``settled`` before.

    Raises:
        RuntimeError: the tensor has no memory, or its memory holds other values than it stands for.
    """
    at = tensor.data_ptr()
    if (at == 0 and tensor.numel() > 0) or tensor.is_neg():
        reason = reason_without_memory(tensor) or "it is lazy"
        raise RuntimeError(f"the address of a tensor was asked for, but {reason}")
    return at


class Matrices(Sequence[torch.Tensor]):
    """The matrices of a tensor, which are made once one of them is asked for.

    Attributes:
        whole: the tensor, [count, rows, columns].
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self._each: tuple[torch.Tensor, ...] | None = None

    def __len__(self) -> int:
        return self.whole.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if self._each is None:
            self._each = self.whole.unbind()
        return self._each[index]


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return [count, N, K] over the memory of weights that lie at equal distances, or None."""
    first, *others = weights
    size, itemsize = first.untyped_storage().nbytes(), first.itemsize
    step = others[0].data_ptr() - first.data_ptr() if others else 0
    for number, weight in enumerate(weights):
        place = weight.data_ptr() - first.data_ptr()
        if place != number * step or weight.stride() != first.stride():
            return None
        if weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
    if step <= 0 or step % itemsize or step >= size:
        return None
    strides = (step // itemsize, *first.stride())
    return first.as_strided((len(weights), *first.shape), strides)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what tells that the same tensor object still has the memory and layout it had.

    In-place operations change it: ``set_``, ``resize_``, ``.data =``, and those of its storage.
    """
    storage = tensor.untyped_storage()
    return (
        tensor.data_ptr(),
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.is_neg(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )
