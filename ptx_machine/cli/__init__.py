"""The command ``python -m ptx_machine``: run, trace and profile kernels."""
