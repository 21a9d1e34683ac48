"""Peers: whether each says why it is absent, and whether its adapter computes and is checked."""

from __future__ import annotations

import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from peers import byte_flux as byte_flux_adapter

import fake_byte_flux
import peer_cases
from flux.bench import launch
from flux.bench.config import BenchConfig
from flux.bench.op import Measurement
from flux.bench.peers import PEERS, load, survey, unsupported
from flux.core import env
from flux.core.knobs import Op
from flux.core.problem import Problem
from flux.launch.spawn import RankFailedError
from harness import more, nothing_left_in_shared_memory, stress_only
from scripts import ROOT

NAMES = ["async_tp", "te_userbuffers", "byte_flux", "cublasmp"]
EVERYBODY = load(ROOT / "benchmarks" / "peers")


def config(op: str = "ag_gemm", dtype: str = "bfloat16", **changes: Any) -> BenchConfig:
    sizes = {name: changes.pop(name, size) for name, size in (("m", 12), ("n", 8), ("k", 16))}
    problem = Problem(op=Op[op], dtype=dtype, world=2, **sizes)
    return BenchConfig(problem=problem, repeats=3, warmup=1, **changes)


def measured(name: str, op: str, dtype: str = "bfloat16", python: str = "") -> Measurement:
    factory = partial(peer_cases.beside_unfused, name=name, python=python)
    return launch.measured(config(op, dtype), lambda what, done, total: None, factory)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        *(("async_tp", op) for op in ("ag_gemm", "gemm_rs")),
        *more(*((name, "ag_gemm") for name in ("te_userbuffers", "cublasmp"))),
        *((name, "gemm_rs") for name in ("te_userbuffers", "cublasmp")),
    ],
)
def test_adapters_compute_the_op_and_are_checked(name: str, op: str) -> None:
    result = measured(name, op)
    assert result.complaints == []
    assert [method.name for method in result.methods] == ["unfused", name]
    peer = result.methods[1]
    assert len(peer.repeats_ms) == 3 and peer.metrics is not None and peer.knobs["path"]


def test_cublasmp_reduces_to_all() -> None:
    assert measured("cublasmp", "gemm_ar", "float32").complaints == []


def test_wrong_result_of_a_peer_hides_its_speed() -> None:
    result = measured("wrong_async_tp", "gemm_rs")
    peer = result.methods[1]
    assert peer.metrics is None and peer.repeats_ms == []
    assert any("async_tp: rank 0" in text for text in result.complaints)


# -- byte-flux, in an interpreter of its own -------------------------------------------------------


@pytest.fixture
def byte_flux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(fault: str = "pass", package: str = fake_byte_flux.PACKAGE) -> str:
        python = fake_byte_flux.make_interpreter(tmp_path, fault, package)
        monkeypatch.setenv(env.BENCH_BYTE_FLUX_PYTHON.name, str(python))
        return str(python)

    monkeypatch.setattr(byte_flux_adapter, "no_gpu", lambda: None)
    return make


def test_byte_flux_runs_in_its_own_processes(byte_flux: Any) -> None:
    python = byte_flux()
    assert byte_flux_adapter.ByteFlux().available() is None
    with nothing_left_in_shared_memory():
        result = measured("byte_flux", "ag_gemm", python=python)
    assert not list(Path(tempfile.gettempdir()).glob("flux-byte-flux-*"))
    assert result.complaints == []
    peer = result.methods[1]
    assert peer.knobs["byte_flux"] == "1.1.2"
    assert len(peer.repeats_ms) == 3
    assert peer.comm_cpu_ms is None, "its CPU time is another process's"


@stress_only  # of the interpreters, which import torch
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise ValueError('no such kernel')", "ValueError: no such kernel"),
        ("import os; os._exit(3)", "its process is gone"),
    ],
)
def test_failure_of_byte_flux_names_the_peer(fault: str, words: str, byte_flux: Any) -> None:
    python = byte_flux(fault)
    with pytest.raises(RankFailedError) as caught:
        measured("byte_flux", "gemm_rs", python=python)
    assert f"peer byte_flux: RuntimeError: {words}" in str(caught.value)


