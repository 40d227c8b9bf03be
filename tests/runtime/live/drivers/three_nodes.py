"""Run on the first of three nodes with addresses of their own: prints what workers on all of them saw and did."""

import json
import os
import sys

import numpy as np
import torch
import torch.distributed

import roost
from roost import Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker

SIZE = 2_000_000  # floats: more than fits into a message's own frame


class Traveller(Worker):
    def place(self):
        return int(os.environ["CLUSTER_NODE_RANK"]), os.environ["ROOST_VISIBLE_DEVICES"], os.environ["MASTER_ADDR"]

    def pass_on(self):
        """A ring over all nodes: a large tensor goes once round, and each worker adds one."""
        after, before = (self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size
        if self._rank == 0:
            self.send({"ring": torch.zeros(SIZE)}, "traveller", after)
            return float(self.recv("traveller", before)["ring"].sum()) / SIZE
        got = self.recv("traveller", before)
        got["ring"] += 1
        self.send(got, "traveller", after)
        return None

    def hear(self):
        value = np.arange(SIZE, dtype=np.float32) if self._rank == 0 else None
        return float(self.broadcast(value, groups=[("traveller", None)])[-1])

    def produce(self, channel):
        channel.put(np.full(SIZE, self._rank, np.float32))

    def consume(self, channel, count):
        return sorted(float(channel.get()[0]) for _ in range(count))

    def reduce(self):
        torch.distributed.init_process_group("gloo")
        total = torch.ones(1) * (self._rank + 1)
        torch.distributed.all_reduce(total)
        return float(total)

    def speak(self):
        print(f"this is {self._rank}", flush=True)


def main(address, log_dir, config):
    with Cluster(num_nodes=3, address=address, log_dir=log_dir) as cluster:
        group = Traveller.create_group().launch(
            cluster, name="traveller", placement_strategy=NodePlacementStrategy([0, 1, 2])
        )
        channel = cluster.create_channel("far", node_rank=2)
        answer = {
            "addresses": [node.report.address for node in cluster.nodes],
            "places": group.place().wait(),
            "ring": group.pass_on().wait()[0],
            "broadcast": group.hear().wait(),
        }
        group.produce(channel)
        answer["channel"] = group.execute_on(1).consume(channel, 3).wait()[0]
        answer["reduce"] = group.reduce().wait()
        group.speak().wait()
        plan = roost.plan(config, inventory=cluster)
        planned = cluster.launch(plan, {"actor": Traveller.create_group()})["actor"]
        answer["planned"] = planned.place().wait()
        packed = Traveller.create_group().launch(
            cluster, name="packed", placement_strategy=PackedPlacementStrategy(1, 1)
        )
        answer["single"] = packed.place().wait()
    answer["logs"] = {
        path.relative_to(log_dir).as_posix(): path.read_text() for path in sorted(cluster.log_dir.rglob("*.log"))
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
