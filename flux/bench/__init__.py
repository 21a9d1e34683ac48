"""Measure fused ops: metrics, synchronised timing, float64 checks, and the ranks to run on.

command.py -> launch.py -> flux/launch/spawn.py (or torchrun) -> op.py on every rank, with
                                                     methods.py, reference.py, rounds.py, timing.py
report.py <- metrics.py <------------------------+

flux bench suite: suite.py -> suite_ranks.py -> launch.py, or flux/launch/supervisors.py (torchrun)

flux bench model: launch.py -> model_run.py on every rank, with model_layers.py; model_report.py
"""
