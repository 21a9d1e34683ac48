"""Every kind of file that flux reads, with what may come of a damaged one.

    python tests/support/fuzz_files.py --cases 10000 --json benchmarks/results/fuzz/files.json

reads that many damaged files of each kind in this process, prints how many were accepted, refused
and set aside, and exits with 1 if one ended otherwise.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

import fuzz_plans
import suite_data
from flux.bench import page, results, suite_view
from flux.bench.model_files import model_of
from flux.bench.shapes import Layer, Shapes, layer_of, load_shapes
from flux.core.datafile import data_root, write_whole
from flux.core.events import Trace
from flux.core.knobs import Knobs, Op
from flux.core.problem import Problem
from flux.core.sparse_problem import NAMES
from flux.kernels import manifest, runtime
from flux.kernels.generator import symbol
from flux.kernels.legality import reason_illegal
from flux.kernels.manifest import DamagedLibraryError, Library
from flux.kernels.ptxas import Usage
from flux.kernels.registry import Registry
from flux.kernels.runtime import RuntimeLibrary
from flux.kernels.trust import UntrustedError
from flux.machine import host
from flux.machine.cluster import Cluster, load_cluster
from flux.machine.detection import System
from flux.plan.files import read_plan
from flux.select.cache import read, read_export
from flux.select.heuristic import resolve
from flux.select.predict import predict
from flux.select.space import Space, combinations, load_space
from flux.select.winners import DamagedEntryError
from flux.trace import read_chrome, write_chrome
from flux.trace.chrome import flows
from fuzz_tuning import (
    KERNEL,
    KEY,
    check_entries,
    check_entry,
    check_knobs,
    check_search,
    journal_text,
    load_cached,
    resume,
    sample_entry,
    seal,
    seal_all,
)
from mutate import mutation

SIZE = 2**30  # no M, N or K is larger
CPU_SECONDS = 20  # that a case may take; a thousand times what it does take
SHAPE = Problem(Op.ag_gemm, 64, 256, 128, "bfloat16", 2, 1)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: of the kind.
        file: its name in the directory of a test.
        sample: a good file, as flux writes it.
        form: ``json`` | ``toml`` | ``lines`` of JSON | ``text``.
        read: what reads it.
        errors: what ``read`` may raise, and nothing else.
        check: asserts that what was read is within the documented ranges.
        seal: puts the checksum of a changed document into it.
    """

    name: str
    file: str
    sample: bytes
    form: str
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...]
    check: Callable[[Any], None]
    seal: Callable[[Any], Any] | None = None


class HangError(BaseException):
    """A case took too much of the processor's time."""


# -- kernels ---------------------------------------------------------------------------------------


def _library(directory: Path) -> Library:
    name = f"libflux_test_{'0123456789abcdef'[:12]}"
    configs = (KERNEL, replace(KERNEL, tile=(128, 128, 64)))
    used = Usage(functions=1, registers=168)
    return Library(
        name=name,
        size=7,
        sha256="239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5",
        abi_version=1,
        arch="90a",
        nvcc="13.0.88",
        cutlass="4.2.0.0",
        flags=("-O3", "-std=c++17"),
        sources="ab" * 32,
        key="0123456789abcdef",
        kernels={symbol(config, False): config for config in configs},
        usage={symbol(config, False): used for config in configs},
        warnings=("a warning",),
        seconds=12.5,
        directory=directory,
    )


_LIBRARY = _library(Path()).name


def _read_library(path: Path) -> Library:
    (path.parent / f"{_LIBRARY}.so").write_bytes(b"payload")
    return manifest.read(path.parent)


def _check_library(library: Library) -> None:
    assert type(library.size) is int and type(library.abi_version) is int
    assert type(library.traced) is bool and math.isfinite(library.seconds)
    texts = (library.arch, library.nvcc, library.cutlass, library.sources, library.key)
    assert all(isinstance(text, str) for text in (*texts, *library.flags, *library.warnings))
    for name, config in library.kernels.items():
        assert reason_illegal(config) is None and name == symbol(config, library.traced)
        used = library.usage[name]
        assert all(type(count) is int and count >= 0 for count in used.as_dict().values())


def _registered(path: Path) -> Registry:
    root, directory = path.parent.parent, path.parent
    (directory / f"{_LIBRARY}.so").write_bytes(b"payload")
    return Registry.load([root])


