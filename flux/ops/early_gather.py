"""The rows of a column layer's input that its weight gradient needs, gathered a layer early.

With sequence parallelism a column layer saves its own rows only, so its backward gathers the others
once more. During its own products another transfer is on the wires already. The next layer of the
model, a row layer, leaves the wires idle: its backward gathers first, and multiplies afterwards. So
the gather begins there.

    backward   | row layer: dgrad | wgrad     | (attention, activation) | column: dgrad | wgrad |
    wires      | dz ...........   | x of the column layer ............  | dx .................  |

The order of gathers follows from the calls of forward alone, so it is the same on all ranks. The
rows are kept from the row layer's backward to the column layer's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from flux.core.tensors import reason_without_memory

Gather = Callable[[torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]


class EarlyGather:
    """The gather of one column layer's saved input, between its forward and its backward.

    Args:
        ctx: of the layer's autograd function, which saves the operands in forward. It is held
            weakly: else an abandoned graph would live on until the next forward.
        start: begins to gather what the layer has saved, (own rows, weight); its result waits.
    """

    def __init__(self, ctx: Any, start: Gather) -> None:
        self._start = start
        self._ctx: Callable[[], Any] = weakref.ref(ctx)
        self._saved: tuple[torch.Tensor, torch.Tensor] | None = None
        self._wait: Callable[[], torch.Tensor] | None = None

    def begin(self) -> None:
        """Begin the gather, in the backward of a later layer, if it can begin and has not."""
        ctx = self._ctx()
        if ctx is None or self._wait is not None or _capturing():
            return
        # Looked up once: what recomputes or fetches saved tensors may give them out only once.
        self._saved = x, weight = ctx.saved_tensors
        if reason_without_memory(x) is None:  # else its owner freed it, and will compute it again
            self._wait = self._start(x, weight)

    def take(
        self, ctx: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]:
        """Return the saved operands, and what waits for all rows if the gather has begun."""
        x, weight = ctx.saved_tensors if self._saved is None else self._saved
        wait = self._wait
        self._ctx, self._saved, self._wait = lambda: None, None, None
        return x, weight, wait


def _capturing() -> bool:
    """Return whether a CUDA graph is captured, which may end before the gather is waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
