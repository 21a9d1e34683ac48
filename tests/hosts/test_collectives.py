"""Collectives without a GEMM over several hosts: sums, sizes, disagreements, failures, ends.

Hosts are names here (FLUX_HOST), as in test_network.py.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flux import Collectives, PeerDiedError, PeerTimeoutError
from flux.core.env import HOST
from harness import BUSY, fresh_ranks, held, more, run_ranks, settled

PLACEMENTS = ("ab", "aabb", "aab", "abc", *more("aaa", "abab", "aabbc"))
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.complex64,
)


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Integers so small that all sums of ranks are exact in every dtype."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8, shape, generator=rng).to(dtype)


def random_calls(rank: int, world: int, hosts: str, seed: int) -> None:
    """Calls of all kinds, sizes and dtypes in turn, with pauses of this rank's own."""
    rng, own = random.Random(seed), random.Random(f"{seed} {rank}")
    with HOST.during(hosts[rank]), Collectives(timeout_s=30.0) as ranks:
        assert ranks._host is not None
        for call in range(40):
            if call % 8 == 4:
                ranks._host.native.set_delay(2e-4 if call % 16 == 4 else 0.0, seed + rank)
            dtype = rng.choice(DTYPES)
            size = rng.choice((0, 1, 3, 64, 1000, 30_001, 150_000))
            shape = rng.choice(((size,), (size, 1), (1, size), (2, size)))
            inputs = [integers(shape, dtype, 100 * call + r) for r in range(world)]
            x = inputs[rank]
            if call % 3 == 0:  # not contiguous
                x = torch.stack([x, x], -1)[..., 0]
            whole = torch.stack(inputs).sum(0, dtype=dtype)
            time.sleep(own.choice((0, 0, 0, 1e-3)))
            dim = rng.randrange(len(shape))
            kind = rng.choice(("reduce", "in place", "gather", "scatter"))
            if kind == "reduce":
                assert torch.equal(ranks.all_reduce(x), whole)
            elif kind == "in place":
                y = x.contiguous().clone()
                assert ranks.all_reduce(y, out=y) is y and torch.equal(y, whole)
            elif kind == "gather":
                assert torch.equal(ranks.all_gather(x, dim), torch.cat(inputs, dim))
            else:
                each = -(-shape[dim] // world)
                part = whole.narrow(
                    dim,
                    min(rank * each, shape[dim]),
                    max(0, min(each, shape[dim] - rank * each)),
                )
                assert torch.equal(ranks.reduce_scatter(x, dim), part), (kind, shape, dim)


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_random_calls_are_exact(hosts: str) -> None:
    run_ranks(len(hosts), random_calls, hosts, 7)


def same_bits(rank: int, world: int, hosts: str) -> list[bytes]:
    """Sums of floats of all sizes, and where they depend on the order of summation."""
    with HOST.during(hosts[rank]), Collectives() as ranks:
        results = []
        for size in (5, 5000, 100_000):
            torch.manual_seed(rank)
            results.append(ranks.all_reduce(torch.randn(size)).numpy().tobytes())
    return results


@pytest.mark.parametrize("hosts", ["aabb", "abc"])
def test_all_ranks_get_the_same_bits(hosts: str) -> None:
    first, *others = run_ranks(len(hosts), same_bits, hosts)
    assert all(other == first for other in others)


def uneven_parts(rank: int, world: int, hosts: str) -> None:
    sizes = [3, 0, 5, 1][:world]
    with HOST.during(hosts[rank]), Collectives() as ranks:
        mine = torch.full((2, sizes[rank]), rank + 1)
        whole = ranks.all_gather(mine, -1, sizes=sizes)
        assert whole.tolist() == [[r + 1 for r in range(world) for _ in range(sizes[r])]] * 2
        part = ranks.reduce_scatter(whole, 1, sizes=sizes)
        assert torch.equal(part, mine * world)
        with pytest.raises(ValueError, match="sizes"):
            ranks.all_gather(mine, 1, sizes=[1] * (world + 1))


@pytest.mark.parametrize("hosts", ["aabb"])
def test_parts_may_have_any_sizes(hosts: str) -> None:
    run_ranks(len(hosts), uneven_parts, hosts)


def disagreements(rank: int, world: int, hosts: str) -> None:
    with HOST.during(hosts[rank]), Collectives(timeout_s=20.0) as ranks:
        for culprit in range(world):
            odd = rank == culprit
            x = torch.ones(50_000)
            dist.barrier()  # a rank that refuses waits for nobody, and its next text replaces this
            with pytest.raises(ValueError, match=r"cannot sum torch.bool"):
                ranks.all_reduce(x.bool() if odd else x)
            dist.barrier()
            with pytest.raises(ValueError, match=r"ranks disagree: rank \d calls all_reduce"):
                ranks.all_reduce(x[1:] if odd else x)
            dist.barrier()
            with pytest.raises(ValueError, match=r"ranks disagree: rank \d calls"):
                ranks.all_gather(x) if odd else ranks.all_reduce(x)
            dist.barrier()
            with pytest.raises(TypeError if odd else ValueError, match="expected a tensor"):
                ranks.reduce_scatter(None if odd else x)
            assert ranks.all_reduce(x)[-1] == world


@pytest.mark.parametrize("hosts", ["ab", "aabb", "aab"])
def test_calls_that_differ_raise_on_all_ranks(hosts: str) -> None:
    run_ranks(len(hosts), disagreements, hosts)


def unusual_memory(rank: int, world: int, hosts: str) -> None:
    """Inputs that are lazy count with their values; others that have none are refused."""
    with HOST.during(hosts[rank]), Collectives(timeout_s=30.0) as ranks:
        z = torch.tensor([1 + 2j, 3 - 1j])
        conjugated = z.conj()
        negated = conjugated.imag  # lazy: -z.imag
        assert conjugated.is_conj() and negated.is_neg()
        assert torch.equal(
            ranks.all_gather(conjugated), torch.cat([z.conj().resolve_conj()] * world)
        )
        assert torch.equal(ranks.all_reduce(negated), -world * z.imag)
        assert torch.equal(ranks.all_reduce(conjugated), world * z.conj().resolve_conj())
        x = torch.arange(8.0)
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        for wrong, out, match in (
            (freed, None, "in memory"),
            (x[:4], x[2:6], "overlaps"),
            (torch.ones(4, requires_grad=True), None, "no backward"),
        ):
            with pytest.raises(ValueError, match=match):
                ranks.all_reduce(wrong, out)
        with torch.no_grad():
            assert ranks.all_reduce(torch.ones(4, requires_grad=True)).tolist() == [world] * 4


def test_lazy_tensors_have_their_values_and_freed_ones_are_refused() -> None:
    run_ranks(2, unusual_memory, "ab")


def two_at_once(rank: int, world: int, hosts: str) -> None:
    """Two objects, called by two threads."""
    with HOST.during(hosts[rank]), Collectives() as first, Collectives() as second:

        def sums(ranks: Collectives) -> None:
            for size in (1, 40_000, 7, 300_000) * 5:
                assert torch.equal(
                    ranks.all_reduce(torch.ones(size)), torch.full((size,), 1.0 * world)
                )

        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                sums(second)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        sums(first)
        thread.join()
        assert not errors


def test_two_objects_work_at_once() -> None:
    run_ranks(4, two_at_once, "aabb")


def open_and_close(rank: int, world: int, hosts: str) -> None:
    with HOST.during(hosts[rank]):
        for round_ in range(6):
            if round_ == 2:
                gc.collect()
                before = held()
            with Collectives() as ranks:
                assert ranks.all_reduce(torch.ones(3)).tolist() == [world] * 3
            with pytest.raises(RuntimeError, match="is closed"):
                ranks.all_reduce(torch.ones(3))
        gc.collect()
        after = settled(before)
        assert all(after[what] <= before[what] for what in before), (before, after)


@pytest.mark.parametrize("hosts", ["aab"])
def test_closed_collectives_release_everything(hosts: str) -> None:
    run_ranks(len(hosts), open_and_close, hosts)


def ends(rank: int, world: int, hosts: str, how: str, victim: int) -> dict[str, Any]:
    """A rank dies, closes or stalls amid a large call; the errors of the others, and their time."""
    with HOST.during(hosts[rank]):
        ranks = Collectives(timeout_s=1.5 if how == "stalls" else 60.0)
        x = torch.ones(1 << 22)
        ranks.all_reduce(x[:10])
        dist.barrier()
        if rank == victim:
            if how == "killed":  # while all are inside the call
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
                while True:
                    ranks.all_reduce(x)
            if how == "closes":
                ranks.close()
            else:
                time.sleep(3.0)
            return {}
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError) as raised:
            while True:
                began = time.monotonic()
                ranks.all_reduce(x)
        took = time.monotonic() - began
        assert ranks.closed
        with pytest.raises(RuntimeError, match="earlier call failed"):
            ranks.all_reduce(x)
        died = isinstance(raised.value, PeerDiedError)
        return {"text": str(raised.value), "took": took, "died": died}


