"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A busy machine is no failure of the code, so nothing is judged by how long an example takes. In CI the examples are
# the same in every run: what a new example finds there would look like a fault of an innocent change.
settings.register_profile(
    "deeplink", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("deeplink")
