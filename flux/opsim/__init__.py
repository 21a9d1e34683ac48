"""Predict the time of one fused op on a cluster, from its schedule."""