@pytest.mark.parametrize(
    ("hosts", "victim", "how"),
    [
        *(("aabb", 2, how) for how in ("killed", "closes", "stalls")),
        ("aabb", 1, "killed"),
        *more(*(("ab", 1, how) for how in ("killed", "closes", "stalls"))),
        *more(("aabb", 1, "closes"), ("aabb", 1, "stalls")),
    ],
)
def test_a_rank_that_is_gone_is_named(hosts: str, victim: int, how: str) -> None:
    with fresh_ranks(len(hosts)) as ranks:
        ranks.start(ends, hosts, how, victim)
        outcomes = ranks.collect(30)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome is not None and outcome.ok, outcome
        result = outcome.value
        assert f"rank {victim}" in result["text"], (rank, result)
        assert result["took"] < (3.0 if how == "stalls" else 1.0) * BUSY, result
        here = hosts[rank] == hosts[victim]
        assert result["died"] == (how == "killed" and here), result


def closes_amid_a_call(rank: int, world: int, hosts: str) -> None:
    """Another thread closes while a call waits for a peer that does not come."""
    with HOST.during(hosts[rank]):
        ranks = Collectives()
        ranks.all_reduce(torch.ones(2))
        if rank == 0:
            threading.Timer(0.1, ranks.close).start()
            with pytest.raises(RuntimeError, match="closed during call 2"):
                ranks.all_reduce(torch.ones(2))
            assert ranks.closed
        dist.barrier()


def test_close_ends_a_call_of_another_thread() -> None:
    run_ranks(2, closes_amid_a_call, "ab")
