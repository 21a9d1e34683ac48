"""Find the fastest knobs, path and kernel for a shape by measuring, and cache them.

choice of an op          flux/select: choose.py -> cache.py (winners on disk), winners.py, keys.py
                                               -> predict.py (the model, without tuning)
`flux tune`              command.py -> tuner.py -> journal.py, halving.py (survivors)
                         -> worker.py on every rank, with flux.bench's rounds and checks
candidates               flux/select/space.py <- tuning/spaces/*.toml
shapes                   flux/bench/shapes.py <- tuning/shapes/*.toml
"""
