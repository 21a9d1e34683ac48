"""Tests use the machine of the checkout if it is built there, else the installed one."""

import sys
from pathlib import Path

MACHINE = Path(__file__).resolve().parents[1]

if list(MACHINE.glob("_machine*.so")):
    sys.path.insert(0, str(MACHINE.parent))
