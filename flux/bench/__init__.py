"""Measuring fused ops: metrics, synchronised timing, float64 checks, and the ranks to do it on.

cli.py -> launch.py -> spawn.py (or torchrun) -> op.py on every rank, with methods.py,
                                                 reference.py, rounds.py, timing.py
report.py <- metrics.py <------------------------+

suite_cli.py -> suite.py -> suite_ranks.py -> launch.py, or supervisors.py under torchrun

model_cli.py -> launch.py -> model_run.py on every rank, with model_layers.py; model_report.py
"""
