"""The charts of docs/contribute/results/, from the raw JSON under benchmarks/results/.

tables.py writes them: `python benchmarks/tables.py`. How they are drawn: drawing.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_host_time
import gpu_kernels
import kernel_choice
import layers
import multi_host
import one_host as ranks_of_a_host
import reliability
import scale
import serving
from common import LINK_NAMES, RESULTS, ROOT, load, ratio, unfused_interval
from drawing import Bar, BarChart, Chart, Group, Line, LineChart, Series

from flux.bench.metrics import ratio_interval
from flux.bench.serve_report import phase_title
from flux.core.knobs import Op

OVER_UNFUSED = "time over the unfused path's; below 1 is faster"
INTERVAL = "90% interval"
FLUX, RING = Series("flux", "blue"), Series("one chunk per rank, round a ring", "grey")
OPS = tuple(
    Series(op.label, colour) for op, colour in zip(Op, ("blue", "orange", "green"), strict=True)
)


def method_bar(document: dict[str, Any], method: str, *, with_gemm: bool = False) -> Bar:
    """Return a method's time over unfused."""
    mark = None
    if with_gemm:
        methods = document["methods"]
        mark = methods[method]["gemm_non_split_ms"] / methods["unfused"]["overall_ms"]
    return Bar(ratio(document, method), unfused_interval(document, method), mark)


def hosts() -> Chart:
    """Return flux and medium over unfused at the largest shape, by link."""
    m, n, k = multi_host.SHAPES[0]
    groups = []
    for op in multi_host.OPS:
        for link in multi_host.RATES:
            name = multi_host.name_of(op, (m, n, k), "2x1", link)
            document = load(multi_host.RESULTS / f"{name}.json")
            both = tuple(
                method_bar(document, method, with_gemm=True) for method in ("flux", "medium")
            )
            groups.append(Group(LINK_NAMES[link], both, Op[op].label))
    return BarChart(
        "Between two hosts: slower link, larger gain",
        f"M x N x K = {m} x {n} x {k}, one rank per host",
        OVER_UNFUSED,
        (FLUX, RING),
        groups,
        reference=1.0,
        interval=INTERVAL,
        mark="the multiply alone",
    )


def hosts_shapes() -> Chart:
    """Return flux over unfused by shape, for one and for two ranks per host."""
    groups = []
    for op in multi_host.OPS:
        for shape in multi_host.SHAPES:
            both = []
            for layout in ("2x1", "2x2"):
                path = multi_host.RESULTS / (
                    multi_host.name_of(op, shape, layout, "1gbit") + ".json"
                )
                both.append(_bar_of(path))
            groups.append(Group(" x ".join(map(str, shape)), tuple(both), Op[op].label))
    return BarChart(
        "All shapes between two hosts, 1 Gbit/s",
        "M x N x K, float32; – was not measured",
        OVER_UNFUSED,
        (Series("1 rank per host", "blue"), Series("2 ranks per host", "violet")),
        groups,
        reference=1.0,
        interval=INTERVAL,
    )


def _bar_of(path: Any) -> Bar:
    """Return flux over unfused, or nothing where the run is not there."""
    try:
        return method_bar(load(path), "flux")
    except FileNotFoundError:
        return Bar(None)


def _layer_groups(case: tuple[str, int, int, int], phases: tuple[str, ...]) -> list[Group]:
    groups = []
    model, scale, sequence, batch = case
    section = f"{model} / {scale}, {sequence} x {batch} tokens"
    for link in layers.LINKS:
        figures = load(layers.path_of(*case, link))["phases"]
        each = [(figures[phase]["ratio"], figures[phase]["ratio_interval"]) for phase in phases]
        bars = tuple(Bar(value, None if ends is None else tuple(ends)) for value, ends in each)
        groups.append(Group(LINK_NAMES[link], bars, section))
    return groups


OVER_MEGATRON = "time over Megatron-core's; below 1 is faster"


def layer() -> Chart:
    """Return our layers over Megatron's in a GPT-3 layer, by link."""
    phases = ("train", "prefill", "decode")
    return BarChart(
        "A transformer layer: flux over Megatron-core",
        "two ranks, one per host or both in one host",
        OVER_MEGATRON,
        [
            Series(name, colour)
            for name, colour in zip(phases, ("blue", "orange", "green"), strict=True)
        ],
        _layer_groups(layers.CASES[0], phases),
        reference=1.0,
        interval="95% interval",
    )


def layer_models() -> Chart:
    """Return the other models' layers."""
    phases = ("train", "prefill")
    groups = [group for case in layers.CASES[1:] for group in _layer_groups(case, phases)]
    return BarChart(
        "Layers with all tokens in one sequence",
        "attention, unchanged by flux, has a larger share",
        OVER_MEGATRON,
        (Series("train", "blue"), Series("prefill", "orange")),
        groups,
        reference=1.0,
        interval="95% interval",
    )


