"""Two groups of workers on simulated accelerators: a producer sends arrays to consumers through a channel.

ROOST_FAKE_ACCELERATORS=4 python examples/workers/relay.py
"""

import os
import time

import numpy as np

from roost import ChannelClosed, Cluster, PackedPlacementStrategy, Worker

os.environ.setdefault("ROOST_FAKE_ACCELERATORS", "4")


class Producer(Worker):
    def produce(self, channel, count):
        for number in range(count):
            with self.worker_timer("make"):
                batch = np.full(1_000_000, number, np.float32)
            channel.put({"number": number, "batch": batch})
        channel.close()


class Consumer(Worker):
    def consume(self, channel):
        total = 0.0
        while True:
            try:
                item = channel.get()
            except ChannelClosed:
                return f"{self.worker_address} on accelerator {', '.join(self.accelerators)} counted {total:,.0f}"
            total += float(item["batch"].sum())
            time.sleep(0.02)  # let the other consumer take the next item


if __name__ == "__main__":
    with Cluster(num_nodes=1, address="local", log_dir="runs/relay") as cluster:
        channel = cluster.create_channel("batches", maxsize=4)
        producer = Producer.create_group().launch(
            cluster, name="producer", placement_strategy=PackedPlacementStrategy(0, 0)
        )
        consumers = Consumer.create_group().launch(
            cluster, name="consumer", placement_strategy=PackedPlacementStrategy(2, 3)
        )
        consumers.wait_ready()
        producing = producer.produce(channel, 20)
        for line in consumers.consume(channel).wait():
            print(line)
        producing.wait()
        summary = cluster.write_trace("runs/relay/trace.json")
        for use in summary.devices:
            print(f"node {use.node}, accelerator {use.device}: busy {use.busy_share:.0%} of {use.wall_ns / 1e9:.1f} s")
        print(f"what every worker did, for https://ui.perfetto.dev: {summary.path}")
