"""What AGGemm, GemmRS and GemmAR have in common: construction, checks, life cycle."""

from __future__ import annotations

import itertools
import os
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import Self

from flux import _C
from flux.backends import make_cuda_backend
from flux.backends.cpu.backend import CpuBackend
from flux.backends.unfused import UnfusedBackend
from flux.core.backend import Backend, OverlapHooks
from flux.core.call import Call, CallChecker, Gemm
from flux.core.env import CHECK, KERNEL_CHOICE
from flux.core.knobs import Knobs, OpRow, Topology
from flux.core.schedule import TileSchedule
from flux.core.spec import OpSpec
from flux.ops import torch_internals
from flux.ops.comparison import Comparison
from flux.ops.executor import (
    built_together,
    check_executor,
    check_mesh,
    open_exchange,
    open_gpus,
    places_of,
)
from flux.ops.transforms import call
from flux.select import choose as choice
from flux.select.choose import Choice, Fixed
from flux.select.heuristic import make_schedule
from flux.transport.base import DeviceTransport
from flux.transport.exchange import Exchange
from flux.transport.one_gpu import OneGpuExchange, OneGpuRank
from flux.transport.placement import Placement

T = TypeVar("T")

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

MAX_SCHEDULES = 1024  # kept per op
_REGISTRY: weakref.WeakValueDictionary[int, TensorParallelOp] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def op_of(handle: int) -> TensorParallelOp:
    """Return the live op behind a handle of ``torch.ops.flux``.

    Raises:
        RuntimeError: the op is gone.
    """
    op = _REGISTRY.get(handle)
    if op is None:
        raise RuntimeError(f"the flux op with handle {handle} no longer exists")
    return op


