"""Running a Python file as its reader would: by itself, or under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def torchrun(ranks: int) -> list[str]:
    """The start of a command. --standalone picks a free port: tests can run side by side."""
    module = "torch.distributed.run"
    return [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={ranks}"]


def start_interruptible(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command that SIGINT ends, also where pytest ignores it.

    A shell script starts its background jobs with SIGINT ignored, and children inherit that.
    """

    def restore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, text=True, preexec_fn=restore, **options)


def under_torchrun(*command: str, timeout_s: float) -> str:
    """What two ranks of ``command`` print; AssertionError with their complaints if they fail."""
    done = subprocess.run(
        [*torchrun(2), *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(
    script: Path, ranks: int = 0, timeout_s: float = 200.0, arguments: Sequence[str] = ()
) -> str:
    """Run ``script``, under torchrun when ``ranks`` is given; returns what it printed.

    Raises:
        AssertionError: it failed, took too long, or used what its readers will soon have to change;
            the message holds its output.
    """
    command = torchrun(ranks) if ranks else [sys.executable]
    # Poisoned, so that memory which nobody wrote cannot pass for a result.
    settings = {"FLUX_POISON": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own: killing only torchrun would leave its ranks
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:  # a Ctrl-C too
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise AssertionError(f"{script.name} hangs after {timeout_s:g} s:\n{output}") from None
    assert process.returncode == 0, f"{script.name} exited with {process.returncode}:\n{output}"
    for complaint in ("leaked", "DeprecationWarning", "FutureWarning"):
        assert complaint not in output, output
    return output
