"""`flux bench serve --program vllm`: engines of vLLM that take turns.

    stock   vLLM's own tensor parallelism, with FLUX_VLLM=0
    flux    with Flux's plugin
    alone   one rank with the whole model

All engines live until the end, each with ranks of its own. Before each turn the others' processes
have time to fall asleep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from flux.bench.serve import ServeConfig
from flux.bench.serve_report import PhaseTimes
from flux.bench.serve_transformers import save_model
from flux.bench.serve_vllm import (
    IDLE_S,
    Answer,
    EngineFailedError,
    EngineOptions,
    HostedEngine,
)
from flux.launch.hosts import Hosts
from flux.launch.progress import Progress
from flux.launch.spawn import RankFailedError

READY_S = 900.0
"""Limit of building all engines: vLLM imports and warms up for a minute on a slow core."""
ANSWER_S = 600.0
PORT = 29640  # where the ranks of the first engine meet; the others take the next ones
LOG_LINES = 40


def measure_engines(config: ServeConfig, progress: Progress) -> list[PhaseTimes]:
    """Return the times of all phases, each engine's interleaved with the others'.

    Raises:
        RankFailedError: an engine failed; the details are the end of its log.
        HostsUnavailableError: this machine cannot simulate hosts.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "model").mkdir()
        save_model(config, folder / "model")
        many = len(set(config.host_of))
        hosts = stack.enter_context(Hosts(many, config.link_rate)) if many > 1 else None
        try:
            engines = _engines(config, folder, hosts, stack)
            return [
                _measure(config, kind, size, engines, progress)
                for kind, sizes in (("prefill", config.prompts), ("decode", config.batches))
                for size in sizes
            ]
        except EngineFailedError as error:
            raise RankFailedError(str(error), _logs(folder)) from None


def _engines(
    config: ServeConfig, folder: Path, hosts: Hosts | None, stack: ExitStack
) -> dict[str, HostedEngine]:
    """Return the engines, ready; ``stack`` ends them."""
    engines = {}
    forms = ("stock", "flux", *(("alone",) if config.alone else ()))
    for number, form in enumerate(forms):
        options = EngineOptions(
            model=str(folder / "model"),
            ranks=1 if form == "alone" else config.world,
            dtype=config.dtype,
            max_tokens=config.most_tokens,
            threads=config.threads,
            kv_cache_mb=1024,
            seed=config.seed,
        )
        engine = HostedEngine(
            options,
            None if form == "alone" else hosts,
            folder / f"log-{form}",
            environment={
                "FLUX_VLLM": "0" if form == "stock" else "1",
                "FLUX_LAYER_TIMEOUT_S": str(config.timeout_s),
            },
            python=sys.executable,
            port=PORT + number,
        )
        engines[form] = stack.enter_context(engine)
    for engine in engines.values():
        engine.wait_until_ready(READY_S)
    return engines


def _logs(folder: Path) -> str:
    """Return the end of each host's log."""
    return "\n".join(
        "\n".join(
            [f"{path.parent.name}, {path.stem}:", *path.read_text().splitlines()[-LOG_LINES:]]
        )
        for path in sorted(folder.glob("log-*/*.log"))
    )


def _measure(
    config: ServeConfig,
    kind: str,
    size: int,
    engines: dict[str, HostedEngine],
    progress: Progress,
) -> PhaseTimes:
    """Return the times of one phase."""
    vocabulary = config.vocabulary if not config.has_config else 256
    generator = torch.Generator().manual_seed(config.seed + size)
    rows, length = (1, size) if kind == "prefill" else (size, config.context)
    prompts = torch.randint(vocabulary, (rows, length), generator=generator).tolist()
    count = 1 if kind == "prefill" else config.tokens + 1
    time_of: Callable[[Answer], float] = (
        (lambda answer: answer.first_s)
        if kind == "prefill"
        else (lambda answer: answer.rest_s / config.tokens)
    )
    names = list(engines)
    times: dict[str, list[float]] = {name: [] for name in names}
    different = 0.0
    for index in range(-config.warmup, config.repeats):
        progress(f"{kind} {size}", index + config.warmup, config.warmup + config.repeats)
        shift = index % len(names)
        answers = {}
        for name in names[shift:] + names[:shift]:
            time.sleep(IDLE_S)
            answers[name] = engines[name].generate(prompts, count, ANSWER_S)
        for name, answer in answers.items():
            different = max(different, _share_of_others(answer, answers["stock"]))
            if index >= 0:
                times[name].append(time_of(answer) * 1e3)
    if different and config.dtype == "float32":
        complaint = f"{kind} {size}: {different:.0%} of the tokens differ from stock's"
        return PhaseTimes(kind, size, {}, different, complaint)
    return PhaseTimes(kind, size, times, different)


def _share_of_others(answer: Answer, stock: Answer) -> float:
    """Return the share of tokens that are not stock's."""
    pairs = [
        (ours, theirs)
        for row, expected in zip(answer.tokens, stock.tokens, strict=True)
        for ours, theirs in zip(row, expected, strict=True)
    ]
    return sum(ours != theirs for ours, theirs in pairs) / len(pairs)
