"""vLLM's engine with one group of tensor-parallel ranks on several simulated hosts.

Each host is a process of its own: the first has vLLM's engine and answers requests, the others run
vLLM's headless executor, as `vllm serve --headless --node-rank 1` does. A host has a private
/dev/shm, so that nothing but the network joins the hosts.

    this process --JSON lines--> host 0: engine, its workers
                                 host 1: headless executor, its workers
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from flux.launch.hosts import SUBNET, Hosts, Placed
from flux.launch.spawn import pin

_CLONE_NEWNS = 0x00020000
_PR_SET_PDEATHSIG = 1
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_REQUESTS, _REPLIES = "FLUX_BENCH_REQUESTS", "FLUX_BENCH_REPLIES"  # file descriptors


END_S = 20.0
"""Seconds that vLLM's processes have to end by themselves."""
IDLE_S = 1.2
"""Seconds after a step until vLLM's processes sleep. Until then they spin: wait before another
engine is measured on the same cores."""


@dataclass(frozen=True)
class EngineOptions:
    """How vLLM's engine is built.

    Attributes:
        model: a folder with config.json; without weights they are random.
        ranks: number of tensor-parallel ranks, spread evenly over the hosts.
        dtype: of the model.
        max_tokens: longest prompt with its answer, and most tokens of one step.
        eager: False compiles the model.
        threads: OpenMP threads of a rank.
        kv_cache_mb: memory for keys and values on each rank.
        seed: of random weights.
    """

    model: str
    ranks: int = 2
    dtype: str = "float32"
    max_tokens: int = 2176
    eager: bool = True
    threads: int = 1
    kv_cache_mb: int = 256
    seed: int = 0

    def arguments(self, hosts: int, host: int, port: int) -> dict[str, Any]:
        """Return arguments of vllm.LLM and vllm.EngineArgs for one host."""
        weights = any(Path(self.model).glob("*.safetensors"))
        return {
            "model": self.model,
            "load_format": "auto" if weights else "dummy",
            "skip_tokenizer_init": True,
            "tensor_parallel_size": self.ranks,
            "distributed_executor_backend": "mp",
            "nnodes": hosts,
            "node_rank": host,
            "master_addr": f"{SUBNET}.1" if hosts > 1 else "127.0.0.1",
            "master_port": port,
            # Without them vLLM assumes one CPU device, and so one rank, on each host.
            "device_ids": list(range(self.ranks // hosts)) if hosts > 1 else None,
            "dtype": self.dtype,
            "max_model_len": self.max_tokens,
            "max_num_batched_tokens": self.max_tokens,
            "max_num_seqs": 16,
            "enforce_eager": self.eager,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": self.kv_cache_mb << 20,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Answer:
    """What the engine returned for prompts that it was given at once.

    Attributes:
        tokens: generated for each prompt.
        first_s: seconds to the first token of the last prompt to get one.
        rest_s: seconds from then on to the last token of all.
    """

    tokens: list[list[int]]
    first_s: float
    rest_s: float


class EngineFailedError(RuntimeError):
    """The engine reported an error, or its process ended."""


class HostedEngine:
    """vLLM's engine on hosts, for the duration of a ``with`` block.

    Args:
        options: of the engine.
        hosts: simulated hosts; None: this one alone.
        log: folder for the output of each host's processes.
        environment: variables beside those of this process, such as ``FLUX_VLLM``.
        python: interpreter that has vLLM.
        port: where the ranks meet.
    """

    def __init__(
        self,
        options: EngineOptions,
        hosts: Hosts | None,
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        python: str = sys.executable,
        port: int = 29600,
    ) -> None:
        self.count = 1 if hosts is None else hosts.count
        self.processes: list[subprocess.Popen[bytes]] = []
        log.mkdir(parents=True, exist_ok=True)
        to_engine, self._requests = os.pipe()
        self._replies, from_engine = os.pipe()
        self._left = b""
        try:
            for host in range(self.count):
                name = "" if hosts is None else hosts.names[host]
                job = json.dumps([asdict(options), self.count, host, name, port])
                passed = (to_engine, from_engine) if host == 0 else ()
                with open(log / f"host{host}.log", "wb") as out:
                    process = subprocess.Popen(
                        [python, "-m", "flux.bench.serve_vllm", job],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        pass_fds=passed,
                        start_new_session=True,
                        env={
                            **os.environ,
                            **(environment or {}),
                            **({_REQUESTS: str(to_engine)} if host == 0 else {}),
                            **({_REPLIES: str(from_engine)} if host == 0 else {}),
                        },
                    )
                self.processes.append(process)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(to_engine)
            os.close(from_engine)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the engine is built.

        Raises:
            EngineFailedError: it failed, or was not ready in time.
        """
        self._reply(timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, timeout_s: float = 120.0
    ) -> Answer:
        """Return ``tokens`` greedy tokens for each prompt, and the time that they took.

        Raises:
            EngineFailedError: the engine failed, or took longer than ``timeout_s``.
        """
        self.send(prompts, tokens)
        return self.receive(timeout_s)

    def send(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Give the engine prompts; ``receive`` returns the answer."""
        request = json.dumps({"prompts": [list(p) for p in prompts], "tokens": tokens})
        os.write(self._requests, request.encode() + b"\n")

    def receive(self, timeout_s: float) -> Answer:
        """Wait for the answer to the oldest prompts without one.

        Raises:
            EngineFailedError: as ``generate``.
        """
        return Answer(**self._reply(timeout_s))

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            rest = deadline - time.monotonic()
            readable, _, _ = select.select([self._replies], [], [], max(rest, 0.0))
            if not readable:
                raise EngineFailedError(f"vLLM did not answer within {timeout_s:g} s")
            part = os.read(self._replies, 1 << 16)
            if not part:
                raise EngineFailedError("vLLM's process has ended; see its log")
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailedError(reply["error"])
        return reply

    def close(self) -> None:
        """End all processes of the engine. Idempotent."""
        for descriptor in (self._requests, self._replies):
            with suppress(OSError):  # closed before
                os.close(descriptor)
        self._requests = self._replies = -1
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.0))
            # Its workers, and the process that removes their shared memory, are in its session.
            with suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- on a host -------------------------------------------------------------------------------------


def _private_shared_memory() -> None:
    """Give this process and its children a /dev/shm of their own, as another machine has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4g") != 0
    ):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot make a private /dev/shm: {os.strerror(error)}")


def _end_with_parent() -> None:
    """Let this process end when its parent does, and SIGTERM end it as the end of a program does.

    vLLM's processes end with the one that started them, if that leaves time for it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _serve(arguments: dict[str, Any]) -> None:
    """Build the engine, then answer requests until there are no more."""
    replies = os.fdopen(int(os.environ[_REPLIES]), "w", buffering=1)
    requests = os.fdopen(int(os.environ[_REQUESTS]))
    try:
        from vllm import LLM, SamplingParams

        engine = LLM(**arguments).llm_engine
        replies.write("{}\n")
        for number, line in enumerate(requests):
            request = json.loads(line)
            sampling = SamplingParams(
                temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False
            )
            tokens: dict[str, list[int]] = {}
            began = time.perf_counter()
            for index, prompt in enumerate(request["prompts"]):
                name = f"{number}-{index}"
                tokens[name] = []
                engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            first = 0.0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    name = output.request_id.rpartition("/")[2]
                    tokens[name] = list(output.outputs[0].token_ids)
                if not first and all(tokens.values()):
                    first = time.perf_counter()
            rest = time.perf_counter() - first
            reply = {"tokens": list(tokens.values()), "first_s": first - began, "rest_s": rest}
            replies.write(json.dumps(reply) + "\n")
    except Exception as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise


def _work(arguments: dict[str, Any]) -> None:
    """Run the ranks of a host without an engine until one of them ends."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**arguments).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def _main(job: str) -> None:
    _end_with_parent()
    fields, count, host, namespace, port = json.loads(job)
    options = EngineOptions(**fields)
    if namespace:
        Placed(namespace, host).enter()
        _private_shared_memory()
        os.environ["VLLM_HOST_IP"] = f"{SUBNET}.{host + 1}"
        # Else the kernel often wakes a rank on the core of the one that sends to it from another
        # host: the two take turns then, and a token takes up to twice the time.
        pin(host, count, options.ranks // count * options.threads)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    (_serve if host == 0 else _work)(options.arguments(count, host, port))


if __name__ == "__main__":
    _main(sys.argv[1])
