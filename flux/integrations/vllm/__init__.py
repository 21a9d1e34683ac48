"""vLLM on CPUs: row-parallel layers as GemmAR, collectives between hosts by Flux.

``pip install flux-overlap`` beside vLLM is enough: vLLM finds ``plugin.register`` by its entry
point.
"""
