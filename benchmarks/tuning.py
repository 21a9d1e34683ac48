"""What tuning finds and what it costs: against exhaustive search, and of a look-up.

    python benchmarks/tuning.py                    # both parts; about an hour for `search`
    python benchmarks/tuning.py --parts search --shapes 2

`search`     for each of 12 shapes: the tuner, then every legal candidate with all rounds, and then
             the two winners and the unfused path once more, interleaved in one run: that run's
             ratios are the figures, so that neither search is judged by its own luckiest sample.
`look_up`    the cost of a schedule look-up per call, of a tuned and of an untuned op.
`ship`       copies the winners of `search` to tuning/results. Runs only if it is named.

Raw figures: benchmarks/results/cpu/tuning.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, keep, markdown, milliseconds, sizes

from flux.bench.metrics import ratio_interval
from flux.bench.shapes import load_shapes
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.launch.spawn import run_ranks
from flux.launch.supervisors import Spawned
from flux.machine import host
from flux.machine.cluster import world_shape
from flux.machine.detection import detect
from flux.select.cache import Cache
from flux.select.space import load_space
from flux.select.winners import Key, Winner
from flux.tune.halving import Halving, median_ms
from flux.tune.journal import Journal
from flux.tune.machine import survey
from flux.tune.tuner import Options, Search, Tuner, make_search

WORLD = 2


def run(search: Search, options: Options) -> float:
    """Run one search with a cache of its own; seconds that it took."""
    launcher = Spawned(WORLD)
    here = survey(launcher, "cpu", options.transport, options.threads)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), "run", {})
        Tuner([search], launcher, here, Cache(Path(folder)), journal, options).run()
        journal.close()
    if search.winner is None:
        raise SystemExit(f"{search.label}: {search.problem_text}")
    return time.monotonic() - begin


def only(search: Search, names: Sequence[str], rounds: int) -> Search:
    """A search among a few of the candidates, with the same number of rounds for each."""
    kept = tuple(candidate for candidate in search.candidates if candidate.name in names)
    halving = Halving(tuple(candidate.name for candidate in kept), tuple(names), (rounds,))
    return Search(search.problem, kept, [], halving)


def compare(problem: Problem) -> dict[str, Any]:
    """The tuner against exhaustive search, for one shape."""
    here, options = detect("cpu", 1), Options(threads=1)
    hosts, space = ["here"] * WORLD, load_space("cpu")
    tuned = make_search(problem, space, here, hosts, options)
    tuned_s = run(tuned, options)
    rounds = tuned.halving.rounds[-1]
    everything = replace(options, rounds=(rounds,), exhaustive=True)
    full = make_search(problem, replace(space, prune_above=math.inf), here, hosts, everything)
    full_s = run(full, everything)
    winner, best = tuned.best(), full.best()
    assert winner is not None and best is not None
    final = only(full, list(dict.fromkeys(("unfused", winner, best))), 2 * rounds + 1)
    run(final, options)
    ms = {name: median_ms(taken) for name, taken in final.samples.items()}
    rounds_ms = {name: [own for own, _ in taken] for name, taken in final.samples.items()}
    return {
        "at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "op": problem.op.name,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "dtype": problem.dtype,
        "tuned": {"name": winner, "seconds": tuned_s, "rounds": tuned.rounds_done},
        "exhaustive": {"name": best, "seconds": full_s, "rounds": full.rounds_done},
        "exhaustive_ms": {name: median_ms(taken) for name, taken in full.samples.items()},
        "candidates": len(tuned.candidates),
        "candidates_exhaustive": len(full.candidates),
        "excluded": {**tuned.excluded, **full.excluded},
        "ms": {"tuned": ms[winner], "best": ms[best], "unfused": ms["unfused"]},
        "rounds_ms": rounds_ms,
        "tuned_over_best": ms[winner] / ms[best],
        "tuned_over_best_interval": ratio_interval(rounds_ms[winner], rounds_ms[best], 0.95),
        "tuned_over_unfused": ms[winner] / ms["unfused"],
        "time_share": tuned_s / full_s,
    }


def search_part(options: argparse.Namespace) -> dict[str, Any]:
    problems = load_shapes(options.file).problems(WORLD)
    # The server that ranks are forked from imports torch at its first use: not in a timed search.
    run_ranks(_nothing, None, WORLD)
    documents = []
    for problem in problems[: options.shapes]:
        documents.append(compare(problem))
        last = documents[-1]
        print(
            f"{problem.op.name} {problem.m}: tuned/best {last['tuned_over_best']:.3f}, "
            f"tuned/unfused {last['tuned_over_unfused']:.3f}, {last['time_share']:.0%} of the time "
            f"({last['tuned']['seconds']:.0f} of {last['exhaustive']['seconds']:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    ratios = [document["tuned_over_unfused"] for document in documents]
    return {
        "shapes": documents,
        "geometric_mean_speedup_over_unfused": 1 / statistics.geometric_mean(ratios),
        "worst_tuned_over_best": max(document["tuned_over_best"] for document in documents),
        "worst_tuned_over_unfused": max(ratios),
        "time_share": sum(d["tuned"]["seconds"] for d in documents)
        / sum(d["exhaustive"]["seconds"] for d in documents),
    }


def _look_up(argument: Any, rank: int, progress: Any) -> dict[str, float]:
    import torch.distributed as dist

    import flux

    shape = world_shape(["here"] * WORLD)
    parts = detect("cpu").parts(shape)
    problem = Problem(Op.ag_gemm, 64, 256, 256, "float32", WORLD)
    if rank == 0:
        winner = Winner(64, Knobs(comm_tile_rows=8), 1.0)
        Cache(Path(argument)).store(Key.of(problem, shape, parts, "cpu"), winner, parts)
    os.environ["FLUX_TUNE_CACHE"] = argument
    dist.barrier()
    figures = {}
    for name, tuning in (("tuned", "cache"), ("off", "off"), ("knobs", flux.Knobs())):
        with flux.AGGemm(max_m=64, n=256, k=256, tuning=tuning) as op:
            begin = time.perf_counter_ns()
            op.schedule(64)
            figures[f"{name}_first_us"] = (time.perf_counter_ns() - begin) * 1e-3
            repeats = []
            for _ in range(200):
                begin = time.perf_counter_ns()
                for _ in range(200):
                    op.schedule(64)
                repeats.append((time.perf_counter_ns() - begin) / 200 * 1e-3)
            figures[f"{name}_us"] = statistics.median(repeats)
    return figures


def look_up_part(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, float] = run_ranks(_look_up, folder, WORLD)
    return {**figures, "added_us": figures["tuned_us"] - figures["off_us"]}


def _nothing(argument: Any, rank: int, progress: Any) -> None:
    """A rank that has nothing to do."""


def ship_part(options: argparse.Namespace) -> dict[str, Any]:
    """Winners of the last `search`, from its last run, which timed both searches' side by side."""
    search = json.loads(Path(options.out).read_text())["search"]
    here, shape = detect("cpu", 1), world_shape(["here"] * WORLD)
    parts, shipped = here.parts(shape), {}
    results = ROOT / "tuning" / "results"
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        for entry in Cache(results, read_only=True).entries():
            cache.store(entry)
        for document in search["shapes"]:
            problem = Problem(
                Op[document["op"]], *(document[name] for name in ("m", "n", "k", "dtype")), WORLD
            )
            winner = _fastest(problem, document)
            cache.store(Key.of(problem, shape, parts, "cpu"), winner, parts)
            shipped[f"{problem.op.name} {problem.m}"] = str(winner.knobs)
        for path in cache.directory.glob("*.json"):
            shutil.copy(path, results)
    return shipped


