"""Stages of torch.distributed.pipelining whose model ``flux.runtime.centauri`` has sharded."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_STAGE = "torch.distributed.pipelining.stage"


def whole_backward_in_stage() -> None:
    """Let the stage that calls compute all gradients in one pass, under zero-bubble schedules too.

    Those first ask for gradients of inputs alone, and then for those of ``submod.parameters()``.
    These are shards here, which are no part of the graph, so torch would find none without a word.
    A stage with a ``dw_builder`` runs the whole backward where the first is due, and leaves the
    rest to what it builds, which here is nothing. Gradients are those of any other schedule; the
    bubbles that the second pass would fill stay.
    """
    pipelining: Any = sys.modules.get(_STAGE)
    if pipelining is None:
        return
    calls = pipelining._PipelineStageBase.forward_maybe_with_nosync.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not calls:
        frame = frame.f_back
    # torch has no other way from a stage's module to the stage, nor a hook before a step.
    stage = None if frame is None else frame.f_locals["self"]
    if stage is not None and stage.dw_builder is None:
        stage.dw_builder = lambda: lambda *_: None  # nothing is left to compute
