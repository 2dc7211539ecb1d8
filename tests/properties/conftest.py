"""Property tests draw the same examples each time, so that a red run is red again; ``make soak`` draws new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SOAK = int(os.environ.get("FOREBAY_SOAK", "1"))

settings.register_profile(
    "forebay", derandomize=SOAK == 1, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("forebay")