def served() -> Chart:
    """Return flux over stock of whole models, by program, hosts and link."""
    groups = []
    for document in serving.documents():
        bars = tuple(
            Bar(phase["ratio_to_stock"], tuple(phase["ratio_to_stock_interval"]))
            for phase in document["phases"]
        )
        groups.append(Group(serving.place_of(document), bars, serving.title_of(document)))
    names = [phase_title(kind, size) for kind, size in serving.PHASES]
    return BarChart(
        "Whole models: flux over the program's own tensor parallelism",
        "hosts x ranks of each, and link; Llama with random weights",
        "time over the program's own tensor parallelism; below 1 is faster",
        [
            Series(name, colour)
            for name, colour in zip(names, ("blue", "violet", "orange", "green"), strict=True)
        ],
        groups,
        reference=1.0,
        interval="95% interval",
    )


def one_host() -> Chart:
    """Return flux over unfused by M, for the three ops."""
    groups = []
    for m, n, k in [*ranks_of_a_host.LARGE, *reversed(ranks_of_a_host.SMALL)]:
        paths = [ranks_of_a_host.result_path(op, (m, n, k)) for op in Op.__members__]
        ratios = tuple(method_bar(load(path), "flux") for path in paths)
        groups.append(Group(f"M = {m}", ratios, f"N x K = {n} x {k}"))
    return BarChart(
        "Two ranks of one host: few rows gain most",
        "float32, one thread per rank, two cores",
        OVER_UNFUSED,
        OPS,
        groups,
        reference=1.0,
        interval=INTERVAL,
    )


def growth() -> Chart:
    """Return times against M of one and of two ranks."""
    panels = []
    for op in ("ag_gemm", "gemm_rs"):
        paths = {
            (m, world): ranks_of_a_host.growth_path(op, m, world)
            for m in ranks_of_a_host.ROWS
            for world in (1, 2)
        }
        methods = {
            at: load(path)["methods"] for at, path in paths.items() if (ROOT / path).exists()
        }
        sizes = sorted({m for m, _ in methods})
        curves = [
            Line(tuple((m, methods[m, world][name]["overall_ms"]) for m in sizes), dashed)
            for name, world, dashed in (
                ("unfused", 2, False),
                ("flux", 2, False),
                ("flux", 1, True),
            )
        ]
        panels.append((Op[op].label, curves))
    return LineChart(
        "Time against M, one rank and two",
        f"N x K = {ranks_of_a_host.N} x {ranks_of_a_host.K}, float32, two cores",
        "M, rows of all ranks",
        "ms per call",
        (
            Series("unfused, 2 ranks", "grey"),
            Series("flux, 2 ranks", "blue"),
            Series("flux, 1 rank", "orange"),
        ),
        panels,
    )


OVERHEAD = {
    "torch.mm": ("torch.mm",),
    "engine": ("engine: begin", "engine: peers, copies, reduction"),
    "Python": ("Python",),
}


def overhead() -> Chart:
    """Return the parts of a small call's time."""
    costs = load(RESULTS / "overhead.json")["call_cost_us"]
    groups = []
    for op, parts in costs.items():
        sums = tuple(Bar(sum(parts[key] for key in keys)) for keys in OVERHEAD.values())
        groups.append(Group(Op[op].label, sums))
    return BarChart(
        "What one call costs besides its multiply",
        "M = 1, N = K = 64, two ranks of one host",
        "microseconds per call",
        [
            Series(name, colour)
            for name, colour in zip(OVERHEAD, ("grey", "violet", "blue"), strict=True)
        ],
        groups,
        stacked=True,
        value_text="{:.0f}".format,
    )


def tuning() -> Chart:
    """Return tuned ops over unfused, by M."""
    shapes = load(RESULTS / "tuning.json")["search"]["shapes"]
    bar_of = {}
    for shape in shapes:
        rounds, name = shape["rounds_ms"], shape["tuned"]["name"]
        ends = ratio_interval(rounds[name], rounds["unfused"])
        bar_of[shape["op"], shape["m"]] = Bar(shape["tuned_over_unfused"], ends)
    sizes = sorted({m for _, m in bar_of})
    groups = [
        Group(f"M = {m}", tuple(bar_of[op, m] for op in ("ag_gemm", "gemm_rs"))) for m in sizes
    ]
    return BarChart(
        "Tuned ops are faster at every shape",
        f"N x K = {shapes[0]['n']} x {shapes[0]['k']}, float32, two ranks of one host",
        OVER_UNFUSED,
        OPS[:2],
        groups,
        reference=1.0,
        interval=INTERVAL,
    )


