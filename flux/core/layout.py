"""The layout of the CUDA backend's symmetric memory."""

from __future__ import annotations

from dataclasses import dataclass

from flux import _C
from flux.core.knobs import Knobs
from flux.core.problem import ceil_div, round_up
from flux.core.spec import SCALE_BYTES, OpSpec

ALIGNMENT = 256  # bytes, of every region of symmetric memory
MAX_FLAGS = 1 << 26  # 256 MB of flags; flag numbers are 32-bit


def _up(size: int) -> int:
    return round_up(size, ALIGNMENT)


@dataclass(frozen=True)
class Layout:
    """Symmetric memory of one rank: words of its pad, and bytes of its data.

    CudaOpSetup in csrc/cuda_host/cuda_op.h describes the order of the regions.
    """

    signals: int
    slots: int
    slot_bytes: int  # of a guard and the slot behind it
    rest_offset: int  # of the region behind gathered rows or slots
    sums_offset: int  # of sums that the device puts to other nodes
    data_bytes: int
    row_bytes: int
    offers: int = 0  # words of ranks that pull; or own flags, where copies take partials
    guard_bytes: int = 0  # in front of each slot (core/scatter.h)
    boxes: int = 0  # words for arrivals from other nodes
    strips: int = 0  # of the boxes, for the sum of one node, where the device puts it
    pushed_bytes: int = 0  # of one of the two buffers of rows that kernels push; they are the last
    sum_flags: int = 0  # where kernels end an AllReduce
    sum_words: int = 0  # these, and a word for each sum
    second_offset: int = 0  # of the second buffer of gathered rows, with signals of its own
    copied_offset: int = 0  # of partials that copies take to their owners
    staged_offset: int = 0  # of blocks for, or from, ranks of other nodes

    @staticmethod
    def of(
        spec: OpSpec,
        world: int,
        knobs: Knobs,
        tile: tuple[int, int],
        most_tiles: int,
        nodes: int = 1,
        relays: bool = False,
        guard_rows: int = 0,
        pushed_rows: int = 0,
        buffers: int = 1,
        copied: bool = False,
    ) -> Layout:
        """Return the smallest layout that serves every M up to ``spec.max_m``.

        Args:
            spec: the op's problem.
            world: number of ranks.
            knobs: the op's knobs.
            tile: (rows, columns) of a GEMM tile.
            most_tiles: most communication tiles that a chunk is cut into, at any M.
            nodes: number of sets of ranks that share memory.
            relays: whether the device puts sums to other nodes.
            guard_rows: rows that the kernel needs in front of each slot.
            pushed_rows: rows of calls in which kernels push or sum them, at most.
            buffers: of gathered rows.
            copied: whether copies take partials to their owners, in some calls.
        """
        chunk = ceil_div(spec.max_m, world)
        if spec.op.exchanges:
            return Layout._of_exchange(spec, world, nodes, chunk, tile, most_tiles, guard_rows)
        row = spec.row_elements * spec.itemsize
        # There is no schedule with more than max_tiles signals.
        tiles = min(most_tiles, ceil_div(_C.core.max_tiles, world))
        if spec.op.gathers:
            rows = _up(spec.max_m * row)
            scales = _up(spec.max_m * SCALE_BYTES) if spec.scales_travel else 0
            boxes = world * tiles * (2 if scales else 1)
            size = rows + scales
            signals = world * tiles
            offers = signals if knobs.direction == "pull" else 0
            pushed = _up(min(pushed_rows, spec.max_m) * row)
            second = size + 2 * pushed if buffers == 2 else 0
            end = size + 2 * pushed + (size if second else 0)
            return Layout(
                signals,
                0,
                0,
                rows,
                size,
                end,
                row,
                offers,
                boxes=boxes,
                pushed_bytes=pushed,
                second_offset=second,
            )
        tiling = _C.core.ScatterTiling(spec.max_m, spec.n[0], world, *tile)
        count = 1 if knobs.reduce == "in_flight" else world + nodes - 1
        guard = _up(guard_rows * row)
        slot = guard + _up(chunk * row)
        result = _up(spec.max_m * row) if spec.op.all_reduces else 0
        strips = tiling.strip_count() if relays else 0
        boxes = nodes * ((strips or tiles) + (tiles if result else 0))
        size = count * slot
        sums = size + result
        end = sums + (nodes - 1) * slot if relays else sums
        signals = nodes * tiling.flag_count()
        if signals > MAX_FLAGS:
            raise ValueError(
                f"{spec.label}: tiles of {tile[0]} x {tile[1]} cut [{spec.max_m}, {spec.n[0]}] "
                f"and need {signals} flags, at most {MAX_FLAGS} are possible: take larger ones"
            )
        flags = words = 0
        if pushed_rows:
            few = min(pushed_rows, spec.max_m)
            flags = _C.core.ScatterTiling(few, spec.n[0], world, *tile).flag_count()
            words = flags + few * tiling.flag_columns()
        offset = end if copied else 0
        end += world * slot if copied else 0
        return Layout(
            signals,
            count,
            slot,
            size,
            sums,
            end,
            row,
            tiling.flag_count() if copied else 0,
            copied_offset=offset,
            guard_bytes=guard,
            boxes=boxes,
            strips=strips,
            sum_flags=flags,
            sum_words=words,
        )

    @staticmethod
    def _of_exchange(
        spec: OpSpec,
        world: int,
        nodes: int,
        chunk: int,
        tile: tuple[int, int],
        most_tiles: int,
        guard_rows: int,
    ) -> Layout:
        """Return the layout of an all-to-all, whose ranks have up to ``chunk`` rows each."""
        width, dtype = spec.travelling(world)
        blocks = _up(world * chunk * width * dtype.itemsize)
        far = world - world // nodes
        staged = _up(far * chunk * width * dtype.itemsize)
        if spec.op.kernel == "ag_gemm":
            row = world * width * dtype.itemsize
            rest = _up(chunk * row)
            begin = rest + blocks
            size = begin + staged
            counts = {"offers": world, "boxes": world * most_tiles if far else 0}
            return Layout(
                most_tiles, 0, 0, rest, size, size, row, **counts, staged_offset=begin if far else 0
            )
        row = spec.n[0] * dtype.itemsize
        flags = _C.core.ScatterTiling(chunk, spec.n[0], 1, *tile).flag_count()
        guard = _up(guard_rows * row)
        begin = blocks + guard + _up(chunk * row)
        size = begin + staged
        return Layout(
            world,
            0,
            0,
            0,
            size,
            size,
            row,
            flags,
            guard_bytes=guard,
            boxes=world if far else 0,
            copied_offset=blocks,
            staged_offset=begin if far else 0,
        )

    @property
    def native(self) -> dict[str, int]:
        """The fields that the native op takes."""
        return {name: value for name, value in vars(self).items() if name != "data_bytes"}

    def pad_words(self, world: int) -> int:
        """Return the words of a rank's pad."""
        words = (self.signals, self.offers, self.sum_words)
        return _C.CudaOp.pad_words(world, *words, two_buffers=self.second_offset > 0)

    def own_row(self, row: int, epoch: int) -> int:
        """Return the offset of a gathered row of a call, in bytes."""
        return self.second_offset * (epoch % 2) + row * self.row_bytes

    def slot_offset(self, slot: int) -> int:
        """Return the offset of row 0 of a slot from the start of the data, in bytes."""
        return slot * self.slot_bytes + self.guard_bytes
