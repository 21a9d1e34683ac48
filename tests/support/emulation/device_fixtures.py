"""Fixtures around the emulated device, which is built once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emulated import EmulatedDevice, build, emulated_device
from side_by_side import built_once


@pytest.fixture(scope="session")
def emulator(pytestconfig: pytest.Config) -> Path:
    """The emulator of GPU and NCCL, as a shared library."""
    return built_once(pytestconfig, "emulator", build)


@pytest.fixture(scope="module")
def device(emulator: Path) -> Iterator[EmulatedDevice]:
    """An emulated device."""
    with emulated_device(emulator) as device:
        yield device


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full of NaN until it is written."""
    monkeypatch.setenv("FLUX_POISON", "1")
