"""Measuring fused ops: metrics, synchronised timing, float64 checks, and the ranks to do it on.

cli.py -> launch.py -> spawn.py (or torchrun) -> op.py on every rank, with methods.py,
                                                 reference.py, rounds.py, timing.py
report.py <- metrics.py <------------------------+
"""
