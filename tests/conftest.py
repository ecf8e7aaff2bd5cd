from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long one example takes says more about what else runs on the machine than about the code.
settings.register_profile("deeplink", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deeplink")
