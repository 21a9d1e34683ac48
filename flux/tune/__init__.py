"""Tuning: which knobs, path and kernel are fastest for a shape, found by measuring, and remembered.

what an op asks          choice.py -> cache.py (winners on disk) -> winners.py, keys.py
                                   -> cost.py  (the model, where nobody has tuned)
what `flux tune` does    cli.py -> tuner.py -> journal.py, halving.py (who goes on)
                                   -> worker.py on every rank, with flux.bench's rounds and checks
what it chooses from     space.py <- tuning/spaces/*.toml;  shapes.py <- tuning/shapes/*.toml
"""
