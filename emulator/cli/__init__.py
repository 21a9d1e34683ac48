"""The command ``python -m emulator``: run, trace and profile kernels."""
