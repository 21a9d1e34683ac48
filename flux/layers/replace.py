"""Put our layers into existing models."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:  # importing DTensors takes a second, and few models need them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from flux.layers.sequence_plan import SequencePlan

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")


def replace_linears(
    model: M,
    plan: Mapping[str, ParallelStyle | str] | None = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    overlap: bool | None = None,
    sequence_parallel: bool | str = False,
) -> M:
    """Make the linear layers of a model ours, in place, and return the model.

    Megatron-core models, without ``plan``: all layers of the classes ColumnParallelLinear and
    RowParallelLinear, also inside wrappers such as DistributedDataParallel. Parameters stay the
    same objects. Layers of other classes, including subclasses, stay as they are.

    Other models, with a tensor-parallel plan as for ``parallelize_module``: the model is
    parallelized by that plan, with our form of ``ColwiseParallel`` and ``RowwiseParallel`` for
    linear layers (flux.layers.dtensor). Hugging Face's names of styles ("colwise", "rowwise", ...)
    work too. A Hugging Face model may bring its plan, as ``tp_plan`` or ``_tp_plan``; then every
    style of Transformers serves, which applies those that are not fused. Models that Transformers
    has sharded while it loaded them (``tp_plan="auto"``, ``distributed_config``) need neither plan
    nor mesh: their linear layers become ours. Modules that
    share a parameter share it afterwards, also those that the plan does not name
    (flux/layers/planned.py). Make optimizers afterwards: parameters become new objects.

    Args:
        model: a module, or for Megatron a list of modules (chunks of a pipeline).
        plan: styles by module name, in which * stands for any part; None: see above.
        mesh: for a plan: a mesh of one dimension, or the process group to make one of.
        overlap: for Megatron: True or False instead of the configuration's tp_comm_overlap.
        sequence_parallel: for a plan that keeps activations whole, as Hugging Face's do: between
            the blocks of a decoder, each rank has its own tokens (flux/layers/sequence_plan.py).
            ``"auto"``: in calls that are faster so by the cost model, of models that have a plan
            for it.

    Raises:
        ValueError: there is nothing to replace, the arguments contradict one another, the plan
            shards one parameter in two ways, or there is no sequence-parallel plan; on all ranks
            alike, before any communication. The model is as it was.
        TypeError: the same, for an argument of a wrong type.
    """
    chunks: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise TypeError(f"model must be a module or a sequence of modules, got {model!r}")
    if _is_sharded(chunks):
        if plan is not None or overlap is not None or sequence_parallel:
            raise ValueError(
                "Transformers has sharded the model already: pass no plan, overlap or "
                "sequence_parallel"
            )
        from flux.layers import huggingface

        huggingface.fuse_sharded(chunks[0], mesh)
        return model
    own_plan = plan if plan is not None else _plan_of(chunks)
    if mesh is None:
        if plan is not None:
            raise ValueError("a plan needs a mesh: DeviceMesh of one dimension, or ProcessGroup")
        if sequence_parallel:
            raise ValueError("sequence_parallel is for models with a plan, and needs a mesh")
        _replace_megatrons(chunks, overlap)
        return model
    if sequence_parallel not in (True, False, "auto"):
        raise ValueError(f'sequence_parallel must be True, False or "auto": {sequence_parallel!r}')
    if overlap is not None:
        raise ValueError("overlap is for Megatron-core models, which have no plan")
    if own_plan is None:
        raise ValueError("the model has no tensor-parallel plan (tp_plan): pass plan")
    if len(chunks) != 1:
        raise ValueError(f"a plan is for one module, got {len(chunks)}")
    _apply_plan(chunks[0], own_plan, mesh, sequence_parallel)
    return model


def sequence_parallel_plan(model: nn.Module, plan: Mapping[str, Any] | None = None) -> SequencePlan:
    """Return which modules of a decoder can work on shards of the sequence. Local.

    The model is not changed, and may be on the meta device.

    Args:
        model: with a tensor-parallel plan that keeps activations whole, such as Hugging Face's.
        plan: as for ``replace_linears``, instead of the model's.

    Raises:
        ValueError: no module can, with the reason.
        TypeError: the tensor-parallel plan holds something other than styles.
    """
    from flux.layers.sequence_plan import derive

    own_plan = plan if plan is not None else _plan_of([model])
    if own_plan is None:
        raise ValueError("no sequence-parallel plan: the model has no tensor-parallel plan")
    return derive(model, _styles_of(model, own_plan))


def _is_sharded(chunks: Sequence[nn.Module]) -> bool:
    """Return whether Transformers has sharded the model, while it loaded it."""
    if len(chunks) != 1 or "transformers.modeling_utils" not in sys.modules:
        return False
    from flux.layers import huggingface

    return huggingface.is_sharded(chunks[0])


def _plan_of(chunks: Sequence[nn.Module]) -> Mapping[str, Any] | None:
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(chunks[0], name, None) if len(chunks) == 1 else None
        if isinstance(plan, Mapping) and plan:
            return plan
    return None


def _replace_megatrons(chunks: Sequence[nn.Module], overlap: bool | None) -> None:
    count = 0
    if "megatron.core.tensor_parallel.layers" in sys.modules:  # else no layer can be Megatron's
        from flux.layers.megatron import swap

        count = sum(swap(chunk, overlap) for chunk in chunks)
    if count == 0:
        raise ValueError(
            "the model has no ColumnParallelLinear or RowParallelLinear of Megatron-core; for "
            "other models pass mesh, and plan if the model has no tp_plan"
        )


def _apply_plan(
    model: nn.Module,
    plan: Mapping[str, Any],
    mesh: DeviceMesh | dist.ProcessGroup,
    sequence_parallel: bool | str,
) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    from flux.layers import huggingface
    from flux.layers import sequence_parallel as sequences
    from flux.layers.eligible import say_once
    from flux.layers.planned import apply_plan
    from flux.layers.sequence_plan import derive

    if isinstance(mesh, dist.ProcessGroup):
        mesh = DeviceMesh.from_group(mesh, _device_type(model))
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, got {mesh}")
    styles = _styles_of(model, plan)
    if huggingface.is_pretrained(model):
        huggingface.check_heads(model, styles, mesh.size())
    elif hasattr(model, "peft_config"):
        raise ValueError("replace the linear layers first, then wrap the model with PEFT")
    shards = None
    if sequence_parallel:
        try:
            shards = derive(model, styles)
            sequences.check_world(model, shards, mesh.size())
        except ValueError as error:
            if sequence_parallel is True:
                raise
            shards = None
            say_once(f'sequence_parallel="auto": {error}')
    apply_plan(model, styles, mesh)
    if huggingface.is_pretrained(model):
        huggingface.mark_sharded(model, plan, mesh)
    if shards is not None and mesh.size() > 1:
        choice = None
        if sequence_parallel == "auto":
            choice = sequences.modelled_choice(model, shards, mesh.get_group())
        sequences.insert(model, shards, choice)


def _styles_of(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the styles that a plan gives to modules of a model, with our fused forms."""
    from flux.layers import dtensor, huggingface

    if huggingface.is_pretrained(model):
        return huggingface.styles_of(model, plan)
    return {name: dtensor.fused_style(style) for name, style in plan.items()}


def _device_type(model: nn.Module) -> str:
    first = next(model.parameters(), None)
    return "cpu" if first is None or first.is_meta else first.device.type
