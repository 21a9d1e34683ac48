"""Synthetic results of `flux bench suite`, for tests of page, CSV and terminal output."""

from __future__ import annotations

import random
from typing import Any

from flux.bench.metrics import evaluate
from flux.bench.report import FIGURES
from flux.bench.results import DONE, FAILED, FORMAT, SHAPE, SKIPPED, VERSION
from flux.core.events import Event, Kind

ROWS = (64, 512, 1024, 2048, 4096, 8192)
SIZES = {"ag_gemm": (49152, 12288), "gemm_rs": (12288, 49152)}
METHODS = {"unfused": 1.0, "medium": 0.93, "flux": 0.78, "async_tp": 0.88, "te_userbuffers": 0.9}
ABSENT = {
    "async_tp": None,
    "te_userbuffers": None,
    "byte_flux": 'FLUX_BENCH_BYTE_FLUX_PYTHON is not set & <b>"never"</b> was',
    "cublasmp": "nvmath-python is not installed",
}


def figures(overall: float, gemm: float, comm: float, unfused: float) -> dict[str, Any]:
    """A method's figures, as in JSON."""
    metrics = evaluate(overall, gemm, comm, unfused)
    known = {name: getattr(metrics, name) for name in FIGURES}
    efficiency = metrics.overlap_efficiency
    interval = None if efficiency is None else [efficiency - 0.08, efficiency + 0.06]
    return {
        **known,
        "overlap_efficiency_interval": interval,
        "max_abs_err": 1.5e-3,
        "repeats_ms": [overall] * 5,
        "knobs": {"path": "fused", "tile": [128, 256], "note": "<script>alert(1)</script>"},
        "comm_cpu_ms": None,
        "link_bytes": None,
    }


def wrong() -> dict[str, Any]:
    """A method whose result was wrong."""
    phase = figures(1.0, 0.5, 0.5, 1.0)
    return {**phase, **dict.fromkeys(FIGURES), "wrong": ["rank 1: 3 of 12 elements are wrong"]} | {
        "overlap_efficiency_interval": None,
        "repeats_ms": [],
    }


def result(op: str, m: int, n: int, k: int, methods: dict[str, Any]) -> dict[str, Any]:
    """Return a result in the format of `flux bench op`."""
    return {
        "op": op,
        "m": m,
        "n": n,
        "k": k,
        "dtype": "bfloat16",
        "world": 8,
        "hosts": 1,
        "backend": "cuda",
        "transport": "symm_mem",
        "device": "Invented GPU",
        "versions": {"flux": "0", "torch": "0", "python": "0"},
        "methods": methods,
        "repeats": 5,
    }


def entry(
    kind: str, op: str, m: int, methods: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """One run; failed without methods."""
    n, k = SIZES[op]
    made = {"kind": kind, "op": op, "m": m, "n": n, "k": k, "peers": {}, "seconds": 1.0}
    if methods is None:
        return (
            made | {"status": FAILED, "error": "RankFailedError: rank 1: killed by SIGKILL"} | more
        )
    return made | {"status": DONE, "result": result(op, m, n, k, methods)} | more


def shape_methods(op: str, m: int) -> dict[str, Any]:
    draw = random.Random(f"{op}{m}")
    gemm = m * 1.5e-3 + 0.05
    comm = gemm * (0.3 if op == "ag_gemm" else 0.55)
    unfused = gemm + comm
    return {
        name: figures(unfused * share * draw.uniform(0.92, 1.08), gemm, comm, unfused)
        for name, share in METHODS.items()
    } | {"unfused": figures(unfused, gemm, comm, unfused)}


def sweep_methods(values: tuple[str, ...]) -> dict[str, Any]:
    made = {"unfused": figures(1.3, 1.0, 0.3, 1.3)}
    for index, value in enumerate(values):
        made[value] = figures(1.02 + 0.04 * (index - 2) ** 2, 1.0, 0.3, 1.3)
    return made


def document() -> dict[str, Any]:
    """Return a suite on fictitious GPUs with a failed shape, a skipped one and a wrong method."""
    entries = [entry(SHAPE, op, m, shape_methods(op, m)) for op in SIZES for m in ROWS]
    slow = entries[0]["result"]["methods"]
    slow["medium"] = figures(0.6, 0.146, 0.04, 0.19)  # far below what the figure shows
    entries[1]["result"]["methods"]["async_tp"] = wrong()
    entries[1]["error"] = "async_tp: rank 1: 3 of 12 elements are wrong"
    del entries[6]["result"]["methods"]["te_userbuffers"]
    entries[6]["peers"] = {"te_userbuffers": "failed: peer te_userbuffers: RuntimeError: <none>"}
    entries[-1] = entry(SHAPE, "gemm_rs", 8192, None)
    entries[-2] |= {"status": SKIPPED, "error": "not started: --budget was used up"}
    del entries[-2]["result"]
    for op in SIZES:
        entries.append(
            entry("comm_tile_rows", op, 4096, sweep_methods(("512", "256", "128", "64", "32")))
        )
        entries.append(entry("direction", op, 4096, sweep_methods(("push", "pull"))))
    return {
        "format": FORMAT,
        "version": VERSION,
        "command": ["flux", "bench", "suite", "--shapes", "a file's <name>.toml"],
        "started": "2026-01-01T00:00:00+00:00",
        "host": "Invented CPU, 2 cores",
        "device": "Invented GPU",
        "versions": {"flux": "0", "torch": "0", "python": "0"},
        "settings": {"world": 8, "dtype": "bfloat16", "backend": "cuda", "sweeps": []},
        "peers": dict(ABSENT),
        "about": {"async_tp": "PyTorch, torch.ops.symm_mem.fused_*"},
        "entries": entries,
        "timeline": None,
    }


def events(ranks: int = 2, tiles: int = 12) -> list[Event]:
    """A call as it might go: tiles are moved beside the GEMM, which waits for some of them."""
    results = []
    for rank in range(ranks):
        time = 5.0 * rank
        results.append(Event(rank, "main", Kind.barrier, "start", 0.0, 6.0 + rank))
        copied = 8.0
        for tile in range(tiles):
            name = f"rows {tile * 64}-{tile * 64 + 63} to rank {1 - rank}"
            results.append(Event(rank, "copy", Kind.copy, name, copied, 14.0, {"bytes": 196608}))
            copied += 15.0
        time = 8.0
        for tile in range(2 * tiles):
            ready = 0.0 if tile < tiles else 8.0 + 15.0 * (tile - tiles + 1) + 60.0
            if ready > time:
                wait = f"waits for tile {tile - tiles}"
                results.append(
                    Event(rank, "gemm", Kind.wait, wait, time, ready - time, {"tile": tile})
                )
                time = ready
            results.append(Event(rank, "gemm", Kind.gemm, f"tile ({tile}, 0)", time, 9.0))
            time += 9.5
    return results
