"""The NVSHMEM transport over processes: libflux_nvshmem with the emulated NVSHMEM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import flux
from emulated_nvshmem import Native, load
from emulated_processes import run
from flux import _C, PeerTimeoutError
from flux.transport import nvshmem
from flux.transport.exchange import Exchange
from flux.transport.nvshmem_library import NvshmemLibrary
from harness import fresh_ranks, nothing_left_in_shared_memory
from ptx_device import MachineDevice
from ptx_machine.gpu import LIBRARY


@pytest.fixture
def path(nvshmem_library: Path) -> Path:
    return nvshmem_library


def device_of(rank: int) -> MachineDevice:
    device = MachineDevice()
    device.identity = f"emulated {rank}"
    return device


def open_(
    rank: int, path: Path, exchange: Exchange | None = None, nodes: int = 1
) -> nvshmem.Nvshmem:
    """The transport of an op, on a device of this rank's."""
    exchange = exchange or Exchange(dist.group.WORLD, "Op")
    return nvshmem.open_nvshmem(exchange, device_of(rank), lambda: load(path), nodes)


# -- memory ----------------------------------------------------------------------------------------


def _reach(rank: int, world: int, path: Path, lanes: int) -> None:
    os.environ["EMULATED_NVSHMEM_LANES"] = str(lanes)
    transport = open_(rank, path, nodes=world // lanes)
    native = Native(transport.job.library)
    memory = transport.memory(5, 1000)
    assert transport.sm_share == transport.device.sm_count - 4
    for peer in range(world):
        near = peer // lanes == rank // lanes
        assert (memory.pads[peer].numel(), memory.data[peer].numel()) == (
            (5, 1000) if near else (0, 0)
        )
        assert (memory.data[peer].data_ptr() != 0) == near
    assert memory.pads[rank].data_ptr() % 256 == memory.data[rank].data_ptr() % 256 == 0
    assert not memory.pads[rank].any() and not memory.data[rank].any()
    dist.barrier()
    for peer in range(world):
        row = memory.data[rank][800:816]  # NVSHMEM sends from its heap
        row.fill_(10 * rank + 1)
        place, word = 16 * rank, 512 + 8 * rank
        if peer // lanes == rank // lanes:
            memory.data[peer][place : place + 16] = row
            memory.data[peer][word : word + 8].view(torch.int64)[0] = 3
        else:
            own = memory.data[rank].data_ptr()
            native.put_signal(own + place, row.data_ptr(), 16, own + word, 3, peer)
    device = transport.device
    assert isinstance(device, MachineDevice)
    device.finish()
    device.library.emulated_nvshmem_await_puts()
    assert not device.error()
    dist.barrier()
    words = memory.data[rank][512 : 512 + 8 * world]
    assert words.view(torch.int64).tolist() == [3] * world
    rows = memory.data[rank][: 16 * world].view(world, 16)
    assert rows.tolist() == [[10 * peer + 1] * 16 for peer in range(world)]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_memory_is_reached_directly_or_by_puts(path: Path, lanes: int) -> None:
    with nothing_left_in_shared_memory():
        run(4, _reach, path, lanes)


def _remote(rank: int, world: int, path: Path) -> None:
    os.environ["EMULATED_NVSHMEM_LANES"] = "2"
    transport = open_(rank, path, nodes=2)
    memory = transport.memory(200, 1000)
    assert transport.remote(memory, boxes=7, blocks=1) is not None
    assert transport.job.held_blocks == 2, "memory, and words for what comes"
    transport.leave()
    alone = open_(rank, path, nodes=1)
    with pytest.raises(ValueError, match=r"cannot address rank 2 of its node|rank [01] refused"):
        alone.memory(5, 100)  # four ranks that are said to be one node, and are two
    alone.leave()
    nvshmem.shutdown()


def test_a_remote_has_words_in_the_symmetric_heap(path: Path) -> None:
    with nothing_left_in_shared_memory():
        run(4, _remote, path)


def test_ops_take_nvshmem_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    run(2, _by_name)


def _by_name(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank 0: backend cuda needs a CUDA device"):
        flux.AGGemm(max_m=8, n=8, k=8, dtype=torch.bfloat16, backend="cuda", transport="nvshmem")


def _give_back(rank: int, world: int, path: Path) -> None:
    first, second, third = (open_(rank, path) for _ in range(3))
    job = first.job
    assert second.job is job and third.job is job
    memories = [first.memory(1, 4096), second.memory(1, 4096)]
    assert job.held_blocks == 2
    # Not in the same order everywhere, and one of them on one rank only.
    if rank == 0:
        first.leave()
    second.leave()
    second.leave()
    with pytest.raises(ValueError, match="rank 0 has 1 open ops"):
        nvshmem.shutdown()
    third.memory(1, 10)
    assert job.held_blocks == 2
    del memories
    if rank != 0:
        first.leave()
    third.leave()
    nvshmem.shutdown()
    nvshmem.shutdown()  # nothing left to do
    again = open_(rank, path)
    assert again.job is not job
    assert not again.memory(3, 3).data[rank].any()
    again.leave()
    nvshmem.shutdown()


def test_memory_is_freed_when_all_ranks_have_released_it(path: Path) -> None:
    with nothing_left_in_shared_memory():
        run(3, _give_back, path)


def _too_much(rank: int, world: int, path: Path) -> None:
    transport = open_(rank, path)
    with pytest.raises(
        RuntimeError, match=r"Op: allocating .* failed on rank 0: NVSHMEM has no 10\d+ bytes"
    ):
        transport.memory(1, 1 << 30)


def test_too_little_memory_is_an_error_everywhere(path: Path) -> None:
    run(2, _too_much, path)


# -- what goes wrong -------------------------------------------------------------------------------


def _fails(rank: int, world: int, path: Path, function: str, culprit: int, message: str) -> None:
    if rank == culprit:
        os.environ["EMULATED_NVSHMEM_FAIL"] = function
    nvshmem.COLLECTIVE_S = 1.5  # the others wait in NVSHMEM for who has failed
    with pytest.raises(RuntimeError, match=f"Op: .*rank {culprit}: {message}"):
        open_(rank, path).memory(1, 1)
    os.environ.pop("EMULATED_NVSHMEM_FAIL", None)
    if function in ("init", "align"):  # nobody knows what NVSHMEM is then
        with pytest.raises(ValueError, match=r"rank 0: NVSHMEM cannot be used any more.*NVSHMEM"):
            open_(rank, path)
    else:
        assert open_(rank, path).memory(1, 1).data[rank].numel() == 1


@pytest.mark.parametrize(
    ("function", "culprit", "message"),
    [
        ("get_uniqueid", 0, "nvshmemx_get_uniqueid failed with status 7"),
        ("init", 1, "NVSHMEM cannot be initialized: status 7"),
        ("align", 1, "NVSHMEM has no 512 bytes left"),
    ],
)
def test_a_failure_raises_on_all_ranks(
    path: Path, function: str, culprit: int, message: str
) -> None:
    run(2, _fails, path, function, culprit, message)


def _has_no_such_device(rank: int, world: int, path: Path) -> None:
    device = device_of(rank)
    device.index = rank  # the emulated one of a process is its first
    exchange = Exchange(dist.group.WORLD, "Op")
    with pytest.raises(ValueError, match=r"Op: rank 1: cudaSetDevice: .*status 101"):
        nvshmem.open_nvshmem(exchange, device, lambda: load(path))
    assert open_(rank, path).memory(1, 1).data[rank].numel() == 1


def test_a_rank_that_cannot_take_part_raises_on_all_ranks(path: Path) -> None:
    run(2, _has_no_such_device, path)


def _hangs(rank: int, world: int, path: Path, function: str) -> None:
    if rank == 1:
        os.environ["EMULATED_NVSHMEM_HANG"] = function
    nvshmem.COLLECTIVE_S = 1.0
    with pytest.raises(PeerTimeoutError, match="failed on rank 0: took longer than 1 s"):
        open_(rank, path).memory(1, 1)
    with pytest.raises(ValueError, match="cannot be used any more"):
        open_(rank, path)


@pytest.mark.parametrize("function", ["init", "align"])
def test_a_rank_that_hangs_raises_on_all_ranks_in_time(path: Path, function: str) -> None:
    run(2, _hangs, path, function)


def _dies(rank: int, world: int, path: Path) -> None:
    transport = open_(rank, path)
    transport.memory(1, 1)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    transport.leave()  # waits for nobody
    with pytest.raises(PeerTimeoutError, match="lost a peer"):
        open_(rank, path)


def test_a_rank_that_dies_raises_on_all_ranks_in_time(path: Path) -> None:
    with fresh_ranks(2) as ranks:
        ranks.start(_dies, path)
        first, _ = ranks.collect(60.0, grace=30.0)
        assert first is not None and first.ok, first


def _other_ranks(rank: int, world: int, path: Path) -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2])]
    if rank < 2:
        open_(rank, path, Exchange(groups[0], "Op"))
    if rank != 1:
        wanted = r"rank 0: this process is in an NVSHMEM job of the ranks \(0, 1\), not \(0, 2\)"
        with pytest.raises(ValueError, match=wanted):
            open_(rank, path, Exchange(groups[1], "Op"))
    dist.barrier()
    if rank < 2:
        nvshmem.shutdown(groups[0])
    if rank != 1:
        open_(rank, path, Exchange(groups[1], "Op"))


