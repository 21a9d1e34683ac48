"""``python -m ptx_machine``."""

from ptx_machine.cli.app import app

app(prog_name="python -m ptx_machine")
