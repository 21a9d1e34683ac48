"""A forked child that ends normally does not touch resources of its parent."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from emulated_processes import Emulated
from flux.launch.hosts import Hosts
from harness import run_ranks
from reference import Problem
from scripts import programs

# torch's own group is a different matter: its destructor waits in a child for threads that are not
# there. The child keeps it, so that only what flux holds is looked at.
SCRIPT = """
import ctypes, gc, os, signal, sys, time, weakref, torch, torch.distributed as dist, flux
rank, how = int(sys.argv[1]), sys.argv[3]
os.environ["FLUX_HOST"] = "ab"[rank]
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
op = flux.AGGemm(max_m=4, n=2, k=3, timeout_s=20)

def call():
    assert torch.equal(op(torch.ones(2, 3), torch.ones(1, 3)), torch.full((4, 1), 3.0))

call()
dist.barrier()
if how == "closed":
    op.close()
network = weakref.ref(op._backend.network)  # its sends keep the connections
child = os.fork()
if child == 0:
    signal.alarm(10)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    if how == "exits":
        sys.exit()
    op.close()
    del op
    gc.collect()
    os._exit(0 if network() else 3)
_, status = os.waitpid(child, 0)
assert status == 0, f"the child ended with {status}"
for _ in range(0 if how == "closed" else 3):
    call()
op.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["exits", "drops", "closed"])
def test_connections_survive_the_end_of_a_forked_child(how: str, tmp_path: Path) -> None:
    each = [(str(rank), str(tmp_path / "store"), how) for rank in range(2)]
    ended = programs(SCRIPT, tmp_path, each)
    assert [one.returncode for one in ended] == [0, 0], ended
    assert [one.stdout for one in ended] == ["done\n"] * 2, ended


def _drop_in_a_child(rank: int, world: int, library: Path) -> None:
    """Streams and communicators of an op on GPUs are there as before when a child has let go."""
    here = Emulated(rank, library, rank)
    op = Problem("ag_gemm", 8, (4,), 8, torch.bfloat16).build(backend="cuda")

    def alive() -> tuple[int, int]:
        return here.device.streams(), here.nccl.emulated_nccl_alive()

    before = alive()
    assert before[0] > 0 and before[1] == 1
    child = os.fork()
    if child == 0:
        op.close()
        del op
        gc.collect()
        os._exit(0 if alive() == before else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child destroyed its parent's streams or communicator"
    op.close()
    del op
    here.close()


def test_a_forked_child_leaves_the_gpu_and_nccl_alone(emulator: Path) -> None:
    run_ranks(2, _drop_in_a_child, emulator, timeout=60.0, fresh=True)


def test_a_forked_child_leaves_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    monkeypatch.setattr("flux.launch.hosts.check_available", lambda: None)
    monkeypatch.setattr("flux.launch.hosts._FOLDER", Path("/"))
    monkeypatch.setattr("flux.launch.hosts._remove", removed.append)
    hosts = Hosts(1)
    hosts.names, hosts.switch = ["proc"], "tmp"  # as good as any that exist below _FOLDER
    child = os.fork()
    if child == 0:
        hosts.close()
        os._exit(len(removed))
    assert os.waitpid(child, 0)[1] == 0, "the child removed its parent's hosts"
    hosts.close()
    assert removed == ["proc", "tmp"]