def test_process_cannot_join_a_second_nvshmem_job(path: Path) -> None:
    run(3, _other_ranks, path)


def _same_device(rank: int, world: int, path: Path) -> None:
    with pytest.raises(ValueError, match=r"a device per rank, got \['emulated 7', 'emulated 7'\]"):
        open_(7, path)


def test_ranks_must_not_share_a_device(path: Path) -> None:
    run(2, _same_device, path)


def _no_library(rank: int, world: int) -> None:
    def loader() -> NvshmemLibrary:
        raise RuntimeError("libflux_nvshmem.so is not built")

    exchange = Exchange(dist.group.WORLD, "Op")
    with pytest.raises(ValueError, match=r"Op: rank 0: libflux_nvshmem\.so is not built"):
        nvshmem.open_nvshmem(exchange, device_of(rank), loader)


def test_missing_library_raises_on_all_ranks() -> None:
    run(2, _no_library)


# -- the loader ------------------------------------------------------------------------------------


def _host(folder: Path, version: str) -> Path:
    """What tells NVSHMEM's version, as its host library does."""
    numbers = "".join(f"*{name} = {n};" for name, n in zip("abc", version.split("."), strict=True))
    function = f"void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) {{ {numbers} }}"
    return _library(folder / f"libnvshmem_host-{version}.so", function)


