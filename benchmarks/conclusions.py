"""The first sentence of pages in docs/contribute/results/: figures from the raw JSON, in words.

tables.py writes them, so that they say what the tables below them say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import layers
import multi_host
import one_host as ranks_of_a_host
import reliability
from common import RESULTS, load, ratio

from flux.core.knobs import OPS


def between_hosts(op: str, link: str) -> float:
    """Return flux over unfused at the largest shape, one rank per host."""
    name = multi_host.name_of(op, multi_host.SHAPES[0], "2x1", link)
    return ratio(load(multi_host.RESULTS / f"{name}.json"), "flux")


def hosts() -> str:
    """Return what both ops gain at the largest shape over the slowest and the fastest link."""
    gather, scatter = (
        [between_hosts(op, link) for link in ("500mbit", "2gbit")] for op in ("ag_gemm", "gemm_rs")
    )
    return (
        f"**At 500 Mbit/s between two hosts, GemmRS takes {scatter[0]:.2f} and AGGemm "
        f"{gather[0]:.2f} of the unfused path's time; at 2 Gbit/s they take {scatter[1]:.2f} and "
        f"{gather[1]:.2f}.**"
    )


def training_ratios() -> list[float]:
    """Return the ratio of a training step of the GPT-3 layer for each of `layers.LINKS`."""
    return [
        load(layers.path_of(*layers.CASES[0], link))["phases"]["train"]["ratio"]
        for link in layers.LINKS
    ]


def layer() -> str:
    """Return what a training step of the GPT-3 layer gains, by link."""
    alone, slow, middle, fast = (f"{value:.2f}" for value in training_ratios())
    return (
        "**Forward and backward of a GPT-3 layer with our linear layers take "
        f"{slow} of Megatron-core's time at 500 Mbit/s between two hosts, {middle} at 1 Gbit/s, "
        f"{fast} at 2 Gbit/s and {alone} inside one host.**"
    )


def one_host() -> str:
    """Return the span of ratios for few rows and for many."""

    def span(shapes: list[tuple[int, int, int]]) -> str:
        paths = [ranks_of_a_host.result_path(op, shape) for op in OPS for shape in shapes]
        ratios = [ratio(load(path), "flux") for path in paths]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    few = [shape for shape in ranks_of_a_host.SMALL if shape[0] <= 64]
    return (
        f"**Between two ranks of one host flux takes {span(few)} of the unfused path's time with "
        f"up to 64 rows, and {span(ranks_of_a_host.LARGE)} with 1024 rows and more.**"
    )


def tuned() -> str:
    """Return the speed-up over unfused and the price of the search."""
    search: dict[str, Any] = load(RESULTS / "tuning.json")["search"]
    least = 1 / search["worst_tuned_over_unfused"]
    return (
        f"**Tuned knobs make ops {search['geometric_mean_speedup_over_unfused']:.2f} times as fast "
        f"as the unfused path in the geometric mean over {len(search['shapes'])} shapes, and at "
        f"least {math.floor(least * 100 + 0.5) / 100:.2f} times; the searches took "
        f"{search['time_share']:.0%} of the time of exhaustive ones.**"
    )


def cuda_host() -> str:
    """Return driver calls of the paper's AllGather, and the native time of all ops."""
    now, before = (
        load(RESULTS / f"{name}.json")["ops"]
        for name in ("cuda_host_time", "cuda_host_time_before")
    )
    place = next(i for i, entry in enumerate(now) if entry["op"] == "ag_gemm" and entry["m"] > 64)
    return (
        f"**One call of AGGemm with M = {now[place]['m']} on 8 GPUs makes "
        f"{now[place]['driver_calls']} calls of the CUDA driver, where an earlier version made "
        f"{before[place]['driver_calls']}; one call of GemmRS makes "
        f"{next(entry['driver_calls'] for entry in now if entry['op'] == 'gemm_rs')}.**"
    )


def reliable() -> str:
    """Return how many results differed and how many findings there were."""
    soak, kinds = load(reliability.SOAK), load(reliability.FILES)["kinds"]
    different = sum("another result" in finding for finding in soak["findings"])
    cases = sum(sum(counts.values()) for counts in kinds.values())
    wrong = sum(counts["wrong"] for counts in kinds.values())
    return (
        f"**Of {soak['counts']['compared']:,} results of disturbed ranks {different or 'none'} "
        f"differed from those of a quiet run; the soak had {len(soak['findings']) - different} "
        f"other findings. Of {cases:,} damaged files {wrong or 'none'} had an undocumented "
        "outcome.**"
    )


SENTENCES: dict[str, Callable[[], str]] = {
    "hosts_says": hosts,
    "layers_says": layer,
    "one_host_says": one_host,
    "tuning_says": tuned,
    "cuda_host_says": cuda_host,
    "reliability_says": reliable,
}
