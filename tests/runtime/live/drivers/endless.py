"""A job that goes on until it is stopped: workers with devices, a child process, shared memory, a lock and a port."""

import signal
import subprocess
import sys
import time

import numpy as np

from roost import Cluster, PackedPlacementStrategy, Worker


class Busy(Worker):
    def work(self, channel):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        port = self.acquire_free_port()
        with self.device_lock():
            channel.put(np.ones(1_000_000))
            kept = channel.get()
            self.send(kept, "busy", self._rank)
            print("working", child.pid, port, flush=True)
            channel.put("ready", key="ready")
            time.sleep(600)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    with Cluster(num_nodes=1, address=sys.argv[1]) as cluster:
        channel = cluster.create_channel("things")
        group = Busy.create_group().launch(cluster, name="busy", placement_strategy=PackedPlacementStrategy(0, 1))
        working = group.work(channel)
        for _ in range(2):
            channel.get(key="ready")
        print("ready", flush=True)
        working.wait()
