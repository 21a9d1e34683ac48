"""DHelix for real: a pipeline schedule in which forward and backward hide each other's collectives.

H. Wang et al., arXiv 2411.15871. ``flux.plan.policies.dhelix`` plans and predicts it; this module
runs it in the runtime of torch.distributed.pipelining, alongside torch's own schedules:

    model = replace(llama)                          # flux.runtime.domino: layers that wait
    first, last = folded(model.layers, p, rank)     # this rank's two stages of 2p
    stages = [PipelineStage(..., rank, 2 * p, ...), PipelineStage(..., 2 * p - 1 - rank, ...)]
    schedule = ScheduleDHelix(stages, n_microbatches, loss_fn, script=script)
    schedule.step(tokens, target=labels, losses=losses)       # rank 0; schedule.step() on others

Both strands share the modules and their parameters. A rank's row has blocks such as
``(0F4;7B0)OVERLAP_F_B``, whose two passes ``flux.runtime.dhelix.strands`` runs by turns.

The private classes of torch.distributed.pipelining are used in this file only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as pipelining
from torch.distributed.pipelining.stage import PipelineStage

from flux.plan.policies.folding import fold, w_blocks
from flux.plan.policies.passes import row
from flux.runtime.dhelix.strands import Strands

T = TypeVar("T")


def folded(layers: Sequence[T], p: int, rank: int) -> tuple[list[T], list[T]]:
    """Return the layers of a rank's two stages: ``rank``, and ``2p - 1 - rank``."""
    if len(layers) % (2 * p):
        raise ValueError(f"{2 * p} stages must divide {len(layers)} layers")
    if fold(rank, p) != rank:
        raise ValueError(f"rank must be in [0, {p}), got {rank}")
    size = len(layers) // (2 * p)
    last = 2 * p - 1 - rank
    return list(layers[rank * size :][:size]), list(layers[last * size :][:size])


