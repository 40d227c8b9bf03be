"""Rules for all tests and doctests; docs/testing.md has the reasons. Loaded before any of them imports torch."""

import os

from hypothesis import HealthCheck, settings

# Threads that spin while they wait for each other take the cores from the servers and workers that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test depends on how fast the machine is, or on what an earlier run left in the checkout.
settings.register_profile(
    "roost",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    print_blob=True,
)
settings.load_profile("roost")
