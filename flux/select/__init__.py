"""Every choice of knobs and kernels, and the cost model that it shares with planner and simulators.

choose.py       the knobs of an op for each M: the user's, a winner's, or the model's
winners.py      winners of `flux tune`; keys.py what they depend on, cache.py the files
heuristic.py    fills in open knobs, and makes the tile schedule with them
kernel.py       the built kernel of a GEMM or an op; nvidia_heuristics.py ranks them if asked to
space.py        the candidates of `flux tune`
cost.py         predicted times of GEMMs and collectives, predict.py of calls; hardware.py has the
                parameters, cycles.py ranks kernels

What is legal is stated in flux/core and flux/kernels/legality.py.
"""
