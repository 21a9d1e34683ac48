"""Sequence parallelism by heads (DeepSpeed-Ulysses): all-to-alls hidden behind the projections.

``GemmAllToAll`` projects tokens and sends heads to their ranks; ``AllToAllGemm`` sends tokens back
and projects the heads. ``flux.layers.UlyssesAttention`` is a layer of both.
"""

from flux.ulysses import autograd
from flux.ulysses.ops import AllToAllGemm, GemmAllToAll

__all__ = ["AllToAllGemm", "GemmAllToAll", "autograd"]
