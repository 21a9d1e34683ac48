"""Running a Python file or a command as its reader would: by itself, or under torchrun.

An interpreter that imports torch takes seconds, and a command that starts ranks imports it twice.
So most tests use ``forked``: processes of the test ranks' server, which has torch already. Tests of
a program's end use ``programs``: there the interpreter ends as it does without multiprocessing.
Tests of the start, and those that interrupt a command, start interpreters.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.forkserver as server
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import arbitrary_address, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flux.launch.spawn import end_with_parent
from harness import start_forked

ROOT = Path(__file__).resolve().parents[2]
# What pyproject.toml has on sys.path for tests, for programs that import what tests share.
SUPPORT = [str(ROOT / name) for name in ("tools", "tests/support", "tests/support/emulation")]


# -- real interpreters -----------------------------------------------------------------------------


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


# -- forked processes ------------------------------------------------------------------------------


def _become(
    arguments: Sequence[str], environment: dict[str, str], folder: str, cwd: str
) -> NoReturn:
    """Run in a forked process what ``python ARGUMENTS`` would, and end the process."""
    os.setsid()  # a group of its own, which is killed as one
    end_with_parent()
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    # Under PYTHONUNBUFFERED a line and its end are two writes: another rank may print in between.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    multiprocessing.process._parent_process = None
    _serve_forks()
    status: Any = 1
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve_forks() -> None:
    """Have multiprocessing fork this process's children from a copy of it: no new server."""
    own = server._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(arbitrary_address("AF_UNIX"))
        listener.listen()
        alive, own._forkserver_alive_fd = os.pipe()
        own._forkserver_address = listener.getsockname()
        own._forkserver_pid = os.fork()
        if own._forkserver_pid == 0:
            os.close(own._forkserver_alive_fd)
            own._forkserver_pid = None
            server.main(listener.detach(), alive, [])  # ends by SystemExit
        os.close(alive)


def start_forked_command(
    arguments: Sequence[str],
    folder: Path,
    settings: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Any:
    """A forked process that leads its own session, and prints into ``folder``, out and err."""
    environment = {**os.environ, **(settings or {})}
    return start_forked(_become, arguments, environment, str(folder), str(cwd), daemon=False)


def processes_of_session(number: int) -> list[int]:
    """The processes of a session that have not ended; a forked command leads its own."""
    import psutil  # a bare machine with a GPU may lack it

    running = []
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(pid) == number and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
    return running


@dataclass
class Ended:
    """How processes ended: the first status that is not 0, all that they printed, their numbers."""

    returncode: int
    stdout: str
    stderr: str
    pids: list[int]


def forked(
    *arguments: str, ranks: int = 0, timeout_s: float, settings: Mapping[str, str] | None = None
) -> Ended:
    """Run ``python ARGUMENTS`` in a forked process, or in ``ranks`` of them as torchrun would.

    Raises:
        AssertionError: it took longer than ``timeout_s``; the message has what was printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="flux-forked-"))
    store = None
    if ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: dict[int, Any] = {}

    def printed(name: str) -> str:
        return (folder / name).read_text() if (folder / name).exists() else ""

    try:
        for rank in range(max(ranks, 1)):
            joined = _as_torchrun(rank, ranks, store.port) if store is not None else {}
            process = start_forked_command(arguments, folder, {**(settings or {}), **joined})
            processes[process.sentinel] = process
        running, deadline = set(processes), time.monotonic() + timeout_s
        status = 0
        while running:
            ended = wait(running, max(0.0, deadline - time.monotonic()))
            if not ended:
                break
            running -= set(ended)
            codes = [processes[sentinel].exitcode for sentinel in ended]
            if status == 0 and any(codes):
                status = next(code for code in codes if code)
                deadline = min(deadline, time.monotonic() + 5.0)  # torchrun ends the others
        assert not running or status, f"hangs after {timeout_s:g} s:\n{printed('err')}"
        pids = [process.pid for process in processes.values()]
        return Ended(status, printed("out"), printed("err"), pids)
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which torchrun's ranks find each other."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "none"}
    return {"OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}


# -- programs that come to their end ---------------------------------------------------------------

# A child runs the program at the top level of this script, and comes to its end.
_FORKS = """
import json, os, sys
import torch, torch.distributed, flux, flux.ops

for line in sys.stdin:
    request, ranks = json.loads(line), []
    for arguments, out, err in request:
        pid = os.fork()
        if pid == 0:
            break
        ranks.append(pid)
    else:
        print(json.dumps(ranks), flush=True)
        print(json.dumps([os.waitpid(pid, 0)[1] for pid in ranks]), flush=True)
        continue
    break
else:
    sys.exit()
for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_CREAT | os.O_WRONLY),
                            (2, err, os.O_CREAT | os.O_WRONLY)):
    os.dup2(os.open(name, flags), number)
