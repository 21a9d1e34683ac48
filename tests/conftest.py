"""Settings common to all tests."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# "ci" draws the same examples on every run, so that a red build means that the change is at fault.
# Look further with HYPOTHESIS_PROFILE=explore.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
