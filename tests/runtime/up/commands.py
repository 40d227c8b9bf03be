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
        import psutil

        listens = [one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
        return os.environ["ROOST_NODE_RANK"], ray.util.get_node_ip_address(), listens

    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        tell.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)).remote()
        for each in nodes
    ]
    counted = {node["Labels"]["roost.rank"]: node["Resources"] for node in nodes}
    told = sorted(ray.get(asked))
    ports = [port for *_, listens in told for port in listens]
    ports += [node[name] for node in nodes for name in ("NodeManagerPort", "ObjectManagerPort")]
    ports.append(int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
    found = {"nodes": [each[:2] for each in told], "resources": counted, "ports": ports}
    Path(file).write_text(json.dumps(found))
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