def cuda_host() -> Chart:
    """Return driver calls per call, now and before."""
    now, before = (
        load(RESULTS / f"{name}.json") for name in ("cuda_host_time", "cuda_host_time_before")
    )
    groups = [
        Group(
            Op[new["op"]].label,
            (Bar(new["driver_calls"]), Bar(old["driver_calls"])),
            f"M = {new['m']}",
        )
        for new, old in zip(now["ops"], before["ops"], strict=True)
    ]
    return BarChart(
        "Calls of the CUDA driver per call of an op",
        f"one rank of {cuda_host_time.WORLD}, on a device that does nothing",
        "driver calls per call; fewer is better",
        (Series("now", "blue"), Series("before", "grey")),
        groups,
        value_text="{:.0f}".format,
    )


def kernel_rating() -> Chart:
    """Return NVIDIA's estimate of our choice over its own, by M."""
    groups = [
        Group(f"M = {name}", (Bar(middle), Bar(most)))
        for name, _, _, middle, most in kernel_choice.agreements(load(kernel_choice.RESULT))
    ]
    return BarChart(
        "Chosen kernels, rated by NVIDIA's model",
        "predictions for 8 ranks, bfloat16; nothing is measured",
        "estimated time of ours over the best one's",
        (Series("median shape", "blue"), Series("worst shape", "orange")),
        groups,
        reference=1.0,
    )


def gpu() -> Chart:
    """Return the kernels that ops choose on a GPU over torch's GEMM, by M."""
    by_m: dict[int, dict[str, Bar]] = {}
    for shape in load(gpu_kernels.RESULT)["shapes"]:
        share = shape["vs_torch"][gpu_kernels.default_of(shape, "bf16")]
        by_m.setdefault(shape["m"], {})[shape["op"]] = Bar(share["median"], share["interval"])
    ops = ("ag_gemm", "gemm_rs")
    return BarChart(
        "Kernels that communicate, beside torch.mm",
        "an H100, bfloat16; what they wait for is there before, and slots are local",
        "time over torch.mm's",
        tuple(series for series in OPS if series.name in [Op[op].label for op in ops]),
        [Group(f"M = {m}", tuple(by_m[m][op] for op in ops)) for m in sorted(by_m)],
        reference=1.0,
    )


def soak() -> Chart:
    """Return how often each disturbance hit the ranks of the soak."""
    document = load(reliability.SOAK)
    counts = document["counts"]
    groups = [
        Group(text, (Bar(counts[name]),), place)
        for place, names in reliability.DISTURBANCES.items()
        for name, text in names.items()
    ]
    return BarChart(
        f"What {document['minutes']:.0f} minutes of soak did to four ranks",
        f"{counts['compared']:,} results compared, {document['episodes']} episodes",
        "disturbances",
        (Series("disturbances", "blue"),),
        groups,
        value_text="{:,.0f}".format,
    )


def scaling() -> Chart:
    """Return policies over serial by number of GPUs, in steps of weak and strong scaling."""
    content = load(scale.RESULT)
    series = [
        Series(label, colour)
        for label, colour in zip(
            [policy for policy in scale.POLICIES if policy != "serial"],
            ("grey", "blue", "orange"),
            strict=True,
        )
    ]
    groups = []
    for study, model, gpus in (
        *(("weak", "llama3-8b", count) for count in (8, 512, 16384)),
        *(("weak", "llama3-70b", count) for count in (32, 512, 16384)),
        *(("strong", "llama3-70b", count) for count in (1024, 4096, 16384)),
    ):
        (rows,) = (
            group
            for group in scale.by_case(content, study)
            if (group[0]["model"], group[0]["gpus"]) == (model, gpus)
        )
        bars = tuple(Bar(1 / row["speedup"], None, 1 / row["bound"]) for row in rows[1:])
        section = f"{model}, {rows[0]['cluster']}, {study} scaling"
        groups.append(Group(f"{gpus:,} GPUs", bars, section))
    return BarChart(
        "Simulated steps: what policies gain at scale",
        "sequence parallelism, ZeRO-1, inputs gathered again; tensor parallel 8",
        "time over the step without overlap; below 1 is faster",
        series,
        groups,
        reference=1.0,
        mark="least that any overlap can reach",
    )


CHARTS: dict[str, Callable[[], Chart]] = {
    "hosts.svg": hosts,
    "hosts-shapes.svg": hosts_shapes,
    "layers.svg": layer,
    "layers-models.svg": layer_models,
    "one-host.svg": one_host,
    "serving.svg": served,
    "growth.svg": growth,
    "overhead.svg": overhead,
    "tuning.svg": tuning,
    "cuda-host.svg": cuda_host,
    "kernel-choice.svg": kernel_rating,
    "gpu.svg": gpu,
    "reliability.svg": soak,
    "scale.svg": scaling,
}
