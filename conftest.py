"""Rules for all tests and doctests; docs/testing.md has the reasons. Loaded before any of them imports torch."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent

# Threads that spin while they wait for each other take the cores from the servers and workers that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Processes that tests start find `roost` and `tests` wherever they are started.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

# Seconds for Ray's control service to start, inherited by all that tests start; 30 are too few on a busy machine.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "600")

# A shell starts background jobs with Ctrl-C ignored, and all that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is, or on what an earlier run left in the checkout.
settings.register_profile(
    "roost",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    print_blob=True,
)
settings.load_profile("roost")


@pytest.fixture(scope="session", autouse=True)
def _outside_the_checkout(tmp_path_factory):
    """Relative paths lead to an empty folder: nothing in the checkout is found or written by accident."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)