def _check_registry(registry: Registry) -> None:
    for library in (*registry.libraries, *registry.stale):
        _check_library(library)


def _runtime_library() -> RuntimeLibrary:
    library = _library(Path())
    used = {name: Usage(functions=1) for name in runtime.KERNELS}
    return RuntimeLibrary(
        Path(),
        *(library.sha256, "nvidia-nvshmem-cu13", "3.3.20", ("80", "90a")),
        *(library.nvcc, library.cutlass, library.sources, library.key, used, 3.0),
    )


def _read_runtime(path: Path) -> RuntimeLibrary:
    (path.parent / f"{runtime.NAME}.so").write_bytes(b"payload")
    return runtime.read(path.parent)


def _check_runtime(library: RuntimeLibrary) -> None:
    texts = (library.package, library.nvshmem, library.sources, library.key, *library.archs)
    assert all(isinstance(text, str) for text in texts) and math.isfinite(library.seconds)
    assert all(type(used.registers) is int for used in library.ptxas.values())


# -- what users write ------------------------------------------------------------------------------


def _check_cluster(cluster: Cluster) -> None:
    device = cluster.device
    numbers = [device.memory_gb, device.memory_gbs, *device.tflops.values(), cluster.link.gbs]
    numbers += [cluster.link.latency_us, cluster.network.gbits, cluster.network.latency_us]
    assert all(type(number) is float and 0 <= number <= 1e15 for number in numbers)
    counts = (device.units, cluster.devices, cluster.hosts, cluster.numa_domains)
    assert all(type(count) is int and 1 <= count <= SIZE for count in counts)
    assert (cluster.name + device.name + device.arch).isprintable()
    for shape in ("1x1", "1x8", "2x4"):
        assert len(cluster.fingerprint(shape)) == 16
    knobs = resolve(SHAPE, Knobs())
    assert math.isfinite(sum(predict(SHAPE, cluster, knobs, None)))
    fuzz_plans.check_planned(cluster)


def _check_shapes(shapes: Shapes) -> None:
    assert shapes.sizes or shapes.sparse
    for op, *sizes in [*shapes.sizes, *(shape[:4] for shape in shapes.sparse)]:
        assert op in NAMES and all(type(size) is int and 1 <= size <= SIZE for size in sizes)
    assert all(1 <= world <= SIZE for world in shapes.tensor_parallel)
    assert shapes.problems(2)


def _check_layer(layer: Layer) -> None:
    sizes = (layer.hidden, layer.heads, layer.kv_heads, layer.head_dim, layer.intermediate + 1)
    assert all(type(size) is int and 1 <= size <= SIZE + 1 for size in sizes)


def _check_space(space: Space) -> None:
    assert 1 <= space.prune_above <= 1e15
    for knobs in islice(combinations(space, SHAPE), 20):
        check_knobs(knobs)
    for name, values in space.kernels.items():
        for value in values:
            assert isinstance(value, (str, int, tuple)), name


# -- results and traces ----------------------------------------------------------------------------


def _document() -> dict[str, Any]:
    """A short one: shapes that are done, failed, skipped and pending, a sweep, a timeline."""
    whole = suite_data.document()
    entries = whole["entries"]
    chosen = [entries[1], entries[-6], entries[-5], entries[-1]]
    chosen.append({**chosen[0], "m": 16, "status": results.PENDING})
    del chosen[-1]["result"]
    timeline = results.CallTimeline("ag_gemm", suite_data.events(tiles=2))
    return {**whole, "entries": chosen, "timeline": timeline.as_json()}


def _check_results(document: results.SuiteDocument) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    suite_view.show(document, console)
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
    page.render(document).encode()
    results.to_csv(document).encode()
    json.dumps(results.rounded(document.as_json()), allow_nan=False)


def _trace_text() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_chrome(suite_data.events(tiles=4), path, {"flux": "0.1.0"})
        return path.read_bytes()


def _check_trace(trace: Trace) -> None:
    for event in trace.events:
        assert type(event.rank) is int and isinstance(event.lane, str)
        assert abs(event.start_us) <= 1e15 and 0 <= event.duration_us <= 1e15
    list(flows(trace.events))


