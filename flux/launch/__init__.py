"""Start ranks as processes: on this machine, on simulated hosts, or under torchrun."""
