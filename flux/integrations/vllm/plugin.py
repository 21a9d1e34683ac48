"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import logging

from flux.core.env import VLLM

logger = logging.getLogger("vllm.flux")


def register() -> None:
    """Replace vLLM's row-parallel layer and its communicator for CPUs.

    vLLM may call this several times in a process. Layers decide for themselves when they are built:
    without tensor parallelism they stay as they are. FLUX_VLLM=0 switches everything off.
    """
    if not VLLM.get():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm.model_executor.custom_op import op_registry_oot
        from vllm.model_executor.layers.linear import RowParallelLinear

        from flux.integrations.vllm.communicator import use_for
        from flux.integrations.vllm.linear import FusedRowParallelLinear
    except ImportError as error:
        logger.warning("flux does not know this version of vLLM and stays out of it: %s", error)
        return
    name = RowParallelLinear.__name__
    present = op_registry_oot.get(name)
    if present is None:
        RowParallelLinear.register_oot(FusedRowParallelLinear)
    elif present is not FusedRowParallelLinear:
        logger.warning("flux: another plugin, %s, has replaced %s", present.__module__, name)
    use_for(type(current_platform))