def _library(target: Path, text: str) -> Path:
    source = target.with_suffix(".c")
    source.write_text(f"{text}\n")
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def _loads(rank: int, world: int, path: Path, folder: Path) -> None:
    device_of(rank)
    library = load(path)
    assert library.version == "0.0.0" and library.address != 0
    NvshmemLibrary(path, _host(folder, "0.0.0"))
    with pytest.raises(RuntimeError, match=r"is built for NVSHMEM 0\.0\.0, but 9\.8\.7 is loaded"):
        NvshmemLibrary(path, _host(folder, "9.8.7"))
    with pytest.raises(RuntimeError, match=r"NVSHMEM cannot be loaded: .*nowhere"):
        NvshmemLibrary(path, folder / "nowhere.so")
    with pytest.raises(RuntimeError, match=r"cannot open .*nothing"):
        NvshmemLibrary(folder / "nothing.so", LIBRARY)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*flux_nvshmem"):
        NvshmemLibrary(_host(folder, "1.1.1"), None)  # some other library
    with pytest.raises(ValueError, match="an id has 128 bytes, got 3"):
        library.init(0, 1, b"abc", 0)


def test_incompatible_library_is_refused(path: Path, tmp_path: Path) -> None:
    run(1, _loads, path, tmp_path)


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    other = _library(tmp_path / "other.so", "unsigned flux_nvshmem[40] = {99};")
    expected = _C.NVSHMEM_ABI[0]
    with pytest.raises(RuntimeError, match=f"has ABI 99, expected {expected}: build it again"):
        NvshmemLibrary(other, None)
