"""Hardware and software of this machine and of clusters."""
