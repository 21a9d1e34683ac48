"""Programs end with the expected status, never by an abort, and their peers raise."""

from __future__ import annotations

import _thread
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from flux.transport import threads
from harness import STRESS, stress_only
from scripts import ROOT, programs

# The end of rank 0 lasts until rank 1, which it lets go, is gone: that wakes threads in gloo.
_START = '''
import os, signal, sys, threading, time
import torch, torch.distributed as dist, flux
from flux.transport import network as send_recv
from flux.transport.exchange import Exchange

rank, folder = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)

def op(network=False, **options):
    os.environ["FLUX_HOST"] = f"host{rank}" if network else ""
    built = flux.AGGemm(max_m=8, n=8, k=8, **options)
    built(torch.ones(4, 8), torch.ones(4, 8), m=8)
    return built

class LateEnd:
    """Collected after the interpreter began to end, when globals are gone."""
    def __init__(self):
        flags = os.O_CREAT | os.O_WRONLY
        self.steps = [lambda make=os.open, path=folder + "/go": make(path, flags),
                      lambda sleep=time.sleep: sleep(0.5)]
    def __del__(self):
        for step in self.steps:
            step()

if rank == 0:
    sys.late_end = LateEnd()  # what sys has goes last

def wait_for_go():
    while not os.path.exists(folder + "/go"):
        time.sleep(0.005)
    os._exit(0)
'''


def _ends(folder: Path, body: str) -> list[tuple[int, str]]:
    """Status and stderr of two ranks that run ``body``."""
    each = [(str(rank), str(folder)) for rank in range(2)]
    ended = programs(_START + textwrap.dedent(body), folder, each)
    return [(one.returncode, one.stderr) for one in ended]


def _check_rank_0(ended: list[tuple[int, str]], error: str) -> None:
    status, text = ended[0]
    assert status == 1, text
    assert error in text
    assert "terminate called" not in text


def test_program_ends_with_a_daemon_thread_in_a_native_wait(tmp_path: Path) -> None:
    """The thread takes the GIL while the interpreter ends, without an interrupt."""
    body = """
    if rank == 1:
        wait_for_go()
    from flux import _C
    pads = [torch.zeros(_C.pad_bytes(4), dtype=torch.uint8) for _ in range(2)]
    addresses = [pad.data_ptr() for pad in pads]
    engine = _C.Engine(rank=0, pads=addresses, data=addresses, remote=[False, False], row_bytes=8,
                       slot_bytes=8, result_offset=0, data_bytes=8, dtype=0, signals=4)
    inside = threading.Event()
    def wait():
        inside.set()
        engine.await_agreement(1)  # which rank 1 never enters
    threading.Thread(target=wait, daemon=True).start()
    inside.wait()
    sys.late_end.steps.insert(0, engine.end_call)  # ends the wait, without a word to the thread
    raise ValueError("as planned")
    """
    _check_rank_0(_ends(tmp_path, body), "ValueError: as planned")


def test_program_ends_after_an_interrupted_close_between_hosts(tmp_path: Path) -> None:
    """Threads that are still in gloo end before the interpreter does."""
    body = """
    built = op(network=True)
    if rank == 1:
        wait_for_go()
    def interrupted(*arguments):
        raise RuntimeError("as Ctrl-C")
    send_recv._Link.send_header = interrupted
    built.close()
    """
    _check_rank_0(_ends(tmp_path, body), "RuntimeError: as Ctrl-C")


def test_program_ends_after_an_unreported_construction_failure(tmp_path: Path) -> None:
    """A rank that could not build an op ends while its peer still has not heard of that."""
    body = """
    exchange = Exchange(dist.group.WORLD)
    if rank == 1:
        wait_for_go()
    error = ValueError("as planned")
    exchange.tell_failure(error, 0.1)
    raise error
    """
    _check_rank_0(_ends(tmp_path, body), "ValueError: as planned")


@pytest.mark.parametrize("network", [False, True], ids=["shared_memory", "network"])
def test_peers_raise_when_a_program_ends(tmp_path: Path, network: bool) -> None:
    """The op may never be collected, for example if a compiled graph holds it."""
    body = f"""
    import ctypes
    built = op(network={network}, timeout_s=30.0)
    if rank == 0:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(built))
        raise ValueError("as planned")
    built(torch.ones(4, 8), torch.ones(4, 8), m=8)
    """
    ended = _ends(tmp_path, body)
    _check_rank_0(ended, "ValueError: as planned")
    status, text = ended[1]
    assert status == 1
    assert "PeerTimeoutError" in text
    assert "did not deliver" not in text


