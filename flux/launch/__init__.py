"""Start ranks as processes, or join those that torchrun has started.

spawn.py        ``run_ranks``: the one function that starts rank processes, watches and ends them
supervisors.py  ranks that may die, on top of both: started by this process, or one by each of
                torchrun's
hosts.py        simulated hosts on one machine: network namespaces
"""
