"""The cost model: the one place that predicts times, of ops, kernels, and operators of a step.

    hardware.py     shares, latencies and overheads of devices and links, each with its source
    gemm.py         a GEMM: roofline, traffic of a band of tiles, slowdown beside transfers
    cycles.py       a kernel's GEMM in cycles, to rank kernels
    collective.py   collectives of a library, and single messages
    call.py         a call of a fused op with certain knobs

Ops without tuning results, the pruner of `flux tune`, the planner and the op simulator call these
functions and have no formulas of their own. A measurement always takes precedence.
"""
