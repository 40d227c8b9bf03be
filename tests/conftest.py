"""What holds for all tests. It is read before any of them imports torch."""

import os

# Threads that spin while they wait for each other take the cores from the servers and workers that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
