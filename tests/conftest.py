"""Settings common to all tests."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from flux.bench.hosts import Hosts, HostsUnavailableError

# Whatever has been tuned on this machine must not decide what tests run; ranks inherit it.
os.environ["FLUX_TUNE_CACHE"] = tempfile.mkdtemp(prefix="flux-test-tune-")


def _remove_winners(folder: str, process: int) -> None:
    """Remove the folder; not in a forked child that ends normally."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove_winners, os.environ["FLUX_TUNE_CACHE"], os.getpid())

pytest_plugins = ["browser", "device_fixtures", "fake_nvshmem", "kernel_sandbox"]

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


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """``make_hosts(count, link_rate)``: hosts and links for one test (flux/bench/hosts.py).

    Skips the test, with the reason, on machines that cannot make them.
    """
    with contextlib.ExitStack() as stack:

        def make(count: int, link_rate: str | None = None) -> Hosts:
            try:
                return stack.enter_context(Hosts(count, link_rate))
            except HostsUnavailableError as error:
                pytest.skip(str(error))

        yield make
