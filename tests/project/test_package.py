"""Version, public names, imports and stub of the package."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import flux
from flux import _C
from harness import run_ranks

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_pyproject() -> None:
    text = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    stated = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert stated is not None
    assert flux.__version__ == stated.group(1)


def test_every_public_name_is_there() -> None:
    for name in flux.__all__:
        assert getattr(flux, name) is not None
    for name in flux.ops.__all__:
        assert getattr(flux.ops, name).__doc__


NEW_INTERPRETER = """
import json, sys

sys.modules["megatron"] = None  # not installed

def tell(what, value=None):
    print(json.dumps([what, value or [m for m in sys.modules if m.partition(".")[0] == "flux"]]))

import flux
tell("import")
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with flux.AGGemm(max_m=8, n=8, k=8) as op:
    op(torch.zeros(8, 8), torch.zeros(8, 8))
tell("op")
from flux.layers import replace_linears
try:
    flux.layers.FluxSpecProvider
except ImportError as error:
    tell("provider", str(error))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """Return what an interpreter without Megatron loads by an import and an op, and an error."""
    done = subprocess.run(
        [sys.executable, "-c", NEW_INTERPRETER], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()  # gloo says something too, in torch 2.9
    return dict(json.loads(line) for line in lines if line.startswith('["'))


def test_importing_flux_loads_little(loaded: dict[str, Any]) -> None:
    """Public names are imported at their first use: transports, kernels and tuner with them."""
    assert "flux" in loaded["import"]
    assert not [name for name in loaded["import"] if name.split(".")[1:2] not in ([], ["core"])]


def test_an_op_on_the_cpu_loads_nothing_of_gpus(loaded: dict[str, Any]) -> None:
    assert "flux.ops.ag_gemm" in loaded["op"]
    of_gpus = ("backends.cuda", "kernels.build", "kernels.registry", "symm_mem", "nvshmem")
    assert not [name for name in loaded["op"] for part in of_gpus if part in name]


def test_flux_needs_no_megatron(loaded: dict[str, Any]) -> None:
    assert "megatron" in loaded["provider"]


def test_backends_are_told_apart_by_their_package_alone() -> None:
    """The protocol of flux/core/backend.py is all that the rest knows of them."""
    classes = {"CpuBackend", "CudaBackend", "UnfusedBackend"}
    for path in ROOT.joinpath("flux").rglob("*.py"):
        if "backends" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not names & classes, f"{path}:{node.lineno}"


def _functions_of_calls(rank: int, world: int, name: str) -> list[list[tuple[str, str]]]:
    """Return file and name of the functions of flux that two calls enter.

    The first has a weight that the op has not met, the second differs from it in nothing.
    """
    with getattr(flux, name)(max_m=8, n=8, k=8, tuning=flux.Knobs(path="fused")) as op:
        x, weight = (torch.zeros(rows, 8 if name == "AGGemm" else 4) for rows in (4, 4))
        if name == "GemmRS":
            x, weight = torch.zeros(8, 4), torch.zeros(8, 4)
        op(x, weight.clone())
        entered: list[tuple[str, str]] = []

        def note(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            path = Path(code.co_filename)
            if event == "call" and path.is_relative_to(ROOT / "flux"):
                entered.append((path.relative_to(ROOT).as_posix(), code.co_name))

        calls = []
        for _ in range(2):
            entered.clear()
            sys.setprofile(note)
            try:
                op(x, weight)
            finally:
                sys.setprofile(None)
            calls.append(list(entered))
    return calls


@pytest.mark.parametrize(
    ("name", "file", "most", "most_again"),
    # With torch 2.9 one or two more than with later ones.
    [("AGGemm", "ag_gemm.py", 42, 24), ("GemmRS", "gemm_rs.py", 40, 26)],
)
def test_a_call_passes_through_the_files_that_the_docs_name(
    name: str, file: str, most: int, most_again: int
) -> None:
    text = ROOT.joinpath("docs/contribute/architecture.md").read_text(encoding="utf-8")
    section = text.split("## Following one call")[1].split("\n## ")[0]
    named = set(re.findall(r"\]\(\.\./\.\./(flux/[a-z_/]+\.py)\)", section))
    named = {path.replace("ag_gemm.py", file) for path in named}
    first, second = run_ranks(2, _functions_of_calls, name)[0]
    assert {path for path, _ in first} == named
    assert len(named) <= 8  # as CONTRIBUTING.md says
    assert len(first) <= most and len(second) <= most_again


def _declared(body: list[ast.stmt], prefix: str = "") -> dict[str, list[str] | None]:
    """What the stub has: parameters of functions, with = where there is a default; None for values.

    Private names and aliases of types are left out.
    """
    declared: dict[str, list[str] | None] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            if not any(getattr(base, "id", "") == "TypedDict" for base in node.bases):
                declared[prefix + node.name] = None
                declared |= _declared(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            decorators = [getattr(decorator, "id", "") for decorator in node.decorator_list]
            declared[prefix + node.name] = (
                None if "property" in decorators else _parameters(node.args)
            )
        elif isinstance(node, ast.AnnAssign):
            declared[prefix + ast.unparse(node.target)] = None
    return declared


def _parameters(arguments: ast.arguments) -> list[str]:
    plain = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    first = len(plain) - len(arguments.defaults)
    plain = [name + ("=" if i >= first else "") for i, name in enumerate(plain)]
    keyword = [
        argument.arg + ("=" if default is not None else "")
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    parameters = plain + (["*", *keyword] if keyword else [])
    return [name for name in parameters if name != "self"]


def _bound(module: Any, prefix: str = "") -> dict[str, list[str] | None]:
    """What the module has, from the signatures that pybind11 writes into docstrings."""
    bound: dict[str, list[str] | None] = {}
    for name in vars(module):
        if name.startswith("_") and name != "__init__":
            continue
        key, value = prefix + name, getattr(module, name)
        signature = re.match(r"(\w+)\((.*)\) -> ", getattr(value, "__doc__", None) or "")
        if isinstance(value, (ModuleType, type)):
            bound[key] = None
            bound |= _bound(value, f"{key}.")
        elif not callable(value) or signature is None:
            bound[key] = None
        else:
            bound[key] = _in_signature(signature[2])
    return bound


def _in_signature(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "(": 1, "<": 1, "]": -1, ")": -1, ">": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    names = []
    for part in parts:
        name = part.strip().split(":")[0]
        if name and name != "self":
            names.append(name + ("=" if " = " in part else ""))
    return names


def test_the_stub_matches_the_native_module() -> None:
    stub = ast.parse((ROOT / "flux" / "_C.pyi").read_text(encoding="utf-8"))
    declared, bound = (
        {
            name: parameters
            for name, parameters in names.items()
            if "__" not in name or (name.endswith("__init__") and parameters)
        }
        for names in (_declared(stub.body), _bound(_C))
    )
    assert declared.keys() == bound.keys()
    for name, parameters in bound.items():
        unnamed = parameters is not None and any(
            parameter.startswith("arg") for parameter in parameters
        )
        if unnamed:
            assert len(parameters or ()) == len(declared[name] or ()), name
        else:
            assert declared[name] == parameters, name
