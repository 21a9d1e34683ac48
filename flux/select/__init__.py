"""Choose knobs and kernel of an op: cached winners first, else the cost model."""
