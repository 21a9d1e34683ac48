"""Units of Centauri's FSDP: weights that are gathered together, and modules that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from flux.core.errors import PeerTimeoutError
from flux.runtime.centauri.plan import RuntimePlan
from flux.runtime.centauri.routes import Routes
from flux.runtime.centauri.shards import Chunk, Managed


class Traffic:
    """Moves weights and gradients, and keeps the error of a wait that failed."""

    def __init__(self, plan: RuntimePlan, routes: Routes) -> None:
        self.plan, self.routes, self.closed = plan, routes, False
        self.failure: Exception | None = None

    def check(self) -> None:
        """Raise what an earlier wait has raised, or if this was closed."""
        if self.failure is not None:
            raise PeerTimeoutError(f"a peer has failed before: {self.failure}") from self.failure
        if self.closed:
            raise RuntimeError("the model's communication was closed by flux.runtime.centauri")

    def guarded(self, wait: Callable[[], None]) -> None:
        """Call a wait; after a failure every further one fails."""
        try:
            wait()
        except (PeerTimeoutError, ValueError) as error:
            self.failure = self.failure or error
            raise


class Unit:
    """Parameters that are gathered for one module's forward and backward.

    Attributes:
        reduced: chunks in the order in which a plain backward completes them.
        depth: of forward calls that run.
        in_backward: whether backward has asked for it, and may still.
        gathered: whether its weights are there, or on their way.
    """

    def __init__(
        self, number: int, name: str, parameters: Sequence[Managed], traffic: Traffic
    ) -> None:
        self.number, self.name, self.traffic = number, name, traffic
        self.parameters = list(parameters)
        plan = traffic.plan
        small: dict[tuple[torch.dtype, bool], list[Managed]] = {}
        large = [p for p in parameters if p.nbytes >= plan.chunk_bytes]
        for p in parameters:
            if p.nbytes < plan.chunk_bytes:
                small.setdefault((p.dtype, p.trained), []).append(p)
        self.chunks = [Chunk(of, f"{len(of)} small parameters of {name}") for of in small.values()]
        self.chunks += [Chunk([p], p.name) for p in large]
        self.chunk_of = {id(p): chunk for chunk in self.chunks for p in chunk.parameters}
        first = {id(self.chunk_of[id(p)]): -n for n, p in reversed([*enumerate(parameters)])}
        self.reduced = sorted(self.chunks, key=lambda chunk: first[id(chunk)])
        self.depth = 0
        self.in_backward = False
        self.gathered = False

    def gather(self) -> None:
        """Begin to fill the whole tensors, from the shards as they are now."""
        if self.gathered:
            return
        self.traffic.check()
        self.gathered = True
        routes = self.traffic.routes
        routes.enter(self.number, self.name)
        # Lanes write into tensors that are made here, which those of inference mode do not allow.
        with torch.inference_mode(False):
            for chunk in self.chunks:
                for p in chunk.parameters:
                    p.allocate()
                chunk.start_gather(routes)
                if not self.traffic.plan.overlap:
                    self.traffic.guarded(chunk.wait)

    def wait(self) -> None:
        """Wait until all whole tensors are filled."""
        for chunk in self.chunks:
            self.traffic.guarded(chunk.wait)

    def read(self, parameter: Managed) -> nn.Parameter:
        """Return a whole tensor when it is filled."""
        self.gather()
        self.traffic.guarded(self.chunk_of[id(parameter)].wait)
        return parameter.whole

    def free(self) -> None:
        """Give whole tensors back; the next use gathers again."""
        if not self.gathered or self.traffic.failure:  # a lane may still write there
            return
        self.wait()
        for p in self.parameters:
            p.free()
        self.gathered = False


Read = Callable[[Unit, Managed], nn.Parameter | None]
"""Returns a whole tensor when it is filled; None if modules read none of its unit now."""


class Parameters(dict[str, Any]):
    """A module's parameters: reading one by name while its unit is in use gives the whole tensor.

    ``items`` and ``values`` always give the shards, so that optimizers and checkpoints see them.
    """

    def __init__(
        self, state: dict[str, Any], owners: dict[str, tuple[Unit, Managed]], read: Read
    ) -> None:
        super().__init__({n: owners[n][1].sharded if n in owners else p for n, p in state.items()})
        self._owners, self._read = owners, read
        for name, (_, parameter) in owners.items():
            parameter.places.append((self, name))

    def __getitem__(self, name: str) -> Any:
        owner = self._owners.get(name)
        whole = None if owner is None else self._read(*owner)
        return super().__getitem__(name) if whole is None else whole

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self._owners:
            super().__setitem__(name, value)
        elif value is not super().__getitem__(name):
            self._owners[name][1].assign(value)

    def __delitem__(self, name: str) -> None:
        self._keep(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter that is not sharded, and return it."""
        self._keep(name)
        return super().pop(name, *default)

    def _keep(self, name: str) -> None:
        if name in self._owners:
            raise RuntimeError(
                f"{self._owners[name][1].name} is sharded and cannot be removed; parametrize, "
                "prune or change the model before flux.runtime.centauri.parallelize"
            )

    @staticmethod
    def shows(parameters: dict[str, Any], name: str) -> bool:
        """Return whether a module's parameter is a shard."""
        return isinstance(parameters, Parameters) and name in parameters._owners

    def __reduce_ex__(self, _: Any) -> NoReturn:
        refuse_copy()


def added_parameters(model: nn.Module) -> list[str]:
    """Return an error for each parameter that came after sharding, and would train by itself."""
    return [
        f"{module}.{name}".lstrip(".")
        + " came after parallelize and is not sharded: its gradients "
        "would differ between ranks; add it before"
        for module, of in model.named_modules()
        for name, p in of._parameters.items()
        if p is not None and p.requires_grad and not Parameters.shows(of._parameters, name)
    ]


def refuse_copy() -> NoReturn:
    """Raise for ``copy.deepcopy`` and ``pickle``."""
    raise TypeError(
        "a model that flux.runtime.centauri has sharded cannot be copied or pickled, as its groups "
        "and threads cannot; copy it before, save model.state_dict(), or keep an average as "
        "{name: p.detach().clone() for name, p in model.named_parameters()}"
    )
