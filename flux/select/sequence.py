"""Whether a decoder is faster on shards of the sequence, by the cost model.

    whole     columns: GEMM           rows: GemmAR       norms, sums of all tokens
    shards    columns: AGGemm         rows: GemmRS       norms, sums of own tokens     one AllGather

The AllGather at the end is not needed where only the last tokens' logits are computed.
The same bytes move, but on shards half of them are hidden behind the columns' GEMM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flux.core.knobs import Op
from flux.core.problem import Problem, ceil_div
from flux.machine.cluster import Cluster
from flux.select import cost
from flux.select.hardware import ELEMENTWISE_SHARE
from flux.select.predict import choose, predict

PASSES = 8
"""How often a norm and the residual sum after it read or write activations, without fusion."""


@dataclass(frozen=True)
class BlockSizes:
    """The features of a block: of its input and result, of all its columns, of its row layer."""

    features: int
    columns: int
    row: int


class SequenceChoice:
    """Chooses by the number of tokens; equal on all ranks.

    Args:
        blocks: of the decoder.
        dtype: of activations.
        world: number of ranks.
        nodes: number of hosts of the ranks.
        cluster: devices and links.
    """

    def __init__(
        self, blocks: Iterable[BlockSizes], dtype: str, world: int, nodes: int, cluster: Cluster
    ) -> None:
        self._blocks = Counter(blocks)
        self._sizes = dtype, world, nodes
        self._cluster = cluster
        self._pays: dict[tuple[int, bool], bool] = {}

    def pays(self, tokens: int, gathers: bool = True) -> bool:
        """Return whether shards are faster than whole activations.

        Args:
            tokens: of all sequences.
            gathers: whether all tokens are gathered at the end.
        """
        key = tokens, gathers
        if key not in self._pays:
            whole, shards = self.times_ms(tokens, gathers)
            self._pays[key] = shards < whole
        return self._pays[key]

    def times_ms(self, tokens: int, gathers: bool = True) -> tuple[float, float]:
        """Return the modelled times of all blocks, in ms: on whole activations, on shards."""
        cluster, world = self._cluster, self._sizes[1]
        whole = shards = 0.0
        for block, count in self._blocks.items():
            gather = Problem(Op.ag_gemm, tokens, block.columns, block.features, *self._sizes)
            scatter = Problem(Op.gemm_rs, tokens, block.features, block.row, *self._sizes)
            reduce = Problem(Op.gemm_ar, tokens, block.features, block.row, *self._sizes)
            row_ms = cost.memory_ms(
                cluster.device, PASSES * block.features * gather.itemsize, ELEMENTWISE_SHARE
            )
            whole += count * (cost.gemm_ms(gather, cluster) + self._op_ms(reduce))
            shards += count * (self._op_ms(gather) + self._op_ms(scatter))
            whole += count * row_ms * tokens
            shards += count * row_ms * ceil_div(tokens, world)
        return whole, shards + (cost.library_ms(gather, cluster) if gathers else 0.0)

    def _op_ms(self, problem: Problem) -> float:
        knobs = choose(problem, self._cluster)
        return sum(predict(problem, self._cluster, knobs))
