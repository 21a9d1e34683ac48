"""The passes in Inductor's form: callables with an identity for the cache of compiled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

from flux.compile.fuse import fuse
from flux.compile.uneven import note_uneven, noted_parts
from flux.ops import functional

_SOURCES = (
    *sorted(str(path) for path in Path(__file__).parent.glob("*.py")),
    str(functional.__file__),  # shapes and strides of the ops in the graph
)


class _PassAfter(CustomGraphPass):
    """A pass that runs after ``theirs``: the pass set before, a list of passes, or None."""

    def __init__(self, theirs: Any = None) -> None:
        several = isinstance(theirs, (list, tuple))
        self.theirs: tuple[Any, ...] = tuple(theirs) if several else (theirs,) if theirs else ()

    def __call__(self, graph: fx.Graph) -> None:
        """Run the previous passes, then this one."""
        for each in self.theirs:
            each(graph)
        self.run(graph)

    def run(self, graph: fx.Graph) -> None:
        """Run this pass."""
        raise NotImplementedError

    def uuid(self) -> Any:
        """Return the cache key of compiled code.

        None, which disables caching, if a pass has no key.
        """
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.theirs]
        return None if None in ids else (get_hash_for_files(_SOURCES), noted_parts(), *ids)


class NotePass(_PassAfter):
    """Notes in Dynamo's graph which sizes the ranks do not divide."""

    def run(self, graph: fx.Graph) -> None:
        """Note them; the graph stays as it is."""
        note_uneven(graph)


class FusePass(_PassAfter):
    """Rewrites a graph of aten operators."""

    def run(self, graph: fx.Graph) -> None:
        """Rewrite it."""
        if fuse(graph):
            stable_topological_sort(graph)  # new nodes are placed at their readers
            graph.lint()