def test_another_flux_is_not_byte_flux(byte_flux: Any) -> None:
    byte_flux(package="__version__ = '0.1.0'\n")
    reason = byte_flux_adapter.ByteFlux().available()
    assert reason is not None and "is not byte-flux" in reason


def test_unusable_interpreter_makes_byte_flux_unavailable(
    byte_flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_flux(package="raise ImportError('libflux_cuda.so is missing')\n")
    reason = byte_flux_adapter.ByteFlux().available()
    assert reason is not None and reason.endswith("ImportError: libflux_cuda.so is missing")
    monkeypatch.setenv(env.BENCH_BYTE_FLUX_PYTHON.name, "/no/such/python")
    assert "is not an executable" in str(byte_flux_adapter.ByteFlux().available())
    monkeypatch.delenv(env.BENCH_BYTE_FLUX_PYTHON.name)
    assert "needs an interpreter of its own" in str(byte_flux_adapter.ByteFlux().available())


# -- who is there, and for what --------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_each_peer_says_why_it_is_unavailable() -> None:
    reasons = survey(EVERYBODY)
    assert list(reasons) == NAMES
    assert all(reason for reason in reasons.values())


def test_library_that_cannot_be_loaded_makes_the_peer_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peers import cublasmp, transformer_engine

    def broken(name: str) -> None:
        raise OSError("libcublasMp.so.0: cannot open shared object file")

    for adapter, peer in (
        (transformer_engine, transformer_engine.TransformerEngine()),
        (cublasmp, cublasmp.CublasMp()),
    ):
        monkeypatch.setattr(adapter, "no_gpu", lambda: None)
        monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(adapter.importlib, "import_module", broken)
        assert "OSError: libcublasMp.so.0: cannot open" in str(peer.available())


def test_problems_that_each_peer_does_not_support() -> None:
    cuda = {"backend": "cuda"}
    assert set(unsupported(config(**cuda), EVERYBODY).values()) == {None}
    assert set(unsupported(config("gemm_rs", **cuda), EVERYBODY).values()) == {None}
    on_cpu = unsupported(config(), EVERYBODY)
    assert all("GPUs only" in str(reason) for reason in on_cpu.values())
    virtual = unsupported(config(backend="cuda", transport="virtual"), EVERYBODY)
    assert all("--transport virtual" in str(reason) for reason in virtual.values())
    ragged = unsupported(config(m=13, **cuda), EVERYBODY)
    assert all("needs m divisible by the 2 ranks, got m=13" in str(r) for r in ragged.values())
    assert "n=9" in str(unsupported(config(n=9, **cuda), EVERYBODY)["async_tp"])
    assert "k=9" in str(unsupported(config("gemm_rs", k=9, **cuda), EVERYBODY)["async_tp"])
    everybody = unsupported(config("gemm_ar", **cuda), EVERYBODY)
    assert [name for name, reason in everybody.items() if reason is None] == ["cublasmp"]
    wide = unsupported(config(dtype="float32", **cuda), EVERYBODY)
    assert [name for name, reason in wide.items() if reason is None] == ["async_tp", "cublasmp"]


def test_peer_names_are_unique() -> None:
    assert [peer.name for peer in EVERYBODY] == NAMES
    assert len({peer.about for peer in EVERYBODY}) == len(EVERYBODY)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "not a Python package"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("", "has no attribute 'PEERS'"),
        ("from flux.bench.peers import PEERS", "need different names, got async_tp, async_tp"),
    ],
)
def test_invalid_peer_package_raises(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / f"peers_{len(words)}"
    package.mkdir()
    if text is not None:
        (package / "__init__.py").write_text(text)
    with pytest.raises(ValueError, match=re.escape(words)):
        load(package)


def test_peer_package_whose_name_is_already_imported_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "__init__.py").write_text("PEERS = ()")
    with pytest.raises(ValueError, match=re.escape(str(peers.__file__))):
        load(tmp_path / "peers")


def test_pytorch_is_the_only_peer_without_a_package() -> None:
    assert load(None) == PEERS
