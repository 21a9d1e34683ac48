"""Published training runs beside what `flux plan` predicts for them, from data sheets alone.

    python benchmarks/published_runs.py      # a quarter of an hour: runs of 16,384 GPUs are large

A run is compared by the figure that its source gives: seconds of a step, tokens per second and
GPU, or TFLOPS per GPU. The sources name model, degrees, batch and what is computed again. What
they leave open is in ``Run.assumed``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from common import ROOT, keep, markdown

from flux.machine.cluster import load_cluster
from flux.plan.compare import compared
from flux.plan.model import Parallel, TrainingStep, step_of
from flux.select.hardware import ELEMENTWISE_SHARE

RESULT = ROOT / "benchmarks" / "results" / "plan" / "published_runs.json"
MEGATRON = "arXiv 2104.04473"
RECOMPUTATION = "arXiv 2205.05198, table 5"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
LLAMA = "arXiv 2407.21783, table 4"
TITAN_H200 = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
MOSAIC = "llm-foundry, scripts/train/benchmarking/README.md"
MIXTRAL = "Megatron-LM, megatron/core/transformer/moe/README.md"
INTERLEAVED = ("interleaved", {"chunks": 2})
_FSDP = ("centauri", {"operation": False, "model": False})
OPERATIONS = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / 6 / 12288 + 51200 / 16 / 96 / 12288)
"""Of a step of 1,536 sequences of GPT-3 175B, as MEGATRON counts them: with recomputation, and all
pairs of attention (section 5.1)."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: for display.
        source: where it is published.
        figure: that the source gives.
        unit: of the figure: ``s``, ``tokens/s`` and ``TFLOPS``, of a GPU.
        model: name, or a model whose sizes are changed by ``sizes``.
        cluster: in tuning/clusters.
        policy: that schedules it.
        degrees: of parallelism.
        options: of ``step_of``.
        sizes: of the layer, and ``layers``, ``vocabulary`` and ``tied``, in place of the model's.
        assumed: what the source leaves open.
        besides: GB that the source's programs move and the planner leaves out, by cause.
        like: another cluster, of the same multiprocessors and programs, whose shares of attention
            and of overlap hold.
        shares: of the device's peaks, in place of the cluster file's.
        unexplained: why a row that is off by more than 15% stays so.
    """

    name: str
    source: str
    figure: float
    unit: str
    model: str
    cluster: str
    policy: tuple[str, dict[str, Any]]
    degrees: dict[str, Any]
    options: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)
    assumed: str = ""
    besides: dict[str, float] = field(default_factory=dict)
    like: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    unexplained: str = ""

    def step(self) -> TrainingStep:
        """Return the step."""
        step = step_of(self.model, Parallel(**self.degrees), **self.options)
        sizes: dict[str, Any] = dict(self.sizes)
        of_step = {key: sizes.pop(key) for key in ("layers", "vocabulary", "tied") if key in sizes}
        return replace(step, layer=replace(step.layer, **sizes), **of_step)


_UNFUSED = {"unfused_attention": True, "fp32_gradients": True}
_22B = {"hidden": 6144, "intermediate": 24576, "heads": 64, "kv_heads": 64, "head_dim": 96}
_FULL = {"recompute": "full", **_UNFUSED}
_TITAN = {"micro_batch": 2, "sequence": 8192, "zero": 3, "recompute": "ops", "fp32_gradients": True}
_F8 = {"gemm_dtype": "float8_e4m3fn"}
_ASYNC_TP = ("intra_batch", {"chunks": 8})
_WAITS = ("serial", {"overlap_grad_reduce": True})
"""FSDP beside computation; tensor parallel collectives wait, as compiled code does."""
_MPT = {
    "7B": ((4096, 32, 32), 6.66),
    "13B": ((5120, 40, 40), 12.85),
    "30B": ((7168, 56, 48), 29.98),
    "70B": ((8192, 64, 80), 64.86),
}
"""Width, heads and layers of a model, and its weights, 1e9."""
_SCALE = "published runs lose 2% on 128 GPUs and 9% on 512, without checkpoints; plans 0.5%"
_RING = "each step of the ring takes half as long again as on 2 ranks"
_8B = 8.03
"""Weights of Llama 3.1 8B, 1e9."""


def _titan(
    degrees: dict[str, int],
    how: str,
    figure: float,
    *,
    policy: tuple[str, dict[str, Any]] = _FSDP,
    source: str = TITAN,
    unexplained: str = "",
    **options: Any,
) -> Run:
    """Return a run of torchtitan with Llama 3.1 8B.

    What it moves besides, as its sources and torch's have it: FSDP2 copies each gathered weight out
    of the buffer that it arrives in, twice a step, and each gradient into a float32 buffer, all on
    the stream that computes (_fsdp_collectives.py). Adam runs with foreach, which reads and writes
    80 bytes of an element in place of 28. Positions, and keys and values that are repeated for all
    query heads, are a kernel forward, again for backward, and backward; an eager step has the first
    in its graph. Queries, keys and values are products of their own, and gate and up: gradients of
    their inputs are summed, in 7 passes. With tensor parallelism of 8, those of keys and values
    have 128 columns, and take the memory's time. In 2024, blocks alone were compiled: the last norm
    and the loss are eager, which is 48 and 10 more passes.
    """
    step = {**_TITAN, **options}
    tp, gpus = degrees.get("tp", 1), prod(degrees.values())
    tokens = step["micro_batch"] * step["sequence"] // degrees.get("cp", 1)
    passed = 2 * tokens / 1e9  # GB of a pass over one number of each token
    heads, kv, eager = 4096 / tp, 1024 / tp, bool(options.get("eager"))
    products = 4096 + kv - kv * 4096 * (2208 / 0.6 / 989400)  # memory's time, less that to multiply
    besides = {
        "copies of FSDP2": _8B / tp * (2 * (2 + 2) + 2 + 4),
        "Adam with foreach": _8B / gpus * (80 - 28),
        "positions, repeated heads": 0.0 if eager else 3 * 32 * passed * (4 * heads + 2 * kv),
        "sums of gradients": 7 * 32 * passed * 4096,
    }
    if products > 0 and not step.get("gemm_dtype"):
        besides["narrow products"] = 6 * 32 * passed * products
    if source == TITAN and not eager:
        besides["eager norm and loss"] = passed * (48 * 4096 + 10 * 128256 / tp)
    h200 = source == TITAN_H200
    return Run(
        *(f"Llama 3.1 8B, {how}", source, figure, "tokens/s", "llama3-8b"),
        *("h200" if h200 else "grand-teton", policy, degrees, step),
        besides=besides,
        like="grand-teton" if h200 else "",
        unexplained=unexplained,
    )


def _titan_large(
    name: str,
    model: str,
    figure: float,
    policy: tuple[str, dict[str, Any]],
    cp: int = 1,
    source: str = TITAN,
    **options: Any,
) -> Run:
    """Return a run of torchtitan with tensor parallelism of 8, compiled, checkpoints of whole
    layers. With a pipeline: 8 micro-batches.

    torchtitan of that time cuts a local batch into as many micro-batches as pipeline ranks, unless
    an option says otherwise (parallelisms/pipelining_utils.py). With 32 of one sequence, the step
    of 1F1B would be 30% shorter than the published one. AsyncTP cuts GEMMs into a chunk for each
    rank.
    """
    pipeline = model == "llama3-405b"
    given = {"zero": 1, "micro_batches": 8} if pipeline else {"zero": 3, "micro_batch": 16}
    degrees = {"tp": 8, "sequence": True, **({"pp": 8, "dp": 8 // cp} if pipeline else {"dp": 32})}
    if cp > 1:
        degrees["cp"] = cp
        given |= {"cp_kind": "torch", "sequence": 32768 * cp}
    return Run(
        *(f"Llama 3.1 {name}", source, figure, "tokens/s", model, "grand-teton", policy, degrees),
        {"recompute": "full", "fp32_gradients": True, **given, **options},
        assumed="default number of micro-batches" if pipeline else "",
    )


def _mpt(
    name: str,
    gpus: int,
    figure: float,
    batch: tuple[int, int],
    *,
    sequence: int = 2048,
    recompute: str = "full",
    h100: bool = False,
    unexplained: str = "",
) -> Run:
    """Return a run of MosaicML with an MPT model and FSDP.

    Its attention was Triton's (``attn_impl``): 1.3 times slower than FlashAttention-2 at least
    (arXiv 2307.08691, section 4.1). H100: FlashAttention-2 as in grand-teton.toml, and GEMMs at
    the 663 TFLOPS that an H200 kept up at 700 W (results/h200/calibration.json, ``sustained``).
    Besides: the optimizer of composer 0.16 is ten kernels, of 80 bytes an element in place of 28
    (decoupled_weight_decay.py). FSDP casts gradients to float32 for DEFAULT, which H100 runs have,
    and divides them, whole (_runtime_utils.py).

    Args:
        name: of the model.
        gpus: of the run.
        figure: tokens per second and GPU.
        batch: sequences of a micro-batch, and micro-batches.
        sequence: tokens of a sequence.
        recompute: "none" without checkpoints.
        h100: whether on H100; else A100 of 80 GB.
        unexplained: see ``Run``.
    """
    sizes, weights = _MPT[name]
    each, count = batch
    shares = {"gemm_share": 0.67, "attention_share": 0.287 / 1.3} if h100 else {}
    return Run(
        *(
            f"MPT {name}, {sequence:,} tokens, {'H100' if h100 else 'A100'}",
            MOSAIC,
            figure,
            "tokens/s",
            "gpt3-175b",
        ),
        *("llama3-h100" if h100 else "selene", _FSDP, {"dp": gpus}),
        {
            "sequence": sequence,
            "micro_batch": each,
            "micro_batches": count,
            "zero": 3,
            "recompute": recompute,
            "fp32_gradients": h100,
        },
        _gpt(*sizes) | {"vocabulary": 50368, "dropout": False},
        besides={
            "optimizer of ten kernels": weights / gpus * (80 - 28),
            "gradients cast, divided": weights * count * (6 + 8 if h100 else 4),
        },
        shares=shares or {"attention_share": 0.5 / 1.3},
        assumed="network of the cluster file",
        unexplained=unexplained,
    )


def _gpt(hidden: int, heads: int, layers: int) -> dict[str, int]:
    sizes = {"hidden": hidden, "intermediate": 4 * hidden, "heads": heads, "kv_heads": heads}
    return {**sizes, "head_dim": hidden // heads, "layers": layers}


def _scaled(
    name: str,
    sizes: tuple[int, int, int],
    degrees: tuple[int, int, int],
    batch: tuple[int, int],
    tflops: int,
    chunks: int = 1,
) -> Run:
    """Return a run of MEGATRON's table 1; Megatron-LM's scripts have its micro-batches and stages.

    Args:
        name: for display.
        sizes: width of the model, heads, layers.
        degrees: of tensor, pipeline and data parallelism.
        batch: sequences of a step, and of a micro-batch.
        tflops: of a GPU; they count recomputation, and all pairs of attention.
        chunks: stages on each rank.
    """
    (hidden, _, layers), (tp, pp, dp), (whole, each) = sizes, degrees, batch
    operations = 96 * whole * 2048 * layers * hidden**2
    operations *= 1 + 2048 / 6 / hidden + 51200 / 16 / layers / hidden
    return Run(
        *(name, f"{MEGATRON}, table 1", operations / (tp * pp * dp) / (tflops * 1e12), "s"),
        *("gpt3-175b", "selene"),
        ("interleaved", {"chunks": chunks}) if chunks > 1 else ("serial", {}),
        {"tp": tp, "pp": pp, "dp": dp},
        {"micro_batch": each, "micro_batches": whole // dp // each, "zero": 0, **_FULL},
        _gpt(*sizes),
    )


def _llama(gpus: int, sequence: int, cp: int, batch: int, figure: float) -> Run:
    return Run(
        f"Llama 3 405B, {sequence:,} tokens",
        LLAMA,
        figure,
        "TFLOPS",
        "llama3-405b",
        "llama3-h100",
        ("interleaved", {"chunks": 8}),
        {"tp": 8, "cp": cp, "pp": 16, "dp": gpus // 128 // cp, "sequence": True},
        {
            "sequence": sequence,
            "micro_batches": batch,
            "zero": 2,
            "reduce_every": 16,
            "fp32_gradients": True,
            "recompute": "act",
            "cp_kind": "all_gather",
        },
        assumed="stages of one layer; xformers' SwiGLU, which keeps no product",
    )


RUNS = (
    Run(
        *("GPT 22B, full recomputation", RECOMPUTATION, 1.42, "s", "gpt3-175b", "selene"),
        *(("serial", {}), {"tp": 8}, {"micro_batch": 4, **_FULL}, {**_22B, "layers": 48}),
    ),
    Run(
        *("GPT 22B, selective", RECOMPUTATION, 1.10, "s", "gpt3-175b", "selene"),
        *(("serial", {"wgrad_overlap": True}), {"tp": 8, "sequence": True}),
        *({"micro_batch": 4, "recompute": "selective", **_UNFUSED}, {**_22B, "layers": 48}),
    ),
    Run(
        *("GPT-3 175B, full recomputation", RECOMPUTATION, 18.13, "s", "gpt3-175b", "selene"),
        *(("interleaved", {"chunks": 3}), {"tp": 8, "pp": 8}, {"micro_batches": 64, **_FULL}),
    ),
    Run(
        *("GPT-3 175B, selective", RECOMPUTATION, 13.75, "s", "gpt3-175b", "selene"),
        *(("interleaved", {"chunks": 3}), {"tp": 8, "pp": 8, "sequence": True}),
        {"micro_batches": 64, "recompute": "selective", **_UNFUSED},
    ),
    Run(
        *("GPT-3 175B", f"{MEGATRON}, table 2", OPERATIONS / 384 / 153e12, "s", "gpt3-175b"),
        *("selene", INTERLEAVED, {"tp": 8, "pp": 12, "dp": 4}, {"micro_batches": 384, **_FULL}),
        assumed="tensor parallelism of 8; 2 stages on each rank",
    ),
    Run(
        *("GPT-3 175B", f"{MEGATRON}, section 5.1", OPERATIONS / 1024 / 140e12, "s", "gpt3-175b"),
        *("selene", INTERLEAVED, {"tp": 8, "pp": 8, "dp": 16}, {"micro_batches": 96, **_FULL}),
        assumed="degrees; 2 stages on each rank",
    ),
    _titan({"dp": 8}, "FSDP", 5762, eager=True),
    _titan({"dp": 8}, "FSDP + compile", 6667),
    _titan({"dp": 8}, "FSDP + compile + float8", 8532, **_F8),
    _titan({"dp": 128}, "FSDP", 5605, eager=True),
    _titan({"dp": 128}, "FSDP + compile", 6514),
    _titan({"dp": 128}, "FSDP + compile + float8", 8380, **_F8),
    *(
        _titan(
            {"dp": 8 // cp, "cp": cp},
            f"FSDP {8 // cp} + CP {cp}, {32768 * cp:,} tokens",
            figure,
            **{**_F8, "micro_batch": 1, "sequence": 32768 * cp, "recompute": "full"},
            cp_kind="torch",
            unexplained=_RING if cp > 2 else "",
        )
        for cp, figure in ((1, 3890), (2, 2540), (4, 1071), (8, 548))
    ),
    _titan_large("70B, FSDP + TP", "llama3-70b", 829, _WAITS, **_F8),
    _titan_large("70B, FSDP + AsyncTP", "llama3-70b", 876, _ASYNC_TP, **_F8),
    _titan_large("405B, 1F1B + AsyncTP", "llama3-405b", 100, _ASYNC_TP, micro_batch=4, **_F8),
    _titan_large(
        *("405B, interleaved + AsyncTP", "llama3-405b", 128, INTERLEAVED), micro_batch=4, **_F8
    ),
    *(
        _titan_large(
            f"405B, 1F1B + AsyncTP + CP {cp}, {32768 * cp:,} tokens",
            *("llama3-405b", figure, _ASYNC_TP, cp),
            **{"sequence": 32768 * cp, "micro_batch": 1, **_F8},
        )
        for cp, figure in ((1, 76), (2, 47), (4, 31), (8, 16))
    ),
    *(
        _titan_large(
            f"70B, {how}{' + float8' if of else ''}",
            *("llama3-70b", figure, policy),
            source=TITAN_TP,
            **of,
        )
        for how, policy, of, figure in (
            ("FSDP + TP", _WAITS, {}, 597.3),
            ("FSDP + AsyncTP", _ASYNC_TP, {}, 652.4),
            ("FSDP + TP", _WAITS, _F8, 809.8),
            ("FSDP + AsyncTP", _ASYNC_TP, _F8, 942.4),
        )
    ),
    *(
        _titan(
            {"tp": 8, "dp": 8, "sequence": True},
            f"{how}{' + float8' if of else ''}",
            figure,
            policy=policy,
            source=TITAN_TP,
            micro_batch=12,
            **of,
        )
        for how, policy, of, figure in (
            ("FSDP + TP", _WAITS, {}, 4378),
            ("FSDP + AsyncTP", _ASYNC_TP, {}, 4809.4),
            ("FSDP + TP", _WAITS, _F8, 5078.1),
            ("FSDP + AsyncTP", _ASYNC_TP, _F8, 5570.1),
        )
    ),
    _titan({"dp": 32}, "FSDP + compile + float8, H200", 10938, source=TITAN_H200, **_F8),
    _titan({"dp": 64}, "FSDP + compile + float8, H200", 10753, source=TITAN_H200, **_F8),
    _mpt("7B", 8, 4641, (6, 2), recompute="none"),
    _mpt("7B", 8, 3206, (8, 2), sequence=8192),
    _mpt("7B", 8, 1672, (2, 2), sequence=32768),
    _mpt("7B", 8, 1013, (1, 2), sequence=65536),
    _mpt("13B", 8, 2262, (2, 3), recompute="none"),
    _mpt("13B", 8, 2060, (10, 3), sequence=4096),
    _mpt("13B", 8, 1016, (1, 3), sequence=32768),
    _mpt("70B", 32, 373, (2, 16)),
    _mpt("70B", 64, 410, (8, 4)),
    _mpt("7B", 8, 10643, (6, 1), recompute="none", h100=True),
    _mpt("7B", 128, 10475, (6, 1), recompute="none", h100=True, unexplained=_SCALE),
    _mpt("7B", 512, 9670, (6, 1), recompute="none", h100=True, unexplained=_SCALE),
    _mpt("7B", 8, 3318, (2, 2), sequence=32768, h100=True),
    _mpt("7B", 8, 1956, (1, 2), sequence=65536, h100=True),
    _mpt("13B", 8, 4792, (2, 1), recompute="none", h100=True),
    _mpt("13B", 128, 5080, (16, 1), h100=True),
    _mpt("30B", 128, 2199, (8, 1), h100=True),
    _mpt("70B", 64, 1039, (8, 4), h100=True),
    _mpt("70B", 128, 1058, (8, 1), h100=True),
    _mpt("70B", 512, 1007, (8, 1), h100=True),
    Run(
        *("Mixtral 8x7B", MIXTRAL, 468, "TFLOPS", "mixtral-8x7b", "llama3-h100"),
        *(("interleaved", {"chunks": 8}), {"pp": 4, "dp": 16, "ep": 8}),
        {"sequence": 4096, "micro_batches": 16, "fp32_gradients": True},
        assumed="468 TFLOPS are of the README's reference mapping",
    ),
    _scaled("GPT 1.7B", (2304, 24, 24), (1, 1, 32), (512, 16), 137),
    _scaled("GPT 3.6B", (3072, 32, 30), (2, 1, 32), (512, 16), 138),
    _scaled("GPT 7.5B", (4096, 32, 36), (4, 1, 32), (512, 16), 142),
    _scaled("GPT 18.4B", (6144, 48, 40), (8, 1, 32), (1024, 8), 135),
    _scaled("GPT 39.1B", (8192, 64, 48), (8, 2, 32), (1536, 4), 138),
    _scaled("GPT 76.1B", (10240, 80, 60), (8, 4, 32), (1792, 2), 140, 3),
    _scaled("GPT 145.6B", (12288, 96, 80), (8, 8, 24), (2304, 2), 148, 2),
    _scaled("GPT 310.1B", (16384, 128, 96), (8, 16, 15), (2160, 1), 155, 2),
    _scaled("GPT 529.6B", (20480, 128, 105), (8, 35, 9), (2520, 1), 163, 3),
    _scaled("GPT 1008B", (25600, 160, 128), (8, 64, 6), (3072, 1), 163),
    Run(
        *("GPT 530B, full recomputation", RECOMPUTATION, 49.05, "s", "gpt3-175b", "selene"),
        *(("interleaved", {"chunks": 3}), {"tp": 8, "pp": 35}),
        *({"micro_batches": 280, **_FULL}, _gpt(20480, 128, 105)),
    ),
    Run(
        *("GPT 530B, selective", RECOMPUTATION, 37.83, "s", "gpt3-175b", "selene"),
        *(("interleaved", {"chunks": 3}), {"tp": 8, "pp": 35, "sequence": True}),
        {"micro_batches": 280, "recompute": "selective", **_UNFUSED},
        _gpt(20480, 128, 105),
    ),
    Run(
        *("Nemotron-4 340B", "arXiv 2406.11704, table 2", 8.0, "s", "gpt3-175b", "llama3-h100"),
        *(("interleaved", {"chunks": 8}), {"tp": 8, "pp": 12, "dp": 64, "sequence": True}),
        {"sequence": 4096, "micro_batches": 36, "fp32_gradients": True},
        _gpt(18432, 96, 96)
        | {"kv_heads": 8, "vocabulary": 256000, "tied": False, "dropout": False},
        assumed="stages of one layer, micro-batches of 1; hosts as those of Llama 3",
    ),
    _llama(8192, 8192, 1, 32, 430),
    _llama(16384, 8192, 1, 16, 400),
    _llama(16384, 131072, 16, 16, 380),
)


def entry_of(run: Run) -> dict[str, Any]:
    """Return a run's entry of the JSON file."""
    step, cluster = run.step(), load_cluster(run.cluster)
    if run.cluster == "h200":
        cluster = replace(cluster, hosts=8)
    shares = run.shares
    if run.like:
        other = load_cluster(run.like)
        shares = {"attention_share": other.device.attention_share}
        cluster = replace(cluster, overlap=other.overlap)
    cluster = replace(cluster, device=replace(cluster.device, **shares))
    ((_, timeline, reason),) = compared((run.policy,), step, cluster)
    assert timeline is not None, reason
    ms, gpus = timeline.iteration_ms, step.parallel.world
    ours = {
        "s": ms / 1e3,
        "tokens/s": 1e3 * step.batch_tokens / ms / gpus,
        "TFLOPS": step.operations / ms / 1e9 / gpus,
    }[run.unit]
    # A step that takes longer has fewer tokens per second: off is that of the step's time.
    off = ours / run.figure - 1 if run.unit == "s" else run.figure / ours - 1
    device = cluster.device
    speed = device.memory_gbs * (device.memory_share or ELEMENTWISE_SHARE)
    besides = {cause: gb / speed for cause, gb in run.besides.items()}
    return {
        **asdict(run),
        "gpus": gpus,
        "ours": ours,
        "off": off,
        "causes_s": besides,
        "off_with_causes": (1 + off) * (1 + sum(besides.values()) / (ms / 1e3)) - 1,
        "step_s": ms / 1e3,
        "idle": timeline.idle_ms / ms,
        "exposed": timeline.exposed_comm_ms / ms,
        "peak_gb": timeline.peak_memory_bytes / 1e9,
        "fits": not reason,
    }


def table(content: dict[str, Any]) -> str:
    """Return the table of benchmarks/results/runs.md."""
    header = ["run", "GPUs", "source", "published", "ours", "step off", "with its causes", "GB"]
    lines = []
    for entry in content["runs"]:
        digits = 2 if entry["figure"] < 100 else 0
        lines.append(
            [
                entry["name"],
                f"{entry['gpus']:,}",
                entry["source"],
                f"{entry['figure']:,.{digits}f} {entry['unit']}",
                f"{entry['ours']:,.{digits}f}",
                f"{100 * entry['off']:+.0f}%",
                f"{100 * entry['off_with_causes']:+.0f}%" if entry["besides"] else "",
                f"{entry['peak_gb']:.0f}",
            ]
        )
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = []
    for run in RUNS:
        runs.append(entry_of(run))
        print(run.name, runs[-1]["gpus"], f"{100 * runs[-1]['off']:+.1f}%", flush=True)
    keep({"command": "python benchmarks/published_runs.py", "runs": runs}, options.out)


if __name__ == "__main__":
    main()