def _system(path: Path) -> tuple[Any, ...]:
    """What is found out of the kernel's files, all of which have this text."""
    root = path.parent.with_name("kernel")
    if not root.exists():
        for name in (
            "sys/class/infiniband/mlx5_0/ports/1/rate",
            "sys/class/net/eth0/speed",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq",
            "proc/cpuinfo",
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(path)
        (root / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("4: ACTIVE\n")
        (root / "sys/class/net/eth0/device").mkdir()
    system = System(root)
    return (system.cpu(), *system._infiniband(), *system._ethernet())


def _check_system(parts: tuple[Any, ...]) -> None:
    (_, ghz), *rates = parts
    assert all(math.isfinite(number) and number >= 0 for number in (ghz, *rates))


# -- all of them -----------------------------------------------------------------------------------


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _tuning(part: str, name: str) -> bytes:
    return (data_root() / part / f"{name}.toml").read_bytes()


def kinds() -> list[Kind]:
    """All kinds."""
    entry = f"{KEY.name}.json"
    sample = sample_entry().as_dict()
    exported, winners = {"flux_winners": 1, "entries": [sample, sample]}, _json(sample)
    library = f"{_LIBRARY}/{_LIBRARY}.json"
    built = _json(_library(Path()).as_dict())
    runtime_file = f"nvshmem_0123456789ab/{runtime.NAME}.json"
    bad = (ValueError,)
    damaged, unread = (DamagedEntryError, FileNotFoundError), (DamagedEntryError, OSError)
    broken = (DamagedLibraryError, UntrustedError)
    cpu = b"vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\ncpu MHz : 2000.5\n"
    return [
        Kind("winners", entry, winners, "json", read, damaged, check_entry, seal),
        Kind(
            *("winners in the cache", f"v1/{entry}", winners, "json"),
            *(load_cached, (), check_entry, seal),
        ),
        Kind(
            *("exported winners", "winners.json", _json(exported), "json"),
            *(read_export, unread, check_entries, seal_all),
        ),
        Kind("journal", "run.jsonl", journal_text(), "lines", resume, (OSError,), check_search),
        Kind("kernel manifest", library, built, "json", _read_library, broken, _check_library),
        Kind("kernel registry", library, built, "json", _registered, (), _check_registry),
        Kind(
            *("runtime manifest", runtime_file, _json(_runtime_library().as_dict()), "json"),
            *(_read_runtime, broken, _check_runtime),
        ),
        Kind(
            *("cluster", "c.toml", _tuning("clusters", "flux-h800"), "toml"),
            *(load_cluster, bad, _check_cluster),
        ),
        Kind(
            *("shapes of a model", "s.toml", _tuning("shapes", "llama3-8b"), "toml"),
            *(load_shapes, bad, _check_shapes),
        ),
        Kind(
            *("list of shapes", "s.toml", _tuning("shapes", "cpu-small"), "toml"),
            *(load_shapes, bad, _check_shapes),
        ),
        Kind(
            *("layer of a model", "s.toml", _tuning("shapes", "llama3-8b"), "toml"),
            *(layer_of, bad, _check_layer),
        ),
        Kind(
            *("model of a step", "s.toml", _tuning("shapes", "phi-moe"), "toml"),
            *(model_of, bad, fuzz_plans.check_model),
        ),
        Kind(
            *("config of Transformers", "c.json", fuzz_plans.CONFIG, "json"),
            *(model_of, (*bad, OSError), fuzz_plans.check_model),
        ),
        Kind(
            *("found plans", "f.json", fuzz_plans.plans_text(), "json"),
            *(lambda path: read_plan(str(path)), (*bad, OSError), fuzz_plans.check_taken),
        ),
        Kind(
            *("job of torchtitan", "j.toml", fuzz_plans.JOB, "toml"),
            *(lambda path: read_plan(str(path), gpus=16), bad, fuzz_plans.check_taken),
        ),
        Kind(
            *("configuration of DeepSpeed", "d.json", fuzz_plans.deepspeed_text(), "json"),
            *(lambda path: read_plan(str(path), gpus=4), (*bad, OSError), fuzz_plans.check_taken),
        ),
        Kind(
            *("script of Megatron", "m.sh", fuzz_plans.trainer_text("megatron"), "text"),
            *(lambda path: read_plan(str(path)), (*bad, OSError), fuzz_plans.check_taken),
        ),
        Kind(
            *("options of torchtitan", "t.sh", fuzz_plans.trainer_text("torchtitan"), "text"),
            *(lambda path: read_plan(str(path)), (*bad, OSError), fuzz_plans.check_taken),
        ),
        Kind(
            *("space of the CPU", "s.toml", _tuning("spaces", "cpu"), "toml"),
            *(load_space, bad, _check_space),
        ),
        Kind(
            *("space of GPUs", "s.toml", _tuning("spaces", "sm90a"), "toml"),
            *(load_space, bad, _check_space),
        ),
        Kind(
            *("suite results", "r.json", _json(_document()), "json"),
            *(results.load, bad, _check_results),
        ),
        Kind("trace", "t.json", _trace_text(), "json", read_chrome, (*bad, OSError), _check_trace),
        Kind("kernel's files", "text", cpu, "text", _system, (), _check_system),
        Kind(
            "kernel's rates", "text", b"400 Gb/sec (4X NDR)\n", "text", _system, (), _check_system
        ),
        Kind("kernel's numbers", "text", b"3500000\n", "text", _system, (), _check_system),
    ]


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise HangError in the body once it has computed so long. Waiting does not count, so other
    processes make no difference."""

    def stop(number: int, frame: object) -> None:
        raise HangError(f"more than {seconds} s of the processor")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(kind: Kind, path: Path) -> tuple[str, str]:
    """Read a file: (``accepted`` | ``refused`` | ``set aside``, the error or the warnings).

    Raises:
        AssertionError: a value out of its range was accepted, or an error is not one line of text.
        Exception: what ``read`` must not raise.
    """
    with warnings.catch_warnings(record=True) as caught, cpu_limit(CPU_SECONDS):
        warnings.simplefilter("always")
        try:
            content = kind.read(path)
        except kind.errors as error:
            how, text = "refused", str(error)
        else:
            kind.check(content)
            text = "; ".join(str(warning.message) for warning in caught)
            how = "set aside" if caught else "accepted"
    assert text.isprintable() and len(text) < 4000, f"not a line of text: {text[:4000]!r}"
    return how, text


def place(kind: Kind, folder: Path, data: bytes) -> Path:
    """Put a file where its reader looks for it, in an empty directory."""
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / kind.file
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def fuzz(kind: Kind, folder: Path, cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Read this many damaged files; return outcomes, and failures with their seeds."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for case in range(cases):
        draw = random.Random(f"{kind.name} {seed} {case}")
        data = mutation(kind.sample, kind.form, draw, kind.seal)
        path = place(kind, folder, data)
        try:
            counts[outcome(kind, path)[0]] += 1
        except (Exception, HangError) as error:
            counts["wrong"] += 1
            where = f"{kind.name}, seed {seed}, case {case}"
            failures.append(f"{where}: {type(error).__name__}: {error!s:.300}: {data[:300]!r}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damage")
    parser.add_argument("--kind", help="read only kinds whose name contains this")
    parser.add_argument("--json", type=Path, help="file to write the counts to")
    options = parser.parse_args()
    counts: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.exists():  # keep kinds that are not read now
        earlier = json.loads(options.json.read_text())
        if (earlier["seed"], earlier["cases"]) == (options.seed, options.cases):
            counts = earlier["kinds"]
    failed = False
    with tempfile.TemporaryDirectory(prefix="flux-fuzz-") as folder:
        for kind in kinds():
            if options.kind is not None and options.kind not in kind.name:
                continue
            begin = time.monotonic()
            outcomes, failures = fuzz(kind, Path(folder) / "files", options.cases, options.seed)
            counts[kind.name] = sorted_counts(outcomes)
            seconds = time.monotonic() - begin
            print(f"{kind.name}: {counts[kind.name]}, {seconds:.0f} s", flush=True)
            for text in failures[:20]:
                print(f"  {text}")
            failed |= bool(failures)
            if options.json is not None:
                _write(options, counts)
    return int(failed)


def _write(options: argparse.Namespace, counts: dict[str, dict[str, Any]]) -> None:
    arguments = f"--cases {options.cases} --seed {options.seed} --json FILE"
    document = {
        "command": f"python tests/support/fuzz_files.py {arguments}",
        "seed": options.seed,
        "cases": options.cases,
        "versions": host.versions(),
        "kinds": counts,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.json, json.dumps(document, indent=1) + "\n")


def sorted_counts(counts: Counter[str]) -> dict[str, int]:
    """All outcomes, those that did not occur too."""
    return {name: counts[name] for name in ("accepted", "refused", "set aside", "wrong")}


if __name__ == "__main__":
    sys.exit(main())
