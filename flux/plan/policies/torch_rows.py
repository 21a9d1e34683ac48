"""The pipeline schedules of torch.distributed.pipelining, as blocks of actions."""

from __future__ import annotations

import logging
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from flux.plan.policies.passes import Action, Block


@lru_cache(maxsize=64)
def blocks_of(
    name: str, ranks: int, stages: int, micro_batches: int
) -> tuple[tuple[Block, ...], ...]:
    """Return the blocks of each rank."""
    made: Any = getattr(schedules, f"Schedule{name}", None)
    if made is None:
        raise ValueError(f"this version of torch has no pipeline schedule {name}")
    of_rank = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "group": None}
    shapes = [  # stages without modules: what a schedule asks for when it is made
        SimpleNamespace(stage_index=index, submod=nn.Identity(), **of_rank)
        for index in range(0, stages, ranks)
    ]
    log = logging.getLogger(schedules.__name__)
    level = log.level
    log.setLevel(logging.ERROR)  # torch warns of what it checks again below
    try:
        order = made(shapes, micro_batches, loss_fn=lambda *_: None).pipeline_order
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"{name}: {micro_batches} micro-batches on {ranks} ranks: {error}"
        ) from error
    finally:
        log.setLevel(level)
    return tuple(
        tuple(_block(action) for action in order[rank] if action is not None)
        for rank in range(ranks)
    )


def _block(action: Any) -> Block:
    parts = action.sub_actions or (action,)
    return tuple(
        Action(part.stage_index, part.computation_type.value, part.microbatch_index)
        for part in parts
    )
