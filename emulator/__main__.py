"""``python -m emulator``."""

from emulator.cli.app import app

app(prog_name="python -m emulator")
