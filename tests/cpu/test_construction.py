"""Constructors end when a peer is silent, on Ctrl-C and with the program."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux import Collectives, PeerDiedError, PeerFailedError, PeerTimeoutError
from flux.core.env import LAYER_TIMEOUT_S
from flux.ops.pool import OpPool
from flux.transport.exchange import Exchange
from harness import BUSY, fresh_ranks, run_ranks, shared_mappings
from reference import OPS
from scripts import programs

SIZES: dict[str, Any] = {"max_m": 8, "n": 8, "k": 8}
SLACK_S = 1.5 * BUSY


def _patient_group() -> dist.ProcessGroup:
    """Return a group with the default timeout of half an hour."""
    group = dist.new_group(timeout=timedelta(minutes=30))
    assert group is not None
    dist.barrier(group)  # connected
    return group


def _silence() -> None:
    """Wait until the other ranks are done."""
    cast(Any, distributed_c10d)._get_default_store().wait(["done"], timedelta(seconds=60))


def _done() -> None:
    cast(Any, distributed_c10d)._get_default_store().set("done", "")


def _silent_peer(rank: int, world: int, op: str, where: str | None) -> list[str]:
    """Let rank 1 stop before the exchange ``where``; return the error on rank 0."""
    group = _patient_group()
    if rank == 1:
        if where is None:
            _silence()
            return []
        with (
            mock.patch(where, side_effect=lambda *_: _silence()),
            pytest.raises(Exception),  # noqa: B017  rank 0 is gone
        ):
            OPS[op](group=group, **SIZES, timeout_s=2.0)
        return []
    heard = []
    for limit_s in (2.0, 0.0):  # the second time it need not even wait
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError) as raised:
            OPS[op](group=group, **SIZES, timeout_s=2.0)
        assert limit_s - 0.1 <= time.monotonic() - began < limit_s + SLACK_S
        heard.append(str(raised.value))
    assert shared_mappings() == 0
    _done()
    return heard


@pytest.mark.parametrize(
    ("op", "where"),
    [
        ("ag_gemm", None),
        ("gemm_rs", "flux.ops.base.choice.choose"),
        ("ag_gemm", "flux.transport.shm.create"),
    ],
)
def test_a_silent_peer_is_waited_for_no_longer_than_timeout(op: str, where: str | None) -> None:
    first, second = run_ranks(2, _silent_peer, op, where, timeout=60.0, fresh=True)[0]
    label = OPS[op].__name__
    limit = "(timeout_s, 2 s at least)"
    assert f"{label}: rank 0 waited more than 2 s {limit} for its peers to" in first
    assert f"{label}: rank 0 stopped waiting for its peers earlier" in second


def _late_to_connect(rank: int, world: int) -> str:
    """Build an op on several hosts; rank 1 does not connect."""
    os.environ["FLUX_HOST"] = str(rank)
    group = _patient_group()
    if rank == 1:
        with (
            mock.patch("torch.distributed.ProcessGroupGloo", side_effect=lambda *_: _silence()),
            pytest.raises(Exception),  # noqa: B017
        ):
            OPS["gemm_rs"](group=group, **SIZES, timeout_s=2.0)
        return ""
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError) as raised:
        OPS["gemm_rs"](group=group, **SIZES, timeout_s=2.0)
    assert time.monotonic() - began < 2 * (2.0 + SLACK_S)  # it also tells why it goes
    _done()
    return str(raised.value)


def test_peer_that_does_not_connect_raises() -> None:
    heard = run_ranks(2, _late_to_connect, timeout=60.0, fresh=True)[0]
    assert "GemmRS: rank 0" in heard and ("connect" in heard), heard


def _interrupted(rank: int, world: int) -> None:
    group = _patient_group()
    if rank == 1:
        _silence()
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        OPS["ag_gemm"](group=group, **SIZES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert time.monotonic() - began < SLACK_S
    _done()


def test_ctrl_c_interrupts_construction() -> None:
    run_ranks(2, _interrupted, timeout=60.0, fresh=True)


ENDS = """
import os, select, signal, sys, types
from datetime import timedelta
import torch
import torch.distributed as dist
import flux

child = os.fork()
rank = int(child == 0)
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
dist.barrier()
if rank == 1:
    signal.pause()
try:
    flux.AGGemm(max_m=8, n=8, k=8, timeout_s=0.2)
except flux.PeerTimeoutError:
    pass

class Last:
    \"\"\"Goes when the interpreter is being finalized; the peer ends then.\"\"\"

    def __del__(self, child=child, kill=os.kill, wait=select.select):
        kill(child, 9)
        wait([], [], [], 0.3)

