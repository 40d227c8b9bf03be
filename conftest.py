"""Rules for all tests and doctests; docs/testing.md has the reasons. Loaded before any of them imports torch."""

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.local_ray import end_ray

ROOT = Path(__file__).parent
# Doctests import every module, and Triton comes with torch for CUDA alone.
KERNELS = ["roost/torch_engine/paged_attention.py", "roost/engines/weights/hash_kernel.py"]
collect_ignore = [] if importlib.util.find_spec("triton") else KERNELS
# Beside those in folders called live; with processes, but not with Ray in this one.
SLOW_FILES = {
    *("test_interrupts.py", "test_try.py", "test_inventory_command.py", "test_programs.py", "test_control.py"),
    *("test_server_process.py", "test_server_generate.py", "test_distributed.py", "test_group.py", "test_tasks.py"),
    *("test_html.py", "test_report_page.py"),
}
# In folders called live, but with a Ray of their own: after those that share one.
OWN_RAY_FILES = {"test_between_nodes.py", "test_heterogeneous.py", "test_outer_mask.py", "test_namespaces.py"}

# Until tests run: imports and tests make millions of objects that stay, and a third of the time was spent on
# garbage collection.
gc.disable()

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


def pytest_collection_modifyitems(items):
    """Files that take long come first, so that both processes of tests end together.

    Those in folders called live follow each other, as any other between them ends the Ray that they share. The Makefile
    keeps xdist from sorting files by their number of tests, which is smallest where tests take longest.
    """
    items.sort(key=lambda item: _turn(item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Tests are collected. With xdist the process that hands them out collects none, but gets here, too."""
    gc.freeze()
    gc.enable()


def _turn(path):
    if path.parent.name == "live":
        return 2 if path.name in OWN_RAY_FILES else 1
    return 0 if path.name in SLOW_FILES else 3


@pytest.fixture(scope="module", autouse=True)
def _ray_of_live_tests(request):
    """The Ray that modules share ends before a module that may start one of its own."""
    if request.path.parent.name != "live":
        end_ray()


@pytest.fixture(scope="session", autouse=True)
def _a_ray_of_its_own():
    """Ray's folder is this process's own, as a driver joins the cluster whose address it finds there."""
    folder = tempfile.mkdtemp(prefix="rt-", dir="/tmp")  # short: the paths of Ray's sockets are limited
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    yield
    end_ray()
    if before is None:
        del os.environ["RAY_TMPDIR"]
    else:
        os.environ["RAY_TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)
