"""One rank's part of `flux bench serve --program transformers`.

Each rank holds the model in up to three forms, all with the same weights, and times them
interleaved:

    stock   Transformers' own tensor parallelism: gloo's all-reduce after row-parallel layers
    flux    the whole model, then flux.layers.replace_linears
    alone   the whole model on rank 0, while the other ranks wait
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from flux.bench.metrics import slowest_rank
from flux.bench.places.cpu import ProcessTimer
from flux.bench.rounds import Rounds
from flux.bench.serve import ServeConfig
from flux.bench.serve_report import PhaseTimes
from flux.core.collector import paused_collector
from flux.launch.progress import Progress, silent
from flux.launch.supervisors import all_gather

TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1}
"""Relative to the largest logit: the sums over ranks have another order in every layer."""

LAST = {"use_cache": True, "logits_to_keep": 1}
"""Options of a call that serves: only the last position needs logits."""


def measure_serving(
    job: tuple[ServeConfig, None], rank: int, progress: Progress = silent
) -> list[PhaseTimes]:
    """Run the benchmark on an initialised default process group. Collective."""
    config, _ = job
    from flux.layers import close_pools

    with TemporaryDirectory() as folder:
        models = _models(config, rank, Path(all_gather(folder)[0]))
        dist.barrier()  # rank 0 removes the folder
    try:
        with torch.inference_mode():
            runs = [_Phase(config, "prefill", size, models, rank) for size in config.prompts]
            runs += [_Phase(config, "decode", size, models, rank) for size in config.batches]
            return [run.measure(progress) for run in runs]
    finally:
        close_pools()


def save_model(config: ServeConfig, folder: Path) -> None:
    """Write the model, with random weights, into a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = Path(config.model)
    if not config.has_config:
        source = folder
        (folder / "config.json").write_text(json.dumps(config.llama))
    described = AutoConfig.from_pretrained(source)
    if config.layers:
        described.num_hidden_layers = config.layers
    torch.manual_seed(config.seed)
    model = AutoModelForCausalLM.from_config(described, dtype=config.torch_dtype)
    model.save_pretrained(folder)


def _models(config: ServeConfig, rank: int, folder: Path) -> dict[str, Any]:
    """Return the forms of the model that this rank has. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from flux.layers import replace_linears

    disable_progress_bar()
    if rank == 0:
        save_model(config, folder)
    dist.barrier()
    dtype = config.torch_dtype
    models = {"stock": _stock(folder, config.world, dtype)}
    if config.alone and rank == 0:
        models["alone"] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    parallel: Any = config.sequence_parallel
    models["flux"] = replace_linears(
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        mesh=init_device_mesh("cpu", (config.world,)),
        sequence_parallel=parallel,
    )
    return {name: model.eval() for name, model in models.items()}


def _stock(folder: Path, world: int, dtype: torch.dtype) -> Any:
    """Return the model as Transformers shards it; releases before 5.10 take tp_plan itself."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"tp_plan": "auto"}
    with suppress(ImportError, TypeError):
        from transformers.distributed import DistributedConfig

        options = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=world)}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


class _Phase:
    """Times one length of prompts, or one number of sequences that are decoded."""

    def __init__(
        self, config: ServeConfig, kind: str, size: int, models: dict[str, Any], rank: int
    ) -> None:
        self._config, self._kind, self._size, self._rank = config, kind, size, rank
        self._timer = ProcessTimer(config.world, config.threads, config.common_clock)
        generator = torch.Generator().manual_seed(config.seed + size)
        vocabulary = models["flux"].config.vocab_size
        rows, length = (1, size) if kind == "prefill" else (size, config.context)
        self._prompt = torch.randint(vocabulary, (rows, length), generator=generator)
        self._logits: dict[str, torch.Tensor] = {}
        make = self._prefill if kind == "prefill" else self._decode
        self._forms = ("stock", "flux", *(("alone",) if config.alone else ()))
        self._calls: dict[str, Callable[[], torch.Tensor | None]] = {
            form: make(form, models[form]) if form in models else lambda: None
            for form in self._forms
        }

    def measure(self, progress: Progress) -> PhaseTimes:
        """Return the times of all forms. Collective."""
        config, name = self._config, f"{self._kind} {self._size}"
        rounds = Rounds(self._calls, self._timer)
        wall: dict[str, list[float]] = {form: [] for form in self._forms}
        complaint, error = "", 0.0
        with paused_collector(collect=True):
            for index in range(-config.warmup, config.repeats):
                if self._rank == 0:
                    progress(name, index + config.warmup, config.warmup + config.repeats)
                times = rounds.run(index)
                if index in (-config.warmup, config.repeats - 1):  # the first and the last round
                    error, complaint = self._compare(rounds.last, name)
                    if complaint:
                        return PhaseTimes(self._kind, self._size, {}, error, complaint)
                if index >= 0:
                    for form, taken in times.items():
                        wall[form].append(taken.wall_ms)
        everybody = all_gather(wall)
        steps = 1 if self._kind == "prefill" else config.tokens
        slowest = {
            form: [time / steps for time in slowest_rank([times[form] for times in everybody])]
            for form in self._forms
        }
        return PhaseTimes(self._kind, self._size, slowest, error, "")

    def _prefill(self, form: str, model: Any) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            out = model(input_ids=self._prompt, **LAST)
            self._logits[form] = out.logits[:, -1]
            first: torch.Tensor = self._logits[form].argmax(-1)
            return first

        return call

    def _decode(self, form: str, model: Any) -> Callable[[], torch.Tensor]:
        out = model(input_ids=self._prompt, **LAST)
        first = out.logits[:, -1:].argmax(-1)
        cache = out.past_key_values if "past_key_values" in out else out.cache
        accepted = inspect.signature(type(model).forward).parameters
        options = {"cache" if "cache" in accepted else "past_key_values": cache, **LAST}

        def call() -> torch.Tensor:
            token, tokens = first, []
            for _ in range(self._config.tokens):
                out = model(input_ids=token, **options)
                token = out.logits[:, -1:].argmax(-1)
                tokens.append(token)
            self._logits[form] = out.logits[:, -1]
            cache.crop(-self._config.tokens)  # the next repeat decodes the same tokens
            return torch.cat(tokens, 1)

        return call

    def _compare(self, results: dict[str, object], name: str) -> tuple[float, str]:
        """Return the largest error of logits over all ranks, and a complaint about a wrong one.

        Tokens must be equal in float32. In bfloat16 two logits are often equal, so only the logits
        of a phase whose tokens are equal are compared.
        """
        expected = self._logits["stock"]
        error = 0.0
        same = True
        for form, logits in self._logits.items():
            equal = torch.equal(_tensor(results[form]), _tensor(results["stock"]))
            same &= equal
            if equal:
                error = max(error, float((logits - expected).abs().max() / expected.abs().max()))
        limit, strict = TOLERANCE[self._config.dtype], self._config.dtype == "float32"
        for rank, (worst, alike) in enumerate(all_gather((error, same))):
            # Not `worst > limit`: a NaN is wrong too.
            if not worst <= limit:
                return worst, f"{name}: logits of rank {rank} differ by {worst:.2g} from stock's"
            if strict and not alike:
                return worst, f"{name}: tokens of rank {rank} differ from stock's"
        return error, ""


def _tensor(result: object) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result
