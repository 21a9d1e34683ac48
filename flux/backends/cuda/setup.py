"""Choose the kernels of an op on GPUs, and what adds up its partials."""

from __future__ import annotations

from collections.abc import Sequence

from flux.core.env import TRACE
from flux.core.knobs import ClusterTile, Knobs
from flux.core.spec import OpSpec
from flux.kernels.config import GemmConfig
from flux.kernels.legality import reason_not_summing
from flux.select.heuristic import gathered_buffers, reason_one_buffer
from flux.select.kernel import OpKernel, op_kernel
from flux.select.share import lends_margin, margin, taken_units
from flux.transport.base import DeviceTransport

SWITCH_BYTES = 16  # that a multicast access takes


def sums_by_switch(
    spec: OpSpec, transport: DeviceTransport, knobs: Knobs, *, in_kernel: bool
) -> bool:
    """Return whether the NVLink switch adds up partials.

    It does if they may be added in any order and a row is a multiple of its access size.

    Args:
        spec: the op.
        transport: of its ranks.
        knobs: of its fused calls.
        in_kernel: whether calls may be on path in_kernel.

    Raises:
        ValueError: nothing else adds partials on path in_kernel in flight, and it cannot.
    """
    row = spec.row_elements * spec.itemsize
    if not spec.op.reduces or knobs.reduce != "in_flight":
        return False
    if in_kernel and (not transport.multicast or row % SWITCH_BYTES != 0):
        problem = f"rows have {row} bytes" if transport.multicast else "these ranks are behind none"
        raise ValueError(
            f"{spec.label}: path in_kernel with reduce = in_flight needs an NVLink switch and rows "
            f"of a multiple of {SWITCH_BYTES} bytes, and {problem}; use reduce = local"
        )
    return transport.multicast and row % SWITCH_BYTES == 0


def by_switch(spec: OpSpec, configs: Sequence[GemmConfig], wanted: bool) -> bool:
    """Return whether kernels can use the multicast address: those of sm_80 have no such access.

    Raises:
        ValueError: they cannot, and the switch shall add up partials.
    """
    able = all(config.arch == "90a" for config in configs)
    if wanted and not able:
        raise ValueError(
            f"{spec.label}: reduce = in_flight behind an NVLink switch needs a kernel of sm_90a, "
            f"got {configs[0].name}; use reduce = local"
        )
    return able


def buffers_of(spec: OpSpec, transport: DeviceTransport, knobs: Knobs) -> int:
    """Return the number of buffers of gathered rows.

    Raises:
        ValueError: two are wanted where there can be one only.
    """
    reason = reason_one_buffer(spec.op, transport.nodes, knobs)
    if reason is None and spec.dispatches:
        reason = "kernels push rows behind the entries of their call"
    if reason is None and transport.acts_for_peers:
        reason = "the host acts for the peers, as in loopback"
    if reason is not None:
        if knobs.buffers == 2:
            raise ValueError(f"{spec.label}: buffers = 2 is not possible: {reason}")
        return 1
    return knobs.buffers or gathered_buffers(spec.max_m * spec.row_elements * spec.itemsize)


def margin_of(spec: OpSpec, transport: DeviceTransport, knobs: Knobs) -> int:
    """Return the multiprocessors that this rank's kernels leave to other streams.

    By default none where fewer than all are its own: the others are left as well.

    Raises:
        ValueError: kernels on the copy stream would have no room.
    """
    forwards = spec.op.gathers and knobs.direction != "pull"
    forwards &= knobs.path == "medium" or knobs.order not in (None, "direct")
    if knobs.sm_margin == 0 and forwards:
        raise ValueError(
            f"{spec.label}: sm_margin must be 1 or more where rows are pushed on, got 0 "
            f"with order = {knobs.order}: kernels wait for them beside the GEMM"
        )
    sends_blocks = spec.op.exchanges and spec.op.kernel == "gemm_rs"
    if knobs.sm_margin == 0 and (knobs.sends == "copies" or sends_blocks):
        when = "here" if sends_blocks else "with sends = copies"
        raise ValueError(
            f"{spec.label}: sm_margin must be 1 or more {when}, got 0: kernels wait "
            "for partials beside the GEMM"
        )
    if knobs.sm_margin is not None:
        return knobs.sm_margin
    every, mine = transport.device.sm_count, transport.sm_share
    return margin(mine) if transport.world > 1 and transport.nodes == 1 and mine == every else 0


def spare_of(spec: OpSpec, transport: DeviceTransport, knobs: Knobs, margin: int) -> int:
    """Return the multiprocessors of the margin that blocks multiply on while nothing waits."""
    lends = not spec.experts and lends_margin(spec.op, transport.nodes, knobs)
    return margin if lends else 0


def choose_kernels(
    spec: OpSpec,
    transport: DeviceTransport,
    sm_count: int,
    knobs: Knobs,
    preferred: GemmConfig | None,
    spare: int,
) -> list[OpKernel]:
    """Choose a kernel for each weight, the same on all ranks of a ReduceScatter. Collective.

    Args:
        spec: the op.
        transport: of its ranks.
        sm_count: multiprocessors of the GEMM.
        knobs: of its fused calls.
        preferred: the kernel that tuning found.
        spare: multiprocessors that blocks beside them multiply on, if they claim their tiles.

    Raises:
        ValueError: a rank has none, or cannot add in its peers' memory, which the knobs want.
    """
    problem = None
    if spec.op.reduces and knobs.reduce == "in_flight":
        problem = transport.reason_no_adds()
    if problem is not None:
        problem = (
            f"{spec.label}: reduce = in_flight adds in the memory of peers, and on rank "
            f"{transport.rank} {problem}; use reduce = local"
        )
    kernels = []
    taken = taken_units(knobs, transport.sm_share, transport.nodes)
    args = (transport.device, knobs, sm_count, preferred, TRACE.get(), taken, spare)
    try:
        for n in spec.local_n(transport.world, transport.rank):
            kernels.append(op_kernel(spec, transport.world, n, *args))
        if knobs.reduce == "in_kernel":
            reason = reason_not_summing(kernels[0].built.config)
            problem = problem or (None if reason is None else f"{spec.label}: {reason}")
    except ValueError as error:
        problem = problem or str(error)
    transport.ready(problem)
    return kernels


def cluster_tile(
    spec: OpSpec,
    transport: DeviceTransport,
    sm_count: int,
    configs: Sequence[GemmConfig],
    knobs: Knobs,
    preferred: GemmConfig | None,
    spare: int,
) -> ClusterTile:
    """Return what schedules know of the kernels: of rank 0's columns, so all ranks agree."""
    world = transport.world
    columns = spec.local_n(world, 0)
    if columns != spec.local_n(world, transport.rank):
        taken = taken_units(knobs, transport.sm_share, transport.nodes)
        args = (transport.device, knobs, sm_count, preferred, TRACE.get(), taken, spare)
        configs = [op_kernel(spec, world, n, *args).built.config for n in columns]
    return ClusterTile.of([config.cluster_tile for config in configs])