def test_exit_interrupts_a_call_in_progress(tmp_path: Path) -> None:
    """Exit interrupts the call; Ctrl-C ends an exit that takes too long."""
    body = """
    built = op(network=True)
    if rank == 1:
        wait_for_go()
    def call():
        try:
            built(torch.ones(4, 8), torch.ones(4, 8), m=8)
        except RuntimeError as error:
            print("told:", error, file=sys.stderr)
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not built._inside.taken:
        time.sleep(0.001)
    import atexit, weakref
    from flux.transport import threads
    memory = weakref.ref(built._backend._memory)
    part, close, parting = send_recv._Link.part, built._backend.close, threading.Event()
    def close_later(*arguments, **options):
        parting.wait(30)
        close(*arguments, **options)
    built._backend.close = close_later
    def late(link, *arguments):
        parting.set()
        thread.join(10)  # which closes the op as well; the network's threads still run
        state = f"left: {not thread.is_alive()}, memory: {memory() is not None}"
        print(state, file=sys.stderr)
        part(link, *arguments)
    send_recv._Link.part, send_recv.LINGER_S = late, 0.1  # rank 1 does not answer
    def left():  # handlers run last in, first out: this one after ours
        thread.join(30)
        print("SIGINT:", signal.getsignal(signal.SIGINT), file=sys.stderr)
    atexit.unregister(threads._at_exit)
    atexit.register(left)
    atexit.register(threads._at_exit)
    raise ValueError("as planned")
    """
    ended = _ends(tmp_path, body)
    _check_rank_0(ended, "ValueError: as planned")
    assert "told: AGGemm: closed during call" in ended[0][1]
    assert "left: True, memory: True" in ended[0][1]
    assert "SIGINT: 0" in ended[0][1] or "SIGINT: Handlers.SIG_DFL" in ended[0][1]


def test_exit_waits_for_a_thread_that_closes_the_op(tmp_path: Path) -> None:
    """Exit waits for the thread, which may be in gloo."""
    body = """
    built = op(network=True)
    if rank == 1:
        wait_for_go()
    part, inside, go_on = send_recv._Link.part, threading.Event(), threading.Event()
    def slow(link, *arguments):
        inside.set()
        go_on.wait(30)
        part(link, *arguments)
    send_recv._Link.part = slow
    network = built._backend.network
    close = network.close
    def closes(*arguments, **options):
        close(*arguments, **options)
        if threading.current_thread() is closing:
            torch.empty = None  # from now on the end may come, so it may not be called
    network.close = closes
    closing = threading.Thread(target=built.close, daemon=True)
    closing.start()
    assert inside.wait(30)
    end = threading.Thread(target=network.end, daemon=True)
    end.start()
    end.join(0.3)
    print("waits:", end.is_alive(), file=sys.stderr)
    go_on.set()
    end.join(30)
    raise ValueError("as planned")
    """
    ended = _ends(tmp_path, body)
    _check_rank_0(ended, "ValueError: as planned")
    assert "waits: True" in ended[0][1]
    assert "not callable" not in ended[0][1]


@pytest.mark.parametrize("named", [True, False])
def test_exit_waits_for_gloo(named: bool) -> None:
    """Threads of gloo release the tensors of a collective late, and need the GIL for it."""
    begun, done = threading.Event(), threading.Event()
    process = Path("/proc/self/comm").read_text().rstrip()

    def collective() -> None:
        name = threads.GLOO_THREAD if named else process
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # computes without the GIL
        done.set()

    _thread.start_new_thread(collective, ())  # as a thread that Python has not made
    begun.wait()
    threads._await_gloo()
    assert done.is_set()


@stress_only
@pytest.mark.timeout(200 * STRESS)
def test_programs_end_without_findings(tmp_path: Path) -> None:
    """Run cases of benchmarks/endings.py; of its endings, others here have the most likely."""
    report = tmp_path / "endings.json"
    subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/endings.py"), "--json", str(report)),
            *("--endings", "raise-one", "daemon", "raise-backward", "interrupt"),
        ],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert json.loads(report.read_text())["findings"] == 0
