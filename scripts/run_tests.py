"""All tests, in two processes at a time: those that start Ray in one, which take about as long as all others.

Clusters find each other on a machine, and some tests look at all of its processes, so these run one after the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

WITH_RAY = (
    "tests/runtime/live",
    "tests/trainer/live",
    "tests/engines/live/test_on_a_cluster.py",
    "tests/engines/test_server_process.py",
    "tests/cli/test_inventory_command.py",
)
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


def main() -> int:
    with tempfile.TemporaryFile("w+") as said:
        rest = subprocess.Popen(
            [*PYTEST, *(f"--ignore={path}" for path in WITH_RAY)], stdout=said, stderr=subprocess.STDOUT
        )
        print(f"with Ray: {', '.join(WITH_RAY)}", flush=True)
        with_ray = subprocess.run([*PYTEST, *WITH_RAY])
        rest.wait()
        said.seek(0)
        print(f"\nall others:\n{said.read()}", flush=True)
    return with_ray.returncode or rest.returncode


if __name__ == "__main__":
    sys.exit(main())
