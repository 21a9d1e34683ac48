"""Plan a training step: predict what a schedule of its operators takes, and run it.

Policies (serial, Domino, ...) turn a graph of operators into a step schedule. One simulator
predicts its time on a cluster, one executor runs it, and both write the same trace events.
"""