def _fastest(problem: Problem, document: dict[str, Any]) -> Winner:
    everything = replace(load_space("cpu"), prune_above=math.inf)
    search = make_search(problem, everything, detect("cpu", 1), ["here"] * WORLD, Options())
    knobs = {candidate.name: candidate.chosen for candidate in search.candidates}
    rounds = document["rounds_ms"]
    name = min(rounds, key=lambda name: statistics.median(rounds[name]))
    return Winner(
        problem.m,
        knobs[name],
        statistics.median(rounds[name]),
        statistics.median(rounds["unfused"]),
        rounds=len(rounds[name]),
        tuned_at=document["at"],
    )


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "search": search_part,
    "look_up": look_up_part,
    "ship": ship_part,
}


def table(search: dict[str, Any]) -> str:
    header = ["op M x N x K", "unfused ms", "tuned ms", "best ms", "tuned/unfused", "tuned/best"]
    rows = []
    for document in search["shapes"]:
        ms = document["ms"]
        rows.append(
            [
                f"{document['op']} {sizes(document)}",
                *(milliseconds(ms[name]) for name in ("unfused", "tuned", "best")),
                f"**{document['tuned_over_unfused']:.3f}**",
                "{:.3f} ({:.2f} to {:.2f})".format(
                    document["tuned_over_best"], *document["tuned_over_best_interval"]
                ),
                f"{document['candidates_exhaustive']}",
                f"{document['tuned']['seconds']:.0f} of {document['exhaustive']['seconds']:.0f}",
            ]
        )
    return markdown([*header, "candidates", "seconds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="parts to run"
    )
    parser.add_argument("--file", default="cpu-small", help="file of shapes for `search`")
    parser.add_argument("--shapes", type=int, default=12, help="number of its shapes")
    parser.add_argument("--out", default=(ROOT / RESULTS / "tuning.json").as_posix())
    options = parser.parse_args()
    target = Path(options.out)
    content = json.loads(target.read_text()) if target.exists() else {}
    content |= {"device": host.device(), "versions": host.versions(), "world": WORLD}
    for part in options.parts:
        content[part] = PARTS[part](options)
        keep(content, target)
    if "search" in options.parts:
        print(table(content["search"]))
    for part in ("look_up", "ship"):
        if part in options.parts:
            print(f"{part}: {json.dumps(content[part])}")


if __name__ == "__main__":
    main()