class TensorParallelOp:
    """A fused op on one process group: it owns its symmetric workspace until ``close()``.

    Construction is collective: all ranks of the group build the same op, and every rank hears of it
    when one cannot. Calls are collective too, and happen in the same order on all ranks.
    """

    kind: OpRow
    _checks: type[CallChecker] = CallChecker

    def __init__(
        self,
        group: dist.ProcessGroup | OneGpuRank | str | None,
        *,
        max_m: int,
        n: int | Sequence[int],
        k: int,
        dtype: torch.dtype,
        transpose_weight: bool,
        reduce: str,
        backend: str | None,
        transport: str | None,
        tuning: str | Knobs | Fixed,
        timeout_s: float,
        topology: Topology | None,
        scaling: str = "none",
        fast_accum: bool = False,
        activation: str = "none",
        **of_op: Any,
    ) -> None:
        self._runs = 0  # calls that have reached this op
        self.closed = True  # also after a failure
        self._broken: str | None = None
        self._pid = os.getpid()
        self._backend: Backend | None = None  # stays None for a rank that is alone
        self._inside = _C.Exclusive()
        self._begun = False  # the peers count the call that is inside, and it has not ended
        self._ending = False  # close() was called while a call was inside
        self._released = False  # True: nothing is left to give back
        label = type(self).__name__
        exchange = open_exchange(group, label)
        # Memory of the op outlives modes: fake tensors, a default device, inference mode.
        give_up = partial(self._release, failed=True)
        with torch_internals.outside_modes(), built_together(exchange, timeout_s, give_up):
            # 1. Check this rank's arguments, then compare them with those of the peers.
            spec: OpSpec | None = None
            fixed = tuning if isinstance(tuning, Fixed) else None
            knobs = fixed.given if fixed is not None else Knobs()
            problem: Exception | None = None
            places = places_of(exchange, backend)
            placement: Placement | None = None
            try:
                columns = cast(
                    "tuple[int, ...]", tuple(n) if isinstance(n, (list, tuple)) else (n,)
                )
                how = (transpose_weight, reduce, activation, scaling, fast_accum)
                spec = OpSpec(self.kind, max_m, columns, k, dtype, *how, **of_op)
                if isinstance(tuning, Knobs):
                    knobs = tuning
                elif fixed is None and tuning not in ("cache", "off"):
                    text = f"tuning must be 'cache', 'off' or flux.Knobs, got {tuning!r}"
                    raise ValueError(f"{label}: {text}")
                options = (knobs, backend, transport, timeout_s)
                backend = check_executor(label, spec, exchange, *options)
                placement = Placement.of_op(places, backend, transport, topology)
                mesh = (spec, placement, topology, knobs, backend, transport)
                topology, knobs = check_mesh(label, *mesh)
            except (TypeError, ValueError) as error:
                problem = error
            tuned = tuning == "cache"
            kernel = fixed.kernel if fixed is not None else None
            agreed = {
                **{f.name: getattr(spec, f.name) for f in fields(OpSpec) if spec and f.init},
                "backend": backend,
                "tuning": "cache" if tuned else "off",
                "knobs": str(knobs),
                "kernel": kernel.name if kernel is not None else "",
                "timeout_s": timeout_s,
                "topology": str(topology),
                KERNEL_CHOICE.name: os.environ.get(KERNEL_CHOICE.name, ""),
            }
            exchange.agree(problem, agreed)
            assert spec is not None and topology is not None
            assert placement is not None and backend is not None
            # 2. Choose knobs, and allocate what calls need.
            self.spec = spec
            self.knobs = knobs
            self.world = exchange.world
            self.rank = exchange.rank
            self.timeout_s = timeout_s
            self.topology = topology
            gpus: DeviceTransport | None = None
            if isinstance(exchange, OneGpuExchange):
                gpus = exchange
            elif backend == "cuda":
                gpus = open_gpus(exchange, placement.topology.nodes, timeout_s, transport)
            device = gpus.device.torch_device if gpus else torch.device("cpu")
            self._choice: Choice = Fixed(knobs, kernel)
            if tuned and isinstance(exchange, Exchange):
                self._choice = choice.choose(
                    spec, exchange, placement, topology, backend, self._is_legal
                )
            self._checker = self._checks(spec, self.world, self.rank, device)
            self._checker.compares_scales = gpus is None
            # make_schedule caches too, but to hash its arguments costs more than a call may.
            self._schedules: dict[int, TileSchedule] = {}
            of_group = exchange if isinstance(exchange, Exchange) else None
            self._unfused = UnfusedBackend(spec, of_group, self.rank, self.world, timeout_s)
            if self.world > 1 and gpus is not None:
                processes = Placement(tuple(place.memory for place in places))
                self._backend = make_cuda_backend(
                    spec, of_group, gpus, self._choice, topology, processes, timeout_s
                )
            elif self.world > 1 and isinstance(exchange, Exchange):
                self._backend = CpuBackend(
                    spec, exchange, self._choice, topology, placement, timeout_s
                )
                self._unfused.watched = self._backend
            # Whether a call waits, on the CPU, for rows of other hosts: other work could run then.
            self.waits_for_hosts = self._backend is not None and self._backend.waits_for_hosts
            self._comparison: Comparison | None = None
            if CHECK.get() and self.world > 1 and isinstance(exchange, Exchange):
                self._comparison = Comparison(exchange)
        self.handle = next(_handles)
        _REGISTRY[self.handle] = self
        self.closed = False

    @property
    def library_name(self) -> str:
        """Name in ``torch.ops.flux``."""
        return self.kind.name

    # -- state -------------------------------------------------------------------------------------

    def schedule(self, m: int) -> TileSchedule:
        """Return the tile schedule of this rank for a call with ``m`` global rows. Printable.

        Raises:
            ValueError: m is not in [1, max_m], or the op's memory is too small for its schedule.
        """
        schedule = self._schedules.get(m)
        if schedule is not None:
            return schedule
        if not 1 <= m <= self.spec.max_m:
            raise ValueError(f"{self.spec.label}: M must be in [1, {self.spec.max_m}], got {m}")
        if len(self._schedules) >= MAX_SCHEDULES:
            self._schedules.clear()
        schedule = self._make_schedule(m, self._choice.knobs(m))
        if self._backend is not None:
            self._backend.require_room(schedule)
        self._schedules[m] = schedule
        return schedule

    def _schedule_of(self, call: Call) -> TileSchedule:
        return self.schedule(call.m)

    def _capturable(self, schedule: TileSchedule, call: Call, backend: Backend) -> TileSchedule:
        """Return an unfused schedule, or in a capture one that a CUDA graph can contain.

        Raises:
            ValueError: the op has no such path.
        """
        if not backend.capturing() or self._unfused.waits_on_streams():
            return schedule
        fused = next((k for k in self._choice.variants if k.path in ("fused", "medium")), None)
        if fused is None:
            text = "a CUDA graph cannot contain collectives that wait on the host, as gloo's do"
            raise ValueError(f"{self.spec.label}: path=unfused: {text}")
        return self._with_knobs(call, fused)

    def _with_knobs(self, call: Call, knobs: Knobs) -> TileSchedule:
        return self._make_schedule(call.m, knobs)

    def _make_schedule(self, m: int, knobs: Knobs) -> TileSchedule:
        return make_schedule(
            self.kind.name,
            (m, self.spec.scheduled_n(self.world), self.spec.k),
            self.world,
            self.rank,
            self.topology,
            knobs,
            itemsize=self.spec.itemsize,
            cluster=None if self._backend is None else self._backend.cluster,
        )

    def _is_legal(self, m: int, knobs: Knobs) -> bool:
        """Return whether a schedule exists; the answer is the same on all ranks."""
        try:
            self._make_schedule(m, knobs)
        except ValueError:
            return False
        return True

    def own_rows(self, m: int) -> int:
        """Return how many of ``m`` global rows this rank owns."""
        return _C.core.row_count(m, self.world, self.rank)

    @property
    def workspace_bytes(self) -> int:
        """Memory of this rank, in bytes: signals, data, and buffers for what other hosts send."""
        return self._backend.workspace_bytes if self._backend else 0

    def __repr__(self) -> str:
        s = self.spec
        n = s.n[0] if len(s.n) == 1 else s.n
        return (
            f"{s.label}(max_m={s.max_m}, n={n}, k={s.k}, dtype={s.dtype}, rank={self.rank}, "
            f"world={self.world}, knobs=({self.knobs}){', closed' if self.closed else ''})"
        )

    # -- calls -------------------------------------------------------------------------------------

    def _plain(self, *tensors: torch.Tensor) -> bool:
        """Return whether a call may skip the dispatcher, the largest cost of a call in Python.

        It may not when autograd, torch.compile, a mode or a tensor subclass has to see the call.
        """
        if torch.compiler.is_compiling() or torch_internals.modes_are_active():
            return False
        grad = torch.is_grad_enabled()
        for t in tensors:  # noqa: SIM110  done in every call, where all() costs twice as much
            if type(t) not in PLAIN_TYPES or (grad and t.requires_grad):
                return False
        return True

    def _again(self, x: torch.Tensor, weight: Any, bias: Any, m: int | None) -> torch.Tensor | None:
        """Repeat the last call if the arguments differ in contents only; else return None."""
        # First: torch.compile cannot trace the lines below.
        if not (self._plain(x, weight) if bias is None else self._plain(x, weight, bias)):
            return None
        if self._backend is None or self._comparison is not None:
            return None
        again = self._backend.again(x, weight, bias, m)
        return None if again is None else self._guarded(again, begun=True)[0]

    def _dispatched(self, *args: Any, name: str = "") -> Any:
        """Call ``torch.ops.flux``, where modes, subclasses and autograd see the call.

        Their errors before the op itself is reached are told to the peers, as the op's own are.
        """
        name = name or self.library_name
        if torch.compiler.is_compiling():
            return call(name, *args)
        runs = self._runs
        try:
            return call(name, *args)
        except Exception as error:
            if self._runs == runs:
                why = f"{type(error).__name__}: {error}"
                self._guarded(self._refuse, ValueError(why))
            raise

    def _check_tensors(self, *tensors: object) -> None:
        """Raise for tensors that the op does not take, before the dispatcher sees them.

        It would reject or fake some of them without telling the peers, or let autograd need a
        backward that does not exist. ``_plain`` tensors pass, or the op's own checks refuse them.
        """
        try:
            torch_internals.check_no_forward_mode(self.spec.label)
        except ValueError as error:
            self._guarded(self._refuse, error)
            raise
        grad = torch.is_grad_enabled() and not self.spec.plain
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                self._turn_away(TypeError, f"expected a tensor, got {type(tensor).__name__}")
            elif type(tensor) not in PLAIN_TYPES and torch_internals.is_dtensor(tensor):
                text = "a DTensor has no layout that an op knows: pass its to_local()"
                self._turn_away(TypeError, text)
            elif tensor.is_meta:
                self._turn_away(ValueError, f"tensors must be on {self._checker.where}, got meta")
            elif grad and tensor.requires_grad:
                text = "activation and scaling have no backward; use torch.no_grad or tensors that"
                self._turn_away(ValueError, f"{text} need no gradient")

    def _turn_away(self, kind: type[TypeError | ValueError], text: str) -> NoReturn:
        """Raise an error of this kind, on the peers too: they are about to make the same call."""
        error = kind(f"{self.spec.label}: {text}")
        self._guarded(self._refuse, error)
        raise error

    def _refuse(self, error: TypeError | ValueError) -> None:
        """Share a refusal with the peers, who are about to make the same call."""
        self._begun = True  # until all of them are told
        if self._comparison is not None:
            self._comparison.refuse(str(error))
        elif self._backend is not None:
            self._backend.refuse(str(error))
        self._begun = False

    def _call(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor] | Gemm,
        biases: Sequence[torch.Tensor | None],
        m: int | None = None,
        scales: Sequence[torch.Tensor] = (),
        gather: bool = False,
        hooks: OverlapHooks | None = None,
    ) -> list[torch.Tensor]:
        """Make a call: what the ops of ``torch.ops.flux`` execute, ``_guarded``.

        Args:
            x: as the caller passed it, like all arguments up to ``scales``.
            weights: one or more, or the caller's product.
            biases: a bias or None for each weight.
            m: global rows, or None.
            scales: as ``CallChecker.check`` takes them.
            gather: return the gathered x, [M, K], behind the results.
            hooks: the caller's work beside the call, if any.

        Returns:
            The result of each weight, and the gathered x if ``gather``.
        """
        backend = self._backend
        if self._comparison is not None and backend is not None and backend.capturing():
            raise ValueError(
                f"{self.spec.label}: FLUX_CHECK compares calls by a collective of the host, which "
                "a CUDA graph cannot contain: unset FLUX_CHECK"
            )
        # 1. Check the arguments, and 2. schedule: knobs may be illegal for this M. The peers are
        # about to make the same call, so a refusal is shared with them.
        try:
            call = self._checker.check(x, weights, biases, m, scales)
            schedule = self._schedule_of(call)
            if schedule.knobs.path == "unfused" and backend is not None:
                schedule = self._capturable(schedule, call, backend)
        except (TypeError, ValueError) as error:
            self._refuse(error)
            raise
        # 3. Meet the peers. On the fused path the backend does, while the call goes on.
        self._begun = True
        if self._comparison is not None:
            biased = self.kind.reduces and call.biases[0] is not None
            what = f"M = {call.m}{', with bias' if biased else ''}"
            if call.blocks is not None:
                what = f"rows = {call.blocks.rows}"
            self._compare(self._comparison, what)
        if backend is None:
            return self._unfused.run(call, gather, hooks)
        if schedule.knobs.path == "unfused":
            met = backend.meet(schedule, call.digest)
            return self._unfused.run(call, gather, hooks, met)
        # 4. Execute.
        return backend.run(schedule, call, gather, hooks)

    def _compare(self, comparison: Comparison, what: str) -> None:
        disagreement = comparison.compare(what)
        if disagreement is not None:
            self._begun = False  # no rank makes the call
            raise disagreement

    def _guarded(self, run: Callable[..., T], *arguments: object, begun: bool = False) -> T:
        """Run a call: one at a time, in the process that built the op, never after a failure.

        Any exception can be raised between any two lines: signal handlers, hooks, trace functions
        and modes of torch are the caller's code. So its type tells nothing. Once the call has
        begun, the op is closed, unless the backend has counted the call as refused.

        Args:
            run: the call. It sets ``_begun`` before the peers can hear of the call.
            arguments: of ``run``.
            begun: set it here, in place of ``run``.
        """
        self._runs += 1
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{self.spec.label} was built in process {self._pid} and cannot be used in a "
                f"forked child ({os.getpid()}): build a new op there"
            )
        try:
            refusal = f"{self.spec.label}: another thread is inside a call of this op"
            return self._inside.call(refusal, self._run_inside, run, arguments, begun)
        finally:
            if self._ending:
                self._end_if_asked()

    def _run_inside(self, run: Callable[..., T], arguments: tuple[object, ...], begun: bool) -> T:
        refusals = 0 if self._backend is None else self._backend.refusals
        try:
            if self._begun or (self.closed and not self._released):
                self._release(failed=True)  # an exception broke off the end of an earlier call
            if self.closed:
                raise RuntimeError(f"{self.spec.label} is closed{self._broken or ''}")
            self._begun = begun
            result = run(*arguments)
            self._begun = False
            return result
        except BaseException as error:
            if self._begun and self._backend is not None and self._backend.refusals == refusals:
                # Peers wait for what this call will never deliver. Told, they give up at once.
                self._release(failed=True)
                text = "".join(traceback.format_exception_only(type(error), error)).strip()
                self._broken = f": an earlier call failed ({text})"
            self._begun = False
            raise

    def _end_if_asked(self) -> None:
        """Close the op if ``close`` was called and no call is inside."""
        while self._ending and not self._released:
            # If no call has begun, it has ended or was refused.
            if not self._inside.try_call(lambda: self._release(failed=self._begun)):
                return

    def wait(self) -> None:
        """Wait until this rank's calls are done. On the CPU they are when they return.

        Raises:
            PeerTimeoutError: a wait of one of them took longer than the timeout; so does the next
                call that finds out.
        """
        if self._backend is not None and self._backend.asynchronous:
            self._guarded(self._backend.check, begun=True)

    # -- end ---------------------------------------------------------------------------------------

    def __copy__(self, memo: object = None) -> Self:
        """Return this op: a copy of a layer shares it, as layers of one shape may."""
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> NoReturn:
        """Raise TypeError."""
        text = "its memory is that of running ranks: save weights (state_dict), and build it again"
        raise TypeError(f"{self.spec.label} cannot be pickled: {text}")

    def _release(self, failed: bool) -> None:
        """Give everything back. A call that a signal handler interrupts can be repeated."""
        if self._released or self._pid != os.getpid():
            return
        self.closed = True
        if self._backend is not None:
            culprit = self._unfused.culprit if self._unfused.culprit >= 0 else self.rank
            self._backend.close(failed or self._broken is not None, culprit)
            self._unfused.close()
        self._begun = False
        self._released = True

    def close(self) -> None:
        """Free threads and shared memory. Local and idempotent; later calls raise RuntimeError.

        While a call is inside, in another thread or (for a signal handler) further up the stack,
        this only asks it to end: its waits return at once, it raises RuntimeError, and memory goes
        when it has left.
        """
        if self._released or self._pid != os.getpid():
            return
        self._ending = True
        self._end_if_asked()
        if not self._released and self._backend is not None:
            self._backend.end_call()
            self._end_if_asked()  # it may have left in between

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._release(failed=False)