sys.argv = arguments
with open(arguments[0]) as program:
    exec(compile(program.read(), arguments[0], "exec"))
"""


class _Programs:
    """An interpreter that has imported flux and forks programs, one run at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, request: Sequence[Any], timeout_s: float) -> list[int]:
        """Statuses of the processes, as ``subprocess`` gives them; kills them after the timeout."""
        process, late = self._process, threading.Event()
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        pids = json.loads(process.stdout.readline())

        def kill() -> None:
            late.set()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        limit = threading.Timer(timeout_s, kill)
        limit.start()
        statuses = json.loads(process.stdout.readline())
        limit.cancel()
        assert not late.is_set(), f"programs did not end within {timeout_s:g} s"
        return [os.waitstatus_to_exitcode(status) for status in statuses]


_programs: list[_Programs] = []


def programs(
    text: str, folder: Path, arguments: Sequence[Sequence[str]], timeout_s: float = 60.0
) -> list[Ended]:
    """Run a program once with each list of arguments, side by side, to its very end.

    Raises:
        AssertionError: they did not end in time; the message has what they wrote.
    """
    script = folder / "program.py"
    script.write_text(text)
    count = range(len(arguments))
    files = [[str(folder / f"{number}.{kind}") for kind in ("out", "err")] for number in count]
    if not _programs:
        _programs.append(_Programs())
    request = [([str(script), *each], *names) for each, names in zip(arguments, files, strict=True)]
    try:
        statuses = _programs[0].run(request, timeout_s)
    except AssertionError as error:
        written = [[Path(name).read_text() for name in names] for names in files]
        raise AssertionError(f"{error}: {written}") from None
    except BaseException:  # a Ctrl-C: the next run must not hear this one's answer
        _programs.pop()._process.kill()
        raise
    return [
        Ended(status, Path(out).read_text(), Path(err).read_text(), [])
        for status, (out, err) in zip(statuses, files, strict=True)
    ]


# -- what tests call -------------------------------------------------------------------------------


def under_torchrun(*command: str, timeout_s: float) -> str:
    """What two ranks of ``command`` print; AssertionError with their complaints if they fail.

    Args:
        *command: as for python.
        timeout_s: limit of the whole run.
    """
    done = forked(*command, ranks=2, timeout_s=timeout_s, settings={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_script(
    script: Path,
    ranks: int = 0,
    timeout_s: float = 200.0,
    arguments: Sequence[str] = (),
    real: bool = False,
) -> str:
    """Run ``script``, as under torchrun when ``ranks`` is given; returns what it printed.

    ``real`` starts interpreters, and torchrun itself.

    Raises:
        AssertionError: it failed, took too long, or used what its readers will soon have to change;
            the message holds its output.
    """
    # Poisoned, so that memory which nobody wrote cannot pass for a result.
    settings = {"FLUX_POISON": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    run = _interpreted if real else forked
    done = run(str(script), *arguments, ranks=ranks, timeout_s=timeout_s, settings=settings)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{script.name} exited with {done.returncode}:\n{output}"
    for complaint in ("leaked", "DeprecationWarning", "FutureWarning"):
        assert complaint not in output, output
    return done.stdout


def _interpreted(
    *command: str, ranks: int = 0, timeout_s: float, settings: Mapping[str, str] | None = None
) -> Ended:
    """``forked``, by an interpreter of its own, or by torchrun."""
    process = subprocess.Popen(
        [*(torchrun(ranks) if ranks else [sys.executable]), *command],
        cwd=ROOT,
        env={**os.environ, **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own: killing only torchrun would leave its ranks
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:  # a Ctrl-C too
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        message = f"hangs after {timeout_s:g} s:\n{output}{errors}"
        raise AssertionError(message) from None
    return Ended(process.returncode, output, errors, [process.pid])
