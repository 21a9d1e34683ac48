"""Settings common to all tests."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import harness
from flux.launch.hosts import Hosts, HostsUnavailableError

pytest_plugins = [
    "side_by_side",
    "browser",
    "device_fixtures",
    "gpu_cases",
    "emulated_nvshmem",
    "kernel_sandbox",
]

# "ci" draws the same examples on every run, so that a red build means that the change is at fault.
# Look further with HYPOTHESIS_PROFILE=explore.
# A bare machine with a GPU may lack hypothesis, which the tests that run there do without.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("ci", derandomize=True, deadline=None, database=None)
    settings.register_profile(
        "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Have all processes of the tests put their temporary files where pytest removes them.

    A process that is killed leaves its own behind, which some tests do and a Ctrl-C may.
    Winners go there too: what has been tuned on this machine must not decide what tests run.
    """
    from side_by_side import common_folder  # a plugin, which pytest imports after this file

    folder = tmp_path_factory.mktemp("temporary")
    winners = folder / "flux-test-tune"
    winners.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # What torch.compile has compiled serves the next run too, as it would without this.
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
        # A compiler takes half the time for Inductor's code if it need not optimise it, and gains
        # nothing then by headers that each worker compiles first.
        patch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
        patch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        # Threads of OpenMP that wait for work would spin on cores that other tests need.
        patch.setenv("OMP_WAIT_POLICY", "passive")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("FLUX_TUNE_CACHE", str(winners))
        names = ("TMPDIR", "FLUX_TUNE_CACHE")
        harness.rank_environment.update({name: os.environ[name] for name in names})
        if hasattr(pytestconfig, "workerinput"):
            torch.set_num_threads(1)  # too late for the variable above: torch is loaded
            harness.share_server(common_folder(pytestconfig))
        yield  # pytest removes its folders some runs on: processes of this one still use them


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """``make_hosts(count, link_rate)``: hosts and links for one test (flux/launch/hosts.py).

    Skips the test, with the reason, on machines that cannot make them.
    """
    with contextlib.ExitStack() as stack:

        def make(count: int, link_rate: str | None = None) -> Hosts:
            try:
                return stack.enter_context(Hosts(count, link_rate))
            except HostsUnavailableError as error:
                pytest.skip(str(error))

        yield make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print why tests were skipped, as one line a reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(re.sub(r"^Skipped: ", "", report.longrepr[2]) for report in skipped)
    if reasons:
        terminalreporter.write_sep("=", "skipped, by reason")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}")