class ScheduleDHelix(pipelining._PipelineScheduleRuntime):
    """The W-shaped pipeline of a folded model with two strands.

    Args:
        stages: this rank's two stages, in order: ``rank`` and ``2p - 1 - rank`` of 2p.
        n_microbatches: of a step; more than there are pipeline ranks.
        loss_fn: of the last stage, which is on rank 0.
        script: see ``Strands``; by default the strands alternate, which no other order of a layer's
            waits is faster than by the cost model, whichever strand is first ("FB": forward).
        timeout_s: how long a strand waits for the other one.
        **options: of torch's schedules, such as ``args_chunk_spec`` and ``scale_grads``.

    Raises:
        ValueError: other stages, no more micro-batches than ranks, or see ``Strands``.
        RuntimeError: PyTorch is older than 2.10.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor],
        *,
        script: str = "BF",
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        if not hasattr(self, "register_custom_function"):
            raise RuntimeError(
                "DHelix needs PyTorch 2.10 or newer, whose pipeline schedules take custom "
                f"functions; this is {torch.__version__}"
            )
        if not stages:
            raise ValueError("a rank has two stages of a folded model, got none")
        ranks, rank = stages[0].group_size, stages[0].group_rank
        numbers = [(stage.stage_index, stage.num_stages) for stage in stages]
        wanted = [(rank, 2 * ranks), (2 * ranks - 1 - rank, 2 * ranks)]
        if numbers != wanted:
            raise ValueError(
                f"rank {rank} of {ranks} needs stages {wanted[0][0]} and {wanted[1][0]} of "
                f"{2 * ranks}, got (stage, stages) = {numbers}"
            )
        if type(n_microbatches) is not int or n_microbatches <= ranks:
            raise ValueError(
                f"n_microbatches must be more than the {ranks} pipeline ranks, or nothing is "
                f"interleaved; got {n_microbatches!r}"
            )
        self.strands = Strands(script, timeout_s)
        cast(Any, super()).__init__(stages, n_microbatches, loss_fn, **options)
        self.pipeline_order = {
            number: [pipelining._Action.from_str(action) for action in row(blocks)]
            for number, blocks in enumerate(w_blocks(ranks, n_microbatches))
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
        self._begin_transfers_early(stages[0].group)
        self.register_custom_function(pipelining.OVERLAP_F_B, self._interleave)

    def step(self, *args: Any, target: Any = None, **options: Any) -> Any:
        """Run a step on the whole batch, as torch's schedules do."""
        specs = self._args_chunk_spec or ()
        dims = [spec.split_dim for spec in specs] + [0] * (len(args) - len(specs))
        for value, dim in [*zip(args, dims, strict=True), (target, 0)]:
            if isinstance(value, torch.Tensor) and value.shape[dim] % self._n_microbatches:
                raise ValueError(
                    f"{self._n_microbatches} micro-batches must divide the batch of "
                    f"{value.shape[dim]}"
                )
        self._sent: list[tuple[Any, int, list[dist.Work]]] = []  # stage, micro-batch
        result = super().step(*args, target=target, **options)
        for stage, micro, works in self._sent:
            pipelining._wait_batch_p2p(works)
            if hasattr(stage, "release_fwd_send_outputs"):  # since torch 2.15
                stage.release_fwd_send_outputs(micro)
        return result

    def _begin_transfers_early(self, group: dist.ProcessGroup | None) -> None:
        """Take out sends that a block does itself, and let receives begin one pass earlier.

        A block sends what its forward returns while its backward goes on, and the step waits for it
        at the end, where torch 2.15 has a wait in the row. The order of this rank's sends stays,
        and so does that of its receives, so they match those of the neighbours. With
        NCCL receives stay where they are: sends and receives are one queue there, in which a
        receive that waits would hold back the sends after it.
        """
        rows: Any = self.pipeline_order_with_comms
        actions = [action for action in rows[self.rank] if action is not None]
        blocks = {
            (sub.stage_index, sub.microbatch_index)
            for action in actions
            for sub in (action.sub_actions or ())
            if sub.computation_type == pipelining.FORWARD
        }
        receives = (pipelining.RECV_F, pipelining.RECV_B)
        sends = ("SEND_F", "WAIT_SEND_F")
        early = dist.get_backend(group) == "gloo"
        row: list[Any] = []
        last = None  # where the last pass, or block of two, is in the row
        for action in actions:
            kind, place = action.computation_type, (action.stage_index, action.microbatch_index)
            if kind.name in sends and place in blocks:
                continue
            if early and last is not None and kind in receives:
                row.insert(last, action)
                last += 1
                continue
            if kind not in receives and kind.name not in (*sends, "SEND_B", "WAIT_SEND_B"):
                last = len(row)
            row.append(action)
        rows[self.rank] = row

    def _interleave(self, action: Any, ctx: Any) -> None:
        """Run the two passes of a block by turns."""
        forward, backward = action.sub_actions
        of = {stage.stage_index: stage for stage in self._stages}
        f_stage, b_stage = of[forward.stage_index], of[backward.stage_index]
        micro, earlier = forward.microbatch_index, backward.microbatch_index
        runtime: Any = self  # torch's methods have no types
        loss = runtime._maybe_get_loss(b_stage, earlier)
        self.backward_counter[backward.stage_index] += 1
        last = self.backward_counter[backward.stage_index] == self._n_microbatches

        # A strand receives when its turn comes first; meanwhile the other one computes.
        def run_forward() -> Any:
            if not f_stage.is_first and forward.stage_index - 1 not in of:
                pipelining._wait_batch_p2p(self.fwd_recv_ops.pop((forward.stage_index, micro)))
            output = f_stage.forward_one_chunk(
                micro, ctx.arg_mbs[micro], ctx.kwarg_mbs[micro], save_forward_output=True
            )
            if not f_stage.is_last and forward.stage_index + 1 not in of:
                works = pipelining._batch_p2p(f_stage.get_fwd_send_ops(micro))
                self._sent.append((f_stage, micro, works))
            runtime._maybe_compute_loss(f_stage, output, ctx.target_mbs, micro)
            return output

        def run_backward() -> None:
            if not b_stage.is_last and backward.stage_index + 1 not in of:
                pipelining._wait_batch_p2p(self.bwd_recv_ops.pop((backward.stage_index, earlier)))
            b_stage.backward_one_chunk(earlier, loss=loss, full_backward=True, last_backward=last)

        output = self.strands.run(run_forward, run_backward)
        if forward.stage_index + 1 in of:
            of[forward.stage_index + 1].set_local_fwd_input(output, micro)
        if backward.stage_index - 1 in of:
            of[backward.stage_index - 1].set_local_bwd_input(
                b_stage.get_local_bwd_output(earlier), earlier
            )
