"""The problems to tune: those of a model's layers, or a list, from `tuning/shapes/*.toml`.

A layer of a transformer has four GEMMs with communication (Flux paper, figure 2), here with W
ranks, M = batch * sequence, h hidden, f intermediate, d = heads * head_dim:

                       op        N                          K
    query, key, value  ag_gemm   d + 2 * kv_heads * head_dim  h
    attention out      gemm_rs   h                            d
    MLP up (and gate)  ag_gemm   f, or 2 f if gated           h
    MLP down           gemm_rs   h                            f

A [[shape]] of an op of experts or heads has its other sizes too (flux/core/sparse_problem.py).

Decoding has few rows, which are not sharded between the blocks. There gemm_rs becomes gemm_ar, and
no GEMM waits for an AllGather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

from flux.core.datafile import MOST_SIZE, Table, find
from flux.core.problem import ACTIVATION_DTYPES, DTYPES, SCALED, SCALINGS, Problem


@dataclass(frozen=True)
class Moe:
    """The experts of a layer, in place of its MLP.

    Attributes:
        experts: how many there are.
        top_k: how many each token goes to.
        intermediate: of an expert.
        shared: of the experts that every token goes to, together.
        every: of so many layers the last one has experts, the others an MLP.
    """

    experts: int
    top_k: int
    intermediate: int
    shared: int = 0
    every: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Queries, and keys with values, are projected down and up again. ``Layer.head_dim`` is that of
    queries and keys, with the part that has positions.

    Attributes:
        query_rank: width of the compressed queries; 0: they are not compressed.
        kv_rank: width of compressed keys and values.
        rope_dim: of the part of keys with positions, which all heads share.
        value_dim: of a head's values.
    """

    query_rank: int
    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Delta:
    """Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464, section 3).

    Each head of values has a state of key_dim x value_dim; query and key heads serve several. What
    enters passes a short causal convolution, what leaves a gated norm.

    Attributes:
        key_heads: of queries, and of keys.
        value_heads: of values, gates, strengths and decays.
        key_dim: width of a head of queries and keys.
        value_dim: width of a head of values.
        kernel: tokens of the convolution.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    chunk = 64
    """Tokens that kernels compute at once, as in flash-linear-attention."""

    @property
    def convolved(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Width of what is projected: these, a gate, and strength and decay of each head."""
        return self.convolved + self.value_heads * (self.value_dim + 2)

    @property
    def keys(self) -> int:
        """Keys of a head that as much softmax attention has, causal, for each token.

        In chunks of C tokens (section 3.3) a token and head need C (3 key_dim + 2 value_dim)
        multiplications inside its chunk, with the inverse of C x C applied to keys and values, and
        3 key_dim value_dim with the state: read twice, and written.
        """
        inside = self.chunk * (3 * self.key_dim + 2 * self.value_dim)
        both = self.key_dim + self.value_dim
        return -(-2 * (inside + 3 * self.key_dim * self.value_dim) // both)

    @property
    def operations(self) -> float:
        """Multiplications of a token, beside those of weights."""
        return self.value_heads * self.keys * ((self.key_dim + self.value_dim) // 2)

    def weights(self, hidden: int) -> int:
        """Return elements of the weights of a layer's linear attention."""
        out = self.value_heads * self.value_dim * hidden
        return hidden * self.projected + self.kernel * self.convolved + out


@dataclass(frozen=True)
class Layer:
    """Sizes of a transformer layer.

    Attributes:
        hidden: width of the model.
        intermediate: of the MLP; with experts, of layers without experts, or 0.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        gated: whether the MLP, or an expert, has a gate.
        moe: experts in place of the MLP.
        latent: compressed attention.
        window: tokens that attention looks back on; 0: all.
        full_every: of so many layers the last one has no window; 0: all have it.
        chunked: windows do not move: attention looks back to the last multiple of the window.
        dropout: whether a mask is kept of what is added to the residual.
        delta: linear attention, but in the last of every ``full_every`` layers.
        gate: whether attention's results are multiplied with a gate, which is projected.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    moe: Moe | None = None
    latent: Latent | None = None
    window: int = 0
    full_every: int = 0
    dropout: bool = True
    chunked: bool = False
    delta: Delta | None = None
    gate: bool = False

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def compressed(self) -> int:
        """Width of what latent attention gathers: compressed queries, keys and values."""
        latent = self.latent
        if latent is None:
            return 0
        return (latent.query_rank or self.hidden) + latent.kv_rank + latent.rope_dim

    @property
    def attention_weights(self) -> int:
        """Elements of the weights of attention."""
        latent, out = self.latent, self.heads * self.value_dim * self.hidden
        if latent is None:
            inputs = self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.value_dim)
            inputs += self.heads * self.value_dim if self.gate else 0
            return self.hidden * inputs + out
        queries = self.heads * self.head_dim
        down = self.hidden * (latent.query_rank + latent.kv_rank + latent.rope_dim)
        up = (latent.query_rank or self.hidden) * queries
        up += latent.kv_rank * self.heads * (self.head_dim - latent.rope_dim + latent.value_dim)
        return down + up + out

    def mlp_weights(self, intermediate: int) -> int:
        """Return elements of the weights of an MLP, or of an expert."""
        return (3 if self.gated else 2) * self.hidden * intermediate

    @property
    def period(self) -> int:
        """After so many layers windows and experts repeat."""
        return lcm(self.full_every or 1, self.moe.every if self.moe else 1)

    def moe_of(self, layer: int, dense_layers: int) -> Moe | None:
        """Return the experts of a layer, of a model with leading layers without; None: an MLP."""
        moe = self.moe
        has = moe is not None and layer >= dense_layers and (layer + 1) % moe.every == 0
        return moe if has else None

    def delta_of(self, layer: int) -> Delta | None:
        """Return the linear attention of a layer; None: it has softmax attention."""
        has = self.delta is not None and (not self.full_every or (layer + 1) % self.full_every)
        return self.delta if has else None

    def reach(self, layer: int, sequence: int) -> int:
        """Return keys that a layer keeps of a sequence; its attention reads as many, at most."""
        full = not self.window or (self.full_every and (layer + 1) % self.full_every == 0)
        return sequence if full else min(self.window, sequence)

    def visible(self, layer: int, sequence: int) -> float:
        """Return pairs of a query and a key that attention computes, of one sequence and head."""
        reach = self.reach(layer, sequence)
        if self.chunked:
            whole, rest = divmod(sequence, reach)
            return (whole * reach * reach + rest * rest) / 2
        return sequence * reach - reach * reach / 2

    def gemms(self, decodes: bool) -> Iterator[tuple[str, int, int]]:
        """Yield (op, N, K) of each GEMM with communication."""
        inner = self.heads * self.head_dim
        pairs = [(inner + 2 * self.kv_heads * self.head_dim, inner)]
        if self.intermediate:  # experts without tensor parallelism have none
            pairs.append(((2 if self.gated else 1) * self.intermediate, self.intermediate))
        for up, down in pairs:
            if not decodes:
                yield "ag_gemm", up, self.hidden
            yield ("gemm_ar" if decodes else "gemm_rs"), self.hidden, down


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        name: for display.
        dtype: of the operands.
        layer: sizes of a layer.
        layers: how many there are.
        sequence: tokens of a sequence in training: that of the workload "training".
        vocabulary: rows of the embedding; 0: not known, so that plans have no embedding and head.
        tied: whether the head has the embedding's weights.
        dense_layers: leading layers without experts, of a model with experts.
    """

    name: str
    dtype: str
    layer: Layer
    layers: int
    sequence: int
    vocabulary: int = 0
    tied: bool = False
    dense_layers: int = 0

    @property
    def parameters(self) -> int:
        """Elements of all weights but norms and biases."""
        moe = self.layer.moe
        tables = self.vocabulary * self.layer.hidden * (1 if self.tied else 2)
        return tables + self._of_layers(moe.experts if moe else 0)

    @property
    def active(self) -> int:
        """Elements of the weights that a token is multiplied with: of experts, its own."""
        moe = self.layer.moe
        return self.vocabulary * self.layer.hidden + self._of_layers(moe.top_k if moe else 0)

    @property
    def size(self) -> str:
        """Parameters, and active ones if they are fewer for experts, for display."""
        total, active = (f"{count / 1e9:.3g}B" for count in (self.parameters, self.active))
        return f"{total} parameters" + (f" ({active} active)" if self.layer.moe else "")

    def _of_layers(self, experts: int) -> int:
        """Return elements of all layers' weights, with so many routed experts in each."""
        layer, total = self.layer, 0
        for number in range(self.layers):
            delta = layer.delta_of(number)
            total += delta.weights(layer.hidden) if delta else layer.attention_weights
            moe = layer.moe_of(number, self.dense_layers)
            if moe is None:
                total += layer.mlp_weights(layer.intermediate)
            else:
                total += layer.mlp_weights(experts * moe.intermediate + moe.shared)
                total += layer.hidden * moe.experts  # the router
        return total


@dataclass(frozen=True)
class Shapes:
    """The contents of a file of shapes.

    Attributes:
        file: its path.
        model: name, for display.
        dtype: of the operands.
        tensor_parallel: intended world sizes.
        sizes: (op, m, n, k), each once, in the order of the file.
        sparse: the same of ops of experts and heads, with their other sizes.
        scales: ``scaling`` and ``fast_accum`` of float8, where the file has them.
    """

    file: Path
    model: str
    dtype: str
    tensor_parallel: tuple[int, ...]
    sizes: tuple[tuple[str, int, int, int], ...]
    sparse: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = ()
    scales: Mapping[str, Any] = field(default_factory=dict)

    def problems(
        self, world: int, dtype: str | None = None, scales: Mapping[str, Any] | None = None
    ) -> list[Problem]:
        """Return the problems for this number of ranks.

        ``scales`` of float8 take the place of the file's, one by one.
        """
        from flux.core.sparse_problem import make_problem  # plans read files of models only

        every = [*((*sizes, {}) for sizes in self.sizes), *self.sparse]
        kind = dtype or self.dtype
        of_file = self.scales if kind == SCALED else {}
        more = {**of_file, **(scales or {})}
        return [
            make_problem(op, m, n, k, kind, world, {**sizes, **more})
            for op, m, n, k, sizes in every
        ]


def load_shapes(
    name: str | Path, sequence: int | None = None, batches: Sequence[int] | None = None
) -> Shapes:
    """Read a file of shapes: a path, or the name of one in `tuning/shapes`.

    Args:
        name: of the file.
        sequence: tokens of a model's sequences, instead of those of its workloads; 1 is decoding.
        batches: batch sizes of a model, instead of those of its workloads.

    Raises:
        ValueError: no such file, or wrong contents; the message names file and key.
    """
    from flux.core.sparse_problem import NAMES

    file = find("shapes", name)
    top = Table.load(file)
    model, dtype = top.text("model"), top.text("dtype", choices=tuple(DTYPES))
    scales: dict[str, Any] = {}
    if "scaling" in top.keys:
        scales["scaling"] = top.text("scaling", choices=SCALINGS[1:])
    if "fast_accum" in top.keys:
        scales["fast_accum"] = top.flag("fast_accum")
    if scales and dtype != SCALED:
        top.fail(next(iter(scales)), f"is for dtype {SCALED}, got {dtype}")
    worlds = top.integers("tensor_parallel")
    _head(top)
    sizes: list[tuple[str, int, int, int]] = []
    if "layer" in top.keys:
        layer, _ = _layer(top.table("layer"))
        workloads = top.tables("workload")
        if not workloads:
            top.fail("workload", "a layer needs at least one [[workload]]")
        pairs: list[tuple[int, int]] = []
        for table in workloads:
            table.text("name")
            length, counts = table.integer("sequence"), table.integers("batch")
            table.done()
            pairs += [(length, batch) for batch in counts]
        if sequence is not None or batches is not None:
            lengths = [sequence] if sequence else list(dict.fromkeys(length for length, _ in pairs))
            pairs = [(length, batch) for length in lengths for batch in batches or (1,)]
        for length, batch in pairs:
            for op, n, k in layer.gemms(decodes=length == 1):
                sizes.append((op, batch * length, n, k))
    elif sequence is not None or batches is not None:
        raise ValueError(f"{file}: sequence and batch need a file with a [layer], not with shapes")
    sparse: list[tuple[str, int, int, int, dict[str, Any]]] = []
    for table in top.tables("shape"):
        op, n, k = table.text("op", choices=NAMES), table.integer("n"), table.integer("k")
        if of_op := _sizes(table):
            sparse += [(op, m, n, k, of_op) for m in table.integers("m")]
        else:
            sizes += [(op, m, n, k) for m in table.integers("m")]
        table.done()
    top.done()
    for op, m, n, k in [*sizes, *(shape[:4] for shape in sparse)]:
        if max(m, n, k) > MOST_SIZE:
            raise ValueError(
                f"{file}: {op}: the layer and its workloads make (m, n, k) = {(m, n, k)}, each "
                f"must be at most {MOST_SIZE}"
            )
    if not sizes and not sparse:
        raise ValueError(f"{file}: expected a [layer] or a [[shape]]: nothing to tune")
    of_dense = tuple(dict.fromkeys(sizes))
    return Shapes(file, model, dtype, worlds, of_dense, tuple(sparse), scales)


def _sizes(table: Table) -> dict[str, Any]:
    """Return the sizes of a shape beside m, n and k."""
    from flux.core.sparse_problem import EXPERT_SIZES, HEAD_SIZES

    names = [name for name in (*EXPERT_SIZES, *HEAD_SIZES) if name in table.keys]
    return {
        name: tuple(table.integers(name)) if name == "heads" else table.integer(name)
        for name in names
    }


def layer_of(name: str | Path) -> Layer:
    """Return the layer of a model: a file of shapes, or the name of one in `tuning/shapes`.

    Raises:
        ValueError: no such file, or it has no layer or a wrong one.
    """
    file = find("shapes", name)
    top = Table.load(file)
    if "layer" not in top.keys:
        raise ValueError(f"{file}: expected the [layer] of a model, got a list of shapes")
    return _layer(top.table("layer"))[0]


def model_in(file: Path) -> Model:
    """Return the model of a file with a [layer].

    Raises:
        ValueError: it has no layer or no workload "training", or wrong contents.
    """
    top = Table.load(file)
    if "layer" not in top.keys:
        raise ValueError(f"{file}: expected the [layer] of a model, got a list of shapes")
    layer, layers = _layer(top.table("layer"))
    sequences: dict[str, int] = {}
    for workload in top.tables("workload"):
        what = workload.text("name")
        if what in sequences:
            workload.fail("name", f"a second workload {what!r}")
        sequences[what] = workload.integer("sequence")
        workload.integers("batch")
        workload.done()
    if "training" not in sequences:
        top.fail("workload", f"expected one named 'training', got {', '.join(sequences) or 'none'}")
    title, dtype = top.text("model"), top.text("dtype", choices=ACTIVATION_DTYPES)
    top.integers("tensor_parallel")
    top.tables("shape")  # of no model
    vocabulary, tied = _head(top)
    top.done()
    return Model(title, dtype, layer, layers, sequences["training"], vocabulary, tied)


def _head(top: Table) -> tuple[int, bool]:
    """Return rows of the vocabulary, 0 if not given, and whether the head is the embedding."""
    vocabulary = top.integer("vocabulary") if "vocabulary" in top.keys else 0
    return vocabulary, top.flag("tied") if "tied" in top.keys else False


def _layer(table: Table) -> tuple[Layer, int]:
    """Return the layer, and how many of them the model has."""
    layer = Layer(
        hidden=table.integer("hidden"),
        intermediate=table.integer("intermediate", least=0),
        heads=table.integer("heads"),
        kv_heads=table.integer("kv_heads"),
        head_dim=table.integer("head_dim"),
        gated=table.flag("gated"),
        moe=_experts(table.table("moe")) if "moe" in table.keys else None,
        dropout=table.flag("dropout") if "dropout" in table.keys else True,
    )
    layers = table.integer("layers")
    if not layer.intermediate and layer.moe is None:
        table.fail("intermediate", "must be at least 1 in a layer without experts, got 0")
    if layer.heads % layer.kv_heads:
        table.fail("kv_heads", f"must divide heads = {layer.heads}, got {layer.kv_heads}")
    table.done()
    return layer, layers


def _experts(table: Table) -> Moe:
    moe = Moe(table.integer("experts"), table.integer("top_k"), table.integer("intermediate"))
    if moe.top_k > moe.experts:
        table.fail("top_k", f"must be at most experts = {moe.experts}, got {moe.top_k}")
    table.done()
    return moe
