"""Commands for `roost up`: python commands.py who|wait FILE [CODE]."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray


def who(file, code):
    """Write what every node of the cluster says of itself, and exit with the code."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=0)
    def tell():
        return os.environ["ROOST_NODE_RANK"], ray.util.get_node_ip_address()

    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        tell.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)).remote()
        for each in nodes
    ]
    counted = {node["Labels"]["roost.rank"]: node["Resources"] for node in nodes}
    Path(file).write_text(json.dumps({"nodes": sorted(ray.get(asked)), "resources": counted}))
    sys.exit(int(code))


def wait(file, code):
    """Write the file, and wait for SIGTERM or SIGUSR1; then exit with the code."""

    def end(number, _):
        Path(file).with_suffix(".signal").write_text(signal.Signals(number).name)
        sys.exit(int(code))

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, end)
    ray.init(log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, end)  # Ray took it
    Path(file).write_text("ready")
    while True:
        time.sleep(0.1)


if __name__ == "__main__":
    {"who": who, "wait": wait}[sys.argv[1]](*sys.argv[2:])
