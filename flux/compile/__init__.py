"""torch.compile with Inductor, and communication hidden without touching a model.

``flux.compile.enable()`` adds a pass to Inductor that rewrites functional collectives beside matrix
products, as DTensor's tensor-parallel plans make them, into ops of flux (flux/compile/fuse.py).

    with flux.compile.enable():
        model = torch.compile(parallelize_module(model, mesh, plan))
        model(x).sum().backward()
    print(flux.compile.report())
"""

from __future__ import annotations

from typing import Any

from flux.compile import ops as ops
from flux.compile.counts import Report, clear_report, report

__all__ = ["Report", "clear_report", "disable", "enable", "enabled", "report"]

_before: list[Any] = []  # what Inductor's configuration had before enable()


def enable() -> Enabled:
    """Rewrite what Inductor compiles from now on, until ``disable()``. Call it on every rank.

    After ``init_process_group``, where there are GPUs: the ranks tell each other their hosts.

    Returns:
        A context manager whose end is ``disable()``.

    A pass that somebody else has put in the same place (post_grad_custom_pre_pass) runs first.
    Calling it twice is calling it once.
    """
    from torch._inductor import config

    from flux.compile.inductor import FusePass
    from flux.compile.served import learn_hosts

    learn_hosts()
    if not _before:
        theirs = config.post_grad_custom_pre_pass
        _before.append(theirs)
        config.post_grad_custom_pre_pass = FusePass(theirs)
    return Enabled()


def disable() -> None:
    """Compile as before ``enable()``. Graphs that are compiled stay as they are."""
    if _before:
        from torch._inductor import config

        config.post_grad_custom_pre_pass = _before.pop()


def enabled() -> bool:
    """Whether what is compiled now is rewritten."""
    return bool(_before)


class Enabled:
    """What ``enable()`` returns; usable in a ``with`` statement."""

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: object) -> None:
        disable()
