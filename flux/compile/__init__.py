"""Hide communication in models compiled by torch.compile with Inductor, without model changes.

``flux.compile.enable()`` adds a pass to Inductor. The pass rewrites functional collectives next to
matrix products, as in DTensor's tensor-parallel plans, to ops of flux (flux/compile/fuse.py).

    with flux.compile.enable():
        model = torch.compile(parallelize_module(model, mesh, plan))
        model(x).sum().backward()
    print(flux.compile.report())
"""

from __future__ import annotations

from typing import Any

from flux.compile.reporting import Report, clear_report, report

__all__ = ["Report", "clear_report", "disable", "enable", "enabled", "report"]

_before: list[Any] = []  # Inductor's configuration before enable()


def enable() -> Enabled:
    """Rewrite all graphs that Inductor compiles from now on, until ``disable()``.

    Call it on every rank; on GPUs after ``init_process_group``, because the ranks exchange their
    hosts.

    Returns:
        A context manager whose end is ``disable()``.

    Existing passes in the same places (pre_grad_custom_pass, post_grad_custom_pre_pass) run first.
    A second call has no effect.
    """
    from torch._inductor import config

    from flux.compile.inductor import FusePass, NotePass
    from flux.compile.served import learn_hosts

    learn_hosts()
    if not _before:
        _before.extend((config.pre_grad_custom_pass, config.post_grad_custom_pre_pass))
        config.pre_grad_custom_pass = NotePass(config.pre_grad_custom_pass)
        config.post_grad_custom_pre_pass = FusePass(config.post_grad_custom_pre_pass)
    return Enabled()


def disable() -> None:
    """Compile as before ``enable()``. Compiled graphs stay as they are."""
    if _before:
        from torch._inductor import config

        config.pre_grad_custom_pass, config.post_grad_custom_pre_pass = _before
        _before.clear()


def enabled() -> bool:
    """Return whether graphs compiled now are rewritten."""
    return bool(_before)


class Enabled:
    """The return value of ``enable()``; usable in a ``with`` statement."""

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: object) -> None:
        disable()