sys.modules["last"] = types.ModuleType("last")
sys.modules["last"].kept = Last()
sys.exit(3)
"""


def test_program_ends_normally_while_a_rank_waits(tmp_path: Path) -> None:
    """A thread that came back from torch meanwhile aborted the process."""
    (done,) = programs(ENDS, tmp_path, [[str(tmp_path / "store")]])
    assert done.returncode == 3, done.stderr


LATE = """
import atexit, select, sys, types
from datetime import timedelta
import torch.distributed as dist

late = []
# Registered ahead of flux, so it runs behind all of flux's handlers.
atexit.register(lambda: late.append(Abandonable(lambda: store.wait(["never"], limit))))
from flux.transport.threads import Abandonable

store, limit = dist.HashStore(), timedelta(seconds=0.2)

class Last:
    \"\"\"Goes when the interpreter is being finalized; the wait in torch ends meanwhile.\"\"\"

    def __del__(self, wait=select.select):
        wait([], [], [], 1.0)

sys.modules["last"] = types.ModuleType("last")
sys.modules["last"].kept = Last()
sys.exit(3)
"""


def test_wait_started_after_the_exit_handlers_is_not_entered() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 3, done.stderr


def _dies_between(rank: int, world: int) -> float | None:
    """The opposite rank ends between two exchanges; after how long this rank hears of it.

    Nobody gives the group up before all have heard, so no connection but the dead rank's breaks.
    """
    group = _patient_group()
    exchange = Exchange(group, "AGGemm", timeout_s=60.0)
    exchange.all_gather(rank)
    if rank == 2:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError):
        exchange.all_gather(rank)
    took = time.monotonic() - began
    store = cast(Any, distributed_c10d)._get_default_store()
    store.add("heard", 1)
    while store.add("heard", 0) < world - 1:
        time.sleep(0.01)
    return took


def test_a_death_is_noticed_by_ranks_that_exchange_nothing_with_the_dead_one() -> None:
    with fresh_ranks(4) as ranks:
        ranks.start(_dies_between)
        told = ranks.collect(timeout=30.0, grace=20.0)
    took = [one.value for rank, one in enumerate(told) if one is not None and rank != 2]
    assert len(took) == 3 and all(one is not None and one < SLACK_S for one in took), told


def _dies_while_others_connect(rank: int, world: int, hosts: int) -> tuple[float, str] | None:
    """Rank 3 ends where it is to connect; after how long this rank hears of it, and what."""
    os.environ["FLUX_HOST"] = str(rank * hosts // world)
    group = _patient_group()
    exchange = Exchange(group, "AGGemm", timeout_s=60.0)
    exchange.all_gather(rank)

    def connect() -> None:
        dist.ProcessGroupGloo(
            dist.PrefixStore("connect", cast(Any, distributed_c10d)._get_default_store()),
            rank,
            world,
            timedelta(seconds=60),
        )

    if rank == 3:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(PeerTimeoutError) as raised:
        exchange.within("connect", connect)
    took = time.monotonic() - began
    assert isinstance(raised.value, PeerDiedError) == (hosts == 1 or rank == 2)
    exchange.tell_failure(raised.value, 60.0)  # nobody to tell: a group that lost a rank is left
    assert time.monotonic() - began < took + SLACK_S
    return took, str(raised.value)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_death_while_ranks_connect_is_noticed(hosts: int) -> None:
    """Those on its host see its process, the others read in the store that these gave up."""
    with fresh_ranks(4) as ranks:
        ranks.start(_dies_while_others_connect, hosts)
        told = ranks.collect(timeout=30.0, grace=20.0)
    heard = [one.value for one in told[:3] if one is not None and one.value is not None]
    assert len(heard) == 3 and all(took < 5.0 * BUSY for took, _ in heard), told
    assert "rank 3 died (process " in heard[2][1]


def _fails_late(rank: int, world: int) -> None:
    sizes: dict[str, Any] = {**SIZES, "tuning": "off"}
    with mock.patch.dict("os.environ", FLUX_CHECK="1"):
        watched = mock.PropertyMock(side_effect=OSError("no room") if rank == 1 else None)
        with (
            mock.patch("flux.ops.base.UnfusedBackend.watched", watched),
            pytest.raises((OSError, PeerFailedError), match="no room"),
        ):
            OPS["ag_gemm"](**sizes)
        with OPS["ag_gemm"](**sizes) as op:
            op(torch.zeros(2, 8), torch.zeros(8 // world, 8))


def test_op_numbers_agree_among_ranks_after_a_failure() -> None:
    run_ranks(2, _fails_late, timeout=60.0, fresh=True)


def test_ops_wait_as_long_for_a_peer_as_layers() -> None:
    """A checkpoint or a compilation on one rank takes longer than a minute."""
    for kind in (*OPS.values(), Collectives, OpPool.recent, OpPool.agree):
        default = inspect.signature(kind).parameters["timeout_s"].default
        assert default == LAYER_TIMEOUT_S.default, kind
